"""Story: one run as its folder tells it, whatever state that folder is in; nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from nbtoolkit.errors import RunFileError
from nbtoolkit.runtime.events import Event, EventReader
from nbtoolkit.runtime.paths import RunPaths, read_record
from nbtoolkit.search.labels import shortened

Kind = Literal["run", "sweep", "cv"]
Points: TypeAlias = list[tuple[float, float]]

_OWN = ("samples_per_second", "memory_gb_rank", "lr", "grad_norm")  # what fit logs beside the loss


@dataclass(frozen=True)
class Story:
    """What is known of a run, a sweep or a cross-validation.

    Attributes:
        paths: its folder.
        kind: what it is.
        about: its ``versions.json``.
        plan: its ``plan.json``; empty where it was never made.
        result: its ``result.json``; empty where it did not end well.
        error: its ``error.json``; empty where it did not fail.
        events: its diary, all attempts.
        damaged: files of it that cannot be read.
    """

    paths: RunPaths
    kind: Kind
    about: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    error: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    damaged: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The run's name and its 4 hex digits: its id without the time. Of a fold: its number."""
        if self.paths.folder.parent.name == "folds":
            return f"fold {self.paths.run_id}"
        return re.sub(r"^\d{8}T\d{6}-(?=.)", "", self.paths.run_id)

    @cached_property
    def folds(self) -> tuple[Story, ...]:
        """The runs of a cross-validation's folds, by number; empty for another run."""
        folders = [one for one in self.paths.folder.glob("folds/*") if one.name.isdecimal()]
        ordered = sorted(folders, key=lambda folder: int(folder.name))
        return tuple(read_story(RunPaths(folder)) for folder in ordered)

    @property
    def label(self) -> str:
        """The name, short enough for a table's head or a legend."""
        return shortened(self.name, 28)

    @property
    def status(self) -> str:
        """How it ended, ``"failed"``, ``"running"``, or ``"cut off"``: nobody wrote its end."""
        if self.result:
            return str(self.result.get("status", "?"))
        if self.error:
            return "failed"
        return "running" if self.paths.owned() else "cut off"

    @property
    def metrics(self) -> dict[str, float]:
        """Its values: of a run those last reported, of a sweep the best, of folds their mean."""
        return numbers(_METRICS[self.kind](self))

    @cached_property
    def seconds(self) -> float:
        """Wall time of all its attempts together; 0: nothing was written."""
        total, first, last = 0.0, None, 0.0
        for event in self.events:
            if event["type"] == "run" and first is not None:
                total, first = total + last - first, None
            first = event["t"] if first is None else first
            last = event["t"]
        return total + (last - first if first is not None else 0.0)

    @property
    def attempts(self) -> int:
        """How often it was begun or gone on with."""
        return max([event["type"] for event in self.events].count("run"), 1)

    @property
    def began(self) -> float | None:
        """Unix seconds of its first event; None: nothing was written."""
        return self.events[0]["t"] if self.events else None

    @property
    def device(self) -> str:
        """What it ran on, in words: ``"2 x Tesla T4, fp16"``."""
        if not self.plan:
            return ""
        names = [str(name) for name in self.plan.get("device_names") or ()]
        counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        ranks = self.plan.get("processes", 1)
        where = counted or ("CPU" if ranks == 1 else f"CPU, {ranks} processes")
        return f"{where}, {self.plan.get('precision', '?')}"

    @cached_property
    def curves(self) -> dict[str, Points]:
        """Each metric's values by step: those reported; where none were, those logged.

        A step that was trained again after a resume counts once, as it was trained last.
        """
        return self._series("report") or {
            name: points
            for name, points in self._series("metrics").items()
            if not name.startswith(_OWN)
        }

    @cached_property
    def logged(self) -> list[tuple[float, dict[str, float]]]:
        """What was logged on the way: steps, and values by name."""
        found: list[tuple[float, dict[str, float]]] = []
        for event in self.events:
            if event["type"] == "metrics":
                found.append((_step(event, len(found)), numbers(event.get("values"))))
        return found

    @property
    def readings(self) -> list[dict[str, Any]]:
        """What was read of ranks and GPUs every few seconds, oldest first."""
        device = (event for event in self.events if event["type"] == "device")
        return [reading for event in device for reading in event.get("readings") or ()]

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its settings, as they were resolved; of the last attempt."""
        for event in reversed(self.events):
            if event["type"] == "run" and isinstance(event.get("config"), dict):
                settings: dict[str, Any] = event["config"]
                return settings
        return {}

    def _series(self, type: str) -> dict[str, Points]:
        found: dict[str, dict[float, float]] = {}
        for event in self.events:
            if event["type"] != type:
                continue
            for name, value in numbers(event.get("values")).items():
                points = found.setdefault(name, {})
                points[_step(event, len(points))] = value
        return {name: sorted(points.items()) for name, points in found.items()}


def _step(event: Event, before: int) -> float:
    """An event's step; of one without any: how many came before it, and one."""
    step = event.get("step")
    return step if isinstance(step, (int, float)) else before + 1


def _last_reported(story: Story) -> Mapping[str, Any]:
    ended = story.result.get("metrics")
    if ended:
        return dict(ended)
    return {name: points[-1][1] for name, points in story.curves.items()}


def _best_of_sweep(story: Story) -> Mapping[str, Any]:
    summary = story.result.get("summary") or {}
    return {name: summary.get("best_value") for name in (summary.get("metrics") or ())[:1]}


def _mean_of_folds(story: Story) -> Mapping[str, Any]:
    scores = (story.result.get("summary") or {}).get("scores") or {}
    return {name: score.get("mean") for name, score in scores.items()}


_METRICS = {"run": _last_reported, "sweep": _best_of_sweep, "cv": _mean_of_folds}


def numbers(values: object) -> dict[str, float]:
    """The numbers among named values; NaN and infinities are numbers, ``True`` is none."""
    pairs = values.items() if isinstance(values, Mapping) else ()
    return {
        str(name): float(value)
        for name, value in pairs
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def read_story(paths: RunPaths) -> Story:
    """Read a run's folder; what is damaged in it is left out, and named."""
    files = {"about": paths.versions, "plan": paths.plan}
    files |= {"result": paths.result, "error": paths.error}
    read = {name: _read(file) for name, file in files.items()}
    damaged = tuple(file.name for name, file in files.items() if read[name] is None)
    told = {name: value or {} for name, value in read.items()}
    kind = told["about"].get("kind")
    try:
        events = tuple(EventReader(paths.events).read())
    except RunFileError:
        events, damaged = (), (*damaged, paths.events.name)
    return Story(
        paths,
        kind if kind in ("sweep", "cv") else "run",
        **told,
        events=events,
        damaged=damaged,
    )


def _read(file: Path) -> dict[str, Any] | None:
    """A JSON file of names and values; empty where there is none, None where it is damaged."""
    try:
        return read_record(file) or {}
    except RunFileError:
        return None
