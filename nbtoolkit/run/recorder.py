"""Write down as events what is known of a run while it lives."""

from __future__ import annotations

import json
import numbers
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nbtoolkit.run import events
from nbtoolkit.run.messages import StopRequest
from nbtoolkit.run.paths import RunPaths, write_json, write_whole
from nbtoolkit.run.rank_check import Weights, apart

RETURNED = "value"
"""The name of a single number that a function returns."""


def returned_numbers(value: Any) -> dict[str, float]:
    """The plain numbers of what a function returned: a dict's by name, a single one as ``value``.

    Args:
        value: its numbers are Python's and NumPy's, and tensors and arrays without dimensions; all
            else is left out.
    """
    items = value.items() if isinstance(value, Mapping) else ((RETURNED, value),)
    return {str(name): float(one) for name, one in items if _is_number(one)}


def _is_number(value: Any) -> bool:
    single = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    number = value.item() if single else value
    return isinstance(number, numbers.Real) and not isinstance(number, bool)


class RunRecord:
    """The run's diary and its present state: metrics, checkpoint, and whether it is to end.

    Args:
        paths: the run's folder.
        deadline: unix time at which it is to end; None: no limit.
        durable: its end is on the disk when it is told; False where a crash of the machine may lose
            it, since somebody else knows of it too (a flush to disk takes 5 to 20 ms).
    """

    def __init__(self, paths: RunPaths, *, deadline: float | None, durable: bool = True) -> None:
        self.paths, self.deadline, self._durable = paths, deadline, durable
        self.started = time.time()
        self.metrics: dict[str, float] = {}
        """The values last reported or returned (or last logged, where nothing was reported)."""
        self.checkpoint: str | None = None
        self.leaving: str | None = None
        """The status all ranks leave with at the next report; None: go on."""
        self._reported = self._apart = False
        self._log = events.EventLog(paths.events)
        self._stop = str(paths.stop)

    def note(self, text: str, level: str = "info") -> None:
        """Write a sentence for the user."""
        self._log.write(events.NoteAdded(level=level, text=text))

    def write(self, event: events.Event) -> None:
        """Write any other event."""
        self._log.write(event)

    def logged(self, values: dict[str, float], step: int | None) -> None:
        """Metrics from ``ctx.log``."""
        self._log.write(events.MetricsLogged(values=values, step=step))
        if not self._reported:
            self.metrics.update(values)

    def reported(self, values: dict[str, float], step: int | None) -> str | None:
        """Metrics from ``ctx.report``; returns the status to leave with, or None to go on."""
        decision = self.decide()
        self._log.write(events.MetricsReported(values=values, step=step, decision=decision or "go"))
        if not self._reported:
            self.metrics.clear()
            self._reported = True
        self.metrics.update(values)
        return decision

    def returned(self, values: Mapping[str, float]) -> None:
        """Numbers that the function returned: as if it had reported them at its end."""
        new = {name: one for name, one in values.items() if not self._reported_as(name, one)}
        if new:
            self._log.write(events.MetricsReported(values=new))
            self.metrics.update(new)

    def _reported_as(self, name: str, value: float) -> bool:
        return self._reported and name in self.metrics and self.metrics[name] == value

    def compare(self, ranks: Sequence[Weights | None]) -> None:
        """Warn, once, when all ranks' weights at one place are not of one model."""
        if not self._apart and (warning := apart(ranks)):
            self._apart = True
            self.note(warning, "warning")

    def decide(self, reserve: float = 0.0) -> str | None:
        """Whether the run is to end now, and as what; ``reserve``: seconds that saving takes."""
        left = None if self.deadline is None else self.deadline - time.time()
        if self.leaving is None and left is not None and left <= reserve:
            kept = f", but for {left:.0f} s to save in" if left >= 1.0 else ""
            self.ask_to_stop("deadline", f"the run's time is used up{kept}")
        return self.leaving

    def ask_to_stop(self, status: str, reason: str, grace: float | None = None) -> None:
        """Let the ranks leave at the next report with ``status``."""
        if self.leaving is None:
            self.leaving = status
            self._log.write(events.StopRequested(reason=reason, grace=grace))

    def stop_requested(self) -> StopRequest | None:
        """The request a handle left in the run's folder, once."""
        if not os.path.exists(self._stop):  # asked 20 times a second
            return None
        try:
            request: dict[str, Any] = json.loads(self.paths.stop.read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            request = {}
        self.paths.stop.unlink(missing_ok=True)
        reason = request.get("reason", "a handle asked")
        return StopRequest(reason=reason, grace=request.get("grace"))

    def saved(self, path: str, step: int | None, kind: str) -> None:
        """A checkpoint was written."""
        self.checkpoint = path
        self._log.write(events.CheckpointSaved(path=path, step=step, kind=kind))

    def complete(self, status: str, processes: int, **more: Any) -> None:
        """End the run well: result (with ``more`` in it) first, then the last event."""
        seconds = time.time() - self.started
        result = {
            "status": status,
            "metrics": self.metrics,
            "seconds": seconds,
            "processes": processes,
            "checkpoint": self.checkpoint,
            **more,
        }
        write_json(self.paths.result, result, durable=self._durable)
        self._end(status, seconds, None)

    def fail(self, error: dict[str, Any], *, rank: int | None, notes: list[str]) -> None:
        """End the run with a packed error (see crossing.pack_error)."""
        seconds = time.time() - self.started
        packed = pickle.dumps({**error, "rank": rank, "notes": notes})
        write_whole(self.paths.error_pickle, packed, durable=self._durable)
        readable = {"type": error["type"], "text": error["text"], "traceback": error["traceback"]}
        told = {**readable, "rank": rank, "notes": notes, "seconds": seconds}
        write_json(self.paths.error, told, durable=self._durable)
        self._end("failed", seconds, f"{error['type']}: {error['text']}")

    def _end(self, status: str, seconds: float, error: str | None) -> None:
        metrics = self.metrics
        self._log.write(
            events.RunEnded(status=status, seconds=seconds, error=error, metrics=metrics)
        )
        self._log.close(durable=self._durable)
