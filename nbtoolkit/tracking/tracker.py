"""Define the interface of trackers, and choose those of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from typing import Literal, Protocol, get_args

from nbtoolkit.environment.installed import EXTRAS
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
    """Unix seconds of its event: a replay writes the same point."""


class Tracker(Protocol):
    """Writes one run. One thread calls it, in the order of the run's events.

    After a crash between two writes, or in a replay, the same values are written again: this must
    change nothing.
    """

    @property
    def place(self) -> str:
        """Where people find the run: its id, folder or address. Set by :meth:`open`."""

    def open(self, run: RunStarted, *, fresh: bool, done: bool) -> bool:
        """Begin an attempt.

        Args:
            run: the attempt's first event.
            fresh: nothing is written yet; all events follow, from the first.
            done: all events were written, to the end of the run; nothing follows.

        Returns:
            Whether the events before this one, which do not come again, are there. False: all of
            them are needed, from the first.
        """

    def write(self, points: Sequence[Point], events: Sequence[Event]) -> None:
        """Write numbers, and the other events (notes, checkpoints, stops)."""

    def close(self, ended: RunEnded) -> None:
        """Finish the attempt, by its last event."""

    def for_job(self, paths: RunPaths) -> Tracker:
        """Make a tracker for the curves of a job: a trial or a fold, in a folder below the run's.

        Args:
            paths: the job's folder.
        """


def points(event: Event, last_steps: dict[str, int]) -> list[Point]:
    """Return the numbers in an event; none for an event of another kind.

    Args:
        event: any event of a run.
        last_steps: the last step of each curve, updated here. A value logged without a step gets
            the step after its curve's last.
    """
    new_points = []
    event_step, numbers = _numbers(event)
    for name, value in numbers:
        step = last_steps.get(name, -1) + 1 if event_step is None else event_step
        last_steps[name] = step
        new_points.append(Point(name, value, step, event.t))
    return new_points


def _numbers(event: Event) -> tuple[int | None, Iterable[tuple[str, float]]]:
    """Return the step of an event, if it has one; names and values of the numbers in it."""
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
    """Return the value of a complete trial, or one value for each of several objectives."""
    if event.value is not None:
        return {"value": event.value}
    return {f"value_{i}": value for i, value in enumerate(event.values)}


def job_values(event: events.JobEvent) -> dict[str, float]:
    """Return the results of a complete trial or fold, beside the curves in its own events."""
    if isinstance(event, events.TrialChanged):
        return trial_values(event)
    return {f"score/{name}": value for name, value in event.metrics.items()}


def job_folder(event: Event) -> str | None:
    """Return the folder of an event's trial or fold, relative to the sweep's; None: it has none."""
    folder = event.folder if isinstance(event, events.JobEvent) else None
    # A run may come from a bundle of somebody else's: a job's folder must be below the run's.
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


TrackerName = Literal["mlflow", "tensorboard", "wandb"]
"""A tracker, by its package and its setting in ``tracking``."""

# mlflow-skinny comes without these two, and then fails with a message that names neither.
_FOR_SQLITE = ("sqlalchemy", "alembic")


@dataclass(frozen=True, kw_only=True)
class TrackingChoice:
    """The trackers of a run; the notes warn the user of those that are not installed."""

    trackers: tuple[TrackerName, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def on(self) -> bool:
        """Whether anything is written at all."""
        return bool(self.trackers)


def _installed(module: str) -> bool:
    try:
        spec = find_spec(module)  # looks for the files; imports a parent package only
    except ModuleNotFoundError:  # which is not there
        return False
    return spec is not None and spec.has_location  # a mere folder of that name has no location


def choose_tracking(
    settings: Mapping[str, object], installed: Callable[[str], bool] = _installed
) -> TrackingChoice:
    """Choose the trackers of a run.

    A tracker that is not installed is left out with a note, not with an error: MLflow is on by
    default, and Kaggle's image does not have it.

    Args:
        settings: the configuration's ``tracking`` section (``mlflow``, ``tensorboard``, ``wandb``,
            ``uri``).
        installed: whether a module can be imported.
    """
    chosen: list[TrackerName] = []
    notes = []
    for name in get_args(TrackerName):
        if not settings.get(name, name == "mlflow"):
            continue
        missing = [module for module in _needed_modules(name, settings) if not installed(module)]
        if not missing:
            chosen.append(name)
            continue
        notes.append(
            f"tracking.{name} is on, but {' and '.join(missing)} cannot be imported: this run is "
            f"not tracked there. To install it: pip install {name} (or set tracking.{name}: "
            "false). The run's folder has all its metrics; nbtoolkit.tracking.replay(folder) "
            "writes them later."
        )
    return TrackingChoice(trackers=tuple(chosen), notes=tuple(notes))


def _needed_modules(name: str, settings: Mapping[str, object]) -> tuple[str, ...]:
    uri = settings.get("uri") or "sqlite:"
    if name == "mlflow" and str(uri).startswith("sqlite:"):
        return (name, *_FOR_SQLITE)
    return (name, EXTRAS[name]) if name in EXTRAS else (name,)
