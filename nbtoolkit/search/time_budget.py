"""Start no trial that cannot end in time, and re-evaluate the best with other seeds.

The best of many noisy trials is partly the luckiest one; a few more seeds tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nbtoolkit.search.algorithm import EventWriter, RunningTrial, folder_of

if TYPE_CHECKING:
    from nbtoolkit.search.study_recorder import StudyRecorder


# --- the time left ---
# No trial starts that cannot end in time; time for the winner is kept back.


class TimeBudget:
    """Compares what is left with what a trial is expected to take.

    Args:
        study_recorder: what finished trials took.
        diary: where is said that the time is up.
        repeats: for how many repetitions of leaders time is kept back.
    """

    def __init__(
        self, study_recorder: StudyRecorder, diary: EventWriter, repeats: Callable[[], int]
    ) -> None:
        self._study_recorder, self._diary, self._repeats = study_recorder, diary, repeats
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
        return self._enough(self._study_recorder.costs.predict(params), left)

    def suffices_for_new(self, left: float | None) -> bool:
        """Whether a trial like those before, with all its folds, can end in time."""
        job = self._study_recorder.costs.usual()
        rounds = math.ceil((self._study_recorder.folds or 1) / self._slots)
        return self._enough(None if job is None else job * rounds, left)

    def suffices_for_repetition(self, params: Mapping[str, Any], left: float | None) -> bool:
        """Whether a leader can be trained once more in time; from the first no on: no."""
        if (
            left is not None
            and (self._study_recorder.costs.predict(params) or 0.0) > left - self._refit()
        ):
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
        job = self._study_recorder.costs.usual() or 0.0
        jobs = self._repeats() * (self._study_recorder.folds or 1)
        return self._refit() + job * math.ceil(jobs / self._slots)

    def _refit(self) -> float:
        """Seconds to train the winner on all data, or what is wished to be kept back."""
        sweep_config, job = self._study_recorder.sweep_config, self._study_recorder.costs.usual()
        if sweep_config.budget.reserve_for_refit != "auto":
            return sweep_config.budget.reserve_for_refit
        if job is None:
            return 0.0
        folds = self._study_recorder.folds or 1
        return job * folds / (folds - 1) if folds > 1 else job


# --- re-evaluation ---


class TopKReevaluation:
    """Which repetitions are still to be run, once all trials have ended.

    Args:
        study_recorder: the study.
        seed: the trials' own; repetitions take the next ones.
    """

    def __init__(self, study_recorder: StudyRecorder, seed: int) -> None:
        self._study_recorder, self._seed = study_recorder, seed
        self._begun: set[tuple[int, int]] = set()

    @property
    def more(self) -> bool:
        """Whether there is one to be run."""
        return bool(self._missing())

    @property
    def to_come(self) -> int:
        """How many will be begun, also of leaders that are not known yet."""
        wished = self._study_recorder.sweep_config.reevaluate_top
        done = sum(len(by) for by in self._study_recorder.leaderboard.repeats.values())
        running = sum(
            seed not in self._study_recorder.leaderboard.repeats.get(number, {})
            for number, seed in self._begun
        )
        return max(0, wished.k * wished.seeds - done - running)

    def next(self) -> RunningTrial | None:
        """The next repetition; None: all have begun."""
        for number, seed in self._missing()[:1]:
            self._begun.add((number, seed))
            params, key = self._study_recorder.params(number), f"{folder_of(number)}/seed-{seed}"
            return RunningTrial(number, params, self._study_recorder.folds, key=key, seed=seed)
        return None

    def ended(self, trial: RunningTrial) -> None:
        """Take a repetition's value; one that failed is left out of the mean."""
        assert trial.seed is not None
        if trial.leaving is None:
            value = trial.mean(self._study_recorder.sweep_config.metrics[0], trial.folds or 1)
            self._study_recorder.repeated(trial.number, trial.seed, value)
        else:
            self._study_recorder.not_repeated(trial.number, trial.seed, trial.reason or "")
        if not self.more:
            self._study_recorder.name_winner()

    def _missing(self) -> list[tuple[int, int]]:
        """(trial, seed), by seed: when time runs out, all leaders have had as many."""
        wished = self._study_recorder.sweep_config.reevaluate_top
        leaders = self._study_recorder.leaderboard.leaders(wished.k)
        done = {
            (n, seed) for n, by in self._study_recorder.leaderboard.repeats.items() for seed in by
        }
        return [
            (number, self._seed + i)
            for i in range(1, wished.seeds + 1)
            for number in leaders
            if (number, self._seed + i) not in done | self._begun
        ]
