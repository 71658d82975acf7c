"""Define the interface of search algorithms: which job runs next, what its result means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nbtoolkit.environment.grace import EXIT_GRACE
from nbtoolkit.run.events import Event, RunStarted
from nbtoolkit.run.messages import SearchCommand
from nbtoolkit.run.paths import Kind

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.environment.deadline import Note
    from nbtoolkit.environment.placement import MeasuredSpeed
    from nbtoolkit.folds.folds import Folds
    from nbtoolkit.host import Host
    from nbtoolkit.run.paths import RunPaths
    from nbtoolkit.search.slots import Placement, Slots
    from nbtoolkit.study.sweep_config import SweepConfig


JobStatus = Literal["completed", "pruned", "stopped", "deadline", "failed"]
Fault = Literal["raised", "oom", "nan", "died", "hung", "timeout"]


@dataclass(frozen=True, kw_only=True)
class Search:
    """What to search, and how to run its jobs.

    Attributes:
        kind: ``"sweep"`` or ``"cv"``.
        algorithm: ``"module:function"``; called as ``function(request, event_writer)`` in the
            scheduler's process.
        sweep_config: the sweep's settings; None for a cross-validation.
        identity: values that must be equal, besides configuration and function, for
            ``resume="auto"`` to resume a search.
        placement: see :func:`~nbtoolkit.search.slots.make_slots`.
        per_device: jobs per device.
        jobs: number of jobs; None if it is large or unknown.
        total: number of trials over all sessions. A completed search with a smaller total resumes,
            too. None for no number.
        slots: where jobs run; None to derive them from placement and hardware.
        folds: ``folds[job.fold]`` becomes ``ctx.fold``; None without folds.
        timeout: limit in seconds; None for the host's limit only.
        uses_reserve: whether it may use the reserve of the notebook's deadline.
    """

    kind: Kind
    algorithm: str
    sweep_config: SweepConfig | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    placement: Placement = "auto"
    per_device: int = 1
    jobs: int | None = None
    total: int | None = None
    slots: Slots | None = None
    folds: Folds | None = None
    timeout: float | None = None
    uses_reserve: bool = False


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What the scheduler of a search receives.

    Attributes:
        paths: the search's folder.
        config: the base configuration; each job overrides some of its settings.
        slots: where jobs run.
        host: the host, for the jobs' plans.
        header: the first event of the search.
        notes: messages to show at the start.
        deadline: unix time at which the search ends; None for no limit.
        imposed: True if the deadline is the end of the host's session, not the user's own limit.
        search: what is searched.
        grace: seconds that jobs get to leave at the deadline; ``fit`` has saved before it.
        speed: what a calibration has measured, for the jobs' plans.
    """

    paths: RunPaths
    config: Config
    slots: Slots
    host: Host
    header: RunStarted
    notes: tuple[Note, ...]
    deadline: float | None
    imposed: bool
    search: Search
    grace: float = EXIT_GRACE
    speed: MeasuredSpeed | None = None


@dataclass(frozen=True, kw_only=True)
class SearchJob:
    """One call of the training function.

    Attributes:
        key: the job's folder, relative to the search's: ``"trials/0007"``,
            ``"trials/0007/fold-2"``, ``"folds/2"``. A checkpoint in it is resumed from.
        overrides: settings that differ from the base configuration, by dotted name.
        params: the value of ``ctx.params``.
        fold: index of the fold; None without folds.
        timeout: limit in seconds; None for no limit of its own.
        judged: True if each report waits for the answer of :meth:`SearchAlgorithm.on_report`.
    """

    key: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    fold: int | None = None
    timeout: float | None = None
    judged: bool = False


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """How a job ended.

    Attributes:
        status: the run's status, or ``"failed"``.
        metrics: the metrics reported or returned last (if there are none: logged last).
        seconds: from the start of the job to its end.
        fault: kind of failure; None if the job did not fail.
        error: the failure in one line.
    """

    status: JobStatus
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    fault: Fault | None = None
    error: str | None = None


class EventWriter(Protocol):
    """Appends to the events of the search."""

    def write(self, event: Event) -> None:
        """Append an event."""

    def note(self, text: str, level: str = "info") -> None:
        """Append a message for the user."""


