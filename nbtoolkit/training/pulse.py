"""Pulse: where the ranks look up from their work together: sums, wishes of rank 0, the next time.

Between two meetings no rank waits for another but in DDP's own reduction, and nothing is read from
the device. A meeting is one all-reduce of a few numbers; with one rank it is none.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from nbtoolkit.training.order import Share

if TYPE_CHECKING:
    from torch import Tensor

    from nbtoolkit.runtime.context import RunContext

_SECONDS = 1.0  # between two meetings at most, as far as steps are shorter


class Wish(IntEnum):
    """What rank 0 wants the ranks to do at a meeting."""

    GO_ON = 0
    SAVE = 1
    ASK = 2
    """Ask the owner whether to leave."""


@dataclass(frozen=True)
class Meeting:
    """What came out of a meeting; the same on all ranks.

    Attributes:
        loss: the sum of the samples' losses since the last meeting, over all ranks.
        samples: how many those were.
        wish: rank 0's.
        memory: each rank's, in GB.
    """

    loss: float
    samples: int
    wish: Wish
    memory: list[float]

    @property
    def finite(self) -> bool:
        """Whether every loss was a number."""
        return math.isfinite(self.loss)


class LossWindow:
    """This rank's losses since the last meeting; they stay on the device until then."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.shares: list[Share] = []

    def add(self, loss: Tensor, share: Share) -> None:
        """Take in one pass and its mean loss (detached)."""
        self.losses.append(loss)
        self.shares.append(share)

    def values(self) -> list[float]:
        """The mean loss of every pass, read from the device."""
        import torch

        return torch.stack(self.losses).tolist() if self.losses else []

    def clear(self) -> None:
        """Begin anew."""
        self.losses, self.shares = [], []


class Pulse:
    """When the ranks of a fit meet, and how.

    Args:
        ctx: the run's context.
        step: optimizer steps done so far.
        multiples: they meet at every multiple of these steps, and after about a second at most.

    Attributes:
        next: the optimizer step after which they meet next; the same on all ranks.
    """

    def __init__(self, ctx: RunContext, step: int, multiples: list[int]) -> None:
        self._ctx, self._multiples = ctx, multiples
        self._step, self._since = step, time.monotonic()
        self.next = step + 1  # how long a step takes is not known yet

    def meet(
        self, step: int, losses: list[float], shares: list[Share], *, wish: Wish, memory: float
    ) -> Meeting:
        """Meet after ``step`` optimizer steps; called by all ranks.

        Args:
            step: optimizer steps done.
            losses: this rank's mean losses since the last meeting.
            shares: what each of them counts for.
            wish: what to do; rank 0's counts.
            memory: this rank's, in GB.
        """
        # a stand-in's loss does not count, even where it is not a number
        total = sum(
            loss * share.samples
            for loss, share in zip(losses, shares, strict=True)
            if share.samples
        )
        seen = float(sum(share.samples for share in shares))
        asked = [float(wish), float(self._steps_ahead(step))] if self._ctx.is_main else [0.0, 0.0]
        mine = [0.0] * self._ctx.world_size
        mine[self._ctx.rank] = memory
        total, samples, wished, ahead, *memories = self._sum([total, seen, *asked, *mine])
        self._step, self._since = step, time.monotonic()
        self.next = min(step + int(ahead), *(step + n - step % n for n in self._multiples))
        return Meeting(total, int(samples), Wish(int(wished)), memories)

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
