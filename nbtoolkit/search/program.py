"""Program: what a sweep or a cross-validation runs next, and what it makes of the endings.

Pure logic, without processes and sockets: it lives in the conductor's process, which asks it for
jobs, hands it what they report, and tells it how they ended. It alone writes the study.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

JobStatus = Literal["completed", "pruned", "stopped", "deadline", "failed"]
Fault = Literal["raised", "oom", "nan", "died", "hung", "timeout"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of the training function.

    Attributes:
        key: its folder, relative to the sweep's: ``"trials/0007"``, ``"trials/0007/fold-2"``,
            ``"folds/2"``. A job whose folder holds a checkpoint goes on from it.
        overrides: settings that differ from the sweep's configuration, by dotted name.
        params: what ``ctx.params`` is.
        fold: the fold it is for; None: no folds.
        timeout: seconds it may take; None: no limit of its own.
        judged: whether every report waits for :meth:`Program.reported`.
    """

    key: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    fold: int | None = None
    timeout: float | None = None
    judged: bool = False


@dataclass(frozen=True, kw_only=True)
class Ending:
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


class Diary(Protocol):
    """Where a program writes what happened: the sweep's events."""

    def write(self, type: str, **fields: Any) -> Any:
        """Append an event."""

    def note(self, text: str, level: str = "info") -> None:
        """Append a sentence for the user."""


class Program(Protocol):
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

    def next(self, left: float | None) -> Job | None:
        """The next job; called whenever a slot is free.

        Args:
            left: seconds until the deadline; None: there is none.

        Returns:
            None: nothing can start now.
        """

    def reported(self, job: Job, metrics: Mapping[str, float], step: int | None) -> str | None:
        """What a job reported: ``"pruned"`` lets its ranks leave, None lets them go on."""

    def announced(
        self, job: Job, names: Sequence[str], stems: Sequence[str], first_step: int
    ) -> None:
        """The metrics that a job will report; see :meth:`RunContext.announce`."""

    def ended(self, job: Job, ending: Ending) -> None:
        """A job has ended, and its processes are gone."""

    def obey(self, command: Mapping[str, Any]) -> None:
        """A handle's wish: ``{"op": "pause" | "resume" | "stop" | "add_trials" | "stop_trial"}``.

        ``add_trials`` and ``stop_trial`` have a number ``n``. Jobs that run are ended by the
        conductor.
        """

    def close(self, status: str) -> dict[str, Any]:
        """Write what is left to be written; returns a summary for ``result.json``."""
