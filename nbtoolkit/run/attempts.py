"""Find the first and the last event of a run's newest attempt, without reading all events."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from nbtoolkit.config.schema import Config
from nbtoolkit.errors import RunFileError
from nbtoolkit.run.events import (
    Event,
    EventReader,
    PlanChanged,
    RunEnded,
    RunStarted,
    RunSubmitted,
    decode,
)
from nbtoolkit.run.paths import Kind, RunPaths, open_regular, reading

_BLOCK = 2**18  # bytes that are read at a time, from the end of the file
# Lines that may follow the end of an attempt: of other ranks of torchrun, which end a moment later.
_AFTER_END = 100


def first_event(paths: RunPaths) -> RunSubmitted | None:
    """Return the first event of a run's newest attempt; None if there is none.

    It has the configuration, the versions and the identity; a :class:`RunStarted` also has the
    plan.

    Raises:
        RunFileError: the events cannot be read.
    """
    event = _newest(paths, RunSubmitted, RunStarted)
    return event if isinstance(event, RunSubmitted) else None


def last_event(paths: RunPaths) -> RunEnded | None:
    """Return the last event of a run's newest attempt; None if that has not ended.

    Raises:
        RunFileError: the events cannot be read.
    """
    for number, line in enumerate(_lines_from_end(paths)):
        event = decode(line)
        if isinstance(event, RunEnded):
            return event
        if isinstance(event, RunSubmitted) or number >= _AFTER_END:
            return None
    return None


def newest_plan(paths: RunPaths) -> dict[str, object]:
    """Return the launch plan that the newest attempt had last; empty if there is none.

    Raises:
        RunFileError: the events cannot be read.
    """
    event = _newest(paths, RunStarted, PlanChanged)
    return event.plan if isinstance(event, (RunStarted, PlanChanged)) else {}


def run_config(paths: RunPaths) -> Config:
    """Return the configuration of a run's newest attempt.

    Raises:
        RunFileError: the events cannot be read, have no first event, or other settings than today.
    """
    first = first_event(paths)
    with reading(paths.events):
        if first is None:
            raise ValueError("it has no first event")
        return Config.model_validate(first.config)


def as_recorded(config: Config) -> Config:
    """Return a configuration as a record gives it back: tuples as lists, dates as text."""
    return Config.model_validate(json.loads(json.dumps(config.to_dict(), default=str)))


def readable_first_event(paths: RunPaths) -> RunSubmitted | None:
    """Return the first event of a run's newest attempt; None also if it cannot be read."""
    try:
        return first_event(paths)
    except RunFileError:
        return None


def readable_last_event(paths: RunPaths) -> RunEnded | None:
    """Return the last event of a run's newest attempt; None also if it cannot be read."""
    try:
        return last_event(paths)
    except RunFileError:
        return None


def opening_event(paths: RunPaths) -> RunSubmitted | None:
    """Return the first event of a run's first attempt; None if it cannot be read.

    All attempts have its kind and its function. The rest of the file is not read, which may be
    long.
    """
    try:
        event = next(EventReader(paths.events).read(), None)
    except RunFileError:
        return None
    return event if isinstance(event, RunSubmitted) else readable_first_event(paths)


def completed(paths: RunPaths) -> bool:
    """Return True for a finished run; False if it was stopped, ran out of time or failed."""
    ended = readable_last_event(paths)
    return ended is not None and ended.status in ("completed", "pruned")


def failed(paths: RunPaths) -> bool:
    """Return True if a run's newest attempt has failed."""
    ended = readable_last_event(paths)
    return ended is not None and ended.status == "failed"


def kind_of(first: RunSubmitted | None) -> Kind:
    """Return what a folder holds, by its first event."""
    search = None if first is None else first.search
    return "sweep" if search == "sweep" else "cv" if search == "cv" else "run"


def _newest(paths: RunPaths, *kinds: type[Event]) -> Event | None:
    """Return the last event of these types; None if there is none."""
    marks = [f'"type": "{kind.type}"'.encode() for kind in kinds]
    for lines in _blocks_from_end(paths):
        limit = len(lines)
        # Most lines are of other types, and to split and decode them takes a hundred times as long.
        while (place := max(lines.rfind(mark, 0, limit) for mark in marks)) >= 0:
            limit = lines.rfind(b"\n", 0, place) + 1
            event = decode(lines[limit:].partition(b"\n")[0])
            if isinstance(event, kinds):
                return event
    return None


def _lines_from_end(paths: RunPaths) -> Iterator[bytes]:
    """Yield the lines of a run's events that are not empty, the last one first."""
    for block in _blocks_from_end(paths):
        yield from filter(None, reversed(block.split(b"\n")))


def _blocks_from_end(paths: RunPaths) -> Iterator[bytes]:
    """Yield blocks of whole lines of a run's events, the last one first; none without a file.

    Raises:
        RunFileError: the events cannot be read.
    """
    with reading(paths.events):
        try:
            fd = open_regular(paths.events, os.O_RDONLY)
        except FileNotFoundError:
            return
        with os.fdopen(fd, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            rest = b""
            while end > 0:
                begin = max(0, end - _BLOCK)
                file.seek(begin)
                rest, _, lines = (file.read(end - begin) + rest).partition(b"\n")
                yield lines
                end = begin
            yield rest
