"""Summarise a run from its folder, in whatever state it is; nothing in it is executed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias

from nbtoolkit.errors import RunFileError
from nbtoolkit.run.events import Event, EventReader, MetricsLogged, MetricsReported, Reading
from nbtoolkit.run.paths import RunPaths, read_record
from nbtoolkit.text_table import shortened

Kind = Literal["run", "sweep", "cv"]
KIND_NAMES: dict[Kind, str] = {"run": "run", "sweep": "sweep", "cv": "cross-validation"}

Points: TypeAlias = list[tuple[float, float]]
"""A metric's steps and values."""

# What nb.fit logs beside the loss; these are no learning curves.
_OTHER_METRICS = ("samples_per_second", "memory_gb_rank", "lr", "grad_norm")


@dataclass(frozen=True)
class RunSummary:
    """What the folder of a run, a sweep or a cross-validation holds.

    Attributes:
        paths: its folder.
        kind: what it is.
        versions: its ``versions.json``.
        plan: its ``plan.json``; empty where none was made.
        result: its ``result.json``; empty where it did not end well.
        error: its ``error.json``; empty where it did not fail.
        events: the events of all its attempts.
        damaged: the names of its files that cannot be read.
    """

    paths: RunPaths
    kind: Kind
    versions: Mapping[str, object] = field(default_factory=dict)
    plan: Mapping[str, object] = field(default_factory=dict)
    result: Mapping[str, object] = field(default_factory=dict)
    error: Mapping[str, object] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    damaged: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its name and 4 hex digits: the id without the time. Of a fold: its number."""
        if self.paths.folder.parent.name == "folds":
            return f"fold {self.paths.run_id}"
        return re.sub(r"^\d{8}T\d{6}-(?=.)", "", self.paths.run_id)

    @property
    def label(self) -> str:
        """The name, short enough for a table's header or a legend."""
        return shortened(self.name, 28)

    @cached_property
    def folds(self) -> tuple[RunSummary, ...]:
        """The runs of a cross-validation's folds, by number; empty for another run."""
        folders = [path for path in self.paths.folder.glob("folds/*") if path.name.isdecimal()]
        ordered = sorted(folders, key=lambda folder: int(folder.name))
        return tuple(read_run_summary(RunPaths(folder)) for folder in ordered)

    @property
    def status(self) -> str:
        """How it ended, ``"failed"``, ``"running"``, or ``"cut off"`` (its supervisor died)."""
        if self.result:
            return str(self.result.get("status", "?"))
        if self.error:
            return "failed"
        return "running" if self.paths.owned() else "cut off"

    @property
    def totals(self) -> Mapping[str, object]:
        """What a sweep or a cross-validation wrote of itself at its end; empty before."""
        return _mapping(self.result.get("summary"))

    @property
    def metrics(self) -> dict[str, float]:
        """Its values: the last reported ones; of a sweep the best, of folds their mean."""
        if self.kind == "sweep":
            names = self.totals.get("metrics")
            first = names[:1] if isinstance(names, list) else []
            return numbers({name: self.totals.get("best_value") for name in first})
        if self.kind == "cv":
            scores = _mapping(self.totals.get("scores"))
            return numbers({name: _mapping(score).get("mean") for name, score in scores.items()})
        last = {name: points[-1][1] for name, points in self.curves.items()}
        return numbers(self.result.get("metrics") or last)

    @cached_property
    def seconds(self) -> float:
        """Wall time of all its attempts together; 0: nothing was written."""
        total, first, last = 0.0, None, 0.0
        for event in self.events:
            if event.type == "run" and first is not None:
                total, first = total + last - first, None
            first = event.t if first is None else first
            last = event.t
        return total + (last - first if first is not None else 0.0)

    @property
    def attempts(self) -> int:
        """The number of attempts: 1, and 1 more per resume."""
        return max([event.type for event in self.events].count("run"), 1)

    @property
    def began(self) -> float | None:
        """Unix seconds of its first event; None: nothing was written."""
        return self.events[0].t if self.events else None

    @property
    def device(self) -> str:
        """Its devices and precision: ``"2 x Tesla T4, fp16"``."""
        if not self.plan:
            return ""
        listed = self.plan.get("device_names")
        names = [str(name) for name in listed] if isinstance(listed, list) else []
        devices = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        ranks = self.plan.get("processes", 1)
        devices = devices or ("CPU" if ranks == 1 else f"CPU, {ranks} processes")
        return f"{devices}, {self.plan.get('precision', '?')}"

    @cached_property
    def curves(self) -> dict[str, Points]:
        """Each metric's values by step: the reported ones; where there are none, the logged ones.

        A step that was trained again after a resume counts once, with its last value.
        """
        return self._series(MetricsReported) or {
            name: points
            for name, points in self._series(MetricsLogged).items()
            if not name.startswith(_OTHER_METRICS)
        }

    @cached_property
    def logged(self) -> list[tuple[float, dict[str, float]]]:
        """The step of each log entry, and its values by name."""
        entries: list[tuple[float, dict[str, float]]] = []
        for event in self.events:
            if isinstance(event, MetricsLogged):
                entries.append((_step(event, len(entries)), numbers(event.values)))
        return entries

    @property
    def readings(self) -> list[Reading]:
        """The readings of ranks and GPUs, oldest first."""
        samples = (event for event in self.events if event.type == "device")
        return [reading for event in samples for reading in event.readings]

    @cached_property
    def config(self) -> dict[str, object]:
        """The resolved settings of the last attempt."""
        for event in reversed(self.events):
            if event.type == "run" and event.config:
                return event.config
        return {}

    def _series(self, kind: type[MetricsLogged | MetricsReported]) -> dict[str, Points]:
        series: dict[str, dict[float, float]] = {}
        for event in self.events:
            if isinstance(event, kind):
                for name, value in numbers(event.values).items():
                    points = series.setdefault(name, {})
                    points[_step(event, len(points))] = value
        return {name: sorted(points.items()) for name, points in series.items()}


def read_run_summary(paths: RunPaths) -> RunSummary:
    """Read a run's folder; files that are damaged are left out and named."""
    damaged: list[str] = []

    def read(file: Path) -> Mapping[str, object]:
        try:
            return read_record(file) or {}
        except RunFileError:
            damaged.append(file.name)
            return {}

    versions, plan = read(paths.versions), read(paths.plan)
    result, error = read(paths.result), read(paths.error)
    try:
        events = tuple(EventReader(paths.events).read())
    except RunFileError:
        events = ()
        damaged.append(paths.events.name)
    return RunSummary(
        paths, kind_of(versions), versions, plan, result, error, events, tuple(damaged)
    )


def kind_of(versions: Mapping[str, object]) -> Kind:
    """Return what a folder holds, by its ``versions.json``."""
    kind = versions.get("kind")
    return "sweep" if kind == "sweep" else "cv" if kind == "cv" else "run"


def numbers(values: object) -> dict[str, float]:
    """Select the numbers among named values; NaN and infinity are numbers, ``True`` is not."""
    return {
        str(name): float(value)
        for name, value in _mapping(values).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def thinned(points: Points, most: int = 1000) -> Points:
    """Drop points evenly until at most ``most`` are left; the last one stays.

    A chart shows no more of them, and a page with all of them is slow.
    """
    every = -(-len(points) // most)
    return points[:: -every or -1][::-1]


def _step(event: MetricsLogged | MetricsReported, before: int) -> float:
    """Return an event's step; without one, its position after ``before`` others."""
    return before + 1 if event.step is None else event.step


def _mapping(value: object) -> Mapping[str, object]:
    """Return a value of a JSON file if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}
