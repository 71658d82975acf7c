"""Keep a sweep within its time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nbtoolkit.search.algorithm import EventWriter

if TYPE_CHECKING:
    from nbtoolkit.search.study_recorder import StudyRecorder


class TimeBudget:
    """Decides whether a trial can still end in time.

    It reserves time for the refit of the best trial. Once it refuses, it refuses for good.

    Args:
        recorder: knows the durations of finished trials.
        events: receives a note when the time is up.
    """

    def __init__(self, recorder: StudyRecorder, events: EventWriter) -> None:
        self._recorder, self._events = recorder, events
        self._slots = 1
        self.up = False
        """True if no more trials start."""

    def note_running(self, jobs: int) -> None:
        """Note how many jobs run at once: there are at least as many slots."""
        self._slots = max(self._slots, jobs)

    def suffices(self, params: Mapping[str, Any], left: float | None) -> bool:
        """Return True if a job with these parameters can end within ``left`` seconds."""
        return self._enough(self._recorder.costs.predict(params), left)

    def suffices_for_new(self, left: float | None) -> bool:
        """Return True if a trial of typical duration, with all its folds, can end in time."""
        job = self._recorder.costs.usual()
        rounds = math.ceil((self._recorder.folds or 1) / self._slots)
        return self._enough(None if job is None else job * rounds, left)

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
        reserve = self._recorder.sweep_config.budget.reserve_for_refit
        if reserve != "auto":
            return reserve
        job, folds = self._recorder.costs.usual() or 0.0, self._recorder.folds or 1
        return job * folds / (folds - 1) if folds > 1 else job
