"""Summarise a sweep from its events (the best, what runs, what ended last)."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from nbtoolkit.run import events
from nbtoolkit.run.events import TrialChanged
from nbtoolkit.text_table import html_columns, text_columns

if TYPE_CHECKING:
    from nbtoolkit.study.sweep_config import SweepConfig


# --- trial ---


ENDED = ("complete", "pruned", "failed", "infeasible")
"""States of a trial that has ended; the others are running and waiting (to run again)."""


@dataclass(eq=False)
class Trial:
    """What is known of a trial.

    Attributes:
        number: its number in the study.
        state: one of :data:`ENDED`, ``"running"`` or ``"waiting"``.
        params: its parameters by dotted name.
        values: its objectives' values; empty as long as it has none.
        seconds: how long it took; None: it has not ended.
        reason: why it failed or was pruned.
        began: unix seconds of its start.
        step: the step of its last report (with folds: the fold's number).
        latest: what it reported then.
        folds: the state of each of its folds.
    """

    number: int
    state: str = "waiting"
    params: dict[str, Any] = field(default_factory=dict)
    values: tuple[float, ...] = ()
    seconds: float | None = None
    reason: str | None = None
    began: float = 0.0
    step: int | None = None
    latest: float | None = None
    folds: dict[int, str] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.state in ENDED

    def take(self, event: TrialChanged) -> None:
        """Take an event of this trial."""
        if event.state == "running" and self.state != "running":
            self.began, self.step, self.latest = event.t, None, None
            self.folds.clear()
        self.state = event.state
        self.params = event.params or self.params
        self.values = tuple(event.values or [one for one in [event.value] if one is not None])
        self.seconds = event.seconds
        self.reason = event.reason


# --- best ---
# The best trials of a sweep so far: one, or a front when there are several objectives.


class Best:
    """The best trials among those that ended well.

    With one objective it is the trial last marked as best: the study's owner knows of constraints
    and of repeated runs. With several it is the Pareto front: trials that no other one beats in
    everything.

    Args:
        directions: ``"minimize"`` or ``"maximize"`` for each objective.
    """

    def __init__(self, directions: Sequence[str]) -> None:
        self._signs = tuple(-1.0 if direction == "maximize" else 1.0 for direction in directions)
        self.trials: list[Trial] = []
        """The best; with one objective, one or none."""

    def take(self, trial: Trial, marked: bool) -> None:
        """Look at a trial that has a new state; ``marked``: its event called it the best."""
        if len(self._signs) == 1:
            self.trials = [trial] if marked else self.trials
            return
        others = [one for one in self.trials if one is not trial]
        if not _whole(trial, len(self._signs)) or any(self._beats(one, trial) for one in others):
            self.trials = others
        else:
            self.trials = [one for one in others if not self._beats(trial, one)] + [trial]

    def _beats(self, one: Trial, other: Trial) -> bool:
        """At least as good in everything, and better in something."""
        mine, theirs = self._costs(one), self._costs(other)
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))

    def _costs(self, trial: Trial) -> list[float]:
        return [sign * value for sign, value in zip(self._signs, trial.values, strict=True)]


def _whole(trial: Trial, objectives: int) -> bool:
    return trial.state == "complete" and len(trial.values) == objectives


LAST = 5
"""Trials that ended last, below the best and those that run."""

_BEST, _RUNNING, _PARAMS = 10, 16, 8  # rows and columns beyond these make no one wiser
_TEXT = 40  # characters of one value
_WAITING = ("median", "percentile", "patient")


class SweepTable:
    """A sweep as a table, for a cell (HTML) or as text.

    Hand it the sweep's events in their order, as often as there are new ones.

    Args:
        name: the study's name.
        metrics: the objectives' names.
        directions: ``"minimize"`` or ``"maximize"`` for each of them.
        n_trials: how many trials the sweep is to have; None: as many as the time allows.
        deadline: unix seconds at which it ends at the latest; None: there is no limit.
        unpruned: complete trials before which the pruner ends none; None: there is no pruner.
    """

    def __init__(
        self,
        *,
        name: str = "sweep",
        metrics: Sequence[str] = ("value",),
        directions: Sequence[str] = ("maximize",),
        n_trials: int | None = None,
        deadline: float | None = None,
        unpruned: int | None = None,
    ) -> None:
        self.name, self.metrics = name, tuple(metrics)
        self.directions = tuple(directions)
        self.n_trials, self.deadline, self._unpruned = n_trials, deadline, unpruned
        self.paused = False
        """Whether it starts nothing more until it is resumed."""
        self.trials: dict[int, Trial] = {}
        self.status = "running"
        """How the sweep ended, once it has."""
        self._best = Best(directions)
        self._ended: list[Trial] = []  # in the order in which they ended
        self._running: dict[int, Trial] = {}
        self._counts: Counter[str] = Counter()

    @classmethod
    def of(cls, sweep_config: SweepConfig, *, deadline: float | None = None) -> SweepTable:
        """The table of a sweep of this configuration, before its first event."""
        options = sweep_config.study.pruner_options
        # Optuna's median and percentile wait for so many trials, the others for none.
        waits = options.get("n_startup_trials", 5) if sweep_config.pruner in _WAITING else 0
        return cls(
            name=sweep_config.study.name,
            metrics=sweep_config.metrics,
            directions=sweep_config.directions,
            n_trials=sweep_config.budget.n_trials,
            deadline=deadline,
            unpruned=None if sweep_config.pruner == "none" else waits,
        )

    def read(self, events: Iterable[events.Event]) -> None:
        """Take new events."""
        for event in events:
            self.take(event)

    def take(self, event: events.Event) -> None:
        """Take one event; those of other kinds change nothing."""
        match event:
            case events.RunStarted():
                self.paused = False
                self._rest("running")
            case events.RunEnded():
                self._rest(event.status)
            case events.TrialChanged():
                self._trial(event)
            case events.IntermediateReported():
                if trial := self.trials.get(event.number):
                    trial.step, trial.latest = event.step, event.value
            case events.FoldChanged(number=int(number)):
                if trial := self.trials.get(number):
                    trial.folds[event.fold] = event.state
            case events.CommandReceived(op="pause" | "resume" as op):
                self.paused = op == "pause"
            case events.CommandReceived(op="add_trials", n=int(count)) if self.n_trials is not None:
                self.n_trials += count

    @property
    def best(self) -> list[Trial]:
        """The best trial, or those on the front of several objectives; none yet: empty."""
        return self._best.trials

    @property
    def running(self) -> list[Trial]:
        """What runs now, by number."""
        return sorted(self._running.values(), key=lambda trial: trial.number)

    @property
    def waiting(self) -> list[Trial]:
        """What ran when the sweep ended, or is to be run again, by number."""
        if not self._counts["waiting"]:
            return []
        return [one for _, one in sorted(self.trials.items()) if one.state == "waiting"]

    def last(self, count: int = LAST) -> list[Trial]:
        """The trials that ended last, the last one first."""
        return self._ended[: -count - 1 : -1]

    def count(self, state: str) -> int:
        """How many trials are in a state."""
        return self._counts[state]

    def ends_at(self, now: float) -> float | None:
        """When the sweep is going to end: what is left, at the pace so far, or its deadline.

        A trial that the pruner may end is expected to last as those that it could end so far. To
        these, one that is pruned at once and one that is not are added: the median rule ends
        about every second trial, and the first ones, which it spares, do not show it.

        Args:
            now: unix seconds.

        Returns:
            Unix seconds; None: nothing ended yet, nothing runs, it is paused, or there is no end
            in sight.
        """
        if self.paused:
            return None
        if not self._ended or not self._running or self.n_trials is None:
            return self.deadline
        complete = [one for one in self._ended if one.state == "complete"]
        whole = _mean_seconds(complete or self._ended)
        to_start = max(self.n_trials - len(self._ended) - len(self._running), 0)
        since, first, added = 0.0, 0, []
        reports = any(one.step is not None for one in self.trials.values())  # else none is pruned
        if self._unpruned is not None and reports:
            added = [0.0, whole]
            first = max(self._unpruned - len(complete) - len(self._running), 0)
            waited = complete[: self._unpruned]
            if len(complete) < self._unpruned:
                since = math.inf
            elif waited:
                since = waited[-1].began + (waited[-1].seconds or 0.0)
        lasted = [one.seconds or 0.0 for one in self._ended if one.began >= since]
        lasted = sorted([*lasted, *added])
        ages = sorted(now - one.began for one in self._running.values() if one.began >= since)
        first = min(first, to_start)
        left = first * whole + (to_start - first) * _expected(lasted, ages, 0.0)
        for one in self._running.values():
            left += _expected(lasted, ages, now - one.began)
        end = now + left / len(self._running)
        return end if self.deadline is None else min(end, self.deadline)

    def summary(self, now: float | None = None) -> str:
        """One line: how many of how many, the best value, and when it is going to end."""
        parts = [self._progress(), self._states(), *map(self._sentence, self.best[:1])]
        if len(self.best) > 1:
            parts[-1] = f"{len(self.best)} trials on the front"
        if self.status != "running" or self.paused:
            parts.append("paused" if self.status == "running" else self.status)
        elif end := self.ends_at(time.time() if now is None else now):
            parts.append(f"ends about {time.strftime('%H:%M', time.localtime(end))}")
        return f"{self.name}: " + "; ".join(part for part in parts if part)

    def text(self, now: float | None = None) -> str:
        """Summary and table as lines of text."""
        header, rows = self._columns(time.time() if now is None else now)
        return self.summary(now) + ("\n" + text_columns(header, rows) if rows else "")

    def html(self, now: float | None = None) -> str:
        """Summary and table for a cell; all values escaped."""
        header, rows = self._columns(time.time() if now is None else now)
        return f"<p>{escape(self.summary(now))}</p>" + (html_columns(header, rows) if rows else "")

    def line(self, event: events.Event) -> str | None:
        """An event as a line of text: a trial that ended; None for every other event."""
        if not isinstance(event, events.TrialChanged) or event.state not in ENDED:
            return None
        trial = self.trials[event.number]
        values = [f"{name} {short(v)}" for name, v in zip(self.metrics, trial.values, strict=False)]
        mark = ["(best)"] if trial in self.best else []
        params = [f"{name}={short(value)}" for name, value in trial.params.items()]
        took = [f"{trial.seconds:.1f} s"] if trial.seconds is not None else []
        words = [f"trial {trial.number}", trial.state, *values, *mark, *params, *took]
        return "  ".join(words + ([trial.reason] if trial.reason else []))

    # --- events ---

    def _rest(self, status: str) -> None:
        """An attempt begins or ends: what ran before does not run any more."""
        self.status = status
        for trial in self.running:
            self._leave(trial)
            trial.state = "waiting"
            self._enter(trial)

    def _trial(self, event: events.TrialChanged) -> None:
        if event.number in self.trials:
            self._leave(self.trials[event.number])
        trial = self.trials.setdefault(event.number, Trial(event.number))
        trial.take(event)
        self._enter(trial)
        self._best.take(trial, event.best)

    def _leave(self, trial: Trial) -> None:
        """Undo :meth:`_enter`, before the trial's state changes."""
        self._counts[trial.state] -= 1
        self._running.pop(trial.number, None)
        if trial.ended:
            self._ended.remove(trial)

    def _enter(self, trial: Trial) -> None:
        self._counts[trial.state] += 1
        if trial.state == "running":
            self._running[trial.number] = trial
        elif trial.ended:
            self._ended.append(trial)

    # --- words ---

    def _progress(self) -> str:
        of = f" of {self.n_trials}" if self.n_trials is not None else ""
        return f"{len(self._ended)}{of} trials"

    def _states(self) -> str:
        states = (*ENDED, "running", "waiting")
        return ", ".join(f"{self.count(one)} {one}" for one in states if self.count(one))

    def _sentence(self, trial: Trial) -> str:
        values = zip(self.metrics, trial.values, strict=False)
        named = ", ".join(f"{name} {short(value)}" for name, value in values)
        return f"best {named} (trial {trial.number})"

    def _columns(self, now: float) -> tuple[list[str], list[list[str]]]:
        shown = [*self.best[:_BEST], *self.running[:_RUNNING], *self.last()]
        shown = list({trial.number: trial for trial in shown}.values())
        names = list(dict.fromkeys(name for trial in shown for name in trial.params))[:_PARAMS]
        header = ["", "trial", "state", *self.metrics, "seconds", *names]
        return header, [self._row(trial, names, now) for trial in shown]

    def _row(self, trial: Trial, names: Sequence[str], now: float) -> list[str]:
        values = [short(value) for value in trial.values] or [_under_way(trial)]
        values += [""] * (len(self.metrics) - len(values))
        running = max(now - trial.began, 0.0) if trial.state == "running" else None
        seconds = trial.seconds if running is None else running
        return [
            "*" if trial in self.best else "",
            str(trial.number),
            trial.state,
            *values[: len(self.metrics)],
            "" if seconds is None else f"{seconds:.1f}",
            *(short(trial.params[name]) if name in trial.params else "" for name in names),
        ]


def short(value: Any) -> str:
    """A value as a person reads it: four digits of a number, the beginning of a long text."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _TEXT else text[: _TEXT - 3] + "..."


def _mean_seconds(trials: Sequence[Trial]) -> float:
    return sum(one.seconds or 0.0 for one in trials) / len(trials)


def _expected(lasted: list[float], ages: list[float], age: float) -> float:
    """Seconds that a trial of some age goes on: the area below Kaplan and Meier's curve.

    The mean of those that have ended is too short, as the short ones end first: trials that run
    count as long as they did (https://doi.org/10.1080/01621459.1958.10501452).

    Args:
        lasted: of those that have ended, sorted.
        ages: of those that run, sorted.
        age: seconds.
    """
    left, alive, before = 0.0, 1.0, age
    for at, ended in groupby(lasted[bisect_left(lasted, age) :]):
        left, before = left + alive * (at - before), at
        beyond = len(lasted) - bisect_left(lasted, at) + len(ages) - bisect_left(ages, at)
        alive *= 1 - len([*ended]) / beyond
    return left


def _under_way(trial: Trial) -> str:
    """What a trial without a value has said so far."""
    if trial.latest is not None:
        return f"{short(trial.latest)} (step {trial.step})"
    done = sum(state == "complete" for state in trial.folds.values())
    return f"{done} folds" if trial.folds else ""
