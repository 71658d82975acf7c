"""Define the typed events of a run, write them to ``events.jsonl`` and read them back.

Each line is a JSON object with ``t``, ``type`` and the fields of that type's class:

    submitted   RunSubmitted: a job of a cluster will begin the attempt
    run         RunStarted: the first line of each attempt
    plan        PlanChanged: after a failure that another plan may avoid
    rank        RankPhaseChanged
    note        NoteAdded: a sentence for the user
    metrics     MetricsLogged: from ctx.log
    report      MetricsReported: from ctx.report, and the numbers that the function returns
    checkpoint  CheckpointSaved: from ctx.save, ctx.note_saved and fit
    device      DevicesSampled: every few seconds
    stop        StopRequested
    trial       TrialChanged: in a sweep
    intermediate  IntermediateReported: in a sweep
    fold        FoldChanged: in a cross-validation, or in a trial with folds
    command     CommandReceived: in a search
    ended       RunEnded: the last line of each attempt
"""

from __future__ import annotations

import functools
import json
import numbers
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from types import UnionType
from typing import (
    Any,
    Literal,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from nbtoolkit.run.paths import open_regular, reading
from nbtoolkit.wire import messages
from nbtoolkit.wire.messages import Statement

Reading: TypeAlias = dict[str, float | str]
"""``rank`` or ``index`` (of a GPU), and the values read there, by name."""


class Event(Statement):
    """Base class; ``t``: unix seconds, 0 until the event is written. Ranks also send some."""

    t: float = 0.0


RECORD = 1
"""The version of the record. Runs of other versions are shown, and never resumed."""


class RunSubmitted(Event, type="submitted"):
    """An attempt will begin in a job of a cluster.

    Attributes:
        record: the version of the record (:data:`RECORD`); 0: of an earlier build.
        run_id: the name of the run's folder.
        attempt: 1, or more where the run was resumed or its ranks were restarted.
        identity: a hash of what decides the result (run/identity.py).
        code: the hashes of the user's functions in it, by name.
        function: the training function's module and name.
        host: the kind of machine or service it runs on.
        detached: whether it outlives the process that has launched it.
        versions: of Python and libraries, by name.
        config: all settings, nested.
        search: ``"sweep"`` or ``"cv"``; None: a single run or a job of a search.
        total: the trials that a search is to have; None: no limit.
        timeout: the seconds that a search may take; None: no limit.
    """

    record: int = 0
    run_id: str = ""
    attempt: int = 1
    identity: str = ""
    code: dict[str, str] = field(default_factory=dict)
    function: str = ""
    host: str = ""
    detached: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    search: str | None = None
    total: int | None = None
    timeout: float | None = None


class RunStarted(RunSubmitted, type="run"):
    """An attempt begins.

    Attributes:
        restarted_after: the failure after which the supervisor restarted the ranks; empty: a launch
            began the attempt.
        params: the trial's parameters, by dotted name.
        plan: the launch plan; a later :class:`PlanChanged` replaces it.
        mlflow_parent: the MLflow run that was active in the kernel; None: there was none.
    """

    restarted_after: str = ""
    params: dict[str, object] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    mlflow_parent: str | None = None


class PlanChanged(Event, type="plan"):
    """The ranks start again with another plan."""

    plan: dict[str, Any]


class RankPhaseChanged(Event, type="rank"):
    """A rank has ``"started"``, joined its process ``"group"``, is ``"ready"`` or ``"done"``."""

    rank: int
    phase: str
    pid: int | None = None


class NoteAdded(Event, type="note"):
    """A sentence for the user; ``level``: ``"info"`` or ``"warning"``."""

    level: str = "info"
    text: str


class MetricsLogged(Event, type="metrics"):
    """Numbers by name; ``step``: the optimizer step, where the function gave one."""

    values: dict[str, float]
    step: int | None = None


class MetricsReported(Event, type="report"):
    """Metrics of a validation; ``decision``: ``"go"``, or the status that the ranks stop with."""

    values: dict[str, float]
    step: int | None = None
    decision: str = "go"


class CheckpointSaved(Event, type="checkpoint"):
    """A checkpoint was written; ``kind``: ``"last"``, ``"best"``, ``"step"`` or the user's own."""

    path: str
    step: int | None = None
    kind: str = "last"


class DevicesSampled(Event, type="device"):
    """The load of each rank and each GPU."""

    readings: list[Reading]


class StopRequested(Event, type="stop"):
    """The run must end; ``grace``: seconds until its ranks are killed, None: never."""

    reason: str
    grace: float | None = None


class TrialChanged(Event, type="trial"):
    """A trial has a new state, or has become the best one.

    Attributes:
        number: the trial's number in the study.
        state: ``"running"``, ``"waiting"``, ``"complete"``, ``"pruned"``, ``"failed"`` or
            ``"infeasible"``.
        params: its parameters, by dotted name.
        value: its objective; None: none yet, or there are several objectives.
        values: all its objectives; empty: none yet.
        seconds: how long it took; None: it is running.
        reason: why it was pruned, failed, is infeasible or waits.
        folder: its run's folder, relative to the sweep's.
        best: whether it is the best trial so far.
    """

    number: int
    state: str
    params: dict[str, object] = field(default_factory=dict)
    value: float | None = None
    values: list[float] = field(default_factory=list)
    seconds: float | None = None
    reason: str | None = None
    folder: str | None = None
    best: bool = False


class IntermediateReported(Event, type="intermediate"):
    """A value for the pruner; ``step`` counts from 0, or from 1 where ``fit`` reports."""

    number: int
    step: int
    value: float


class FoldChanged(Event, type="fold"):
    """A fold has a new state; ``number``: its trial's, None in a cross-validation.

    The other attributes are those of a trial; ``metrics`` are the scores of a complete fold.
    """

    number: int | None = None
    fold: int
    state: str
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    reason: str | None = None
    folder: str | None = None


class CommandReceived(Event, type="command"):
    """A search has a command from a handle; ``n``: trials to add, or the trial to stop."""

    op: Literal["pause", "resume", "add_trials", "stop_trial"]
    n: int | None = None


class RunEnded(Event, type="ended"):
    """An attempt has ended.

    Attributes:
        status: ``"completed"``, ``"pruned"``, ``"stopped"``, ``"deadline"`` or ``"failed"``.
        seconds: its wall time.
        metrics: the last reported ones.
        processes: the number of ranks; each of a completed run has left a value.
        checkpoint: the last saved checkpoint; None: there is none.
        summary: what a search adds, as its algorithm has it.
        error: the type and the text of the error of a failed run.
        traceback: its printed traceback.
        rank: the rank that raised it; None: no rank did.
        notes: sentences to add to it.
    """

    status: str
    seconds: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    processes: int = 1
    checkpoint: str | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    traceback: str = ""
    rank: int | None = None
    notes: list[str] = field(default_factory=list)


JobEvent: TypeAlias = TrialChanged | FoldChanged

_CLASSES: dict[str, type[Event]] = {
    kind.type: kind for kind in (*Event.__subclasses__(), *RunSubmitted.__subclasses__())
}


def encode(event: Event) -> bytes:
    """Return the line of ``events.jsonl`` that holds an event."""
    return messages.encode(event) + b"\n"


def decode(line: str | bytes) -> Event | None:
    """Return the event in a line of ``events.jsonl``; None: it is damaged, or of an unknown type.

    A null counts as missing; unknown names are ignored.
    """
    try:
        fields = json.loads(line)
        event_type = fields.pop("type")
        classes = _field_classes(event_type)
        known = {k: value for k, value in fields.items() if k in classes and value is not None}
        if all(isinstance(value, classes[k]) for k, value in known.items()) and "t" in known:
            return _CLASSES[event_type](**known)
    # Not JSON, not an object, an unknown type, or fields are missing.
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        pass
    return None


@functools.cache
def _field_classes(event_type: str) -> dict[str, tuple[type, ...]]:
    """Field -> the classes of its values in JSON; of dicts and lists only the outermost."""
    hints = get_type_hints(_CLASSES[event_type])
    return {name: _classes(hints[name]) for name in _CLASSES[event_type].__dataclass_fields__}


def _classes(hint: Any) -> tuple[type, ...]:
    origin = get_origin(hint) or hint
    if origin in (Union, UnionType):  # the former in Python 3.14
        return tuple(kind for part in get_args(hint) for kind in _classes(part))
    return {float: (int, float), Literal: (str,)}.get(origin, (origin,))


def number_values(values: object) -> dict[str, float]:
    """Select the numbers among named values; NaN and infinity are numbers, ``True`` is not."""
    return {
        str(name): float(value)
        for name, value in (values.items() if isinstance(values, Mapping) else ())
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


class EventLog:
    """Appends events; only the supervisor has one. Each event is one ``write`` of one line.

    Without a supervisor several threads write: the one that trains, and the one that saves.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._fd = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        size = os.fstat(self._fd).st_size
        # A crash may have cut the last line; an event behind it in the same line would be lost.
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def write(self, event: Event) -> None:
        """Append one event; sets its time if it has none.

        Raises:
            OSError: the disk is full, the folder is gone, or the log is closed.
        """
        line = encode(event if event.t else replace(event, t=round(time.time(), 6)))
        with self._lock:
            os.write(self._fd, line)

    def sync(self) -> None:
        """Flush what was written to the disk."""
        with self._lock:
            os.fsync(self._fd)

    def close(self, *, durable: bool = True) -> None:
        """Close the file; ``durable``: flush it to disk first."""
        with self._lock:
            # a late write must not reach a new file of that number
            fd = self._fd
            self._fd = -1
            if durable:
                os.fsync(fd)
            os.close(fd)


class EventReader:
    """Reads new events from the file; never blocks, never locks."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self.offset = offset
        """Bytes read so far, whole lines only; a later reader can continue from here."""

    def read(self) -> Iterator[Event]:
        """Yield the events appended since the last call.

        An incomplete line is read by the next call.

        Skips lines that hold no event: a crash may cut one, and the next attempt appends to it.

        Raises:
            RunFileError: the file cannot be read.
        """
        with reading(self._path):
            try:
                fd = open_regular(self._path, os.O_RDONLY)
            except FileNotFoundError:
                return
            with os.fdopen(fd, "rb") as file:
                file.seek(self.offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self.offset += len(line)
                    if (event := decode(line)) is not None:
                        yield event


RETURNED = "value"
"""The name of a single number that a function returns."""


def returned_numbers(value: object) -> dict[str, float]:
    """Return the plain numbers of a return value: a dict's by name, a single one as ``value``.

    Args:
        value: numbers of Python and NumPy, and tensors and arrays without dimensions, count;
            everything else is left out.
    """
    items = value.items() if isinstance(value, Mapping) else ((RETURNED, value),)
    converted = {str(name): _as_number(item) for name, item in items}
    return {name: number for name, number in converted.items() if number is not None}


def _as_number(value: Any) -> float | None:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return float(value) if is_number else None
