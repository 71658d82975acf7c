"""Define the interface of trackers, and a tracker that writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from typing import Any, Protocol

from nbtoolkit.run import events
from nbtoolkit.run.events import Event, Reading, RunEnded, RunStarted
from nbtoolkit.run.paths import RunPaths


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

    def open(self, run: RunStarted) -> bool:
        """Begin an attempt.

        Args:
            run: the attempt's first event.

        Returns:
            Whether this run was found as written before. False means that all events are needed,
            from the first.
        """

    def write(self, points: Sequence[Point], events: Sequence[Event]) -> None:
        """Write numbers, and what else happened (notes, checkpoints, stops)."""

    def close(self, ended: RunEnded) -> None:
        """Finish the attempt, by its last event."""

    def below(self, paths: RunPaths, fresh: bool, state: dict[str, Any]) -> Tracker:
        """A tracker for the curves of a job: a trial or a fold, in a folder below the run's.

        Args:
            paths: the job's folder.
            fresh: its events come from the first.
            state: kept between processes by the caller.
        """


class NullTracker:
    """Tracking is off: the same calls, and nothing happens."""

    def open(self, run: RunStarted) -> bool:
        """Nothing is needed."""
        return True

    def write(self, points: Sequence[Point], events: Sequence[Event]) -> None:
        """Do nothing."""

    def close(self, ended: RunEnded) -> None:
        """Do nothing."""

    def below(self, paths: RunPaths, fresh: bool, state: dict[str, Any]) -> Tracker:
        """Nothing is written of its jobs either."""
        return self


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def open(self, run: RunStarted) -> bool:
        """Open all; True when each of them had written this run before."""
        found = [tracker.open(run) for tracker in self._trackers]
        return all(found)

    def write(self, points: Sequence[Point], events: Sequence[Event]) -> None:
        """Write to all."""
        for tracker in self._trackers:
            tracker.write(points, events)

    def close(self, ended: RunEnded) -> None:
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
    given, numbers = _numbers(event)
    for name, value in numbers:
        step = last.get(name, -1) + 1 if given is None else given
        last[name] = step
        found.append(Point(name, value, step, event.t))
    return found


def _numbers(event: Event) -> tuple[int | None, Iterable[tuple[str, float]]]:
    """What an event is drawn over, if it says so; names and values of the numbers in it."""
    match event:
        case events.MetricsLogged() | events.MetricsReported():
            return event.step, _floats("", event.values)
        case events.DevicesSampled():
            read = (_floats(_device_prefix(reading), reading) for reading in event.readings)
            return None, chain.from_iterable(read)
        case events.TrialChanged(state="complete"):
            best = {"best_value": event.value} if event.best else {}
            return event.number, _floats("", {**trial_values(event), **best})
        case events.FoldChanged(state="complete", number=None):
            return event.fold, _floats("fold/", event.metrics)
    return None, ()


def trial_values(event: events.TrialChanged) -> dict[str, float]:
    """What a complete trial came to: its value, or one for each of several objectives."""
    if event.value is not None:
        return {"value": event.value}
    return {f"value_{i}": value for i, value in enumerate(event.values)}


def job_folder(event: Event) -> str | None:
    """The folder of the trial or fold that an event is about, relative to the sweep's; or None."""
    folder = event.folder if isinstance(event, events.JobEvent) else None
    # A run may have come in a bundle of others: its jobs are followed below its folder alone.
    outside = folder is not None and (folder.startswith("/") or ".." in folder.split("/"))
    return None if outside else folder


def _device_prefix(reading: Reading) -> str:
    """``system/`` is where MLflow's UI looks for what it calls system metrics."""
    kind, key = ("gpu", "index") if "index" in reading else ("rank", "rank")
    return f"system/{kind}_{reading.get(key, 0)}_"


def _floats(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, (int, float)) and not (prefix and name in ("index", "rank")):
            yield prefix + name, float(value)


INSTALL = {
    "mlflow": "pip install mlflow",
    "tensorboard": "pip install tensorboard",
}
"""The install line of each tracker, by package."""

# mlflow-skinny comes without these two, and then fails with a message that names neither.
_FOR_SQLITE = ("sqlalchemy", "alembic")


@dataclass(frozen=True, kw_only=True)
class TrackingChoice:
    """What will be written; the notes warn the user of what was asked for and is missing."""

    mlflow: bool
    tensorboard: bool
    notes: tuple[str, ...] = ()

    @property
    def on(self) -> bool:
        """Whether anything is to be written at all."""
        return self.mlflow or self.tensorboard


def _installed(module: str) -> bool:
    spec = find_spec(module)  # looks for the files; imports nothing
    return spec is not None and spec.has_location  # a mere folder of that name has no location


def choose_tracking(
    settings: Mapping[str, Any], installed: Callable[[str], bool] = _installed
) -> TrackingChoice:
    """Choose the trackers of a run.

    What is not installed is left out with a note, not with an error: MLflow is on by default, and
    Kaggle's image does not have it.

    Args:
        settings: the configuration's ``tracking`` section (``mlflow``, ``tensorboard``, ``uri``).
        installed: whether a module can be imported.
    """
    wanted = [name for name in INSTALL if settings.get(name, name == "mlflow")]
    missing = {name: _missing(_needs(name, settings), installed) for name in wanted}
    return TrackingChoice(
        mlflow="mlflow" in wanted and not missing["mlflow"],
        tensorboard="tensorboard" in wanted and not missing["tensorboard"],
        notes=tuple(_note(name, modules) for name, modules in missing.items() if modules),
    )


def _needs(name: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    uri = settings.get("uri") or "sqlite:"
    sqlite = name == "mlflow" and str(uri).startswith("sqlite:")
    return (name, *_FOR_SQLITE) if sqlite else (name,)


def _missing(modules: tuple[str, ...], installed: Callable[[str], bool]) -> list[str]:
    return [module for module in modules if not installed(module)]


def _note(name: str, modules: list[str]) -> str:
    return (
        f"tracking.{name} is on, but {' and '.join(modules)} cannot be imported: this run is not "
        f"tracked there. To have it: {INSTALL[name]} (or set tracking.{name}: false). The run's "
        "folder has all its metrics; nbtoolkit.tracking.replay(folder) writes them later."
    )
