"""Read the state of a run, a sweep or a cross-validation from its folder, new events only."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from heapq import nlargest
from pathlib import Path
from statistics import median_low
from typing import Any

from nbtoolkit.errors import RunFileError, SweepError
from nbtoolkit.run import events
from nbtoolkit.run.attempts import kind_of, opening_event
from nbtoolkit.run.events import number_values
from nbtoolkit.run.paths import Kind, RunPaths, read_or_empty
from nbtoolkit.run.remote_job import job_has_started
from nbtoolkit.search.crossval.cv_result import FoldTable
from nbtoolkit.search.crossval.fold_loop import FOLDS_FILE, fold_key
from nbtoolkit.search.study.notation import expand
from nbtoolkit.search.study.table import SweepTable, Trial
from nbtoolkit.search.sweep_result import read_sweep_config
from nbtoolkit.text_table import counted, duration, number
from nbtoolkit.views.chart import Points
from nbtoolkit.views.workers import DeviceUse, JobSpan, device_uses, rows_of

_NOTES = 5  # the newest notes that are kept
_LOGGED_POINTS = 4000  # kept per logged metric; above that every second point is dropped
WORKED = 1000
"""The newest spans, of which the workers and the cost of more trials are shown."""

_DEVICE_LOGS = 32  # event logs of ended jobs in which device readings are looked for
_SPEED_LOGS = 20  # the newest logged steps, of which the speed is the mean


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
        space: of a sweep: its parameters, written in full; empty: unknown.
        config: the settings of the last attempt, nested.
        plan: its launch plan.
        notes: the newest notes to the user.
        phases: the phase of each rank.
        epochs: the number of epochs that a run is configured for; None: unknown.
        paused: whether a search starts no more jobs.
        stopping: why this attempt was asked to stop; empty: it was not.
        attempts: the number of attempts: 1, and 1 more per resume or restart.
        restarts: the failures after which the supervisor restarted the ranks of this launch.
        first_began: unix seconds of the first attempt's first event; None: nothing was written yet.
        began: the same of this attempt.
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
        self.kind: Kind = kind_of(opening_event(paths))
        self.metric = "value"
        self.direction = "maximize"
        self.table: SweepTable | FoldTable | None = None
        if self.kind != "run":
            is_sweep = self.kind == "sweep"
            self.table = SweepTable(deadline=deadline) if is_sweep else FoldTable(folds=folds)
        self.curves: dict[str, Points] = {}
        self.logged: dict[str, Points] = {}
        self.trials: dict[int, Points] = {}
        self.values: dict[int, float] = {}
        self.space: dict[str, dict[str, Any]] = {}
        self.notes: deque[str] = deque(maxlen=_NOTES)
        self.phases: dict[int, str] = {}
        self.epochs: int | None = None
        self.paused = False
        self.stopping = ""
        self.gone = False
        self.unreadable = ""
        self.attempts = 0
        self.restarts: list[str] = []
        self.first_began: float | None = None
        self.began: float | None = None
        self.first_report: tuple[float, float] | None = None
        self.last_report: tuple[float, float] | None = None
        self._reports_steps = False
        self.ended: events.RunEnded | None = None
        self.config: dict[str, object] = {}
        self.plan: dict[str, object] = {}
        self._jobs: dict[int | None, dict[int, JobSpan]] = {}  # the folds of each trial
        self._last = 0.0  # unix seconds of the last event
        self._fold_states: dict[int, State] = {}
        self._logged_at: deque[tuple[float, float]] = deque(maxlen=_SPEED_LOGS)
        self._past_attempts = 0.0  # seconds
        self._owned = True
        self._submitted = False
        self._settings_written = 0
        self._read_settings()
        self._reader = events.EventReader(paths.events)

    def _read_settings(self) -> None:
        """Read a sweep's settings where they are new: a later session may add trials."""
        if not isinstance(self.table, SweepTable):
            return
        # Not written yet, or damaged.
        with contextlib.suppress(OSError, RunFileError, SweepError):
            written = (self.paths.folder / "sweep.yaml").stat().st_mtime_ns
            if written != self._settings_written:
                self._settings_written = written
                sweep_config = read_sweep_config(self.paths.folder)
                self.table.configure(sweep_config)
                self.metric = sweep_config.metrics[0]
                self.direction = sweep_config.directions[0]
                space = sweep_config.space.to_dict()
                self.space = {name: expand(parameter) for name, parameter in space.items()}

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
        return self._reader.offset, self._owned, self._submitted, self.gone, self.unreadable

    def _read(self) -> None:
        self.gone = not self.paths.folder.is_dir()
        # The lock first: what a supervisor writes before it exits must not look like its death.
        self._owned = not self.gone and self.paths.owned()
        self._read_settings()
        for event in self._reader.read():
            # A line that is damaged, or written by another version, is skipped.
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
                self._apply(event)
        # Another supervisor may have started, whose first line was read already.
        if not self._owned and self.ended is None and not self.gone:
            self._owned = self.paths.owned()
        self._submitted = not self._owned and not job_has_started(self.paths)
        if self.table is not None and self.status == "cut off":  # nobody was left to write it
            self.table.update(events.RunEnded(status="interrupted"))
            self._end_folds()

    @property
    def status(self) -> str:
        """The status in a word or two.

        ``"submitted"`` (its job has not begun), ``"running"``, ``"paused"``, the one it ended with,
        ``"failed"``, ``"cut off"`` (its supervisor died), ``"gone"`` (deleted) or ``"unreadable"``.
        """
        if self.gone:
            return "gone"
        if self.unreadable:
            return "unreadable"
        if self._submitted:
            return "submitted"
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
        """Whether it has ended, was cut off or is gone; not if it is submitted or unreadable."""
        return not self.live and self.status not in ("unreadable", "submitted")

    @property
    def resumable(self) -> bool:
        """Whether it has ended, its supervisor too, and has work left."""
        return not self._owned and self.status in ("stopped", "deadline", "failed", "cut off")

    def share(self) -> float | None:
        """Return the share that is done, from 0 to 1; None: unknown."""
        if self.kind == "run":
            total = self.total_steps()
            if not total or self.last_report is None:
                return None
            return self.last_report[1] / total
        done, total = self.counts()
        return min(done / total, 1.0) if total else None

    def total_steps(self) -> int | None:
        """Return the step of a run's last report; None: unknown, or its steps are not epochs.

        A loop of the user's own may count other things than ``train.epochs``; a completed run whose
        last step is not ``train.epochs`` did.
        """
        last = 0.0 if self.last_report is None else self.last_report[1]
        ended_elsewhere = self.status == "completed" and last != self.epochs
        return None if last > (self.epochs or 0) or ended_elsewhere else self.epochs

    def counts(self) -> tuple[int, int | None]:
        """Return the number of trials or folds that have ended, and of all (None: unknown)."""
        if isinstance(self.table, SweepTable):
            return self.table.ended, self.table.n_trials
        if self.kind == "cv":
            return sum(fold.state == "complete" for fold in self.folds()), self._fold_count()
        return 0, None

    def seconds_left(self, now: float | None = None) -> float | None:
        """Seconds until it ends at the pace so far; None: unknown."""
        now = time.time() if now is None else now
        if not self.live or self.paused:
            return None
        if isinstance(self.table, SweepTable):
            end = self.table.ends_at(now)
            return None if end is None else max(end - now, 0.0)
        total = self.total_steps()
        if self.first_report is None or self.last_report is None or not total:
            return None
        (t0, step0), (t1, step1) = self.first_report, self.last_report
        if step1 <= step0:
            return None
        return max(t1 + (t1 - t0) / (step1 - step0) * (total - step1) - now, 0.0)

    def elapsed(self, now: float | None = None) -> float:
        """Seconds of all attempts together."""
        if self.began is None:
            return 0.0
        if self.ended is not None and self.ended.seconds is not None:
            return self._past_attempts + self.ended.seconds
        end = self._last
        if self.ended is None and self.live:
            end = time.time() if now is None else now
        return self._past_attempts + max(end - self.began, 0.0)

    def activity(self, now: float | None = None) -> str:
        """Return what it does before the first report; empty later."""
        if self.status != "running" or self.began is None:
            return ""
        if self.first_report or self._logged_at or self.trials:
            return ""
        waited = duration(max((time.time() if now is None else now) - self.began, 0.0))
        doing = ""
        spans = self.spans()
        if self.kind == "run":
            phases = set(self.phases.values())
            ranks = len(self.phases)
            if phases and "started" not in phases:
                doing = "rank 0" if ranks == 1 else f"{ranks} ranks"
                doing += " loading the function" if "group" in phases else " ready"
        elif self.kind == "cv" or any(span.end is not None for span in spans):
            return "" if spans else f"starting: importing torch, {waited}"
        elif spans:
            doing = f"{counted(len(spans), 'trial')} started"
        waiting = ", waiting for the first report" if doing else ""
        return f"{doing or 'starting: importing torch'}{waiting}, {waited}"

    def speed(self) -> dict[str, str]:
        """Of a single run, as far as known: ``epoch`` or ``step``, ``samples/s``, ``steps/s``."""
        values: dict[str, str] = {}
        if self.last_report is not None:
            last = number(self.last_report[1])
            total = self.total_steps()
            values["epoch" if total else "step"] = f"{last}/{total}" if total else last
        if samples := self.logged.get("samples_per_second"):
            values["samples/s"] = number(samples[-1][1])
        if len(self._logged_at) > 1:
            (t0, step0), (t1, step1) = self._logged_at[0], self._logged_at[-1]
            if t1 > t0 and step1 > step0:
                values["steps/s"] = number((step1 - step0) / (t1 - t0))
        return values

    def points(self) -> dict[str, Points]:
        """Of a single run: the reported values by step; where there are none, the logged ones."""
        return self.curves or self.logged

    def trial(self, number: int) -> RunPaths:
        """Return the folder of a sweep's trial."""
        return RunPaths(self.paths.folder / f"trials/{number:04d}")

    def planned_steps(self) -> int | None:
        """Return the number of reports of a whole trial: that of most complete ones.

        None: unknown.
        """
        counts = [len(points) for n in self.values if (points := self.trials.get(n))]
        return median_low(counts) if counts else None

    def saved_by_pruning(self) -> float | None:
        """Return the share of the reports of all ended trials that pruning saved.

        None: it ended none.
        """
        planned = self.planned_steps()
        if not isinstance(self.table, SweepTable) or planned is None:
            return None
        done = saved = 0
        for trial in self.table.trials.values():
            if trial.ended:
                steps = len(self.trials.get(trial.number, ()))
                done += steps
                saved += max(planned - steps, 0) if trial.label == "pruned" else 0
        return saved / (done + saved) if saved else None

    def spans(self, newest: int | None = None) -> list[JobSpan]:
        """When each trial or fold ran, by begin; of one that ran twice the last time.

        Args:
            newest: the number of trials, and of folds, to which it is limited; None: no limit.
        """
        folds = [fold for folds in self._jobs.values() for fold in folds.values()]
        trials: list[Trial] = []
        if isinstance(self.table, SweepTable):
            trials = [t for t in self.table.trials.values() if t.number not in self._jobs]
        if newest is not None:
            folds = nlargest(newest, folds, key=lambda span: span.begin)
            trials = nlargest(newest, trials, key=lambda trial: trial.began or 0.0)
        spans = folds
        for trial in trials:
            waits = trial.state == "waiting"
            if not trial.began or (waits and self.live):
                continue
            end = self._last if waits else trial.ended_at
            spans.append(JobSpan(trial.number, None, trial.began, end, trial.label))
        return sorted(spans, key=lambda span: span.begin)

    def workers(self, now: float | None = None) -> list[list[JobSpan]]:
        """Return the newest spans on the fewest rows on which none overlap: what each slot did.

        Args:
            now: unix seconds, the end of what runs; None: the clock's.
        """
        newest = self.spans(WORKED)[-WORKED:]
        return rows_of(newest, time.time() if now is None else now)

    def job(self, span: JobSpan) -> RunPaths:
        """Return the folder of a span's job."""
        if span.number is None:
            return RunPaths(self.paths.folder / fold_key(span.fold or 0))
        folder = self.trial(span.number).folder
        return RunPaths(folder if span.fold is None else folder / f"fold-{span.fold}")

    def folds(self, trial: int | None = None) -> list[JobSpan]:
        """Return the folds of a cross-validation, or of a sweep's trial, by number.

        Args:
            trial: the trial's number; None: the cross-validation's.
        """
        known = self._jobs.get(trial, {})
        count = (self._fold_count() or 0) if trial is None else 0
        waiting = {n: JobSpan(trial, n, 0.0, state="waiting") for n in range(count)}
        return [fold for _, fold in sorted({**waiting, **known}.items())]

    def fold_runs(self) -> dict[int, State]:
        """Return the states of the runs of a cross-validation's folds, by number."""
        for index in sorted(self._jobs.get(None, ())):
            if index not in self._fold_states:
                self._fold_states[index] = State(RunPaths(self.paths.folder / fold_key(index)))
            self._fold_states[index].refresh()
        return self._fold_states

    def _fold_count(self) -> int | None:
        """Return the number of folds of a cross-validation; None: unknown."""
        assert isinstance(self.table, FoldTable)
        if self.table.folds is None:
            numbers = number_values(read_or_empty(self.paths.folder / FOLDS_FILE))
            if {"k", "repeats"} <= numbers.keys():
                self.table.folds = int(numbers["k"] * numbers["repeats"])
        return self.table.folds

    def devices(self) -> list[DeviceUse]:
        """Return the use of each rank, slot and GPU.

        Of a live run the newest reading; of one that has ended the mean over its last minute. Of a
        sweep, a slot's use is that of the trials that ran on it.
        """
        logs = {self.paths.events: ""}
        if self.kind != "run":
            rows = enumerate(self.workers(self._last))
            jobs = [(span, f"slot {slot}") for slot, row in rows for span in row]
            jobs.sort(key=lambda job: job[0].end or 0.0)
            logs = {self.job(span).events: slot for span, slot in jobs[-_DEVICE_LOGS:]}
        return device_uses(logs, since=self.began if self.live else None)

    def _apply(self, event: events.Event) -> None:
        if self.table is not None:
            self.table.update(event)
        if isinstance(event, events.RunStarted):
            self._start_attempt(event)
        match event:
            case events.IntermediateReported():  # the first case: most events are reports
                if isinstance(self.table, SweepTable) and event.number in self.table.trials:
                    self.trials[event.number] = self.table.trials[event.number].curve
            case events.PlanChanged():
                self.plan = event.plan
            case events.RunEnded():
                self.ended = event
                self._end_folds(event.t)
            case events.NoteAdded():
                self.notes.append(event.text)
            case events.StopRequested():
                self.notes.append(f"stopping: {event.reason}")
                self.stopping = event.reason
            case events.RankPhaseChanged():
                self.phases[event.rank] = event.phase
            case events.CommandReceived(op="pause" | "resume" as op):
                self.paused = op == "pause"
            case events.MetricsReported():
                self._add_report(event)
            case events.MetricsLogged():
                self._add_logged(event)
            case events.TrialChanged(state="complete") if event.value is not None:
                self.values[event.number] = float(event.value)
            case events.FoldChanged():
                folds = self._jobs.setdefault(event.number, {})
                if event.state == "running" or event.fold not in folds:
                    folds[event.fold] = JobSpan(event.number, event.fold, event.t)
                if event.state != "running":
                    folds[event.fold].finish(event.t, event.state)
                    folds[event.fold].metrics = event.metrics
                    folds[event.fold].seconds = event.seconds
        self._last = event.t

    def _end_folds(self, at: float | None = None) -> None:
        """End the folds that are open; they will run again."""
        for folds in self._jobs.values():
            for fold in folds.values():
                if fold.end is None:
                    fold.finish(self._last if at is None else at, "waiting")

    def _start_attempt(self, event: events.RunStarted) -> None:
        self._past_attempts = self.elapsed(self._last)
        self._end_folds()
        self.attempts += 1
        if not event.restarted_after:
            self.restarts.clear()
        else:
            self.restarts.append(event.restarted_after)
        self.first_began = event.t if self.first_began is None else self.first_began
        self.config = event.config
        self.plan = event.plan
        self._logged_at.clear()
        self.began = event.t
        self.ended = None
        self.paused = False
        self.stopping = ""
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
        for name, value in number_values(event.values).items():
            _add_point(self.curves.setdefault(name, []), step, value)

    def _add_logged(self, event: events.MetricsLogged) -> None:
        if event.step is not None:
            self._logged_at.append((event.t, float(event.step)))
        for name, value in number_values(event.values).items():
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
