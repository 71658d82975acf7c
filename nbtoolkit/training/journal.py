"""Journal: what a fit logs while it trains: loss, learning rate, throughput, memory by rank."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nbtoolkit.training.memory import memory_used
from nbtoolkit.training.pulse import LossSum, Mark

if TYPE_CHECKING:
    from nbtoolkit.runtime.context import RunContext

_EVERY = 1.0  # seconds between two looks at the memory: one takes 10 us, a small model's step 150


class Journal:
    """Sums since the last entry, and when that was."""

    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx
        self._since, self._seen = time.perf_counter(), LossSum(0.0, 0.0, 0)
        self._memory, self._looked_at = 0.0, -_EVERY

    def memory(self) -> float:
        """This rank's device memory (on the CPU: resident memory) in GB, at most a second old."""
        now = time.monotonic()
        if now - self._looked_at >= _EVERY:
            self._memory, self._looked_at = memory_used(self._ctx), now
        return self._memory

    def begin(self) -> None:
        """Do not count the time since the last entry: it went into something else."""
        self._since = time.perf_counter()

    def add(self, part: LossSum) -> None:
        """Take in some losses."""
        seen = self._seen
        self._seen = LossSum(
            seen.loss + part.loss, seen.weight + part.weight, seen.samples + part.samples
        )

    def write(self, mark: Mark, memory: list[float]) -> None:
        """Log what there is, at the marked optimizer step; ``memory`` is every rank's."""
        seen = self._seen
        if not seen.samples:
            return  # fp16 has left out these steps
        values = {
            "loss": seen.loss / seen.weight if seen.weight else 0.0,
            "lr": mark.rate,
            "samples_per_second": seen.samples / (mark.at - self._since),
            **{f"memory_gb_rank{rank}": used for rank, used in enumerate(memory)},
        }
        if mark.grad_norm is not None:
            values["grad_norm"] = float(mark.grad_norm)
        self._ctx.log(values, step=mark.step)
        self._since, self._seen = mark.at, LossSum(0.0, 0.0, 0)
