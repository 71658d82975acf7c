"""Costs: how long a trial will take, from those that are done."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any


class Costs:
    """Seconds of finished jobs, by unit of length where a parameter says how long they train.

    The median, not the mean: a first trial that loads data, or one on a busy device, does not
    count for more than one.
    """

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._whole: list[float] = []

    def note(self, params: Mapping[str, Any], seconds: float) -> None:
        """A job with these parameters ran to its end in so many seconds."""
        self._seconds.append(seconds / _length(params))
        self._whole.append(seconds)

    def predict(self, params: Mapping[str, Any]) -> float | None:
        """Seconds that a job with these parameters takes; None: none is done yet."""
        return median(self._seconds) * _length(params) if self._seconds else None

    def usual(self) -> float | None:
        """Seconds that jobs took, whatever their parameters; None: none is done yet."""
        return median(self._whole) if self._whole else None


def _length(params: Mapping[str, Any]) -> float:
    """By how much the number of epochs (or of steps) lengthens a job."""
    for name, value in params.items():
        last = name.rpartition(".")[2]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if last in ("epochs", "max_steps", "n_epochs", "num_epochs") and number and value > 0:
            return float(value)
    return 1.0
