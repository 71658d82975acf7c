"""Refuse class losses whose mean over weights differs from the mean over ranks.

DDP averages the gradients of the ranks with equal weights. That is the step of the whole batch if
every rank's loss is a mean over the same number of samples. With class weights or ignored targets
each rank divides by its own sum of weights: the step depends on the number of ranks, and nothing
fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor

    Loss = Callable[..., Tensor]

# F.cross_entropy and F.nll_loss call these, whatever name a module has imported them by. A torch
# function mode would also see the calls, but costs every other call of torch some microseconds.
_LOSSES = ("cross_entropy_loss", "nll_loss_nd")
_MEAN = 1  # torch.nn._reduction.get_enum("mean")


class ClassLosses:
    """Refuses training losses that divide by weights, until it is closed.

    Does not see ignored targets in compiled code, nor a mean over weights computed by hand.
    """

    def __init__(self) -> None:
        import torch

        self._module: Any = torch._C._nn
        self._losses: dict[str, Loss] = {name: getattr(self._module, name) for name in _LOSSES}
        self._ignored: Tensor | None = None
        for name, function in self._losses.items():
            setattr(self._module, name, self._checked(function))

    def close(self) -> None:
        """Restore torch's own functions."""
        for name, function in self._losses.items():
            setattr(self._module, name, function)

    def _checked(self, function: Loss) -> Loss:
        def checked(
            input: Tensor,
            target: Tensor,
            weight: Tensor | None = None,
            reduction: int = _MEAN,
            ignore_index: int = -100,
            *more: object,
        ) -> Tensor:
            import torch

            # Not in an evaluation, nor while torch.compile traces a call without values.
            trains = torch.is_grad_enabled() and input.requires_grad
            if trains and reduction == _MEAN and type(target) is torch.Tensor:
                self._check(target, weight, ignore_index)
            return function(input, target, weight, reduction, ignore_index, *more)

        return checked

    def _check(self, target: Tensor, weight: Tensor | None, ignore_index: int) -> None:
        # With probabilities as targets torch divides by the samples, whatever the weights.
        if target.is_floating_point():
            return
        if weight is not None:
            raise _refused("class weights")
        ignored = (target == ignore_index).any()
        # Waiting for a GPU in each step costs time: from the second step on, read the last result.
        known = ignored if self._ignored is None or not ignored.is_cuda else self._ignored
        self._ignored = ignored
        if bool(known):
            raise _refused(f"targets that are ignored (ignore_index={ignore_index})")


def _refused(why: str) -> PlanError:
    return PlanError(
        f"a loss with {why} divides by the weights of its rank's part of the batch, not of the "
        "whole batch: the step would depend on the number of ranks",
        allowed="in your own loop on several ranks, means over samples; with train.loss_reduction: "
        "batch any loss, and each rank's loss counts the same",
        do="use nb.fit, which weights the parts; or compute the sum (reduction='sum') and return "
        "total * ctx.world_size / ctx.accelerator.reduce(weight), where weight is the sum of this "
        "rank's weights",
    )
