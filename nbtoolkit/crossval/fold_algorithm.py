"""Define the jobs of a cross-validation, one per fold, and the handling of their results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbtoolkit.errors import FoldError
from nbtoolkit.folds.folds import Folds
from nbtoolkit.run.attempts import readable_last_event
from nbtoolkit.run.events import EventReader, FoldChanged
from nbtoolkit.run.messages import SearchCommand
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.search.algorithm import EventWriter, JobResult, SearchJob, SearchRequest

FOLDS_FILE = "folds.json"

_RETRIED = ("died", "hung")  # not caused by the function, but by memory, a signal, a device


class CrossValidationAlgorithm:
    """Runs each fold once, in order; finished folds do not run again.

    A fold that raises ends the cross-validation: without it there is no mean, and the others would
    mostly raise too. The folds that run then may finish, and do not run again after a resume. A
    fold whose process died or hung is retried once, from its checkpoint.

    Args:
        count: number of folds.
        record: the writer of their events.
        finished: folds that earlier sessions finished.
    """

    def __init__(
        self, count: int, record: EventWriter, *, finished: Mapping[int, JobResult]
    ) -> None:
        self._count = count
        self._record = record
        self._complete = dict(finished)
        self._waiting = [index for index in range(count) if index not in finished]
        self._running: set[int] = set()
        self._failed: dict[int, JobResult] = {}
        self._retried: set[int] = set()
        self._paused = False
        self._stopped = False
        if finished:
            record.note(f"{len(finished)} of {count} folds are done already")

    @property
    def done(self) -> bool:
        """Whether nothing runs and nothing will."""
        return not self._running and not self.ready

    @property
    def cut_short(self) -> bool:
        """Always false: a fold starts even if the deadline will cut it off."""
        return False

    @property
    def ready(self) -> bool:
        """Whether another fold may start. No fold depends on another."""
        return bool(self._waiting) and not self._failed and not self._stopped

    def prepare(self, jobs: int) -> None:
        """Do nothing: folds need no preparation."""

    def next(self, left: float | None) -> SearchJob | None:
        """The next fold; None: there is none now.

        Args:
            left: seconds until the deadline. A fold starts even if the deadline will cut it off:
                the next session resumes it from its checkpoint.
        """
        if not self.ready or self._paused or (left is not None and left <= 0):
            return None
        index = self._waiting.pop(0)
        self._running.add(index)
        self._write(index, "running")
        return SearchJob(key=fold_key(index), fold=index)

    def on_report(self, job: SearchJob, metrics: Mapping[str, float], step: int | None) -> None:
        """Do nothing: a fold always runs to its end."""

    def on_unread(self, job: SearchJob, names: Sequence[str]) -> None:
        """Do nothing: a cross-validation has no parameters."""

    def on_announcement(
        self, job: SearchJob, names: Sequence[str], stems: Sequence[str], first_step: int
    ) -> None:
        """Do nothing: the names of metrics do not matter."""

    def on_end(self, job: SearchJob, ending: JobResult) -> None:
        """Record how a fold ended; a fold whose process died runs again."""
        index = job.fold
        assert index is not None
        self._running.discard(index)
        if ending.status == "completed":
            self._complete[index] = ending
            self._write(index, "complete", ending)
        elif ending.fault in _RETRIED and index not in self._retried:
            self._retried.add(index)
            self._waiting.insert(0, index)
            self._write(index, "waiting", ending)
        else:
            if ending.status == "failed":
                self._failed[index] = ending
            self._write(index, ending.status, ending)

    def on_command(self, command: SearchCommand) -> None:
        """Follow ``pause``, ``resume`` and ``stop``; the others are for sweeps."""
        if command.op in ("pause", "resume"):
            self._paused = command.op == "pause"
        elif command.op == "stop":
            self._stopped = True
        else:
            text = f"a cross-validation has no trials: {command.op} does nothing"
            self._record.note(text, level="warning")

    def close(self, status: str) -> dict[str, Any]:
        """The number of finished folds, and the mean and standard deviation of their scores.

        Raises:
            FoldError: a fold failed; it runs again when the cross-validation is resumed.
        """
        if self._failed and status == "completed":
            index, ending = next(iter(self._failed.items()))
            raise FoldError(
                f"fold {index} failed: {ending.error}",
                allowed=f"{len(self._complete)} of {self._count} folds are done, and are kept",
                do="fix it and cross-validate again: only the unfinished folds run",
            )
        done = [dict(ending.metrics) for ending in self._complete.values()]
        return {"folds": self._count, "complete": len(done), "scores": summary(done)}

    def _write(self, index: int, state: str, ending: JobResult | None = None) -> None:
        event = FoldChanged(
            fold=index,
            state=state,
            metrics=dict(ending.metrics) if ending else {},
            seconds=ending.seconds if ending else None,
            reason=ending.error if ending else None,
            folder=fold_key(index),
        )
        self._record.write(event)


def make_algorithm(request: SearchRequest, record: EventWriter) -> CrossValidationAlgorithm:
    """Make the algorithm of a cross-validation, and store its folds as ``folds.json``.

    Args:
        request: has the folds.
        record: the writer of the search's events.

    Raises:
        FoldError: the folder was made with other folds.
    """
    folds, folder = request.search.folds, request.paths.folder
    assert folds is not None
    if (folder / FOLDS_FILE).exists():
        check_same(Folds.load(folder / FOLDS_FILE), folds)
    else:
        folds.save(folder / FOLDS_FILE)
    return CrossValidationAlgorithm(len(folds), record, finished=finished_folds(folder, len(folds)))


def check_same(before: Folds, now: Folds) -> None:
    """Refuse to resume with other folds: the scores could not be compared.

    Raises:
        FoldError: lists what differs.
    """
    differences = "; ".join(
        f"{name}: {old} then, {new} now" for name, (old, new) in before.differences(now).items()
    )
    if differences:
        raise FoldError(
            f"the folds are not those of the first session: {differences}",
            allowed="the same folds: Folds.load(folder + '/folds.json') reads them",
            do="pass these, or start a new cross-validation with resume='never'",
        )


def fold_key(index: int) -> str:
    """The folder of a fold's run, relative to the cross-validation's."""
    return f"folds/{index}"


def finished_folds(folder: Path, count: int) -> dict[int, JobResult]:
    """The finished folds, and how they ended.

    A fold is finished if its value exists and its event or its own result says so: a scheduler may
    be killed between the two, in either order.
    """
    recorded, finished = _recorded_results(folder), {}
    for index in range(count):
        paths = RunPaths(folder / fold_key(index))
        result = recorded.get(index) or _own_result(paths)
        if result is not None and paths.value(0).exists():
            finished[index] = result
    return finished


def _own_result(paths: RunPaths) -> JobResult | None:
    """How a completed run ended, if it has scores; returned scores are in the events only."""
    ended = readable_last_event(paths)
    if ended is None or ended.status != "completed" or not ended.metrics:
        return None
    return JobResult(status="completed", metrics=ended.metrics, seconds=ended.seconds or 0.0)


def _recorded_results(folder: Path) -> dict[int, JobResult]:
    """The results of the folds that are complete by their last event."""
    events = EventReader(RunPaths(folder).events).read()
    last = {event.fold: event for event in events if isinstance(event, FoldChanged)}
    return {
        index: JobResult(status="completed", metrics=event.metrics, seconds=event.seconds or 0.0)
        for index, event in last.items()
        if event.state == "complete"
    }


def summary(scores: list[dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """Mean and sample standard deviation of each score that all folds have."""
    summaries: dict[str, dict[str, float | None]] = {}
    for name in scores[0] if scores else ():
        values = [fold[name] for fold in scores if name in fold]
        if len(values) == len(scores):
            std = statistics.stdev(values) if len(values) > 1 else None
            summaries[name] = {"mean": statistics.fmean(values), "std": std}
    return summaries
