"""The run's diary: one append-only ``events.jsonl``, written by the owner, read by everybody else.

Each line is a JSON object with ``t`` (unix seconds) and ``type``; the types and their other keys:

    run         the first line of each attempt: run_id, attempt, fingerprint, function, host,
                plan, config, versions (dicts)
    rank        rank, pid, phase ("started" | "group" | "ready" | "done")
    note        level ("info" | "warning"), text: shown to the user as it is
    metrics     values {name: float}, step: from ctx.log
    report      values {name: float}, step, decision ("go" | a status): from ctx.report
    checkpoint  path, step, kind: from ctx.save, ctx.note_saved and fit
    device      readings [{index or rank, name: value}]: device use, every few seconds
    stop        reason, grace: somebody asked to end
    trial       of a sweep: number, state, params {name: value}, value, values [float], seconds,
                reason, folder, best
    intermediate  of a sweep: number, step (from 0), value: what a pruner was told
    fold        number (of the trial; null in a cross-validation), fold, state, metrics, seconds,
                folder or reason
    command     of a search: op ("pause" | "resume" | "stop" | "add_trials" | "stop_trial"), n
    ended       the last line: seconds, error, metrics and
                status ("completed" | "pruned" | "stopped" | "deadline" | "failed")
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nbtoolkit.runtime.paths import reading

Event = dict[str, Any]

# Keys without which an event of this type cannot be taken by its readers.
_NEEDED = {
    "trial": ("number", "state"),
    "intermediate": ("number", "step", "value"),
    "fold": ("fold", "state"),
    "command": ("op",),
    "ended": ("status",),
}


class EventLog:
    """The writing end; only the owner has one. Each event is one ``write`` of one line.

    Without an owner several threads write: the one that trains, and the one that saves.
    """

    def __init__(self, path: Path) -> None:
        self._writing = threading.Lock()
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(self, type: str, **fields: Any) -> Event:
        """Append one event and return it.

        Raises:
            OSError: the disk is full, the folder is gone, or the log is closed.
        """
        event: Event = {"t": round(time.time(), 6), "type": type, **fields}
        line = (json.dumps(event, default=str) + "\n").encode()
        with self._writing:
            os.write(self._fd, line)
        return event

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
                    if (event := _event(line)) is not None:
                        yield event


def _event(line: bytes) -> Event | None:
    """The event in a line; None: there is none."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("t"), (int, float)):
        return None
    known = all(key in event for key in ("type", *_NEEDED.get(str(event.get("type")), ())))
    return event if known else None
