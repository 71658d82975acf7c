"""Decide whether a run whose ranks have failed starts them again, and after which pause."""

from __future__ import annotations

from dataclasses import replace

from nbtoolkit.launcher.outcome import Failed
from nbtoolkit.run.events import CheckpointSaved, MetricsLogged, MetricsReported
from nbtoolkit.wire import messages

PAUSES = (1.0, 10.0, 60.0)
"""Seconds before the first, the second and each further restart."""


class Restarts:
    """The restarts of one run.

    A rank that died or hung is started again also without a checkpoint: the cause may have come
    from outside. An exception of the user's code is not, since the same code on the same samples
    raises it again. After a restart, the next failure starts the ranks again only if the attempt
    got further than the one before. So an error that comes back at the same step ends the run.

    Args:
        limit: the number of restarts.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0
        """The number of restarts so far."""
        self._reached: dict[str, int] = {}  # by this attempt, see _place
        self._before: dict[str, int] = {}  # by all earlier attempts

    def note(self, message: messages.Message) -> None:
        """Note how far rank 0 has come."""
        kind, step = _place(message)
        if not kind:
            return
        if step is None:
            # An attempt reports from its first step on, but saves after the checkpoint it began at.
            begin = self._before.get(kind, 0) if kind == "checkpoint" else 0
            step = self._reached.get(kind, begin) + 1
        self._reached[kind] = max(step, self._reached.get(kind, step))

    def allows(self, failed: Failed, *, has_checkpoint: bool) -> bool:
        """Return whether another attempt may help."""
        if self.count >= self._limit or failed.cause == "final":
            return False
        if failed.cause == "raised" and not has_checkpoint:
            return False
        return self.count == 0 or self._got_further()

    def begin(self) -> float:
        """Count a restart; return the seconds to wait before it."""
        pause = PAUSES[min(self.count, len(PAUSES) - 1)]
        self.count += 1
        for kind, step in self._reached.items():
            self._before[kind] = max(step, self._before.get(kind, step))
        self._reached = {}
        return pause

    def plan(self, failed: Failed, pause: float, *, has_checkpoint: bool) -> str:
        """Return what the user is told of a restart."""
        begin = "the newest checkpoint" if has_checkpoint else "the beginning (no checkpoint)"
        return (
            f"{failed.brief}: the ranks start again from {begin} in {pause:g} s "
            f"(restart {self.count} of {self._limit})"
        )

    def explain_end(self, failed: Failed) -> Failed:
        """Return the failure that ends the run, with a note if the run was restarted before."""
        if self.count == 0:
            return failed
        times = "once" if self.count == 1 else f"{self.count} times"
        ends = "that is the limit (runtime.restarts)"
        if not self._got_further():
            ends = "this attempt got no further than the one before"
        note = f"the ranks were restarted {times}; {ends}"
        return replace(failed, notes=(*failed.notes, note))

    def _got_further(self) -> bool:
        return any(step > self._before.get(kind, 0) for kind, step in self._reached.items())


def _place(message: messages.Message) -> tuple[str, int | None]:
    """Return the kind of the steps that a message counts, and its step; an empty kind: none."""
    match message:
        case CheckpointSaved() | messages.CheckpointRequest():
            return "checkpoint", message.step
        case MetricsReported() | messages.ReportRequest():
            return "report", message.step
        case MetricsLogged():
            return "log", message.step
    return "", None
