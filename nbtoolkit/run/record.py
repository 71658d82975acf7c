"""Write a run's events, and hold what its supervisor needs of them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.environment.deadline import on_monotonic_clock
from nbtoolkit.run.events import (
    CheckpointSaved,
    Event,
    EventLog,
    FoldChanged,
    MetricsLogged,
    MetricsReported,
    NoteAdded,
    RunEnded,
    RunStarted,
    StopRequested,
)
from nbtoolkit.run.paths import RunPaths, read_or_empty, sync_folder, write_whole
from nbtoolkit.run.rank_check import divergence_warning, report_warning
from nbtoolkit.wire import messages
from nbtoolkit.wire.messages import Weights

if TYPE_CHECKING:
    from nbtoolkit.wire.serialization import PackedError


class RunRecord:
    """Writes a run's events; holds its latest metrics, checkpoint and stop request.

    Args:
        paths: the run's folder.
        deadline: unix time at which the run must end; None: no limit.
        durable: flush the begin and the end to the disk (10 ms each); False where a crash of the
            machine may lose them, because another process knows them too.
    """

    def __init__(self, paths: RunPaths, *, deadline: float | None, durable: bool = True) -> None:
        self.paths = paths
        self._durable = durable
        self._started = time.monotonic()
        self._ends = on_monotonic_clock(deadline)
        self.metrics: dict[str, float] = {}
        """The values last reported or returned; the last logged ones if none were reported."""
        self.checkpoint: str | None = None
        self.leaving: str | None = None
        """The status that all ranks stop with at the next report; None: continue."""
        self._reported = self._warned_of_weights = self._warned_of_values = False
        self._stop_file = os.fspath(paths.stop)
        self._log = EventLog(paths.events)
        self._findable = False

    def note(self, text: str, level: str = "info") -> None:
        """Write a sentence for the user."""
        self._log.write(NoteAdded(level=level, text=text))

    def write(self, event: Event) -> None:
        """Write any other event."""
        self._log.write(event)
        # To lose the end of a fold in a crash of the machine would be to train it again.
        if isinstance(event, FoldChanged) and event.state == "complete":
            self._log.sync()

    def begin_attempt(self, first: RunStarted) -> None:
        """Write the first event of another attempt of this process; its seconds count anew."""
        self._started = time.monotonic()
        self._log.write(first)

    def make_findable(self) -> None:
        """Flush to the disk what the next launch finds the run by: its first event and its name.

        It takes about 10 ms, and so comes when the ranks have been started.
        """
        if self._durable:
            self._make_findable()

    def _make_findable(self) -> None:
        if not self._findable:
            self._findable = True
            self._log.sync()
            sync_folder(self.paths.folder)
            sync_folder(self.paths.folder.parent)

    def take(self, message: messages.Statement) -> None:
        """Record a rank's message that has no answer; ignore what only a supervisor needs."""
        match message:
            case MetricsLogged():
                self.logged(message.values, message.step)
            case MetricsReported():
                self.reported(message.values, message.step)
            case CheckpointSaved():
                self.saved(message.path, message.step, message.kind)
            case NoteAdded():
                self.note(message.text, message.level)
            case messages.UsageWarning():
                self.note(message.text, "warning")

    def answer(self, question: messages.Question) -> messages.Answer:
        """Record rank 0's question, which every rank has asked, and answer it."""
        match question:
            case messages.ReportRequest():
                return messages.Answer(leave=self.reported(question.values, question.step))
            case messages.StopCheck():
                return messages.Answer(leave=self.decide(question.reserve))
            case messages.CheckpointRequest():
                self.saved(question.path, question.step, question.kind)
        return messages.Answer()

    def logged(self, values: dict[str, float], step: int | None) -> None:
        """Record metrics from ``ctx.log``."""
        self._log.write(MetricsLogged(values=values, step=step))
        if not self._reported:
            self.metrics.update(values)

    def reported(self, values: dict[str, float], step: int | None) -> str | None:
        """Record metrics from ``ctx.report``; returns the status to stop with, None: continue."""
        decision = self.decide()
        self._log.write(MetricsReported(values=values, step=step, decision=decision or "go"))
        if not self._reported:
            self.metrics.clear()
            self._reported = True
        self.metrics.update(values)
        return decision

    def returned(self, values: Mapping[str, float]) -> None:
        """Record the returned numbers as a last report, but for those that were reported so."""
        before = self.metrics if self._reported else {}
        new = {name: value for name, value in values.items() if before.get(name) != value}
        if new:
            self._log.write(MetricsReported(values=new))
            self.metrics.update(new)

    def compare(
        self, weights: Sequence[Weights | None], values: Sequence[Mapping[str, float]]
    ) -> None:
        """Warn, once each, if the ranks' weights differ, or the numbers that they report.

        Args:
            weights: by rank; None where the ranks are not compared.
            values: by rank.
        """
        if weights[0] is None:
            return
        if not self._warned_of_weights and (warning := divergence_warning(weights)):
            self._warned_of_weights = True
            self.note(warning, "warning")
        if not self._warned_of_values and (warning := report_warning(values)):
            self._warned_of_values = True
            self.note(warning, "warning")

    def seconds_left(self) -> float | None:
        """Return the seconds until the deadline; None: no limit."""
        return None if self._ends is None else self._ends - time.monotonic()

    def decide(self, reserve: float = 0.0) -> str | None:
        """Return the status to stop with now, None: continue.

        ``reserve``: seconds that saving takes.
        """
        left = self.seconds_left()
        if self.leaving is None and left is not None and left <= reserve:
            rest = f", except {left:.0f} s for saving" if left >= 1.0 else ""
            self.request_stop("deadline", f"the run's time is used up{rest}")
        return self.leaving

    def request_stop(self, status: str, reason: str, grace: float | None = None) -> None:
        """Let the ranks stop at the next report with ``status``."""
        if self.leaving is None:
            self.leaving = status
            self._log.write(StopRequested(reason=reason, grace=grace))

    def stop_requested(self) -> messages.StopRequest | None:
        """Return the request that a handle has written into the run's folder; removes it."""
        # Called 20 times per second; an exception would take ten times as long as this check.
        if not os.path.exists(self._stop_file):
            return None
        # Damaged, a FIFO or a folder: somebody asks all the same. A folder stays, and the run stops
        # at its first look.
        request = read_or_empty(self.paths.stop)
        with contextlib.suppress(OSError):
            self.paths.stop.unlink()
        grace = request.get("grace")
        return messages.StopRequest(
            reason=str(request.get("reason", "a handle asked")),
            grace=float(grace) if isinstance(grace, (int, float)) else None,
        )

    def commands_requested(self) -> list[messages.SearchCommand]:
        """Return the commands that handles of a search have written into its folder.

        Removes them.
        """
        folder = self.paths.commands
        requested: list[messages.SearchCommand] = []
        for file in sorted(folder.iterdir()) if folder.is_dir() else ():
            if file.name.startswith("."):  # it is being written
                continue
            if (command := _read_command(file)) is not None:
                requested.append(command)
            else:
                self.note(f"{file} holds no command of a search, and was deleted", "warning")
            file.unlink()
        return requested

    def saved(self, path: str, step: int | None, kind: str) -> None:
        """Record a checkpoint, which is on the disk."""
        self.checkpoint = path
        self._make_findable()  # a trial's was not until now: most trials have no checkpoint
        self._log.write(CheckpointSaved(path=path, step=step, kind=kind))
        self._log.sync()

    def complete(
        self, status: str, processes: int, *, summary: Mapping[str, Any] | None = None
    ) -> None:
        """End the run without an error.

        Args:
            status: how it has ended.
            processes: the number of its ranks.
            summary: what a search adds.
        """
        self.paths.error_pickle.unlink(missing_ok=True)  # of an earlier attempt
        self._end(RunEnded(status=status, processes=processes, summary=dict(summary or {})))

    def fail(self, error: PackedError, *, rank: int | None, notes: Sequence[str] = ()) -> None:
        """End the run with an error.

        Args:
            error: packed.
            rank: that raised it; None: no rank did.
            notes: sentences to add to it.
        """
        error = replace(error, rank=rank, notes=notes)
        write_whole(self.paths.error_pickle, error.encode(), durable=self._durable)
        text = f"{error.type}: {error.text}"
        trace = error.traceback
        ended = RunEnded(status="failed", error=text, traceback=trace, rank=rank, notes=[*notes])
        self._end(ended)

    def _end(self, ended: RunEnded) -> None:
        seconds = time.monotonic() - self._started
        self._log.write(
            replace(ended, seconds=seconds, metrics=self.metrics, checkpoint=self.checkpoint)
        )
        self._log.close(durable=self._durable)


def _read_command(file: Path) -> messages.SearchCommand | None:
    """Return the command in a file; None: it holds none."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(messages.SearchCommand).validate_python(read_or_empty(file))
    except ValidationError:
        return None
