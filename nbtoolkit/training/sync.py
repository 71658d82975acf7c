"""Synchronise loss sums and rank 0's control signal between the ranks, about once a second.

Between two synchronisations no rank waits for another except in DDP's own reduction, and nothing is
read from the device. A synchronisation is one all-reduce of a few numbers; with one rank there is
none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from nbtoolkit.errors import LossNotFinite
from nbtoolkit.training.losses import BatchLoss
from nbtoolkit.training.samples import MicroBatch
from nbtoolkit.worker.collectives import gather_on_all
from nbtoolkit.worker.watch import Signal, Watch

if TYPE_CHECKING:
    from torch import Tensor

    from nbtoolkit.training.step import TrainStep
    from nbtoolkit.worker.context import RunContext


class LossSum(NamedTuple):
    """The losses of some micro-batches."""

    loss: float
    """The sum of their means, each times its weight."""
    weight: float
    """The sum of their weights: the samples, if the loss is a mean over samples."""
    samples: int
    """The number of their samples."""


@dataclass(frozen=True)
class SyncResult:
    """The result of a synchronisation; the same on all ranks.

    Attributes:
        sums: the losses over all ranks, one sum for each log point since the last synchronisation,
            and one for the micro-batches after the last log point.
        signal: rank 0's.
        own: of each rank the numbers it gave, see :func:`sync_ranks`.
        stop: whether a callback of any rank has asked to stop.
    """

    sums: list[LossSum]
    signal: Signal
    own: list[list[float]]
    stop: bool

    @property
    def finite(self) -> bool:
        """Whether every loss was finite."""
        return all(math.isfinite(part.loss) for part in self.sums)


@dataclass(frozen=True)
class LogPoint:
    """An optimizer step whose values are logged at the next synchronisation.

    Attributes:
        step: optimizer steps done.
        micro_batches: micro-batches of the window up to here.
        rate: the learning rate.
        grad_norm: the gradient's norm, a scalar on the device.
        time: ``time.perf_counter()``.
    """

    step: int
    micro_batches: int
    rate: float
    grad_norm: Tensor | None
    time: float


class LossWindow:
    """This rank's losses since the last synchronisation; they stay on the device until then."""

    def __init__(self) -> None:
        self.losses: list[BatchLoss] = []
        self.micro_batches: list[MicroBatch] = []
        self.log_points: list[LogPoint] = []

    def add(self, loss: BatchLoss, micro_batch: MicroBatch) -> None:
        """Add a micro-batch and its loss (detached)."""
        self.losses.append(loss)
        self.micro_batches.append(micro_batch)

    def add_log_point(self, train_step: TrainStep) -> None:
        """Log the optimizer step that was just done, at the next synchronisation."""
        now, steps = time.perf_counter(), train_step.steps_done
        self.log_points.append(
            LogPoint(steps, len(self.losses), train_step.rate, train_step.grad_norm, now)
        )

    def values(self) -> list[float]:
        """The mean loss of every micro-batch, read from the device."""
        import torch

        return torch.stack([loss.mean for loss in self.losses]).tolist() if self.losses else []

    def clear(self) -> None:
        """Start a new window."""
        self.losses, self.micro_batches, self.log_points = [], [], []

    def sums(self, values: list[float]) -> list[LossSum]:
        """The sums of the losses, see :attr:`SyncResult.sums`.

        Args:
            values: what :meth:`values` returned.
        """
        weights = self._weights()
        starts = [0, *(point.micro_batches for point in self.log_points)]
        ends = [*starts[1:], len(values)]
        return [
            self._sum(values[start:end], weights[start:end], self.micro_batches[start:end])
            for start, end in zip(starts, ends, strict=True)
        ]

    def _weights(self) -> list[float]:
        """The weight of every micro-batch, read from the device if it is there."""
        import torch

        if all(isinstance(loss.weight, float) for loss in self.losses):
            return [float(loss.weight) for loss in self.losses]
        weights = [torch.as_tensor(loss.weight, device=loss.mean.device) for loss in self.losses]
        return torch.stack([weight.double() for weight in weights]).tolist()

    @staticmethod
    def _sum(values: list[float], weights: list[float], micro_batches: list[MicroBatch]) -> LossSum:
        # A stand-in's loss does not count, even if it is not finite.
        counted = [
            (value, weight, micro_batch.samples)
            for value, weight, micro_batch in zip(values, weights, micro_batches, strict=True)
            if micro_batch.samples
        ]
        return LossSum(
            sum(value * weight for value, weight, _ in counted),
            sum(weight for _, weight, _ in counted),
            sum(samples for _, _, samples in counted),
        )


