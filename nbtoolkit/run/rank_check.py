"""Check at reports that the ranks still train one model, by comparing some of its weights.

Ranks that train without DDP, ``ctx.prepare`` or ``nb.fit`` learn from their own samples only, and
what is saved is rank 0's model. Nothing fails, so it is looked for: no collective, a few numbers.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from nbtoolkit.config.schema import Config

_NUMBERS = 64  # of an optimizer at most, two of a parameter: a report stays below 2 KB
_OPTIMIZERS = 16  # the last ones: a function may make a new one for each of a hundred folds
_MARK = "_nbtoolkit_followed"
# Ranks that add up in another order, or on other devices, differ by some 1e-7 of a weight.
_RELATIVE, _ABSOLUTE = 1e-4, 1e-7

Weights = list[list[float]]
"""Of every optimizer that took a step, in the order of their first ones."""


class SteppedOptimizers:
    """The optimizers that take a step in this process while this is open."""

    def __init__(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._seen: deque[_Followed] = deque(maxlen=_OPTIMIZERS)
        self._hook = register_optimizer_step_post_hook(self._note)

    def close(self) -> None:
        """Hear of no more."""
        self._hook.remove()

    def weights(self) -> Weights:
        """Some weights of each, the last ones of those that are gone; waits for the device."""
        return [one.weights() for one in self._seen]

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        if not hasattr(optimizer, _MARK):
            self._seen.append(_Followed(optimizer))


class _Followed:
    """One optimizer, which this does not keep alive."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._last: list[float] = []
        every = [one for group in optimizer.param_groups for one in group["params"]]
        parameters = _Parameters([one for one in every if _is_whole(one)], self._keep)
        setattr(optimizer, _MARK, parameters)
        self._parameters = weakref.ref(parameters)

    def weights(self) -> list[float]:
        """The middle and the last number of its first parameters, but of sharded ones."""
        parameters = self._parameters()
        return self._last if parameters is None else parameters.numbers()

    def _keep(self, last: list[float]) -> None:
        self._last = last


class _Parameters:
    """Lies in an optimizer: a function's own one is gone before anybody can look at its end."""

    def __init__(self, every: list[Tensor], keep: Callable[[list[float]], None]) -> None:
        self._some, self._keep = every[: _NUMBERS // 2], keep

    def numbers(self) -> list[float]:
        """Two of each."""
        import torch

        if not self._some:
            return []
        with torch.no_grad():
            picked = [number for one in self._some for number in (_at(one, 0.5), _at(one, 1.0))]
            device = picked[0].device
            values: list[float] = torch.stack([one.float().to(device) for one in picked]).tolist()
        return values

    def __del__(self) -> None:
        self._keep(self.numbers())


def followed(config: Config, ranks: int) -> SteppedOptimizers | None:
    """What notes a function's optimizers from here on, where ranks are compared by them."""
    return SteppedOptimizers() if ranks > 1 and config.runtime.compare_ranks else None


def apart(ranks: Sequence[Weights | None]) -> str | None:
    """What the ranks' weights say, if they are not those of one model; None: they may be.

    Args:
        ranks: each rank's; of ranks whose optimizers differ in number or size nothing is said.
    """
    first = ranks[0]
    if first is None:
        return None
    for rank, other in enumerate(ranks):
        if other is None or list(map(len, other)) != list(map(len, first)):
            return None
        for mine, theirs in zip(first, other, strict=True):
            for one, two in zip(mine, theirs, strict=True):
                both_nan = math.isnan(one) and math.isnan(two)
                if not both_nan and not math.isclose(
                    one, two, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE
                ):
                    return _warning(rank, one, two)
    return None


def _warning(rank: int, one: float, two: float) -> str:
    return (
        f"the ranks train different models: one weight is {one:.6g} on rank 0 and {two:.6g} on "
        f"rank {rank}. Each learns from its own samples only, and rank 0's model is what remains\n"
        "  Do now:  add `model, optimizer = ctx.prepare(model, optimizer)` before the loop (with "
        "the loaders), or call nb.fit; for models that are to differ set "
        "runtime.compare_ranks: false"
    )


def _is_whole(parameter: Tensor) -> bool:
    # A DTensor (FSDP, tensor parallelism) has placements: each rank has a part of its own.
    usable = parameter.is_floating_point() and parameter.numel() > 0 and not parameter.is_sparse
    return usable and not hasattr(parameter, "placements")


def _at(parameter: Tensor, share: float) -> Tensor:
    # One number by its place: to flatten a tensor that lies otherwise in memory copies it.
    return parameter[tuple(int(share * (size - 1)) for size in parameter.shape)]
