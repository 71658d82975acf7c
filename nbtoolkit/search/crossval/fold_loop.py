"""Run the folds of a cross-validation on a pool, one job each, and read which are done."""

from __future__ import annotations

import statistics
from pathlib import Path

from nbtoolkit.errors import FoldError
from nbtoolkit.run.attempts import readable_last_event
from nbtoolkit.run.events import EventReader, FoldChanged
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.search.folds.folds import Folds
from nbtoolkit.search.pool import (
    EventWriter,
    JobEnded,
    JobResult,
    Pool,
    PoolEvent,
    SearchEnd,
    SearchJob,
)
from nbtoolkit.wire.messages import SearchCommand

FOLDS_FILE = "folds.json"

_RETRIED = ("died", "hung")  # not caused by the function, but by memory, a signal, a device


def run_folds(pool: Pool, events: EventWriter) -> SearchEnd:
    """Run the folds of a cross-validation, new or resumed.

    Raises:
        FoldError: the folder was made with other folds, or a fold has failed.
    """
    return CrossValidation(pool, events).run()


class CrossValidation:
    """One session of a cross-validation: it runs each fold once, in order.

    Finished folds do not run again. A fold that raises ends the cross-validation: without it there
    is no mean, and the others would mostly raise too. The folds that run then may finish, and do
    not run again after a resume. A fold whose process died or hung is retried once, from its
    checkpoint.

    Args:
        pool: runs the jobs; its request has the folds, which are stored as ``folds.json``.
        events: receives the events of folds and notes.

    Raises:
        FoldError: the folder was made with other folds.
    """

    def __init__(self, pool: Pool, events: EventWriter) -> None:
        folds = pool.request.search.folds
        folder = pool.request.paths.folder
        assert folds is not None
        if (folder / FOLDS_FILE).exists():
            check_same(Folds.load(folder / FOLDS_FILE), folds)
        else:
            folds.save(folder / FOLDS_FILE)
        self._pool = pool
        self._events = events
        self._count = len(folds)
        self._complete = finished_folds(folder, self._count)
        self._waiting = [index for index in range(self._count) if index not in self._complete]
        self._failed: dict[int, JobResult] = {}
        self._retried: set[int] = set()
        self._paused = False
        self._early: str | None = None
        """The status of a fold that has left before its end, by itself: others may be done."""
        if self._complete:
            events.note(f"{len(self._complete)} of {self._count} folds are done already")

    def run(self) -> SearchEnd:
        """Run the folds until all are done, one has failed, or a handle ends it."""
        self.start_jobs()
        while not self.over:
            for event in self._pool.wait():
                self.handle(event)
            self.start_jobs()
        return self.finish()

    @property
    def over(self) -> bool:
        """True if no fold runs and none will start."""
        ended = self._failed or self._pool.leaving is not None
        return not self._pool.running and (bool(ended) or not self._waiting)

    def start_jobs(self) -> None:
        """Start folds as long as the pool has room for them.

        A fold starts even if the deadline will cut it off: the next session resumes it from its
        checkpoint.
        """
        while self._waiting and self._may_start() and self._pool.free:
            index = self._waiting.pop(0)
            self._write(index, "running")
            self._pool.start(SearchJob(key=fold_key(index), fold=index))

    def _may_start(self) -> bool:
        left = self._pool.seconds_left()
        ended = self._failed or self._pool.leaving is not None
        return not ended and not self._paused and (left is None or left > 0)

    def handle(self, event: PoolEvent) -> None:
        """Follow an event of the pool; what a fold reports does not matter."""
        match event:
            case JobEnded(job=SearchJob(fold=int(index))):
                self._on_end(index, event.result)
            case SearchCommand(op="pause" | "resume" as op):
                self._paused = op == "pause"
            case SearchCommand():
                text = f"a cross-validation has no trials: {event.op} does nothing"
                self._events.note(text, level="warning")

    def _on_end(self, index: int, result: JobResult) -> None:
        """Record how a fold ended; a fold whose process died runs again."""
        if result.status == "completed":
            self._complete[index] = result
            self._write(index, "complete", result)
        elif result.fault in _RETRIED and index not in self._retried:
            self._retried.add(index)
            self._waiting.insert(0, index)
            self._write(index, "waiting", result)
        else:
            if result.status == "failed":
                self._failed[index] = result
            elif result.status != "pruned":
                self._early = result.status
            self._write(index, result.status, result)

    def finish(self) -> SearchEnd:
        """Return the status, the number of finished folds, and the mean and spread of each score.

        Raises:
            FoldError: a fold failed; it runs again when the cross-validation is resumed.
        """
        status = self._pool.leaving or self._early or "completed"
        if self._failed and status == "completed":
            index, result = next(iter(self._failed.items()))
            raise FoldError(
                f"fold {index} failed: {result.error}",
                allowed=f"{len(self._complete)} of {self._count} folds are done, and are kept",
                do="fix it and cross-validate again: only the unfinished folds run",
            )
        done = [dict(result.metrics) for result in self._complete.values()]
        summary = {"folds": self._count, "complete": len(done), "scores": summarise(done)}
        return SearchEnd(status, summary)

    def _write(self, index: int, state: str, result: JobResult | None = None) -> None:
        event = FoldChanged(
            fold=index,
            state=state,
            metrics=dict(result.metrics) if result else {},
            seconds=result.seconds if result else None,
            reason=result.error if result else None,
            folder=fold_key(index),
        )
        self._events.write(event)


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
    """Return the folder of a fold's run, relative to the cross-validation's."""
    return f"folds/{index}"


def finished_folds(folder: Path, count: int) -> dict[int, JobResult]:
    """Return the finished folds, and how they ended.

    A fold is finished if its value exists and its event or its own result says so: a scheduler may
    be killed between the two, in either order.
    """
    recorded = _recorded_results(folder)
    finished = {}
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
    """Return the results of the folds that are complete by their last event."""
    events = EventReader(RunPaths(folder).events).read()
    last = {event.fold: event for event in events if isinstance(event, FoldChanged)}
    return {
        index: JobResult(status="completed", metrics=event.metrics, seconds=event.seconds or 0.0)
        for index, event in last.items()
        if event.state == "complete"
    }


def summarise(scores: list[dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """Mean and sample standard deviation of each score that all folds have."""
    summaries: dict[str, dict[str, float | None]] = {}
    for name in scores[0] if scores else ():
        values = [fold[name] for fold in scores if name in fold]
        if len(values) == len(scores):
            std = statistics.stdev(values) if len(values) > 1 else None
            summaries[name] = {"mean": statistics.fmean(values), "std": std}
    return summaries
