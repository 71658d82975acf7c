"""Define the jobs of a cross-validation, one per fold, and what their ends mean."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbtoolkit.errors import FoldError
from nbtoolkit.folds.folds import Folds
from nbtoolkit.run.events import EventReader, FoldChanged
from nbtoolkit.run.messages import SearchCommand
from nbtoolkit.run.paths import RunPaths, read_or_empty
from nbtoolkit.search.algorithm import EventWriter, JobResult, SearchJob, SearchRequest

FOLDS_FILE = "folds.json"

_RETRIED = ("died", "hung")  # not the function's doing: memory, a signal, a device


class CrossValidationAlgorithm:
    """Each fold once, in order; those that are through are not run again.

    A fold that raises ends the cross-validation: without it there is no mean, and the others would
    mostly raise too. What runs then ends as it may, and is not run again after a resume.

    Args:
        count: folds.
        record: where their events go.
        finished: folds that earlier sessions finished.
        timeout: seconds a fold may take; None: no limit.
        retries: how often a fold whose process died or hung is run again, from its checkpoint.
    """

    def __init__(
        self,
        count: int,
        record: EventWriter,
        *,
        finished: Mapping[int, JobResult],
        timeout: float | None = None,
        retries: int = 1,
    ) -> None:
        self._count, self._record = count, record
        self._timeout, self._retries = timeout, retries
        self._complete = dict(finished)
        self._waiting = [index for index in range(count) if index not in finished]
        self._running: set[int] = set()
        self._failed: dict[int, JobResult] = {}
        self._tries: Counter[int] = Counter()
        self._paused, self._stopped = False, False
        if finished:
            record.note(f"{len(finished)} of {count} folds are done already")

    @property
    def done(self) -> bool:
        """Whether nothing runs and nothing will."""
        return not self._running and not self._more

    @property
    def _more(self) -> bool:
        """Whether there is something left to start."""
        return bool(self._waiting) and not self._failed and not self._stopped

    @property
    def cut_short(self) -> bool:
        """Never: a fold may start that the deadline cuts off."""
        return False

    @property
    def ready(self) -> bool:
        """Whether there is another fold: none depends on another."""
        return self._more

    def prepare(self, jobs: int) -> None:
        """There is nothing to be prepared."""

    def next(self, left: float | None) -> SearchJob | None:
        """The next fold; None: none, now or at all.

        Args:
            left: seconds until the deadline. A fold may start that it will cut off: the next
                session goes on from its checkpoint.
        """
        if not self._more or self._paused or (left is not None and left <= 0):
            return None
        index = self._waiting.pop(0)
        self._running.add(index)
        self._tries[index] += 1
        self._write(index, "running")
        return SearchJob(key=fold_key(index), fold=index, timeout=self._timeout)

    def reported(self, job: SearchJob, metrics: Mapping[str, float], step: int | None) -> None:
        """Nothing is decided within a fold."""

    def announced(
        self, job: SearchJob, names: Sequence[str], stems: Sequence[str], first_step: int
    ) -> None:
        """Nothing depends on names."""

    def ended(self, job: SearchJob, ending: JobResult) -> None:
        """Note how a fold ended; one whose process died comes again."""
        index = job.fold
        assert index is not None
        self._running.discard(index)
        if ending.status == "completed":
            self._complete[index] = ending
            self._write(index, "complete", ending)
        elif ending.fault in _RETRIED and self._tries[index] <= self._retries:
            self._waiting.insert(0, index)
            self._write(index, "waiting", ending)
        else:
            if ending.status == "failed":
                self._failed[index] = ending
            self._write(index, ending.status, ending)

    def obey(self, command: SearchCommand) -> None:
        """``pause``, ``resume`` and ``stop``; the others are for sweeps."""
        if command.op in ("pause", "resume"):
            self._paused = command.op == "pause"
        elif command.op == "stop":
            self._stopped = True
        else:
            said = f"a cross-validation has no trials: {command.op} does nothing"
            self._record.note(said, level="warning")

    def close(self, status: str) -> dict[str, Any]:
        """How many folds are done, and the mean and spread of their scores.

        Raises:
            FoldError: a fold failed; it is run again when the cross-validation is resumed.
        """
        if self._failed and status == "completed":
            index, ending = next(iter(self._failed.items()))
            raise FoldError(
                f"fold {index} failed: {ending.error}",
                allowed=f"{len(self._complete)} of {self._count} folds are done, and are kept",
                do="cross-validate again once it is mended: only the others are run",
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
    """The program of a cross-validation's folder, which keeps the folds as ``folds.json``.

    Args:
        request: has the folds.
        record: the search's diary.

    Raises:
        FoldError: the folder was made with other folds.
    """
    folds, folder = request.folds, request.paths.folder
    assert folds is not None
    _keep(folds, folder / FOLDS_FILE)
    return CrossValidationAlgorithm(len(folds), record, finished=finished_folds(folder, len(folds)))


def _keep(folds: Folds, path: Path) -> None:
    """Write the folds; on a resume compare them with those written."""
    if path.exists():
        check_same(Folds.load(path), folds)
    else:
        folds.save(path)


def check_same(before: Folds, now: Folds) -> None:
    """Refuse to go on with other folds: the scores of the two could not be compared.

    Raises:
        FoldError: shows what differs.
    """
    differences = before.differences(now)
    if differences:
        shown = "; ".join(
            f"{name}: {was} then, {new} now" for name, (was, new) in differences.items()
        )
        raise FoldError(
            f"the folds are not those that were begun with: {shown}",
            allowed="the same folds: Folds.load(folder + '/folds.json') reads them",
            do="pass these, or begin anew with resume='never'",
        )


def fold_key(index: int) -> str:
    """The folder of a fold's run, relative to the cross-validation's."""
    return f"folds/{index}"


def finished_folds(folder: Path, count: int) -> dict[int, JobResult]:
    """The folds that are through, and how they ended.

    A fold is through when its value is there and its event, or its own result, says so: a scheduler
    may be killed between the two, in either order.
    """
    told, finished = _recorded_results(folder), {}
    for index in range(count):
        paths = RunPaths(folder / fold_key(index))
        ending = told.get(index) or _result(paths)
        if ending is not None and paths.value(0).exists():
            finished[index] = ending
    return finished


def _result(paths: RunPaths) -> JobResult | None:
    """How a run that completed ended, if it has scores; returned ones stand in events alone."""
    result: dict[str, Any] = read_or_empty(paths.result)
    if result.get("status") != "completed" or not result["metrics"]:
        return None
    return JobResult(status="completed", metrics=result["metrics"], seconds=result["seconds"])


def _recorded_results(folder: Path) -> dict[int, JobResult]:
    """How each fold ended that was complete by its last event."""
    events = EventReader(RunPaths(folder).events).read()
    last = {event.fold: event for event in events if isinstance(event, FoldChanged)}
    return {
        index: JobResult(status="completed", metrics=event.metrics, seconds=event.seconds or 0.0)
        for index, event in last.items()
        if event.state == "complete"
    }


def summary(scores: list[dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """Mean and sample standard deviation of each score that all folds have."""
    names = [name for name in (scores[0] if scores else {}) if all(name in one for one in scores)]
    found: dict[str, dict[str, float | None]] = {}
    for name in names:
        values = [one[name] for one in scores]
        spread = statistics.stdev(values) if len(values) > 1 else None
        found[name] = {"mean": statistics.fmean(values), "std": spread}
    return found
