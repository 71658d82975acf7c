"""Best: the best trials of a sweep so far: one, or a front when there are several objectives."""

from __future__ import annotations

from collections.abc import Sequence

from nbtoolkit.search.trial import Trial


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
