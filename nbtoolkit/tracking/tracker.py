"""Tracker: what writes a run somewhere; NullTracker when that is off; Point, a number to draw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nbtoolkit.runtime.events import Event
from nbtoolkit.runtime.paths import RunPaths


@dataclass(frozen=True)
class Point:
    """One value of one curve."""

    name: str
    value: float
    step: int
    time: float
    """Unix seconds of the event it comes from: a replay writes the very same point."""


class Tracker(Protocol):
    """Writes one run somewhere. Called by one thread, in the order of the run's events.

    Everything may be called again with what was written before (a crash between two writes, a
    replay): the second time must change nothing.
    """

    def open(self, run: Event) -> bool:
        """Begin an attempt.

        Args:
            run: the attempt's ``run`` event.

        Returns:
            Whether this run was found as written before. False means that all events are needed,
            from the first.
        """

    def write(self, points: Sequence[Point], events: Sequence[Event]) -> None:
        """Write numbers, and what else happened (notes, checkpoints, stops)."""

    def close(self, ended: Event) -> None:
        """Finish the attempt, by its ``ended`` event."""

    def below(self, paths: RunPaths, fresh: bool, state: dict[str, Any]) -> Tracker:
        """A tracker for the curves of a job: a trial or a fold, in a folder below the run's.

        Args:
            paths: the job's folder.
            fresh: its events come from the first.
            state: kept between processes by the caller.
        """


class NullTracker:
    """Tracking is off: the same calls, and nothing happens."""

    def open(self, run: Event) -> bool:
        """Nothing is needed."""
        return True

    def write(self, points: Sequence[Point], events: Sequence[Event]) -> None:
        """Do nothing."""

    def close(self, ended: Event) -> None:
        """Do nothing."""

    def below(self, paths: RunPaths, fresh: bool, state: dict[str, Any]) -> Tracker:
        """Nothing is written of its jobs either."""
        return self


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def open(self, run: Event) -> bool:
        """Open all; True when each of them had written this run before."""
        found = [tracker.open(run) for tracker in self._trackers]
        return all(found)

    def write(self, points: Sequence[Point], events: Sequence[Event]) -> None:
        """Write to all."""
        for tracker in self._trackers:
            tracker.write(points, events)

    def close(self, ended: Event) -> None:
        """Close all."""
        for tracker in self._trackers:
            tracker.close(ended)

    def below(self, paths: RunPaths, fresh: bool, state: dict[str, Any]) -> Tracker:
        """All of theirs."""
        return Trackers([tracker.below(paths, fresh, state) for tracker in self._trackers])


def points(event: Event, last: dict[str, int]) -> list[Point]:
    """The numbers in an event; none for an event of another kind.

    Args:
        event: any event of a run.
        last: the last step of each curve, kept up to date here. A value logged without a step gets
            the one after its curve's last, so that it is drawn after it.
    """
    found = []
    for name, value in _numbers(event):
        step = event.get(_STEPS.get(event["type"], "step"))
        step = last.get(name, -1) + 1 if step is None else int(step)
        last[name] = step
        found.append(Point(name, value, step, event["t"]))
    return found


# What the curves of a sweep's or a cross-validation's own run are drawn over.
_STEPS = {"trial": "number", "fold": "fold"}


def _numbers(event: Event) -> Iterator[tuple[str, float]]:
    """Names and values of the numbers in an event."""
    if event["type"] in ("metrics", "report"):
        yield from _floats("", event["values"])
    elif event["type"] == "device":
        for reading in event["readings"]:
            yield from _floats(_device_prefix(reading), reading)
    elif event["type"] == "trial" and event["state"] == "complete":
        best = {"best_value": event["value"]} if event.get("best") else {}
        yield from _floats("", {**trial_values(event), **best})
    elif event["type"] == "fold" and event["state"] == "complete" and event.get("number") is None:
        yield from _floats("fold/", event.get("metrics") or {})


def trial_values(event: Event) -> dict[str, Any]:
    """What a complete trial came to: its value, or one for each of several objectives."""
    if event.get("value") is not None:
        return {"value": event["value"]}
    return {f"value_{i}": value for i, value in enumerate(event.get("values") or ())}


def job_folder(event: Event) -> str | None:
    """The folder of the trial or fold that an event is about, relative to the sweep's; or None."""
    folder: str | None = event.get("folder") if event["type"] in ("trial", "fold") else None
    # A run may have come in a bundle of others: its jobs are followed below its folder alone.
    outside = folder is not None and (folder.startswith("/") or ".." in folder.split("/"))
    return None if outside else folder


def _device_prefix(reading: dict[str, object]) -> str:
    """``system/`` is where MLflow's UI looks for what it calls system metrics."""
    kind, key = ("gpu", "index") if "index" in reading else ("rank", "rank")
    return f"system/{kind}_{reading.get(key, 0)}_"


def _floats(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, (int, float)) and not (prefix and name in ("index", "rank")):
            yield prefix + name, float(value)
