"""Refuse class losses whose mean over weights differs from the mean over ranks.

DDP averages the ranks' gradients, each counting the same. That is the step of the whole batch where
every rank's loss is a mean over as many samples. With class weights or ignored targets each divides
by a sum of weights of its own, so that the step depends on the number of ranks; nothing fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor

# What F.cross_entropy and F.nll_loss call, by whatever name a module has imported them; a torch
# function mode would see them, too, but costs every other call of torch some microseconds.
_TORCHS = ("cross_entropy_loss", "nll_loss_nd")
_MEAN = 1  # torch.nn._reduction.get_enum("mean")


class ClassLosses:
    """While this is open, a training loss that divides by weights is refused when it is called.

    Not seen: ignored targets in compiled code, and a mean over weights that is computed by hand.
    """

    def __init__(self) -> None:
        import torch

        self._place: Any = torch._C._nn
        self._torchs = {name: getattr(self._place, name) for name in _TORCHS}
        self._ignored: Tensor | None = None
        for name, function in self._torchs.items():
            setattr(self._place, name, self._checked(function))

    def close(self) -> None:
        """Put torch's own functions back."""
        for name, function in self._torchs.items():
            setattr(self._place, name, function)

    def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def checked(
            input: Tensor,
            target: Tensor,
            weight: Tensor | None = None,
            reduction: int = _MEAN,
            ignore_index: int = -100,
            *more: Any,
        ) -> Any:
            import torch

            # Neither in an evaluation, nor where torch.compile looks at a call without numbers.
            trains = torch.is_grad_enabled() and input.requires_grad
            if trains and reduction == _MEAN and type(target) is torch.Tensor:
                self._check(target, weight, ignore_index)
            return function(input, target, weight, reduction, ignore_index, *more)

        return checked

    def _check(self, target: Tensor, weight: Tensor | None, ignore_index: int) -> None:
        # Chances as targets: torch divides by the samples then, whatever the weights.
        if target.is_floating_point():
            return
        if weight is not None:
            raise _refused("class weights")
        ignored = (target == ignore_index).any()
        # To wait for a GPU in each step costs time: after the first one the step before is asked.
        known = ignored if self._ignored is None or not ignored.is_cuda else self._ignored
        self._ignored = ignored
        if bool(known):
            raise _refused(f"targets that are ignored (ignore_index={ignore_index})")


def _refused(why: str) -> PlanError:
    return PlanError(
        f"a loss with {why} divides by the weights of its rank's part of the batch, not of the "
        "whole batch: the step would depend on the number of ranks",
        allowed="in an own loop on several ranks means over samples; with train.loss_reduction: "
        "batch any, each rank's counting the same",
        do="use nb.fit, which weighs the parts; or compute the sum (reduction='sum') and return "
        "total * ctx.world_size / ctx.accelerator.reduce(weight), with the sum of this rank's "
        "weights as weight",
    )
