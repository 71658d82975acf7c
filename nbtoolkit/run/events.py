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
import numbers
import os
import pickle
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from nbtoolkit.run import events
from nbtoolkit.run.messages import StopRequest
from nbtoolkit.run.paths import RunPaths, reading, write_json, write_whole
from nbtoolkit.run.rank_check import Weights, apart

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
