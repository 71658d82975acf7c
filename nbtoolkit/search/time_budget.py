"""Keep a sweep within its time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from nbtoolkit.search.pool import EventWriter


class TimeBudget:
    """Estimates the duration of jobs, and decides whether another one can still end in time.

    It reserves time for the refit of the best trial. Once it refuses, it refuses for good.

    A parameter such as ``train.epochs`` scales the estimate of a job. The estimate is a median: a
    first trial that loads data, or one on a busy device, must not count for more than one.

    Args:
        reserve: seconds for the refit; ``"auto"``: as long as a trial on all data takes.
        folds: number of folds of each trial; None for none.
        events: receives a note when the time is up.
    """

    def __init__(self, reserve: float | str, folds: int | None, events: EventWriter) -> None:
        self._reserve = reserve
        self._folds = folds or 1
        self._events = events
        self._seconds: list[float] = []
        self._per_epoch: list[float] = []
        self.up = False
        """True if no more trials start."""

    def note(self, params: Mapping[str, Any], seconds: float) -> None:
        """Note the duration of a finished job."""
        self._seconds.append(seconds)
        self._per_epoch.append(seconds / _length(params))

    def suffices(self, params: Mapping[str, Any], left: float | None) -> bool:
        """Return True if a job with these parameters can end within ``left`` seconds."""
        job = median(self._per_epoch) * _length(params) if self._per_epoch else None
        return self._enough(job, left)

    def suffices_for_new(self, left: float | None, slots: int) -> bool:
        """Return True if a trial of typical duration, with all its folds, can end in time."""
        rounds = math.ceil(self._folds / max(slots, 1))
        return self._enough(median(self._seconds) * rounds if self._seconds else None, left)

    def _enough(self, seconds: float | None, left: float | None) -> bool:
        if left is None:
            return not self.up
        reserved = self._refit()
        self.up = self.up or left - reserved <= 0 or (seconds or 0.0) > left - reserved
        if self.up:
            estimate = "" if seconds is None else f"; a trial takes about {seconds:.3g} s"
            also = f", {reserved:.3g} s of them reserved for the refit" if reserved else ""
            self._events.note(f"no more trials start: {left:.3g} s are left{also}{estimate}")
        return not self.up

    def _refit(self) -> float:
        """Return the seconds to train the best trial on all data (``reserve_for_refit``)."""
        if not isinstance(self._reserve, str):
            return self._reserve
        job = median(self._seconds) if self._seconds else 0.0
        return job * self._folds / (self._folds - 1) if self._folds > 1 else job


def _length(params: Mapping[str, Any]) -> float:
    """Return the number of epochs or steps among the parameters; 1 without one."""
    for name, value in params.items():
        last = name.rpartition(".")[2]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if last in ("epochs", "max_steps", "n_epochs", "num_epochs") and number and value > 0:
            return float(value)
    return 1.0
