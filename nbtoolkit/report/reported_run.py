"""Summarise a run from its folder, in whatever state it is; nothing in it is executed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from nbtoolkit.errors import RunFileError
from nbtoolkit.run.events import DevicesSampled, Event, Reading, RunStarted, number_values
from nbtoolkit.run.paths import RunPaths, read_record
from nbtoolkit.study.table import SweepTable
from nbtoolkit.text_table import shortened
from nbtoolkit.views.state import State
from nbtoolkit.views.text import curves_of, devices_of, name_of
from nbtoolkit.views.trial_rows import value_of


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
    def label(self) -> str:
        """The name, short enough for a table's header or a legend; of a fold its number."""
        fold = self.paths.folder.parent.name == "folds"
        return f"fold {self.paths.run_id}" if fold else shortened(name_of(self), 28)

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
        if self.kind == "cv":
            scores = _mapping(totals.get("scores"))
            return number_values({name: _mapping(of).get("mean") for name, of in scores.items()})
        if isinstance(self.table, SweepTable):
            best = [value_of(trial) for trial in self.table.best]
            if len(self.table.metrics) > 1 or not best:
                return {}
            averaged = totals.get("best_value")  # with its re-evaluations
            return number_values({self.metric: best[0] if averaged is None else averaged})
        last = {name: points[-1][1] for name, points in curves_of(self).items()}
        return number_values(self.result.get("metrics") or last)

    @property
    def device(self) -> str:
        """Its devices and precision: ``"2 x Tesla T4, fp16"``."""
        return devices_of(self.plan_file)


def _mapping(value: object) -> Mapping[str, object]:
    """Return a value of a JSON file if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}
