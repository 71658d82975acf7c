"""Read the state of a run, a sweep or a cross-validation from its folder, new events only."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from itertools import accumulate
from pathlib import Path

from nbtoolkit.crossval.cv_result import FoldTable
from nbtoolkit.errors import RunFileError
from nbtoolkit.run import events
from nbtoolkit.run.events import DevicesSampled, Reading, decode
from nbtoolkit.run.events import number_values as numbers
from nbtoolkit.run.paths import Kind, RunPaths, kind_of, read_or_empty
from nbtoolkit.search.sweep_result import read_sweep_config
from nbtoolkit.study.table import SweepTable
from nbtoolkit.views.chart import Points

_READINGS_TAIL = 1 << 16  # bytes at the end of an event log in which readings are looked for
_NOTES = 5  # the newest notes that are kept
_LOGGED_POINTS = 4000  # kept per logged metric; above that every second point is dropped


class State:
    """What is known of a folder; :meth:`refresh` reads what was written since.

    It holds everything that a view shows, so two panels on one folder show the same.

    Args:
        paths: the folder.
        deadline: unix seconds at which a sweep ends at the latest; None: no limit.
        folds: the number of folds of a cross-validation; None: unknown.

    Attributes:
        kind: what the folder holds.
        table: its trials or folds; None: it is a single run.
        metric: the first objective of a sweep.
        direction: ``"minimize"`` or ``"maximize"``, for that objective.
        curves: of a single run: each reported metric's values by step.
        logged: of a single run: each logged metric's values by step, thinned.
        trials: of a sweep: each trial's reports by step.
        values: of a sweep: the objective value of each complete trial, by trial number.
        folds: of a cross-validation: the complete folds.
        notes: the newest notes to the user.
        phases: the phase of each rank.
        epochs: the number of epochs that a run is configured for; None: unknown.
        paused: whether a search starts no more jobs.
        began: unix seconds of this attempt's first event; None: nothing was written yet.
        first_report: time and step of this attempt's first report.
        last_report: time and step of its last report.
        ended: its last event, once it has ended.
        gone: whether the folder does not exist any more.
        unreadable: why the folder cannot be read (another user's, a disk that is unavailable);
            empty: it can be read.
    """

    def __init__(
        self, paths: RunPaths, *, deadline: float | None = None, folds: int | None = None
    ) -> None:
        self.paths = paths
        self.kind: Kind = kind_of(read_or_empty(paths.versions))
        self.metric, self.direction = "value", "maximize"
        self.table = self._make_table(deadline, folds)
        self.curves: dict[str, Points] = {}
        self.logged: dict[str, Points] = {}
        self.trials: dict[int, Points] = {}
        self.values: dict[int, float] = {}
        self.folds: set[int] = set()
        self.notes: deque[str] = deque(maxlen=_NOTES)
        self.phases: dict[int, str] = {}
        self.epochs: int | None = None
        self.paused = False
        self.gone = False
        self.unreadable = ""
        self.began: float | None = None
        self.first_report: tuple[float, float] | None = None
        self.last_report: tuple[float, float] | None = None
        self._reports_steps = False
        self.ended: events.RunEnded | None = None
        self._owned = True
        self._restarting = False
        self._reader = events.EventReader(paths.events)

    def _make_table(
        self, deadline: float | None, folds: int | None
    ) -> SweepTable | FoldTable | None:
        if self.kind == "run":
            return None
        if self.kind == "cv":
            return FoldTable(folds=folds)
        try:
            sweep_config = read_sweep_config(self.paths.folder)
        except RunFileError:  # not written yet, or damaged
            return SweepTable(deadline=deadline)
        self.metric, self.direction = sweep_config.metrics[0], sweep_config.directions[0]
        return SweepTable.of(sweep_config, deadline=deadline)

    def refresh(self) -> bool:
        """Read what is new in the folder; returns whether anything is.

        A folder that cannot be read has the status ``"unreadable"`` until a later call can read it.
        """
        before = self._read_so_far()
        self.unreadable = ""
        try:
            self._read()
        except (OSError, RunFileError) as error:
            self.unreadable = str(error)
        return self._read_so_far() != before

    def _read_so_far(self) -> tuple[object, ...]:
        return self._reader.offset, self._owned, self.gone, self.unreadable

    def _read(self) -> None:
        self.gone = not self.paths.folder.is_dir()
        # The lock first: what a supervisor writes before it exits must not look like its death.
        self._owned = not self.gone and self.paths.owned()
        for event in self._reader.read():
            # A line that is damaged, or written by another version, is skipped.
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
                self._apply(event)
        # Another supervisor may have started meanwhile, whose first line was read already.
        if not self._owned and self.ended is None and not self.gone:
            self._owned = self.paths.owned()
        # A new attempt moves the old result away before it writes its first event.
        self._restarting = self._owned and self.ended is not None and not self.paths.ended()
        if self.table is not None and self.status == "cut off":  # nobody was left to write it
            self.table.update(events.RunEnded(status="cut off"))

    # --- status and progress ---

    @property
    def status(self) -> str:
        """The status in a word or two.

        ``"running"``, ``"paused"``, the status it ended with, ``"failed"``, ``"cut off"`` (its
        supervisor died), ``"gone"`` (its folder was deleted) or ``"unreadable"``.
        """
        if self.gone:
            return "gone"
        if self.unreadable:
            return "unreadable"
        if self._restarting:
            return "running"
        if self.ended is not None:
            return self.ended.status
        if self._owned:
            return "paused" if self.paused else "running"
        return "cut off"

    @property
    def live(self) -> bool:
        """Whether it is running or paused."""
        return self.status in ("running", "paused")

    @property
    def over(self) -> bool:
        """Whether it has ended, was cut off, or its folder is gone.

        An unreadable folder may become readable again, so it is neither live nor over.
        """
        return not self.live and self.status != "unreadable"

    @property
    def resumable(self) -> bool:
        """Whether it has ended, its supervisor too, and has work left."""
        return not self._owned and self.status in ("stopped", "deadline", "failed", "cut off")

    def share(self) -> float | None:
        """The share that is done, from 0 to 1; None: unknown."""
        if self.kind == "run":
            total = self.total_steps()
            if not total or self.last_report is None:
                return None
            return self.last_report[1] / total
        done, total = self.counts()
        return min(done / total, 1.0) if total else None

    def total_steps(self) -> int | None:
        """The step of a run's last report; None: unknown, or its steps are not epochs.

        A loop of the user's own may count other things than ``train.epochs``; a completed run whose
        last step is not ``train.epochs`` did.
        """
        last = 0.0 if self.last_report is None else self.last_report[1]
        ended_elsewhere = self.status == "completed" and last != self.epochs
        return None if last > (self.epochs or 0) or ended_elsewhere else self.epochs

    def counts(self) -> tuple[int, int | None]:
        """The number of trials or folds that have ended, and of all (None: unknown)."""
        if isinstance(self.table, SweepTable):
            return len(self.table.last(len(self.table.trials))), self.table.n_trials
        if isinstance(self.table, FoldTable):
            return len(self.folds), self.table.folds
        return 0, None

    def ends_at(self, now: float) -> float | None:
        """Unix seconds at which it will end at the pace so far; None: unknown."""
        if not self.live or self.paused:
            return None
        if isinstance(self.table, SweepTable):
            return self.table.ends_at(now)
        total = self.total_steps()
        if self.first_report is None or self.last_report is None or not total:
            return None
        (t0, step0), (t1, step1) = self.first_report, self.last_report
        return None if step1 <= step0 else t1 + (t1 - t0) / (step1 - step0) * (total - step1)

    def seconds_left(self, now: float | None = None) -> float | None:
        """Seconds until it ends at the pace so far; None: unknown."""
        now = time.time() if now is None else now
        end = self.ends_at(now)
        return None if end is None else max(end - now, 0.0)

    # --- values ---

    def points(self) -> dict[str, Points]:
        """Of a single run: the reported values by step; where there are none, the logged ones."""
        return self.curves or self.logged

    def trial_values(self) -> Points:
        """Number and value of each complete trial."""
        return [(float(number), value) for number, value in sorted(self.values.items())]

    def best_values(self) -> Points:
        """Number of each complete trial, and the best value up to there."""
        values = self.trial_values()
        better = max if self.direction == "maximize" else min
        best = accumulate((value for _, value in values), better)
        return [(number, value) for (number, _), value in zip(values, best, strict=True)]

    def readings(self) -> dict[str, list[Reading]]:
        """The newest device readings: of the run by ``""``, of running trials by ``"trial 3"``."""
        if not isinstance(self.table, SweepTable):
            newest = {"": last_readings(self.paths.events)}
        else:
            newest = {
                f"trial {trial.number}": last_readings(self.trial(trial.number).events)
                for trial in self.table.running
            }
        return {name: readings for name, readings in newest.items() if readings}

    def trial(self, number: int) -> RunPaths:
        """The folder of a sweep's trial."""
        return RunPaths(self.paths.folder / f"trials/{number:04d}")

    # --- events ---

    def _apply(self, event: events.Event) -> None:
        if self.table is not None:
            self.table.update(event)
        match event:
            case events.RunStarted():
                self._start_attempt(event)
            case events.RunEnded():
                self.ended = event
            case events.NoteAdded():
                self.notes.append(event.text)
            case events.StopRequested():
                self.notes.append(f"stopping: {event.reason}")
            case events.RankPhaseChanged():
                self.phases[event.rank] = event.phase
            case events.CommandReceived(op="pause" | "resume" as op):
                self.paused = op == "pause"
            case events.MetricsReported():
                self._add_report(event)
            case events.MetricsLogged():
                self._add_logged(event)
            case events.IntermediateReported():
                points = self.trials.setdefault(event.number, [])
                _add_point(points, float(event.step), float(event.value))
            case events.TrialChanged(state="running"):
                self.trials.pop(event.number, None)  # it runs again
            case events.TrialChanged(state="complete") if event.value is not None:
                self.values[event.number] = float(event.value)
            case events.FoldChanged(state="complete", number=None):
                self.folds.add(event.fold)

    def _start_attempt(self, event: events.RunStarted) -> None:
        self.began = event.t
        self.ended = None
        self.paused = False
        self.first_report = None
        self.last_report = None
        self._reports_steps = False
        self.phases.clear()
        self.epochs = (event.config.get("train") or {}).get("epochs")

    def _add_report(self, event: events.MetricsReported) -> None:
        last = 0.0 if self.last_report is None else self.last_report[1]
        # Returned numbers come as a last report without a step; they belong to the last step.
        next_step = last if self._reports_steps else last + 1
        step = next_step if event.step is None else float(event.step)
        self._reports_steps = event.step is not None or self._reports_steps
        self.first_report = self.first_report or (event.t, step)
        self.last_report = (event.t, step)
        for name, value in numbers(event.values).items():
            _add_point(self.curves.setdefault(name, []), step, value)

    def _add_logged(self, event: events.MetricsLogged) -> None:
        for name, value in numbers(event.values).items():
            points = self.logged.setdefault(name, [])
            step = len(points) + 1.0 if event.step is None else float(event.step)
            _add_point(points, step, value)
            if len(points) > _LOGGED_POINTS:  # a run may log a million steps
                del points[1:-1:2]


def _add_point(points: Points, step: float, value: float) -> None:
    """Add a point; it replaces those of a step that was trained again after a resume."""
    while points and points[-1][0] >= step:
        points.pop()
    points.append((step, value))


def read_state(folder: Path) -> State:
    """Read the state of a run's, a sweep's or a cross-validation's folder."""
    state = State(RunPaths(folder))
    state.refresh()
    return state


def last_readings(log: Path) -> list[Reading]:
    """Read the newest device readings from the end of an ``events.jsonl``; empty without any."""
    for line in reversed(read_tail(log, _READINGS_TAIL).splitlines()):
        # Most lines are of other types and need no decoding.
        if '"type": "device"' in line and isinstance(event := decode(line), DevicesSampled):
            return event.readings
    return []


def read_tail(file: Path, size: int) -> str:
    """Read the last ``size`` bytes of a file as text; empty where it cannot be read."""
    try:
        with file.open("rb") as stream:
            end = stream.seek(0, 2)
            stream.seek(max(end - size, 0))
            return stream.read(size).decode(errors="replace")
    except OSError:
        return ""