class SearchAlgorithm(Protocol):
    """Decides which job runs next and what each result means.

    An algorithm is plain logic without processes or sockets. It lives in the scheduler's process
    and is the only writer of the study. All calls come from one thread.
    """

    @property
    def done(self) -> bool:
        """True if no job runs and none will start."""

    @property
    def cut_short(self) -> bool:
        """True if only the time limit ended the search: a later session can resume it."""

    @property
    def ready(self) -> bool:
        """True if the next job is prepared and does not depend on running jobs."""

    def prepare(self, jobs: int) -> None:
        """Prepare the next job; called several times a second while all slots are busy.

        Args:
            jobs: prepare at most this many jobs in total, one per call.
        """

    def next(self, left: float | None) -> SearchJob | None:
        """Return the next job; None if nothing can start now. Called when a slot is free.

        Args:
            left: seconds until the deadline; None for no limit.
        """

    def on_report(
        self, job: SearchJob, metrics: Mapping[str, float], step: int | None
    ) -> str | None:
        """Judge a report: ``"pruned"`` ends the job, None lets it continue."""

    def on_unread(self, job: SearchJob, names: Sequence[str]) -> None:
        """Receive the parameters that a job's function has ended without reading."""

    def on_announcement(
        self, job: SearchJob, names: Sequence[str], stems: Sequence[str], first_step: int
    ) -> None:
        """Receive the names of the metrics that a job will report (``RunContext.announce``)."""

    def on_end(self, job: SearchJob, result: JobResult) -> None:
        """Receive the result of a job that has ended."""

    def on_command(self, command: SearchCommand) -> None:
        """Follow a command of a handle; the scheduler itself stops running jobs."""

    def close(self, status: str) -> dict[str, Any]:
        """Finish writing; return the summary for the last event."""


# --- running trials ---


class RunningTrial:
    """The jobs of one trial and their results so far.

    Args:
        number: number of the trial.
        params: parameters, constants included.
        folds: number of folds; None for one job without a fold.
        scores: metrics of the folds that an earlier session finished, by fold.
    """

    def __init__(
        self,
        number: int,
        params: Mapping[str, Any],
        folds: int | None,
        scores: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        self.number, self.params, self.folds = number, dict(params), folds
        self.key = folder_of(number)
        self.scores = {index: dict(metrics) for index, metrics in (scores or {}).items()}
        """Metrics of the finished folds, by fold."""
        todo: list[int | None] = [None] if folds is None else [*range(folds)]
        self.waiting = [fold for fold in todo if fold not in self.scores]
        self.running: dict[str, SearchJob] = {}
        self.seconds = 0.0
        self.attempts = 0
        """Number of retries of its jobs."""
        self.leaving: str | None = None
        """State in which the trial ends after its last job; None while it continues."""
        self.reason: str | None = None
        self.best: dict[int | None, float] = {}
        """Best report of each job, by fold."""
        self.first_step = 0
        """Step of the first report: 1 for ``nb.fit``; Optuna's pruners expect 0."""
        self.folds_reported = 0
        """Number of folds whose running mean is in the study."""

    def next_job(self, timeout: float | None, judged: bool) -> SearchJob:
        """Return the next waiting job."""
        fold = self.waiting.pop(0)
        job = SearchJob(
            key=self.key if fold is None else f"{self.key}/fold-{fold}",
            overrides=self.params,
            params=self.params,
            fold=fold,
            timeout=timeout,
            judged=judged,
        )
        self.running[job.key] = job
        return job

    def leave(self, state: str, reason: str) -> None:
        """End the trial after its running jobs; the first reason counts."""
        if self.leaving is None:
            self.leaving, self.reason = state, reason
        self.waiting.clear()

    def retry(self, job: SearchJob) -> None:
        """Retry a job."""
        self.attempts += 1
        self.waiting.insert(0, job.fold)

    @property
    def over(self) -> bool:
        """True if no job of the trial runs or waits."""
        return not self.running and not self.waiting

    def mean(self, metric: str, folds: int) -> float:
        """Return the mean of a metric over the first ``folds`` folds, which must be finished."""
        return math.fsum(self.scores[i][metric] for i in range(folds)) / folds

    def complete_folds(self) -> int:
        """Return the number of finished folds, counted from fold 0 up to the first gap."""
        return next(i for i in range(len(self.scores) + 1) if i not in self.scores)


def folder_of(number: int) -> str:
    """Return a trial's folder, relative to the sweep's."""
    return f"trials/{number:04d}"


def is_of_trial(key: str, number: int) -> bool:
    """Return whether a job, by its key, is the trial ``number`` or one of its folds."""
    return f"{key}/".startswith(f"{folder_of(number)}/")
