"""Define the typed events of a run, and the ``events.jsonl`` that holds them.

Each line is a JSON object with ``t``, ``type`` and the fields of that type's class:

    run         RunStarted: the first line of each attempt
    rank        RankPhaseChanged
    note        NoteAdded: a sentence for the user
    metrics     MetricsLogged: from ctx.log
    report      MetricsReported: from ctx.report, and the numbers that the function returns
    checkpoint  CheckpointSaved: from ctx.save, ctx.note_saved and fit
    device      DevicesSampled: every few seconds
    stop        StopRequested
    trial       TrialChanged: of a sweep
    intermediate  IntermediateReported: of a sweep
    fold        FoldChanged: of a cross-validation, or of a trial with folds
    command     CommandReceived: of a search
    ended       RunEnded: the last line of each attempt
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from nbtoolkit.run.paths import reading

Reading: TypeAlias = dict[str, Any]
"""``rank`` or ``index`` (of a GPU), and what was read there, by name."""


@dataclass(frozen=True, kw_only=True)
class _Event:
    """What all events have: ``t``, unix seconds; 0 until it is written."""

    t: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunStarted(_Event):
    """An attempt begins.

    Attributes:
        run_id: the name of the run's folder.
        attempt: 1, or more where the run was resumed.
        fingerprint: of the configuration and the function.
        function: its module and name.
        host: what kind of machine or service it runs on.
        versions: of Python and libraries, by name.
        config: all settings, nested.
        search: ``"sweep"`` or ``"cv"``; None: it is a single run or a job.
        params: of a trial, by dotted name.
        plan: the launch plan.
    """

    type: Literal["run"] = "run"
    run_id: str = ""
    attempt: int = 1
    fingerprint: str = ""
    function: str = ""
    host: str = ""
    versions: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    search: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RankPhaseChanged(_Event):
    """A rank is ``"started"``, in its process ``"group"``, ``"ready"`` or ``"done"``."""

    type: Literal["rank"] = "rank"
    rank: int
    phase: str
    pid: int | None = None


@dataclass(frozen=True, kw_only=True)
class NoteAdded(_Event):
    """A sentence that the user sees as it is; ``level``: ``"info"`` or ``"warning"``."""

    type: Literal["note"] = "note"
    level: str = "info"
    text: str


@dataclass(frozen=True, kw_only=True)
class MetricsLogged(_Event):
    """Numbers by name; ``step``: the optimizer step, where the function gave one."""

    type: Literal["metrics"] = "metrics"
    values: dict[str, float]
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class MetricsReported(_Event):
    """Numbers of a validation; ``decision``: ``"go"``, or the status that the ranks leave with."""

    type: Literal["report"] = "report"
    values: dict[str, float]
    step: int | None = None
    decision: str = "go"


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(_Event):
    """A checkpoint was written; ``kind``: ``"last"``, ``"best"``, ``"step"`` or the user's own."""

    type: Literal["checkpoint"] = "checkpoint"
    path: str
    step: int | None = None
    kind: str = "last"


@dataclass(frozen=True, kw_only=True)
class DevicesSampled(_Event):
    """How busy each rank and each GPU is."""

    type: Literal["device"] = "device"
    readings: list[Reading]


@dataclass(frozen=True, kw_only=True)
class StopRequested(_Event):
    """The run is to end; ``grace``: seconds after which its ranks are killed, None: never."""

    type: Literal["stop"] = "stop"
    reason: str
    grace: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrialChanged(_Event):
    """A trial has a new state, or is the best one now.

    Attributes:
        number: of the trial in the study.
        state: ``"running"``, ``"waiting"``, ``"complete"``, ``"pruned"``, ``"failed"`` or
            ``"infeasible"``.
        params: by dotted name.
        value: of the objective; None: there is none yet, or there are several.
        values: of all objectives; empty: there are none yet.
        seconds: how long it took; None: it runs.
        reason: why it was pruned, failed, is infeasible or waits.
        folder: of its run, relative to the sweep's.
        best: whether it is the best trial so far.
    """

    type: Literal["trial"] = "trial"
    number: int
    state: str
    params: dict[str, Any] = field(default_factory=dict)
    value: float | None = None
    values: list[float] = field(default_factory=list)
    seconds: float | None = None
    reason: str | None = None
    folder: str | None = None
    best: bool = False


@dataclass(frozen=True, kw_only=True)
class IntermediateReported(_Event):
    """What the pruner learns of a running trial; ``step`` counts from 0 or, of fit, from 1."""

    type: Literal["intermediate"] = "intermediate"
    number: int
    step: int
    value: float


