"""Keep a sweep within its time, and re-evaluate the best trials with other seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nbtoolkit.search.algorithm import EventWriter, RunningTrial, folder_of

if TYPE_CHECKING:
    from nbtoolkit.search.study_recorder import StudyRecorder


class TimeBudget:
    """Decides whether a trial can still end in time.

    It reserves time for the refit of the best trial and for re-evaluations. Once it refuses, it
    refuses for good.

    Args:
        study_recorder: knows the durations of finished trials.
        events: receives a note when the time is up.
        reevaluations: returns the number of re-evaluations to reserve time for.
    """

    def __init__(
        self, study_recorder: StudyRecorder, events: EventWriter, reevaluations: Callable[[], int]
    ) -> None:
        self._study_recorder, self._events = study_recorder, events
        self._reevaluations = reevaluations
        self._slots = 1
        self.up = False
        """True if no more trials start."""
        self.over = False
        """True if no more re-evaluations start either."""

    def note_running(self, jobs: int) -> None:
        """Note how many jobs run at once: there are at least as many slots."""
        self._slots = max(self._slots, jobs)

    def suffices(self, params: Mapping[str, Any], left: float | None) -> bool:
        """Return True if a job with these parameters can end within ``left`` seconds."""
        return self._enough(self._study_recorder.costs.predict(params), left)

    def suffices_for_new(self, left: float | None) -> bool:
        """Return True if a trial of typical duration, with all its folds, can end in time."""
        job = self._study_recorder.costs.usual()
        rounds = math.ceil((self._study_recorder.folds or 1) / self._slots)
        return self._enough(None if job is None else job * rounds, left)

    def suffices_for_reevaluation(self, params: Mapping[str, Any], left: float | None) -> bool:
        """Return True if a re-evaluation with these parameters can end in time."""
        if (
            left is not None
            and (self._study_recorder.costs.predict(params) or 0.0) > left - self._refit()
        ):
            self.over = True
            self._events.note(f"no more re-evaluations start: {left:.3g} s are left")
        return not self.over

    def _enough(self, seconds: float | None, left: float | None) -> bool:
        if left is None:
            return not self.up
        reserved = self._reserved()
        self.up = self.up or left - reserved <= 0 or (seconds or 0.0) > left - reserved
        if self.up:
            estimate = "" if seconds is None else f"; a trial takes about {seconds:.3g} s"
            also = f", {reserved:.3g} s of them reserved for the refit" if reserved else ""
            self._events.note(f"no more trials start: {left:.3g} s are left{also}{estimate}")
        return not self.up

    def _reserved(self) -> float:
        """Return the seconds to reserve for re-evaluations and the refit."""
        job = self._study_recorder.costs.usual() or 0.0
        jobs = self._reevaluations() * (self._study_recorder.folds or 1)
        return self._refit() + job * math.ceil(jobs / self._slots)

    def _refit(self) -> float:
        """Return the seconds to train the best trial on all data (``reserve_for_refit``)."""
        sweep_config, job = self._study_recorder.sweep_config, self._study_recorder.costs.usual()
        if sweep_config.budget.reserve_for_refit != "auto":
            return sweep_config.budget.reserve_for_refit
        if job is None:
            return 0.0
        folds = self._study_recorder.folds or 1
        return job * folds / (folds - 1) if folds > 1 else job


# --- re-evaluation ---


class TopKReevaluation:
    """Re-evaluates the best trials with other seeds, once all trials have ended.

    The best of many noisy trials is partly the luckiest one; further seeds show it.

    Args:
        study_recorder: the study.
        seed: the trials' seed; re-evaluations take the following ones.
    """

    def __init__(self, study_recorder: StudyRecorder, seed: int) -> None:
        self._study_recorder, self._seed = study_recorder, seed
        self._begun: set[tuple[int, int]] = set()

    @property
    def more(self) -> bool:
        """True if a re-evaluation is left to run."""
        return bool(self._missing())

    @property
    def to_come(self) -> int:
        """Number of re-evaluations to start, including those of trials not known yet."""
        settings = self._study_recorder.sweep_config.reevaluate_top
        done = sum(len(by) for by in self._study_recorder.leaderboard.repeats.values())
        running = sum(
            seed not in self._study_recorder.leaderboard.repeats.get(number, {})
            for number, seed in self._begun
        )
        return max(0, settings.k * settings.seeds - done - running)

    def next(self) -> RunningTrial | None:
        """Return the next re-evaluation; None if all have started."""
        for number, seed in self._missing()[:1]:
            self._begun.add((number, seed))
            params, key = self._study_recorder.params(number), f"{folder_of(number)}/seed-{seed}"
            return RunningTrial(number, params, self._study_recorder.folds, key=key, seed=seed)
        return None

    def on_end(self, trial: RunningTrial) -> None:
        """Record the value of a re-evaluation; the mean leaves out failed ones."""
        assert trial.seed is not None
        if trial.leaving is None:
            value = trial.mean(self._study_recorder.sweep_config.metrics[0], trial.folds or 1)
            self._study_recorder.repeated(trial.number, trial.seed, value)
        else:
            self._study_recorder.not_repeated(trial.number, trial.seed, trial.reason or "")
        if not self.more:
            self._study_recorder.name_winner()

    def _missing(self) -> list[tuple[int, int]]:
        """Return the missing (trial, seed) pairs, ordered by seed.

        When the time runs out, all leaders then have been evaluated about equally often.
        """
        settings = self._study_recorder.sweep_config.reevaluate_top
        leaders = self._study_recorder.leaderboard.leaders(settings.k)
        done = {
            (n, seed) for n, by in self._study_recorder.leaderboard.repeats.items() for seed in by
        }
        return [
            (number, self._seed + i)
            for i in range(1, settings.seeds + 1)
            for number in leaders
            if (number, self._seed + i) not in done | self._begun
        ]