def sync_ranks(
    ctx: RunContext,
    watch: Watch,
    step: int,
    sums: list[LossSum],
    *,
    stop: bool = False,
    own: Sequence[float] = (),
) -> SyncResult:
    """Synchronise after ``step`` optimizer steps, in the agreement of the watch; a collective.

    Args:
        ctx: the run's context.
        watch: of this fit.
        step: optimizer steps done.
        sums: this rank's, from :meth:`LossWindow.sums`; equally many on all ranks.
        stop: whether a callback of this rank has asked to stop.
        own: numbers of this rank, not summed; equally many on all ranks.
    """
    table = [0.0] * (ctx.world_size * len(own))
    table[ctx.rank * len(own) : (ctx.rank + 1) * len(own)] = own
    flat = [float(number) for part in sums for number in part]
    signal, (stops, *numbers) = watch.agree(step, [float(stop), *table, *flat])
    table, flat = numbers[: len(table)], numbers[len(table) :]
    rows = [table[rank * len(own) : (rank + 1) * len(own)] for rank in range(ctx.world_size)]
    columns = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    total = [LossSum(loss, weight, int(samples)) for loss, weight, samples in columns]
    return SyncResult(total, signal, rows, stops > 0)


# --- losses that are not finite ---


_SHOWN = 20  # samples named in the message


class StepLoss(NamedTuple):
    """One rank's loss of one micro-batch of an optimizer step."""

    step: int
    """Optimizer steps of the run done with it: the number under which it is logged."""
    epoch: int
    """From 1."""
    in_epoch: int
    """The optimizer step within the epoch, from 0."""
    loss: float
    """The mean over the micro-batch's samples."""


def raise_if_not_finite(
    ctx: RunContext,
    losses: Sequence[StepLoss],
    sample_ids: Callable[[int, int], Sequence[int]],
    *,
    tolerant: bool,
    rate: float | None = None,
    grad_norm: float | None = None,
) -> None:
    """Raise the same error on all ranks for the first step whose loss is not finite.

    A collective: called by **all** ranks, and only when the sum of the losses over all ranks is not
    finite.

    Under fp16 one batch may overflow. Its gradients are then not finite either, so the scaler skips
    the step and halves its scale, and the weights stay good: such a step is only printed, as long
    as the scale can still fall (``tolerant``). So is a step whose targets are all ignored.

    Args:
        ctx: the run's context.
        losses: this rank's losses since the last synchronisation.
        sample_ids: ``(epoch, step in it)`` -> the samples of that step's global batch.
        tolerant: :attr:`TrainStep.keeps_weights`, equal on all ranks.
        rate: the present learning rate, for the message.
        grad_norm: the gradient's norm when it was last measured, for the message.

    Raises:
        LossNotFinite: names the first step that is not finite, and its samples.
    """
    wrong = not_finite(loss for part in gather_on_all(losses, ctx.world_size) for loss in part)
    if wrong and not tolerant:
        first = wrong[0]
        raise _not_finite_error(first, sample_ids(first.epoch, first.in_epoch), rate, grad_norm)
    for step in dict.fromkeys(loss.step for loss in wrong):
        ctx.print(
            f"fit: the loss of optimizer step {step} is not finite, and did not change the weights"
        )


def not_finite(losses: Iterable[StepLoss]) -> list[StepLoss]:
    """The losses that are infinite or NaN, sorted by step."""
    wrong = [loss for loss in losses if not math.isfinite(loss.loss)]
    return sorted(wrong, key=lambda loss: loss.step)


def _not_finite_error(
    first: StepLoss, samples: Sequence[int], rate: float | None, grad_norm: float | None
) -> LossNotFinite:
    more = f" and {len(samples) - _SHOWN} more" if len(samples) > _SHOWN else ""
    known = (("learning rate", rate), ("gradient norm", grad_norm))
    now = ", ".join(f"{name} {value:g}" for name, value in known if value and math.isfinite(value))
    return LossNotFinite(
        f"the loss of optimizer step {first.step} (step {first.in_epoch + 1} of epoch "
        f"{first.epoch}) is {first.loss}{f'; {now}' if now else ''}\n"
        f"  Its batch: samples {', '.join(map(str, samples[:_SHOWN]))}{more}",
        allowed="losses that are finite numbers",
        do="look at these samples (a NaN among the inputs?); lower optim.lr, or set "
        "train.max_grad_norm: 1.0",
    )
