"""Save or stop a training at the same step on all ranks, which agree about once a second.

Between two agreements no rank waits for another. An agreement is one all-reduce of a few numbers;
with one rank there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from nbtoolkit.errors import RunStopped

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Checkpoint
    from nbtoolkit.worker.context import RunContext

_SECONDS = 1.0  # between two agreements at most, if steps are shorter


class Signal(IntEnum):
    """What rank 0 asks all ranks to do."""

    CONTINUE = 0
    SAVE = 1
    CHECK_STOP = 2
    """Ask the supervisor whether to stop."""


@dataclass(frozen=True)
class Decision:
    """What all ranks do after a step.

    Attributes:
        save: whether they write a checkpoint.
        status: the status with which they then leave; None: the run continues.
    """

    save: bool = False
    status: str | None = None


class SaveTimes:
    """When the checkpoints of one training are due, and how long one takes.

    Args:
        settings: the section ``checkpoint``.

    Attributes:
        enabled: whether checkpoints are written.
    """

    def __init__(self, settings: Checkpoint) -> None:
        self.enabled = settings.enabled
        self._minutes = settings.every_minutes
        self._steps = settings.every_steps
        self._saved_at = time.monotonic()
        self._last_seconds = 0.0

    @property
    def reserve(self) -> float:
        """Seconds before the deadline that are reserved for a checkpoint."""
        return 2 * self._last_seconds  # what is saved may grow

    def due_by_steps(self, step: int) -> bool:
        """Whether a checkpoint is due after optimizer step ``step``; the same on all ranks."""
        return self.enabled and self._steps is not None and step % self._steps == 0

    def due_by_time(self) -> bool:
        """Whether a checkpoint is due now, by this rank's clock; the ranks have to agree."""
        if not self.enabled or self._minutes is None:
            return False
        return time.monotonic() - self._saved_at >= self._minutes * 60

    def saved(self, seconds: float = 0.0) -> None:
        """Note that a checkpoint was saved now, and how long it took."""
        self._saved_at = time.monotonic()
        self._last_seconds = seconds


class Watch:
    """Decides after each step of a training whether all ranks save or stop there.

    Args:
        ctx: the run's context.
        times: of the training's checkpoints; None: by the section ``checkpoint``.
    """

    def __init__(self, ctx: RunContext, times: SaveTimes | None = None) -> None:
        self._ctx = ctx
        self.times = SaveTimes(ctx.config.checkpoint) if times is None else times
        self._steps_ahead = 1  # the duration of a step is not known yet
        self._calls = 0
        self._begun = False

    def begin(self, step: int) -> None:
        """Start to watch after ``step`` steps, on all ranks; else :meth:`follow` starts it."""
        self._begun = True
        self._step = step
        self._since = time.monotonic()
        self._next = step + self._steps_ahead

    def follow(self, save: Callable[[], object], step: int | None = None) -> None:
        """Save or stop if it is time to; **all** ranks call this once after each step.

        Args:
            save: writes a checkpoint; called on all ranks.
            step: steps done; None: counts the calls.

        Raises:
            RunStopped: the run must stop here.
        """
        self._calls += 1
        step = self._calls if step is None else step
        if not self._begun:
            self.begin(step)
        decision = self.decide(step)
        if decision.save:
            self.save(save)
        if decision.status is not None:
            raise RunStopped(decision.status)

    def save(self, write: Callable[[], object]) -> None:
        """Write a checkpoint, unless none are written, and note how long it takes."""
        if self.times.enabled:
            began = time.monotonic()
            write()
            self.times.saved(time.monotonic() - began)

    def decide(self, step: int) -> Decision:
        """Return what all ranks do after ``step`` steps; each calls this once after each step."""
        if not self.due(step):
            return _CONTINUE
        signal, _ = self.agree(step)
        return self.decision(signal, step)

    def due(self, step: int) -> bool:
        """Whether the ranks agree after ``step`` steps; the same on all ranks."""
        if self.times.due_by_steps(step):
            return True
        if self._ctx.world_size > 1:
            return step >= self._next
        return step == self._next or time.monotonic() - self._since >= _SECONDS

    def agree(self, step: int, numbers: Sequence[float] = ()) -> tuple[Signal, list[float]]:
        """Return rank 0's signal, and the sums of ``numbers`` over the ranks; a collective."""
        control = [0.0, 0.0]
        if self._ctx.is_main:
            control = [float(self._signal()), float(self._steps_in_time(step))]
        signal, steps_ahead, *sums = self._all_reduce([*control, *numbers])
        self._steps_ahead = int(steps_ahead)
        self.begin(step)
        return Signal(int(signal)), sums

    def decision(self, signal: Signal, step: int) -> Decision:
        """Return what all ranks do, after they have agreed on ``signal``.

        A pruned trial is not saved: it is never resumed.
        """
        status = None
        if signal is Signal.CHECK_STOP:
            status = self._ctx.should_stop(self.times.reserve)
        due = signal is Signal.SAVE or status is not None or self.times.due_by_steps(step)
        return Decision(save=due and self.times.enabled and status != "pruned", status=status)

    def _signal(self) -> Signal:
        if self._ctx.stop_requested(self.times.reserve):
            return Signal.CHECK_STOP
        return Signal.SAVE if self.times.due_by_time() else Signal.CONTINUE

    def _steps_in_time(self, step: int) -> int:
        """Return the number of steps to the next agreement, from the duration of the last ones."""
        if step == self._step:  # no step was measured
            return self._steps_ahead
        seconds = (time.monotonic() - self._since) / (step - self._step)
        return max(1, int(_SECONDS / max(seconds, 1e-6)))

    def _all_reduce(self, numbers: list[float]) -> list[float]:
        if self._ctx.world_size == 1:
            return numbers
        import torch
        import torch.distributed as dist

        sums = torch.tensor(numbers, dtype=torch.float64, device=self._ctx.device)
        dist.all_reduce(sums)
        summed: list[float] = sums.tolist()
        return summed


_CONTINUE = Decision()
