"""TimeLeft: no trial starts that cannot end in time; time for the winner is kept back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nbtoolkit.search.program import Diary

if TYPE_CHECKING:
    from nbtoolkit.search.books import Books


class TimeLeft:
    """Compares what is left with what a trial is expected to take.

    Args:
        books: what finished trials took.
        diary: where is said that the time is up.
        repeats: for how many repetitions of leaders time is kept back.
    """

    def __init__(self, books: Books, diary: Diary, repeats: Callable[[], int]) -> None:
        self._books, self._diary, self._repeats = books, diary, repeats
        self._slots = 1
        self.up = False
        """Whether no trial starts any more."""
        self.over = False
        """Whether no repetition of a leader starts any more either."""

    def running(self, jobs: int) -> None:
        """So many jobs run at once: as many slots there are, at least."""
        self._slots = max(self._slots, jobs)

    def suffices(self, params: Mapping[str, Any], left: float | None) -> bool:
        """Whether a job with these parameters can end in time; from the first no on: no."""
        return self._enough(self._books.costs.predict(params), left)

    def suffices_for_new(self, left: float | None) -> bool:
        """Whether a trial like those before, with all its folds, can end in time."""
        job = self._books.costs.usual()
        rounds = math.ceil((self._books.folds or 1) / self._slots)
        return self._enough(None if job is None else job * rounds, left)

    def suffices_for_repetition(self, params: Mapping[str, Any], left: float | None) -> bool:
        """Whether a leader can be trained once more in time; from the first no on: no."""
        if left is not None and (self._books.costs.predict(params) or 0.0) > left - self._refit():
            self.over = True
            self._diary.note(f"no leader is trained again: {left:.3g} s are left")
        return not self.over

    def _enough(self, seconds: float | None, left: float | None) -> bool:
        if left is None:
            return not self.up
        kept = self._kept_back()
        self.up = self.up or left - kept <= 0 or (seconds or 0.0) > left - kept
        if self.up:
            told = "" if seconds is None else f"; a trial takes about {seconds:.3g} s"
            also = f", {kept:.3g} s of them kept back for the winner" if kept else ""
            self._diary.note(f"no trial starts any more: {left:.3g} s are left{also}{told}")
        return not self.up

    def _kept_back(self) -> float:
        """Seconds for the winner: its refit, and the repetitions that it is to be found by."""
        job = self._books.costs.usual() or 0.0
        jobs = self._repeats() * (self._books.folds or 1)
        return self._refit() + job * math.ceil(jobs / self._slots)

    def _refit(self) -> float:
        """Seconds to train the winner on all data, or what is wished to be kept back."""
        wishes, job = self._books.wishes, self._books.costs.usual()
        if wishes.budget.keep_back != "auto":
            return wishes.budget.keep_back
        if job is None:
            return 0.0
        folds = self._books.folds or 1
        return job * folds / (folds - 1) if folds > 1 else job
