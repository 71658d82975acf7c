"""State: what the folder of a run, a sweep or a cross-validation says now; it reads what is new."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from pathlib import Path
from typing import Any, Literal

from nbtoolkit.errors import RunFileError
from nbtoolkit.report.story import Points, numbers
from nbtoolkit.runtime.events import Event, EventReader
from nbtoolkit.runtime.paths import RunPaths, read_or_empty
from nbtoolkit.search.fold_table import FoldTable
from nbtoolkit.search.sweep_result import read_wishes
from nbtoolkit.search.table import SweepTable
from nbtoolkit.views.readings import last_readings

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
        self.ended: Event | None = None
        self._owned, self._again = True, False
        self._reader = EventReader(paths.events)

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
        # The lock first: what an owner writes before it goes must not look like its death.
        self._owned = not self.gone and self.paths.owned()
        for event in self._reader.read():
            # a line that is damaged, or another version's, costs no more than itself
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
                self._take(event)
        # Another owner may have come meanwhile, whose first line was read already.
        if not self._owned and self.ended is None and not self.gone:
            self._owned = self.paths.owned()
        # Gone on with: how it ended is put aside before the diary says anything of the new attempt.
        self._again = self._owned and self.ended is not None and not self.paths.ended()
        if self.table is not None and self.status == "cut off":  # nobody was left to say so
            self.table.take({"type": "ended", "status": "cut off"})

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
            return str(self.ended.get("status", "?"))
        if self._owned:
            return "paused" if self.paused else "running"
        return "cut off"

    @property
    def live(self) -> bool:
        """Whether it goes on."""
        return self.status in ("running", "paused")

    @property
    def unfinished(self) -> bool:
        """Whether it has ended, its owner too, and there is something left to go on with."""
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

    def readings(self) -> dict[str, list[dict[str, Any]]]:
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

    def _take(self, event: Event) -> None:
        if self.table is not None:
            self.table.take(event)
        if take := _TAKES.get(event["type"]):
            take(self, event)

    def _begins(self, event: Event) -> None:
        self.began, self.ended, self.paused = event["t"], None, False
        self.first_report = self.last_report = None
        self.phases.clear()
        config = event.get("config") or {}
        self.epochs = (config.get("train") or {}).get("epochs") if "train" in config else None

    def _ends(self, event: Event) -> None:
        self.ended = event

    def _note(self, event: Event) -> None:
        self.notes.append(str(event.get("text", "")))

    def _stop(self, event: Event) -> None:
        self.notes.append(f"stopping: {event.get('reason')}")

    def _rank(self, event: Event) -> None:
        self.phases[event["rank"]] = event["phase"]

    def _command(self, event: Event) -> None:
        if event["op"] in ("pause", "resume"):
            self.paused = event["op"] == "pause"

    def _report(self, event: Event) -> None:
        step = event.get("step")
        at = float(step) if isinstance(step, (int, float)) else self._next_step()
        self.first_report = self.first_report or (event["t"], at)
        self.last_report = (event["t"], at)
        for name, value in numbers(event.get("values")).items():
            _put(self.curves.setdefault(name, []), at, value)

    def _metrics(self, event: Event) -> None:
        step = event.get("step")
        for name, value in numbers(event.get("values")).items():
            points = self.logged.setdefault(name, [])
            at = float(step) if isinstance(step, (int, float)) else len(points) + 1.0
            _put(points, at, value)
            if len(points) > _LOGGED:  # a million steps may be logged
                del points[1:-1:2]

    def _next_step(self) -> float:
        return 1.0 if self.last_report is None else self.last_report[1] + 1

    def _intermediate(self, event: Event) -> None:
        value = event.get("value")
        if isinstance(value, (int, float)):
            _put(self.trials.setdefault(event["number"], []), float(event["step"]), float(value))

    def _trial(self, event: Event) -> None:
        number, value = event["number"], event.get("value")
        if event["state"] == "running":
            self.trials.pop(number, None)  # it is run again
        if event["state"] == "complete" and isinstance(value, (int, float)):
            self.values[number] = float(value)

    def _make_table(self) -> SweepTable | FoldTable | None:
        if self.kind == "run":
            return None
        if self.kind == "cv":
            return FoldTable()
        try:
            wishes = read_wishes(self.paths.folder)
        except RunFileError:  # not written yet, or damaged
            return SweepTable()
        self.metric, self.direction = wishes.metrics[0], wishes.directions[0]
        return SweepTable.of(wishes)

    def _fold(self, event: Event) -> None:
        if event.get("number") is None and event["state"] == "complete":
            self.folds.add(event["fold"])


_TAKES = {
    "run": State._begins,
    "ended": State._ends,
    "note": State._note,
    "stop": State._stop,
    "rank": State._rank,
    "command": State._command,
    "report": State._report,
    "metrics": State._metrics,
    "intermediate": State._intermediate,
    "trial": State._trial,
    "fold": State._fold,
}


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
