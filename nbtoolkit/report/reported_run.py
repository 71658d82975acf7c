"""Summarise a run from its folder, in whatever state it is; nothing in it is executed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from nbtoolkit.errors import RunFileError
from nbtoolkit.run.events import DevicesSampled, Event, Reading, RunStarted, number_values
from nbtoolkit.run.paths import RunPaths, read_record
from nbtoolkit.study.table import SweepTable
from nbtoolkit.text_table import shortened
from nbtoolkit.views.chart import Points
from nbtoolkit.views.state import State

# What nb.fit logs beside the loss; these are no learning curves.
_OTHER_METRICS = ("samples_per_second", "memory_gb_rank", "lr", "grad_norm")


class ReportedRun(State):
    """The state of a run, a sweep or a cross-validation, and what only a report shows of it.

    Attributes:
        plan_file: its ``plan.json``; empty where none was made.
        result: its ``result.json``; empty where it did not end well.
        error: its ``error.json``; empty where it did not fail.
        damaged: the names of its files that cannot be read.
        attempts: the number of attempts: 1, and 1 more per resume.
        first: unix seconds of its first event; None: nothing was written.
        samples: the readings of ranks and GPUs, oldest first.
    """

    def __init__(self, paths: RunPaths) -> None:
        self.damaged: list[str] = []
        self.plan_file, self.result = self._record(paths.plan), self._record(paths.result)
        self.error = self._record(paths.error)
        self._record(paths.versions)
        self.attempts = 0
        self.first: float | None = None
        self.samples: list[Reading] = []
        super().__init__(paths)
        self.refresh()
        if self.unreadable:
            self.damaged.append(paths.events.name)

    def _record(self, file: Path) -> Mapping[str, object]:
        try:
            return read_record(file) or {}
        except RunFileError:
            self.damaged.append(file.name)
            return {}

    def _apply(self, event: Event) -> None:
        super()._apply(event)
        self.first = event.t if self.first is None else self.first
        if isinstance(event, RunStarted):
            self.attempts += 1
        elif isinstance(event, DevicesSampled):
            self.samples += event.readings

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
    def fold_runs(self) -> tuple[ReportedRun, ...]:
        """The runs of a cross-validation's folds, by number; empty for another run."""
        folders = [path for path in self.paths.folder.glob("folds/*") if path.name.isdecimal()]
        ordered = sorted(folders, key=lambda folder: int(folder.name))
        return tuple(ReportedRun(RunPaths(folder)) for folder in ordered)

    @property
    def status(self) -> str:
        """How it ended, by its last event; where that is missing, by its files."""
        status = super().status
        if status not in ("cut off", "unreadable"):
            return status
        return "failed" if self.error else str(self.result.get("status", status))

    @property
    def metrics(self) -> dict[str, float]:
        """Its values: the last reported ones; of a sweep the best, of folds their mean."""
        totals = _mapping(self.result.get("summary"))  # of a search that has ended
        if isinstance(self.table, SweepTable):
            best = self.table.best[0].values if self.table.best else ()
            averaged = {self.metric: totals.get("best_value")}  # with its re-evaluations
            several = len(self.table.metrics) > 1
            return (
                {}
                if several
                else number_values(averaged) or dict(zip(self.table.metrics, best, strict=False))
            )
        if self.kind == "cv":
            scores = _mapping(totals.get("scores"))
            return number_values({name: _mapping(of).get("mean") for name, of in scores.items()})
        last = {name: points[-1][1] for name, points in self.lines.items()}
        return number_values(self.result.get("metrics") or last)

    @property
    def device(self) -> str:
        """Its devices and precision: ``"2 x Tesla T4, fp16"``."""
        if not self.plan_file:
            return ""
        listed = self.plan_file.get("device_names")
        names = [str(name) for name in listed] if isinstance(listed, list) else []
        devices = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        ranks = self.plan_file.get("processes", 1)
        devices = devices or ("CPU" if ranks == 1 else f"CPU, {ranks} processes")
        return f"{devices}, {self.plan_file.get('precision', '?')}"

    @property
    def lines(self) -> dict[str, Points]:
        """Each metric's values by step: reported, or where nothing was reported, logged."""
        return {
            name: points
            for name, points in self.points().items()
            if points and (self.curves or not name.startswith(_OTHER_METRICS))
        }


def _mapping(value: object) -> Mapping[str, object]:
    """Return a value of a JSON file if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}
