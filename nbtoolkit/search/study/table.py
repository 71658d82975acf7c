"""Read the trials of a sweep from its events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from nbtoolkit.run import events
from nbtoolkit.run.events import Event, TrialChanged
from nbtoolkit.text_table import duration, number

if TYPE_CHECKING:
    from nbtoolkit.search.study.space import Params
    from nbtoolkit.search.study.sweep_config import SweepConfig

ENDED = ("complete", "pruned", "failed", "infeasible")
"""States of a trial that has ended. The others are running and waiting (to run again)."""

STOPPED_BY_HAND = "stopped by hand"
"""The reason of a trial that a user has stopped; its state is ``"pruned"``."""

_MAX_TEXT = 40  # characters of one value


class EventTable:
    """What events have told of trials or folds."""

    def update(self, event: Event) -> None:
        """Process one event; those of other types change nothing."""

    def line(self, event: Event) -> str | None:
        """Return a line of text on a trial or fold that ended; None for every other event."""
        return None

    def read(self, events: Iterable[Event]) -> None:
        """Process new events, in their order."""
        for event in events:
            self.update(event)


@dataclass(eq=False)
class Trial:
    """The state of a trial.

    Attributes:
        number: its number in the study.
        state: one of :data:`ENDED`, ``"running"`` or ``"waiting"``.
        params: its parameters by dotted name.
        values: its objectives' values; empty until it has them.
        seconds: how long it took; None: it has not ended.
        reason: why it failed or was pruned.
        began: unix seconds of its start.
        ended_at: unix seconds of its end; None: it has not ended.
        step: the step of its last report (with folds: the fold's number).
        latest: the value of that report.
        curve: step and value of each report.
        folds: the state of each of its folds.
    """

    number: int
    state: str = "waiting"
    params: Params = field(default_factory=dict)
    values: tuple[float, ...] = ()
    seconds: float | None = None
    reason: str | None = None
    began: float = 0.0
    ended_at: float | None = None
    step: int | None = None
    latest: float | None = None
    curve: list[tuple[float, float]] = field(default_factory=list)
    folds: dict[int, str] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.state in ENDED

    @property
    def label(self) -> str:
        """The state to show: ``"stopped"`` for a trial that was stopped by hand."""
        return "stopped" if self.reason == STOPPED_BY_HAND else self.state

    def update(self, event: TrialChanged) -> None:
        """Process an event of this trial."""
        if event.state == "running" and self.state != "running":
            self.began = event.t
            self.step = None
            self.latest = None
            self.folds.clear()
        # The event that names the best trial at the end of a sweep comes after the trial's own end.
        if event.state != self.state or event.seconds is not None:
            self.seconds = event.seconds
            self.ended_at = event.t if event.state in ENDED else None
        self.state = event.state
        self.params = event.params or self.params
        self.values = tuple(event.values or ([] if event.value is None else [event.value]))
        self.reason = event.reason


class BestTrials:
    """The best ones of the complete trials.

    With one objective it is the trial that an event last marked as the best: the scheduler knows of
    constraints and repeated runs. With several it is the Pareto front: trials that no other trial
    beats in every objective.

    Args:
        directions: ``"minimize"`` or ``"maximize"`` for each objective.
    """

    def __init__(self, directions: Sequence[str]) -> None:
        self._signs = [-1.0 if direction == "maximize" else 1.0 for direction in directions]
        self.trials: list[Trial] = []
        """The best trials; with one objective, one or none."""

    def update(self, trial: Trial, marked: bool) -> None:
        """Process a trial's new state; ``marked``: its event called it the best."""
        if len(self._signs) == 1:
            self.trials = [trial] if marked else self.trials
            return
        others = [other for other in self.trials if other is not trial]
        complete = trial.state == "complete" and len(trial.values) == len(self._signs)
        if not complete or any(self._beats(other, trial) for other in others):
            self.trials = others
        else:
            self.trials = [other for other in others if not self._beats(trial, other)] + [trial]

    def _beats(self, trial: Trial, other: Trial) -> bool:
        """Whether a trial is at least as good in everything, and better in something."""
        costs = self._costs(trial)
        other_costs = self._costs(other)
        no_worse = all(a <= b for a, b in zip(costs, other_costs, strict=True))
        return costs != other_costs and no_worse

    def _costs(self, trial: Trial) -> list[float]:
        return [sign * value for sign, value in zip(self._signs, trial.values, strict=True)]


class SweepTable(EventTable):
    """The trials of a sweep, made from its events.

    Args:
        metrics: the objectives' names.
        directions: ``"minimize"`` or ``"maximize"`` for each of them.
        n_trials: the number of trials planned; None: as many as the time allows.
        deadline: unix seconds at which the sweep ends at the latest; None: no limit.
    """

    def __init__(
        self,
        *,
        metrics: Sequence[str] = ("value",),
        directions: Sequence[str] = ("maximize",),
        n_trials: int | None = None,
        deadline: float | None = None,
    ) -> None:
        self.metrics = tuple(metrics)
        self.directions = tuple(directions)
        self.n_trials = n_trials
        self.deadline = deadline
        self.paused = False
        """Whether it starts nothing more until it is resumed."""
        self.trials: dict[int, Trial] = {}
        self._best = BestTrials(directions)
        self._ended: dict[int, Trial] = {}  # in the order in which they ended
        self._added = 0  # trials, by commands

    @classmethod
    def of(cls, sweep_config: SweepConfig, *, deadline: float | None = None) -> SweepTable:
        """Return the table of a sweep of this configuration, before its first event."""
        table = cls(deadline=deadline)
        table.configure(sweep_config)
        return table

    def configure(self, sweep_config: SweepConfig) -> None:
        """Use a sweep's configuration; a later session may have another number of trials."""
        self.metrics = sweep_config.metrics
        self.n_trials = sweep_config.budget.n_trials
        if self.n_trials is not None:
            self.n_trials += self._added
        if self.directions != sweep_config.directions:
            self.directions = sweep_config.directions
            self._best = BestTrials(self.directions)

    def update(self, event: Event) -> None:
        """Process one event; those of other types change nothing."""
        match event:
            case events.IntermediateReported():  # the first case: most events are reports
                if trial := self.trials.get(event.number):
                    trial.step = event.step
                    trial.latest = event.value
                    # After a resume, steps are trained again.
                    while trial.curve and trial.curve[-1][0] >= event.step:
                        trial.curve.pop()
                    trial.curve.append((float(event.step), float(event.value)))
            case events.RunStarted():
                self.paused = False
                self._leave_running()
            case events.RunEnded():
                self._leave_running()
            case events.TrialChanged():
                self._update_trial(event)
            case events.FoldChanged(number=int(number)):
                if trial := self.trials.get(number):
                    trial.folds[event.fold] = event.state
            case events.CommandReceived(op="pause" | "resume" as op):
                self.paused = op == "pause"
            case events.CommandReceived(op="add_trials", n=int(count)):
                self._added += count
                self.n_trials = None if self.n_trials is None else self.n_trials + count

    @property
    def best(self) -> list[Trial]:
        """The best trial, or the Pareto front of several objectives; empty if there is none."""
        return self._best.trials

    @property
    def running(self) -> list[Trial]:
        """The trials that run, by number."""
        return self._in_state("running")

    @property
    def waiting(self) -> list[Trial]:
        """The trials that ran when the sweep ended, or that run again, by number."""
        return self._in_state("waiting")

    def _in_state(self, state: str) -> list[Trial]:
        trials = (trial for trial in self.trials.values() if trial.state == state)
        return sorted(trials, key=lambda trial: trial.number)

    def last(self, count: int) -> list[Trial]:
        """Return the trials that ended last, the latest first."""
        return [*islice(reversed(self._ended.values()), count)]

    @property
    def ended(self) -> int:
        """The number of trials that have ended."""
        return len(self._ended)

    def count(self, state: str) -> int:
        """Return the number of trials in a state."""
        return sum(trial.state == state for trial in self.trials.values())

    def ends_at(self, now: float) -> float | None:
        """Estimate when the sweep ends: the rest at the pace so far, at the latest its deadline.

        Args:
            now: unix seconds.

        Returns:
            Unix seconds; None: nothing has ended yet, nothing runs, the sweep is paused, or it
            has no limit.
        """
        if self.paused:
            return None
        running = self.running
        if not self._ended or not running or self.n_trials is None:
            return self.deadline
        mean = sum(trial.seconds or 0.0 for trial in self._ended.values()) / len(self._ended)
        to_start = max(self.n_trials - len(self._ended) - len(running), 0)
        left = to_start * mean
        for trial in running:
            left += max(mean - (now - trial.began), 0.0)
        end = now + left / len(running)
        return end if self.deadline is None else min(end, self.deadline)

    def line(self, event: Event) -> str | None:
        """Return a line of text on a trial that ended; None for every other event."""
        if not isinstance(event, TrialChanged) or event.state not in ENDED:
            return None
        trial = self.trials[event.number]
        parts = [f"trial {trial.number}", trial.label, *self._values(trial)]
        parts += ["(best)"] if trial in self.best else []
        parts += [f"{name}={short(value)}" for name, value in trial.params.items()]
        parts += [duration(trial.seconds)] if trial.seconds is not None else []
        parts += [trial.reason] if trial.reason else []
        return "  ".join(parts)

    def _values(self, trial: Trial) -> list[str]:
        """Return the names and values of a trial's objectives."""
        pairs = zip(self.metrics, trial.values, strict=False)
        return [f"{name} {short(value)}" for name, value in pairs]

    def _leave_running(self) -> None:
        """Begin or end an attempt: the trials that ran before wait now."""
        for trial in self.running:
            trial.state = "waiting"

    def _update_trial(self, event: TrialChanged) -> None:
        trial = self.trials.setdefault(event.number, Trial(event.number))
        trial.update(event)
        self._ended.pop(trial.number, None)
        if trial.ended:
            self._ended[trial.number] = trial
        self._best.update(trial, event.best)


def short(value: object) -> str:
    """Return a value as short text: four digits of a number, the beginning of a long text."""
    text = number(value) if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."
