"""Read the state of a run, a sweep or a cross-validation from its folder, new parts only."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from pathlib import Path
from typing import Literal

from nbtoolkit.crossval.cv_result import FoldTable
from nbtoolkit.errors import RunFileError
from nbtoolkit.report.run_summary import Points, numbers
from nbtoolkit.run import events
from nbtoolkit.run.events import DevicesSampled, Reading, decode
from nbtoolkit.run.paths import RunPaths, read_or_empty
from nbtoolkit.search.sweep_result import read_sweep_config
from nbtoolkit.study.table import SweepTable

# --- readings ---
# What a run last said of its devices, found at the end of its diary.


_TAIL = 1 << 16  # bytes from a diary's end in which it is looked for


def last_readings(diary: Path) -> list[Reading]:
    """The newest reading of the devices in a diary; empty where there is none.

    Args:
        diary: a run's ``events.jsonl``.
    """
    lines = _tail(diary, _TAIL).splitlines()
    for line in reversed(lines):
        # Most lines are of other types, and are not decoded.
        if '"type": "device"' in line and isinstance(event := decode(line), DevicesSampled):
            return event.readings
    return []


def _tail(file: Path, size: int) -> str:
    """The last bytes of a file as text; empty where there is none."""
    try:
        with file.open("rb") as raw:
            end = raw.seek(0, 2)
            raw.seek(max(end - size, 0))
            return raw.read(size).decode(errors="replace")
    except OSError:
        return ""


# --- state ---


Kind = Literal["run", "sweep", "cv"]

_NOTES = 5  # of the newest
_LOGGED = 4000  # points of a metric that are kept; beyond, every second one


class State:
    """What is known of a folder; :meth:`look` takes what was written since.

    Everything a view shows is in here, so that two panels on one folder show the same.

    Args:
        paths: the folder.

    Attributes:
        kind: what it is.
        table: its trials or folds; None: it is a single run.
        curves: of a single run: each reported metric's values by step.
        logged: of a single run: each logged metric's values by step, thinned.
        trials: of a sweep: each trial's reports by step.
        values: of a sweep: trial -> objective value, of those that ended well.
        folds: of a cross-validation: those that are complete.
        notes: what was said to the user last.
        phases: rank -> how far it has come.
        epochs: how many a run is to have; None: not known.
        paused: whether a search starts nothing more.
        began: unix seconds of this attempt's first event; None: nothing was written yet.
        first_report: when this attempt first reported, and at which step.
        last_report: when it last did.
        ended: its last event, once it has ended.
        gone: whether the folder is no longer there.
        unreadable: why it cannot be read (another user's, a disk that is away); empty: it can.
    """

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.kind: Kind = _kind(paths)
        self.metric, self.direction = "value", "maximize"
        self.table = self._make_table()
        self.curves: dict[str, Points] = {}
        self.logged: dict[str, Points] = {}
        self.trials: dict[int, Points] = {}
        self.values: dict[int, float] = {}
        self.folds: set[int] = set()
        self.notes: deque[str] = deque(maxlen=_NOTES)
        self.phases: dict[int, str] = {}
        self.epochs: int | None = None
        self.paused = self.gone = False
        self.unreadable = ""
        self.began: float | None = None
        self.first_report: tuple[float, float] | None = None
        self.last_report: tuple[float, float] | None = None
        self.ended: events.RunEnded | None = None
        self._owned, self._again = True, False
        self._reader = events.EventReader(paths.events)

    def look(self) -> bool:
        """Read what is new in the folder; whether anything there is."""
        before = (self._reader.offset, self._owned, self.gone, self.unreadable)
        try:
            self._read()
            self.unreadable = ""
        except (OSError, RunFileError) as error:
            self.unreadable, self._owned = str(error), False
        return (self._reader.offset, self._owned, self.gone, self.unreadable) != before

    def _read(self) -> None:
        self.gone = not self.paths.folder.is_dir()
        # The lock first: what a supervisor writes before it goes must not look like its death.
        self._owned = not self.gone and self.paths.owned()
        for event in self._reader.read():
            # a line that is damaged, or another version's, costs no more than itself
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
                self._take(event)
        # Another supervisor may have come meanwhile, whose first line was read already.
        if not self._owned and self.ended is None and not self.gone:
            self._owned = self.paths.owned()
        # Gone on with: how it ended is put aside before the diary says anything of the new attempt.
        self._again = self._owned and self.ended is not None and not self.paths.ended()
        if self.table is not None and self.status == "cut off":  # nobody was left to say so
            self.table.update(events.RunEnded(status="cut off"))

    @property
    def status(self) -> str:
        """How it is in a word or two.

        ``"running"``, ``"paused"``, how it ended, ``"failed"``, ``"cut off"`` (nobody is there to
        end it), ``"gone"`` (its folder was deleted) or ``"unreadable"``.
        """
        if self.gone or self.unreadable:
            return "gone" if self.gone else "unreadable"
        if self._again:
            return "running"
        if self.ended is not None:
            return self.ended.status
        if self._owned:
            return "paused" if self.paused else "running"
        return "cut off"

    @property
    def live(self) -> bool:
        """Whether it goes on."""
        return self.status in ("running", "paused")

    @property
    def unfinished(self) -> bool:
        """Whether it has ended, its supervisor too, and there is something left to go on with."""
        return not self._owned and self.status in ("stopped", "deadline", "failed", "cut off")

    def share(self) -> float | None:
        """How much of it is done, from 0 to 1; None: there is no telling."""
        if self.kind == "run":
            total = self.total_steps()
            return (
                None if total is None or self.last_report is None else self.last_report[1] / total
            )
        done, total = self.counts()
        return min(done / total, 1.0) if total else None

    def total_steps(self) -> int | None:
        """Up to which step a run reports; None: not known, or its steps are no epochs.

        ``train.epochs`` is only what an own loop may count to: a run that ends elsewhere did not.
        """
        last = 0.0 if self.last_report is None else self.last_report[1]
        ended_elsewhere = self.status == "completed" and last != self.epochs
        return None if last > (self.epochs or 0) or ended_elsewhere else self.epochs

    def counts(self) -> tuple[int, int | None]:
        """Trials or folds that have ended, and how many there are to be."""
        if isinstance(self.table, SweepTable):
            return len(self.table.last(len(self.table.trials))), self.table.n_trials
        if isinstance(self.table, FoldTable):
            return len(self.folds), self.table.folds
        return 0, None

    def ends_at(self, now: float) -> float | None:
        """Unix seconds at which it is going to end at the pace so far; None: no telling."""
        if not self.live or self.paused:
            return None
        if isinstance(self.table, SweepTable):
            return self.table.ends_at(now)
        total = self.total_steps()
        if self.first_report is None or self.last_report is None or not total:
            return None
        (t0, step0), (t1, step1) = self.first_report, self.last_report
        return None if step1 <= step0 else t1 + (t1 - t0) / (step1 - step0) * (total - step1)

    def points(self) -> dict[str, Points]:
        """Of a single run: what was reported by step; where nothing was, what was logged."""
        return self.curves or self.logged

    def readings(self) -> dict[str, list[events.Reading]]:
        """What was last read of ranks and GPUs, by whose they are: ``""`` or ``"trial 3"``."""
        if not isinstance(self.table, SweepTable):
            found = {"": last_readings(self.paths.events)}
        else:
            folders = {one.number: self.trial(one.number) for one in self.table.running}
            found = {f"trial {n}": last_readings(p.events) for n, p in folders.items()}
        return {name: readings for name, readings in found.items() if readings}

    def trial(self, number: int) -> RunPaths:
        """The folder of a sweep's trial."""
        return RunPaths(self.paths.folder / f"trials/{number:04d}")

    # --- events ---

    def _take(self, event: events.Event) -> None:
        if self.table is not None:
            self.table.update(event)
        match event:
            case events.RunStarted():
                self._begins(event)
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
                self._report(event)
            case events.MetricsLogged():
                self._metrics(event)
            case events.IntermediateReported():
                points = self.trials.setdefault(event.number, [])
                _put(points, float(event.step), float(event.value))
            case events.TrialChanged(state="running"):
                self.trials.pop(event.number, None)  # it is run again
            case events.TrialChanged(state="complete") if event.value is not None:
                self.values[event.number] = float(event.value)
            case events.FoldChanged(state="complete", number=None):
                self.folds.add(event.fold)

    def _begins(self, event: events.RunStarted) -> None:
        self.began, self.ended, self.paused = event.t, None, False
        self.first_report = self.last_report = None
        self.phases.clear()
        self.epochs = (event.config.get("train") or {}).get("epochs")

    def _report(self, event: events.MetricsReported) -> None:
        following = 1.0 if self.last_report is None else self.last_report[1] + 1
        at = following if event.step is None else float(event.step)
        self.first_report = self.first_report or (event.t, at)
        self.last_report = (event.t, at)
        for name, value in numbers(event.values).items():
            _put(self.curves.setdefault(name, []), at, value)

    def _metrics(self, event: events.MetricsLogged) -> None:
        for name, value in numbers(event.values).items():
            points = self.logged.setdefault(name, [])
            _put(points, len(points) + 1.0 if event.step is None else float(event.step), value)
            if len(points) > _LOGGED:  # a million steps may be logged
                del points[1:-1:2]

    def _make_table(self) -> SweepTable | FoldTable | None:
        if self.kind == "run":
            return None
        if self.kind == "cv":
            return FoldTable()
        try:
            sweep_config = read_sweep_config(self.paths.folder)
        except RunFileError:  # not written yet, or damaged
            return SweepTable()
        self.metric, self.direction = sweep_config.metrics[0], sweep_config.directions[0]
        return SweepTable.of(sweep_config)


def read_state(folder: Path) -> State:
    """What a folder says now.

    Args:
        folder: of a run, a sweep or a cross-validation.
    """
    state = State(RunPaths(folder))
    state.look()
    return state


def _put(points: Points, step: float, value: float) -> None:
    """Add a point; a step that is trained again after a resume counts as it was trained last."""
    while points and points[-1][0] >= step:
        points.pop()
    points.append((step, value))


def _kind(paths: RunPaths) -> Kind:
    kind = read_or_empty(paths.versions).get("kind")
    return kind if kind in ("sweep", "cv") else "run"


def seconds_left(state: State, now: float | None = None) -> float | None:
    """Seconds until it ends at the pace so far; None: no telling."""
    now = time.time() if now is None else now
    end = state.ends_at(now)
    return None if end is None else max(end - now, 0.0)
