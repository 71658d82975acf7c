"""Define one trial of a sweep as its events describe it, and select the best trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nbtoolkit.run.events import TrialChanged

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
