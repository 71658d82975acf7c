"""Rank the complete trials of a sweep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean


class Leaderboard:
    """Values of complete trials that keep the constraints.

    Args:
        directions: ``"maximize"`` or ``"minimize"`` for each metric.
    """

    def __init__(self, directions: Sequence[str]) -> None:
        self._signs = [-1.0 if one == "maximize" else 1.0 for one in directions]
        self.values: dict[int, tuple[float, ...]] = {}
        self.repeats: dict[int, dict[int, float]] = {}
        """Trial -> seed -> value, of leaders that were trained again."""

    def add(self, number: int, values: Sequence[float]) -> bool:
        """Enter a trial; whether none before it is at least as good."""
        mine = self._ranked(values)
        beaten = any(self._beats(self._ranked(other), mine) for other in self.values.values())
        self.values[number] = tuple(values)
        return not beaten

    def value(self, number: int) -> float:
        """A trial's first value: the mean with its repetitions, where there are any."""
        return fmean([self.values[number][0], *self.repeats.get(number, {}).values()])

    def leaders(self, k: int) -> list[int]:
        """The numbers of the best trials by their own values, best first; of equals the older."""
        return sorted(self.values, key=lambda n: (self._ranked(self.values[n]), n))[:k]

    def best(self) -> int | None:
        """The winner: of the trials that were repeated, if any were; None: there is no trial."""
        among = [n for n in self.values if n in self.repeats] or list(self.values)
        rank = {n: (self._signs[0] * self.value(n), n) for n in among}
        return min(among, key=rank.__getitem__, default=None)

    def front(self) -> list[int]:
        """The trials that no other beats in one metric without losing in another, by number."""
        ranked = {n: self._ranked(values) for n, values in self.values.items()}
        return sorted(
            n
            for n, mine in ranked.items()
            if not any(other != mine and self._beats(other, mine) for other in ranked.values())
        )

    def _ranked(self, values: Sequence[float]) -> tuple[float, ...]:
        """The values with signs such that lower is better."""
        return tuple(sign * v for sign, v in zip(self._signs, values, strict=True))

    def _beats(self, one: Sequence[float], other: Sequence[float]) -> bool:
        """Whether one is at least as good in every metric."""
        return all(a <= b for a, b in zip(one, other, strict=True))


def missing(metrics: Mapping[str, object], names: Iterable[str]) -> str | None:
    """What keeps these metrics from being compared, as a sentence; None: nothing.

    A metric that is missing, NaN or no number is never taken for a value.
    """
    for name in names:
        value = metrics.get(name)
        if name not in metrics:
            return f"no {name} among what was reported: {', '.join(metrics) or 'nothing'}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"{name} is {value!r}, not a number"
        if not math.isfinite(value):
            return f"{name} is {value}"
    return None


def better(direction: str, one: float, other: float | None) -> float:
    """The better of two values."""
    if other is None:
        return one
    return max(one, other) if direction == "maximize" else min(one, other)
