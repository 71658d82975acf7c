"""Rank the complete trials of a sweep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean


class Leaderboard:
    """Ranks complete trials that satisfy the constraints.

    Args:
        directions: ``"maximize"`` or ``"minimize"`` for each metric.
    """

    def __init__(self, directions: Sequence[str]) -> None:
        self._signs = [-1.0 if one == "maximize" else 1.0 for one in directions]
        self.values: dict[int, tuple[float, ...]] = {}
        self.repeats: dict[int, dict[int, float]] = {}
        """Values of re-evaluations: trial -> seed -> value."""

    def add(self, number: int, values: Sequence[float]) -> bool:
        """Add a trial; return True if it is better than all earlier ones."""
        new = self._ranked(values)
        beaten = any(self._beats(self._ranked(other), new) for other in self.values.values())
        self.values[number] = tuple(values)
        return not beaten

    def value(self, number: int) -> float:
        """Return a trial's first value, averaged with its re-evaluations."""
        return fmean([self.values[number][0], *self.repeats.get(number, {}).values()])

    def leaders(self, k: int) -> list[int]:
        """Return the numbers of the ``k`` best trials, best first; ties go to the older trial."""
        return sorted(self.values, key=lambda n: (self._ranked(self.values[n]), n))[:k]

    def best(self) -> int | None:
        """Return the best trial, of the re-evaluated ones if there are any; None for no trial."""
        among = [n for n in self.values if n in self.repeats] or list(self.values)
        rank = {n: (self._signs[0] * self.value(n), n) for n in among}
        return min(among, key=rank.__getitem__, default=None)

    def front(self) -> list[int]:
        """Return the numbers of the Pareto-optimal trials, in ascending order."""
        ranked = {n: self._ranked(values) for n, values in self.values.items()}
        return sorted(
            n
            for n, values in ranked.items()
            if not any(other != values and self._beats(other, values) for other in ranked.values())
        )

    def _ranked(self, values: Sequence[float]) -> tuple[float, ...]:
        """Return the values with signs such that lower is better."""
        return tuple(sign * v for sign, v in zip(self._signs, values, strict=True))

    def _beats(self, one: Sequence[float], other: Sequence[float]) -> bool:
        """Return True if ``one`` is at least as good in every metric."""
        return all(a <= b for a, b in zip(one, other, strict=True))


def missing(metrics: Mapping[str, object], names: Iterable[str]) -> str | None:
    """Return why the named metrics cannot be compared; None if they can.

    A metric that is missing, NaN, infinite or not a number is never taken for a value.
    """
    for name in names:
        value = metrics.get(name)
        if name not in metrics:
            return f"no {name} among the reported metrics: {', '.join(metrics) or 'none'}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"{name} is {value!r}, not a number"
        if not math.isfinite(value):
            return f"{name} is {value}"
    return None


def better(direction: str, one: float, other: float | None) -> float:
    """Return the better of two values."""
    if other is None:
        return one
    return max(one, other) if direction == "maximize" else min(one, other)
