"""Summarise one run from its folder, in whatever state it is; nothing is executed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from nbtoolkit.errors import RunFileError
from nbtoolkit.run.events import Event, EventReader, MetricsLogged, MetricsReported, Reading
from nbtoolkit.run.paths import RunPaths, read_record
from nbtoolkit.study.plots import shortened

# --- values as text ---
# Values as a person reads them.


def number(value: float | None) -> str:
    """Five digits of a number; nothing for None."""
    return "" if value is None else f"{value:.5g}"


def duration(seconds: float) -> str:
    """A time as ``"2.4 s"``, ``"3 min 20 s"`` or ``"2 h 05 min"``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def moment(unix: float | None) -> str:
    """A moment in UTC, to the minute; nothing for None or for what is no moment."""
    if unix is None or not math.isfinite(unix):
        return ""
    try:
        return datetime.fromtimestamp(unix, timezone.utc).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return ""


def setting(value: Any) -> str:
    """A setting as YAML would say it, in short."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else str(value)
    return shortened(text, 48)


def counted(count: int, noun: str) -> str:
    """``"1 run"``, ``"2 runs"``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# --- one run ---


Kind = Literal["run", "sweep", "cv"]
Points: TypeAlias = list[tuple[float, float]]

_OWN = ("samples_per_second", "memory_gb_rank", "lr", "grad_norm")  # what fit logs beside the loss


@dataclass(frozen=True)
class RunSummary:
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
    def folds(self) -> tuple[RunSummary, ...]:
        """The runs of a cross-validation's folds, by number; empty for another run."""
        folders = [one for one in self.paths.folder.glob("folds/*") if one.name.isdecimal()]
        ordered = sorted(folders, key=lambda folder: int(folder.name))
        return tuple(read_run_summary(RunPaths(folder)) for folder in ordered)

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
            if event.type == "run" and first is not None:
                total, first = total + last - first, None
            first = event.t if first is None else first
            last = event.t
        return total + (last - first if first is not None else 0.0)

    @property
    def attempts(self) -> int:
        """How often it was begun or gone on with."""
        return max([event.type for event in self.events].count("run"), 1)

    @property
    def began(self) -> float | None:
        """Unix seconds of its first event; None: nothing was written."""
        return self.events[0].t if self.events else None

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
        return self._series(MetricsReported) or {
            name: points
            for name, points in self._series(MetricsLogged).items()
            if not name.startswith(_OWN)
        }

    @cached_property
    def logged(self) -> list[tuple[float, dict[str, float]]]:
        """What was logged on the way: steps, and values by name."""
        found: list[tuple[float, dict[str, float]]] = []
        for event in self.events:
            if isinstance(event, MetricsLogged):
                found.append((_step(event, len(found)), numbers(event.values)))
        return found

    @property
    def readings(self) -> list[Reading]:
        """What was read of ranks and GPUs every few seconds, oldest first."""
        sampled = (event for event in self.events if event.type == "device")
        return [reading for event in sampled for reading in event.readings]

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its settings, as they were resolved; of the last attempt."""
        for event in reversed(self.events):
            if event.type == "run" and event.config:
                return event.config
        return {}

    def _series(self, kind: type[MetricsLogged | MetricsReported]) -> dict[str, Points]:
        found: dict[str, dict[float, float]] = {}
        for event in self.events:
            if isinstance(event, kind):
                for name, value in numbers(event.values).items():
                    points = found.setdefault(name, {})
                    points[_step(event, len(points))] = value
        return {name: sorted(points.items()) for name, points in found.items()}


def _step(event: MetricsLogged | MetricsReported, before: int) -> float:
    """An event's step; of one without any: how many came before it, and one."""
    return before + 1 if event.step is None else event.step


def _last_reported(story: RunSummary) -> Mapping[str, Any]:
    ended = story.result.get("metrics")
    if ended:
        return dict(ended)
    return {name: points[-1][1] for name, points in story.curves.items()}


def _best_of_sweep(story: RunSummary) -> Mapping[str, Any]:
    summary = story.result.get("summary") or {}
    return {name: summary.get("best_value") for name in (summary.get("metrics") or ())[:1]}


def _mean_of_folds(story: RunSummary) -> Mapping[str, Any]:
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


def read_run_summary(paths: RunPaths) -> RunSummary:
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
    return RunSummary(
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