@dataclass(frozen=True, kw_only=True)
class FoldChanged(_Event):
    """A fold has a new state; ``number``: of its trial, None in a cross-validation.

    The other attributes are as a trial's; ``metrics`` are the scores of a fold that is complete.
    """

    type: Literal["fold"] = "fold"
    number: int | None = None
    fold: int
    state: str
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    reason: str | None = None
    folder: str | None = None


@dataclass(frozen=True, kw_only=True)
class CommandReceived(_Event):
    """A handle asks something of a search; ``n``: how many trials to add, or which one to stop."""

    type: Literal["command"] = "command"
    op: Literal["pause", "resume", "stop", "add_trials", "stop_trial"]
    n: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunEnded(_Event):
    """An attempt has ended.

    Attributes:
        status: ``"completed"``, ``"pruned"``, ``"stopped"``, ``"deadline"`` or ``"failed"``.
        seconds: its wall time.
        error: in one line, where it failed.
        metrics: those last reported.
    """

    type: Literal["ended"] = "ended"
    status: str
    seconds: float | None = None
    error: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)


_RankEvent: TypeAlias = RankPhaseChanged | MetricsLogged | MetricsReported | CheckpointSaved
_RunEvent: TypeAlias = RunStarted | NoteAdded | DevicesSampled | StopRequested | RunEnded
JobEvent: TypeAlias = TrialChanged | FoldChanged
Event: TypeAlias = _RunEvent | _RankEvent | JobEvent | IntermediateReported | CommandReceived

_CLASSES: dict[str, type[Event]] = {one.type: one for one in get_args(Event)}


def encode(event: Event) -> bytes:
    """The line of ``events.jsonl`` that holds an event."""
    return (json.dumps(vars(event), default=str) + "\n").encode()


def decode(line: str | bytes) -> Event | None:
    """The event in a line of ``events.jsonl``; None: there is none that is known here.

    What is null counts as missing, and names that are not known are passed over.
    """
    try:
        found = json.loads(line)
        kinds = _kinds(found["type"])
        fields = {name: one for name, one in found.items() if name in kinds and one is not None}
        if all(isinstance(one, kinds[name]) for name, one in fields.items()) and "t" in fields:
            return _CLASSES[found["type"]](**fields)
    except (ValueError, LookupError, TypeError, RecursionError):  # damaged, or fields are missing
        pass
    return None


@functools.cache
def _kinds(kind: str) -> dict[str, tuple[type, ...]]:
    """Field -> the classes of its values in JSON; of dicts and lists only the outermost."""
    return {name: _classes(hint) for name, hint in get_type_hints(_CLASSES[kind]).items()}


def _classes(hint: Any) -> tuple[type, ...]:
    origin = get_origin(hint) or hint
    if origin in (Union, UnionType):  # the former in Python 3.14
        return tuple(one for part in get_args(hint) for one in _classes(part))
    return {float: (int, float), Literal: (str,)}.get(origin, (origin,))


class EventLog:
    """The writing end; only the supervisor has one. Each event is one ``write`` of one line.

    Without a supervisor several threads write: the one that trains, and the one that saves.
    """

    def __init__(self, path: Path) -> None:
        self._writing = threading.Lock()
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(self, event: Event) -> None:
        """Append one event; it gets its time here, where it has none.

        Raises:
            OSError: the disk is full, the folder is gone, or the log is closed.
        """
        line = encode(event if event.t else replace(event, t=round(time.time(), 6)))
        with self._writing:
            os.write(self._fd, line)

    def close(self, *, durable: bool = True) -> None:
        """Close, flushed to disk where it is to be ``durable``."""
        with self._writing:
            fd, self._fd = self._fd, -1  # so that a late write meets no other file of that number
            if durable:
                os.fsync(fd)
            os.close(fd)


class EventReader:
    """The reading end: hands out whole new lines when asked; never blocks, never locks."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path, self.offset = path, offset
        """Bytes read so far: whole lines only, so that it can be kept and gone on from."""

    def read(self) -> Iterator[Event]:
        """The events appended since the last call (a line half written waits for the next).

        Lines that hold no event are left out: one cut by a crash is followed by those of the next
        attempt.

        Raises:
            RunFileError: the file cannot be read.
        """
        with reading(self._path):
            try:
                file = self._path.open("rb")
            except FileNotFoundError:
                return
            with file:
                file.seek(self.offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self.offset += len(line)
                    if (event := decode(line)) is not None:
                        yield event
