"""Define what a search runs next and what it concludes from each end; pure logic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nbtoolkit.run.events import Event, RunStarted
from nbtoolkit.run.messages import SearchCommand

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.environment.deadline import Note
    from nbtoolkit.folds.folds import Folds
    from nbtoolkit.host import Host
    from nbtoolkit.run.paths import RunPaths
    from nbtoolkit.search.slots import Slots
    from nbtoolkit.study.sweep_config import SweepConfig


# --- the interface ---
# What a sweep or a cross-validation runs next, and what it makes of the endings.
#
# Pure logic, without processes and sockets: it lives in the scheduler's process, which asks it for
# jobs, hands it what they report, and tells it how they ended. It alone writes the study.


JobStatus = Literal["completed", "pruned", "stopped", "deadline", "failed"]
Fault = Literal["raised", "oom", "nan", "died", "hung", "timeout"]


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """A search that was decided, as its scheduler needs to know it.

    Attributes:
        paths: its folder.
        config: what every job's settings are laid over.
        slots: where jobs run.
        host: where all of it is.
        header: its first event.
        notes: what is said to the user at the start.
        deadline: unix time at which it is to end; None: no limit.
        imposed: whether the host ends the session then, before what was wished.
        program: who decides, as ``"module:function"``; called with this and the search's diary.
        folds: whose ``[job.fold]`` is ``ctx.fold`` in a job; None: none.
        sweep_config: what is wished of a sweep; None: it is none.
    """

    paths: RunPaths
    config: Config
    slots: Slots
    host: Host
    header: RunStarted
    notes: tuple[Note, ...]
    deadline: float | None
    imposed: bool
    program: str
    folds: Folds | None
    sweep_config: SweepConfig | None


@dataclass(frozen=True, kw_only=True)
class SearchJob:
    """One call of the training function.

    Attributes:
        key: its folder, relative to the sweep's: ``"trials/0007"``, ``"trials/0007/fold-2"``,
            ``"folds/2"``. A job whose folder holds a checkpoint goes on from it.
        overrides: settings that differ from the sweep's configuration, by dotted name.
        params: what ``ctx.params`` is.
        fold: the fold it is for; None: no folds.
        timeout: seconds it may take; None: no limit of its own.
        judged: whether every report waits for :meth:`SearchAlgorithm.reported`.
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
        status: as a run's, or ``"failed"``.
        metrics: those last reported or returned (else logged).
        seconds: from its start to its processes' end.
        fault: what went wrong in a failed job; None in the others.
        error: that in one line.
    """

    status: JobStatus
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    fault: Fault | None = None
    error: str | None = None


class EventWriter(Protocol):
    """Where a program writes what happened: the sweep's events."""

    def write(self, event: Event) -> None:
        """Append an event."""

    def note(self, text: str, level: str = "info") -> None:
        """Append a sentence for the user."""


class SearchAlgorithm(Protocol):
    """Decides what is run. All calls come from one thread."""

    @property
    def done(self) -> bool:
        """Whether nothing runs, as far as it knows, and nothing will."""

    @property
    def cut_short(self) -> bool:
        """Whether it is done for lack of time alone: another session can go on with it."""

    @property
    def ready(self) -> bool:
        """Whether the next job is prepared, and depends on nothing that runs."""

    def prepare(self, jobs: int) -> None:
        """Called while all slots are at work, some times a second: do what can be done ahead.

        Args:
            jobs: how many there may be need of at once; one a call may be prepared.
        """

    def next(self, left: float | None) -> SearchJob | None:
        """The next job; called whenever a slot is free.

        Args:
            left: seconds until the deadline; None: there is none.

        Returns:
            None: nothing can start now.
        """

    def reported(
        self, job: SearchJob, metrics: Mapping[str, float], step: int | None
    ) -> str | None:
        """What a job reported: ``"pruned"`` lets its ranks leave, None lets them go on."""

    def announced(
        self, job: SearchJob, names: Sequence[str], stems: Sequence[str], first_step: int
    ) -> None:
        """The metrics that a job will report; see :meth:`RunContext.announce`."""

    def ended(self, job: SearchJob, ending: JobResult) -> None:
        """A job has ended, and its processes are gone."""

    def obey(self, command: SearchCommand) -> None:
        """Follow a handle's command; the scheduler ends the jobs that run."""

    def close(self, status: str) -> dict[str, Any]:
        """Write what is left to be written; returns a summary for ``result.json``."""


# --- running trials ---


class RunningTrial:
    """The jobs of one trial, and what came of them so far.

    Args:
        number: the trial's.
        params: its parameters, constants too.
        folds: how many; None: one job without a fold.
        scores: the metrics of the folds that an earlier session finished.
        key: its folder.
        seed: beats the configuration's, where the trial is a repetition.
    """

    def __init__(
        self,
        number: int,
        params: Mapping[str, Any],
        folds: int | None,
        scores: Mapping[int, Mapping[str, float]] | None = None,
        *,
        key: str | None = None,
        seed: int | None = None,
    ) -> None:
        self.number, self.params, self.folds, self.seed = number, dict(params), folds, seed
        self.key = key or folder_of(number)
        self.scores = {index: dict(metrics) for index, metrics in (scores or {}).items()}
        """The metrics of each fold that is done."""
        todo: list[int | None] = [None] if folds is None else [*range(folds)]
        self.waiting = [fold for fold in todo if fold not in self.scores]
        self.running: dict[str, SearchJob] = {}
        self.seconds = 0.0
        self.attempts = 0
        """How often one of its jobs was tried again."""
        self.leaving: str | None = None
        """The state it ends in when its jobs are gone; None: it goes on."""
        self.reason: str | None = None
        self.best: dict[int | None, float] = {}
        """The best report of each job."""
        self.first_step = 0
        """The step of the first report: of ``nb.fit`` 1, of Optuna's pruners 0."""
        self.told = 0
        """How many folds' running means the study knows."""

    def next_job(self, timeout: float | None, judged: bool) -> SearchJob:
        """The next job; there is one waiting."""
        fold = self.waiting.pop(0)
        seed = {} if self.seed is None else {"seed": self.seed}
        job = SearchJob(
            key=self.key if fold is None else f"{self.key}/fold-{fold}",
            overrides={**self.params, **seed},
            params=self.params,
            fold=fold,
            timeout=timeout,
            judged=judged,
        )
        self.running[job.key] = job
        return job

    def leave(self, state: str, reason: str) -> None:
        """Begin none of the jobs that wait; the first reason holds."""
        if self.leaving is None:
            self.leaving, self.reason = state, reason
        self.waiting.clear()

    def again(self, job: SearchJob) -> None:
        """Try a job once more."""
        self.attempts += 1
        self.waiting.insert(0, job.fold)

    @property
    def over(self) -> bool:
        """Whether nothing of it runs or waits."""
        return not self.running and not self.waiting

    def mean(self, metric: str, folds: int) -> float:
        """The mean of a metric over the first folds, which must be done."""
        return math.fsum(self.scores[i][metric] for i in range(folds)) / folds

    def complete_folds(self) -> int:
        """How many folds are done, counted from the first without a gap."""
        return next(i for i in range(len(self.scores) + 1) if i not in self.scores)


def folder_of(number: int) -> str:
    """A trial's folder, relative to the sweep's."""
    return f"trials/{number:04d}"
