"""Synchronise sums and rank 0's requests between the ranks, and agree when to meet next.

Between two meetings no rank waits for another but in DDP's own reduction, and nothing is read from
the device. A meeting is one all-reduce of a few numbers; with one rank it is none.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from nbtoolkit.training.losses import Passed
from nbtoolkit.training.sampler import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor

    from nbtoolkit.training.step import TrainStep
    from nbtoolkit.worker.context import RunContext

_SECONDS = 1.0  # between two meetings at most, as far as steps are shorter


class ControlSignal(IntEnum):
    """What rank 0 wants the ranks to do at a meeting."""

    GO_ON = 0
    SAVE = 1
    ASK = 2
    """Ask the supervisor whether to leave."""


class LossSum(NamedTuple):
    """The losses of some passes."""

    loss: float
    """The sum of their means, each times its weight."""
    weight: float
    """The sum of their weights; the samples, where a loss is a mean over samples."""
    samples: int
    """How many samples they had."""


@dataclass(frozen=True)
class SyncResult:
    """What came out of a meeting; the same on all ranks.

    Attributes:
        parts: the losses over all ranks, from mark to mark since the last meeting, and from the
            last mark on.
        wish: rank 0's.
        memory: each rank's, in GB.
    """

    parts: list[LossSum]
    wish: ControlSignal
    memory: list[float]

    @property
    def finite(self) -> bool:
        """Whether every loss was a number."""
        return all(math.isfinite(part.loss) for part in self.parts)


@dataclass(frozen=True)
class LogPoint:
    """An optimizer step whose values are to be logged, once the ranks have met.

    Attributes:
        step: optimizer steps done by then.
        passes: how many of the window's passes that were.
        rate: the learning rate.
        grad_norm: still on the device.
        at: ``time.perf_counter()``.
    """

    step: int
    passes: int
    rate: float
    grad_norm: Tensor | None
    at: float


class LossWindow:
    """This rank's losses since the last meeting; they stay on the device until then."""

    def __init__(self) -> None:
        self.losses: list[Passed] = []
        self.shares: list[MicroBatch] = []
        self.marks: list[LogPoint] = []

    def add(self, loss: Passed, share: MicroBatch) -> None:
        """Take in one pass and its loss (detached)."""
        self.losses.append(loss)
        self.shares.append(share)

    def mark(self, train_step: TrainStep) -> None:
        """The optimizer step just taken is one to be logged."""
        at = time.perf_counter()
        self.marks.append(
            LogPoint(train_step.step, len(self.losses), train_step.rate, train_step.grad_norm, at)
        )

    def values(self) -> list[float]:
        """The mean loss of every pass, read from the device."""
        import torch

        return torch.stack([loss.mean for loss in self.losses]).tolist() if self.losses else []

    def clear(self) -> None:
        """Begin anew."""
        self.losses, self.shares, self.marks = [], [], []

    def sums(self, values: list[float]) -> list[LossSum]:
        """The losses' sums, from mark to mark, and from the last one on."""
        weights = self._weights()
        starts = [0, *(mark.passes for mark in self.marks)]
        ends = [*starts[1:], len(values)]
        return [
            self._sum(values[start:end], weights[start:end], self.shares[start:end])
            for start, end in zip(starts, ends, strict=True)
        ]

    def _weights(self) -> list[float]:
        """What every pass counts for, read from the device where it is there."""
        import torch

        if all(isinstance(loss.weight, float) for loss in self.losses):
            return [float(loss.weight) for loss in self.losses]
        weights = [torch.as_tensor(one.weight, device=one.mean.device) for one in self.losses]
        return torch.stack([weight.double() for weight in weights]).tolist()

    @staticmethod
    def _sum(values: list[float], weights: list[float], shares: list[MicroBatch]) -> LossSum:
        # A stand-in's loss does not count, even where it is not a number.
        counted = [
            (value, weight, share.samples)
            for value, weight, share in zip(values, weights, shares, strict=True)
            if share.samples
        ]
        return LossSum(
            sum(value * weight for value, weight, _ in counted),
            sum(weight for _, weight, _ in counted),
            sum(samples for _, _, samples in counted),
        )


class RankSync:
    """When the ranks of a fit meet, and how.

    Args:
        ctx: the run's context.
        every: they meet at every multiple of these optimizer steps, and after about a second at
            most; None: only after that.

    Attributes:
        next: the optimizer step after which they meet next; the same on all ranks.
    """

    def __init__(self, ctx: RunContext, every: int | None) -> None:
        self._ctx, self._every = ctx, every
        self._step, self._since = 0, time.monotonic()
        self._ahead = 1  # how long a step takes is not known yet
        self.next = 1

    def begin(self, step: int) -> None:
        """An epoch begins after ``step`` optimizer steps; called by all ranks."""
        self._step, self._since = step, time.monotonic()
        every = self._every
        due = [] if every is None else [step + every - step % every]
        self.next = min([step + self._ahead, *due])

    def meet(
        self, step: int, sums: list[LossSum], *, wish: ControlSignal, memory: float
    ) -> SyncResult:
        """Meet after ``step`` optimizer steps; called by all ranks.

        Args:
            step: optimizer steps done.
            sums: of this rank's losses since the last meeting, as
                :meth:`LossWindow.sums` gives them; equally many on all ranks.
            wish: what to do; rank 0's counts.
            memory: this rank's, in GB.
        """
        asked = [float(wish), float(self._steps_ahead(step))] if self._ctx.is_main else [0.0, 0.0]
        mine = [0.0] * self._ctx.world_size
        mine[self._ctx.rank] = memory
        flat = [float(number) for part in sums for number in part]
        wished, ahead, *rest = self._sum([*asked, *mine, *flat])
        memories, flat = rest[: len(mine)], rest[len(mine) :]
        columns = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        parts = [LossSum(loss, weight, int(samples)) for loss, weight, samples in columns]
        self._ahead = int(ahead)
        self.begin(step)
        return SyncResult(parts, ControlSignal(int(wished)), memories)

    def _steps_ahead(self, step: int) -> int:
        """How many steps take about as long as ranks may go without a meeting."""
        pace = (time.monotonic() - self._since) / max(1, step - self._step)
        return max(1, int(min(_SECONDS / max(pace, 1e-6), 1e6)))

    def _sum(self, numbers: list[float]) -> list[float]:
        if self._ctx.world_size == 1:
            return numbers
        import torch
        import torch.distributed as dist

        sums = torch.tensor(numbers, dtype=torch.float64, device=self._ctx.device)
        dist.all_reduce(sums)
        summed: list[float] = sums.tolist()
        return summed
