"""BatchSplit: one optimizer step's batch, divided over processes and accumulation steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nbtoolkit.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """``total = per_device x processes x accumulate``, in samples."""

    per_device: int
    """Samples in one process's forward pass: what has to fit in a device's memory."""
    processes: int
    accumulate: int
    """Forward passes of each process before an optimizer step."""

    @property
    def total(self) -> int:
        """Samples behind one optimizer step."""
        return self.per_device * self.processes * self.accumulate

    def on_one(self) -> BatchSplit:
        """The same step on one process: as many forward passes more, of the same size."""
        return replace(self, processes=1, accumulate=self.accumulate * self.processes)

    def __str__(self) -> str:
        steps = "step" if self.accumulate == 1 else "steps"
        who = "process" if self.processes == 1 else "processes"
        return (
            f"batch {self.total} = {self.per_device} x {self.processes} {who} "
            f"x {self.accumulate} accumulation {steps}"
        )


def split_batch(batch_size: int, *, processes: int, accumulate: int) -> BatchSplit:
    """Divide a global batch.

    Args:
        batch_size: samples behind one optimizer step, over all processes and accumulation steps.
        processes: how many processes share it.
        accumulate: forward passes of each process before an optimizer step.

    Raises:
        PlanError: it cannot be divided evenly; names the nearest sizes that can.
    """
    step = processes * accumulate
    if batch_size % step:
        below = batch_size - batch_size % step
        near = [str(size) for size in (below, below + step) if size]
        raise PlanError(
            f"train.batch_size {batch_size} cannot be split evenly over {processes} processes "
            f"x {accumulate} accumulation steps",
            allowed=f"multiples of {step}, such as {' or '.join(near)}",
            do=f"set train.batch_size: {near[-1]}, or another distributed.world_size",
        )
    return BatchSplit(per_device=batch_size // step, processes=processes, accumulate=accumulate)
