"""Check at reports that the ranks train one model, and report the same numbers.

Ranks that train without DDP, ``ctx.prepare`` or ``nb.fit`` learn from their own samples only, and
rank 0's model is what is saved. Counters that are not summed over the ranks count the samples of
one. Nothing fails, hence this check: no collective, a few numbers.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from nbtoolkit.wire.messages import Weights

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from nbtoolkit.config.schema import Config

_NUMBERS = 64  # per optimizer at most, two per parameter: a report stays below 2 KB
_OPTIMIZERS = 16  # the last ones: a function may make a new one for each of a hundred folds
_MARK = "_nbtoolkit_followed"
# Ranks that add up in another order, or on other devices, differ by some 1e-7 of a weight.
_RELATIVE = 1e-4
_ABSOLUTE = 1e-7


class SteppedOptimizers:
    """Tracks the optimizers that take a step in this process, until it is closed."""

    def __init__(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._tracked: deque[_TrackedOptimizer] = deque(maxlen=_OPTIMIZERS)
        self._hook = register_optimizer_step_post_hook(self._track)

    def close(self) -> None:
        """Stop tracking."""
        self._hook.remove()

    def weights(self) -> Weights:
        """Return some weights of each, the last ones if the optimizer is deleted.

        Waits for the device.
        """
        return [optimizer.weights() for optimizer in self._tracked]

    def _track(self, optimizer: Optimizer, *_: object) -> None:
        if not hasattr(optimizer, _MARK):
            self._tracked.append(_TrackedOptimizer(optimizer))


class _TrackedOptimizer:
    """One optimizer, which this does not keep alive."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._last: list[float] = []
        parameters = [item for group in optimizer.param_groups for item in group["params"]]
        sampled = _SampledParameters([item for item in parameters if _is_whole(item)], self._keep)
        setattr(optimizer, _MARK, sampled)
        self._parameters = weakref.ref(sampled)

    def weights(self) -> list[float]:
        """Return the middle and the last number of its first parameters, sharded ones left out."""
        parameters = self._parameters()
        return self._last if parameters is None else parameters.numbers()

    def _keep(self, last: list[float]) -> None:
        self._last = last


class _SampledParameters:
    """An attribute of the optimizer: passes the last weights on when the optimizer is deleted.

    An optimizer that is local to the function is deleted before its last weights can be read.
    """

    def __init__(self, parameters: list[Tensor], keep: Callable[[list[float]], None]) -> None:
        self._parameters = parameters[: _NUMBERS // 2]
        self._keep = keep

    def numbers(self) -> list[float]:
        """Two numbers per parameter."""
        import torch

        if not self._parameters:
            return []
        with torch.no_grad():
            picked = [_at(item, share) for item in self._parameters for share in (0.5, 1.0)]
            device = picked[0].device
            values: list[float] = torch.stack([item.float().to(device) for item in picked]).tolist()
        return values

    def __del__(self) -> None:
        self._keep(self.numbers())


def track_optimizers(config: Config, ranks: int) -> SteppedOptimizers | None:
    """Start to track optimizers, if ``runtime.compare_ranks`` is on and there are several ranks."""
    return SteppedOptimizers() if ranks > 1 and config.runtime.compare_ranks else None


def leave_out(optimizer: Optimizer) -> None:
    """Do not compare the parameters of ``optimizer``: each rank has a part of its own."""
    setattr(optimizer, _MARK, None)


def divergence_warning(ranks: Sequence[Weights | None]) -> str | None:
    """Return a warning if the ranks' weights are not those of one model; None: they may be.

    Args:
        ranks: each rank's weights; not compared if their optimizers differ in number or size.
    """
    first = ranks[0]
    if first is None:
        return None
    for rank, other in enumerate(ranks):
        if other is None or list(map(len, other)) != list(map(len, first)):
            return None
        for first_weights, weights in zip(first, other, strict=True):
            for expected, weight in zip(first_weights, weights, strict=True):
                if not _equal(expected, weight):
                    return _warning(rank, expected, weight)
    return None


def report_warning(ranks: Sequence[Mapping[str, float]]) -> str | None:
    """Return a warning if the ranks report different numbers under one name; None: they do not.

    Args:
        ranks: each rank's numbers.
    """
    first = ranks[0]
    for rank, other in enumerate(ranks):
        for name, number in first.items():
            if name in other and not _equal(number, other[name]):
                return _report_warning(name, rank, number, other[name])
    return None


def _report_warning(name: str, rank: int, first: float, other: float) -> str:
    return (
        f"the ranks report different values: {name} is {first:.6g} on rank 0 and {other:.6g} on "
        f"rank {rank}. Only rank 0's is kept, which may be that of its part of the samples\n"
        "  Do now:  sum counters over the ranks before you divide, as in `right = "
        "ctx.accelerator.reduce(right)`; take the mean of losses, as in `loss = "
        'ctx.accelerator.reduce(loss.detach(), "mean")`; log what rank 0 measures for itself, '
        "such as times, with ctx.log"
    )


def _equal(first: float, other: float) -> bool:
    if math.isnan(first) and math.isnan(other):
        return True
    return math.isclose(first, other, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)


def _warning(rank: int, expected: float, weight: float) -> str:
    return (
        f"the ranks train different models: one weight is {expected:.6g} on rank 0 and "
        f"{weight:.6g} on rank {rank}. Each rank learns from its own samples only, and only rank "
        "0's model is kept\n"
        "  Do now:  add `model, optimizer = ctx.prepare(model, optimizer)` before the loop (with "
        "the loaders), or call nb.fit; if the models are meant to differ, set "
        "runtime.compare_ranks: false"
    )


def _is_whole(parameter: Tensor) -> bool:
    # A DTensor (FSDP, tensor parallelism) has placements: each rank holds a part of its own.
    usable = parameter.is_floating_point() and parameter.numel() > 0 and not parameter.is_sparse
    return usable and not hasattr(parameter, "placements")


def _at(parameter: Tensor, share: float) -> Tensor:
    # One number by its index: flattening would copy a tensor that is not contiguous.
    return parameter[tuple(int(share * (size - 1)) for size in parameter.shape)]
