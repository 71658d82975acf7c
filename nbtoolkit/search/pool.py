"""Define searches, their jobs, and the pools that run the jobs and tell the search's loop."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nbtoolkit.environment.grace import EXIT_GRACE
from nbtoolkit.run.events import CommandReceived, Event, RunStarted
from nbtoolkit.run.paths import Kind
from nbtoolkit.wire.messages import KernelRequest, SearchCommand, StopRequest

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.environment.deadline import Note
    from nbtoolkit.environment.placement import MeasuredSpeed
    from nbtoolkit.host import Host
    from nbtoolkit.run.paths import RunPaths
    from nbtoolkit.run.record import RunRecord
    from nbtoolkit.search.folds.folds import Folds
    from nbtoolkit.search.slots import Placement, Slots
    from nbtoolkit.search.study.sweep_config import SweepConfig

JobStatus = Literal["completed", "pruned", "stopped", "deadline", "failed"]
Fault = Literal["raised", "oom", "nan", "died", "hung", "timeout"]


@dataclass(frozen=True, kw_only=True)
class Search:
    """What to search, and how to run its jobs.

    Attributes:
        kind: ``"sweep"`` or ``"cv"``.
        loop: ``"module:function"``; called as ``function(pool, event_writer)`` in the process that
            owns the search, it runs all jobs on the pool and returns a
            :class:`~nbtoolkit.search.pool.SearchEnd`.
        sweep_config: the sweep's settings; None for a cross-validation.
        identity: values that must be equal, besides configuration and function, for
            ``resume="auto"`` to resume a search.
        placement: see :func:`~nbtoolkit.search.slots.make_slots`.
        per_device: jobs per device.
        jobs: number of jobs; None if it is large or unknown.
        total: number of trials over all sessions. A completed search with a smaller total resumes,
            too. None for no number.
        folds: ``folds[job.fold]`` becomes ``ctx.fold``; None without folds.
        timeout: limit in seconds; None for the host's limit only.
    """

    kind: Kind
    loop: str
    sweep_config: SweepConfig | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    placement: Placement = "auto"
    per_device: int = 1
    jobs: int | None = None
    total: int | None = None
    folds: Folds | None = None
    timeout: float | None = None


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What the process that owns a search receives.

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
        judged: True if the loop may stop the job because of what it reports.
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


@dataclass(frozen=True)
class JobReported:
    """All ranks of a job have reported; a judged job waits until the next :meth:`Pool.wait`."""

    job: SearchJob
    metrics: Mapping[str, float]
    step: int | None


@dataclass(frozen=True)
class MetricsNamed:
    """A job has named the metrics that it will report (``RunContext.announce``)."""

    job: SearchJob
    names: Sequence[str]
    stems: Sequence[str]
    first_step: int


@dataclass(frozen=True)
class ParametersUnread:
    """A job's function has ended without reading these parameters."""

    job: SearchJob
    names: Sequence[str]


@dataclass(frozen=True)
class JobEnded:
    """A job has ended, and its slot is free."""

    job: SearchJob
    result: JobResult

    @property
    def failed(self) -> bool:
        """Whether it has not come to its end."""
        return self.result.status != "completed"


PoolEvent = JobReported | MetricsNamed | ParametersUnread | JobEnded | SearchCommand


class Pool(ABC):
    """Runs the jobs of a search, as many at once as there is room for.

    All calls come from one thread. When a handle asks for a stop, or the deadline has come, the
    pool itself stops all jobs; it starts no others, and :attr:`leaving` says so.

    Args:
        request: the search.
        record: the record of the search; it has the requests of handles, and the deadline.
    """

    def __init__(self, request: SearchRequest, record: RunRecord) -> None:
        self.request = request
        self._record = record
        self.running: dict[str, SearchJob] = {}
        """The jobs that have started, and whose end :meth:`wait` has not returned, by key."""
        self._stopping = False
        self.shared_files: list[str] = []
        """Files outside the jobs' folders that several jobs have written."""

    @property
    def leaving(self) -> str | None:
        """The status that the search ends with, once a stop or the deadline ends it."""
        return self._record.decide()

    def seconds_left(self) -> float | None:
        """Return the seconds until the deadline; None for no limit."""
        return self._record.seconds_left()

    @property
    @abstractmethod
    def free(self) -> int:
        """Number of jobs that can start now."""

    @abstractmethod
    def start(self, job: SearchJob) -> None:
        """Start a job; at most :attr:`free` of them."""

    @abstractmethod
    def wait(self) -> list[PoolEvent]:
        """Answer the reports of the last call, wait a moment, and return what has happened.

        A job that :meth:`stop` has stopped since its report leaves at this report, on all ranks.
        """

    @abstractmethod
    def stop(self, key: str, reason: str) -> None:
        """Let a running job end as ``"pruned"``, at its last report or at its next one."""

    @abstractmethod
    def abandon(self) -> None:
        """Kill all jobs, and write nothing."""

    @abstractmethod
    def _stop_all(self, reason: str, grace: float | None) -> None:
        """Let all jobs end with the status :attr:`leaving`; kill them after ``grace`` seconds."""

    def _follow(self, requests: Iterable[KernelRequest]) -> list[PoolEvent]:
        """Follow stop requests and the deadline; return the commands, which the loop follows."""
        commands: list[PoolEvent] = []
        for request in requests:
            match request:
                case StopRequest():
                    self._record.request_stop(request.status, request.reason, request.grace)
                    self._stopping = True
                    self._stop_all(request.reason, request.grace)
                case SearchCommand():
                    self._record.write(CommandReceived(op=request.op, n=request.n))
                    commands.append(request)
        if self.leaving is not None and not self._stopping:
            self._stopping = True
            self._stop_all("the search's time is used up", self.request.grace)
        return commands

    def _requests_in_folder(self) -> list[KernelRequest]:
        """Read the requests of handles that have no connection to this process."""
        stop = self._record.stop_requested()
        return [*([] if stop is None else [stop]), *self._record.commands_requested()]


class EventWriter(Protocol):
    """Appends to the events of the search."""

    def write(self, event: Event) -> None:
        """Append an event."""

    def note(self, text: str, level: str = "info") -> None:
        """Append a message for the user."""


@dataclass(frozen=True)
class SearchEnd:
    """How a search ended: its status, and the summary for its last event."""

    status: str
    summary: Mapping[str, Any]


def run_search(pool: Pool, record: RunRecord) -> None:
    """Run the loop of a search over a pool, and record its end.

    Raises:
        Exception: the search cannot go on; the caller records its failure.
    """
    record.make_findable()
    module, _, function = pool.request.search.loop.partition(":")
    run: Callable[[Pool, EventWriter], SearchEnd] = getattr(
        importlib.import_module(module), function
    )
    end = run(pool, record)
    record.complete(end.status, 1, summary={**end.summary, "shared_files": pool.shared_files})
