"""LiveTrial: a trial that is being run: one job, or one for each fold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nbtoolkit.search.program import Job


class LiveTrial:
    """The jobs of one trial, and what came of them so far.

    Args:
        number: the trial's.
        params: its parameters, constants too.
        folds: how many; None: one job without a fold.
        scores: the metrics of the folds that an earlier session finished.
        key: its folder.
        seed: beats the configuration's, where the trial is a repetition.
    """

    def __init__(
        self,
        number: int,
        params: Mapping[str, Any],
        folds: int | None,
        scores: Mapping[int, Mapping[str, float]] | None = None,
        *,
        key: str | None = None,
        seed: int | None = None,
    ) -> None:
        self.number, self.params, self.folds, self.seed = number, dict(params), folds, seed
        self.key = key or folder_of(number)
        self.scores = {index: dict(metrics) for index, metrics in (scores or {}).items()}
        """The metrics of each fold that is done."""
        todo: list[int | None] = [None] if folds is None else [*range(folds)]
        self.waiting = [fold for fold in todo if fold not in self.scores]
        self.running: dict[str, Job] = {}
        self.seconds = 0.0
        self.attempts = 0
        """How often one of its jobs was tried again."""
        self.leaving: str | None = None
        """The state it ends in when its jobs are gone; None: it goes on."""
        self.reason: str | None = None
        self.best: dict[int | None, float] = {}
        """The best report of each job."""
        self.first_step = 0
        """The step of the first report: of ``nb.fit`` 1, of Optuna's pruners 0."""
        self.told = 0
        """How many folds' running means the study knows."""

    def next_job(self, timeout: float | None, judged: bool) -> Job:
        """The next job; there is one waiting."""
        fold = self.waiting.pop(0)
        seed = {} if self.seed is None else {"seed": self.seed}
        job = Job(
            key=self.key if fold is None else f"{self.key}/fold-{fold}",
            overrides={**self.params, **seed},
            params=self.params,
            fold=fold,
            timeout=timeout,
            judged=judged,
        )
        self.running[job.key] = job
        return job

    def leave(self, state: str, reason: str) -> None:
        """Begin none of the jobs that wait; the first reason holds."""
        if self.leaving is None:
            self.leaving, self.reason = state, reason
        self.waiting.clear()

    def again(self, job: Job) -> None:
        """Try a job once more."""
        self.attempts += 1
        self.waiting.insert(0, job.fold)

    @property
    def over(self) -> bool:
        """Whether nothing of it runs or waits."""
        return not self.running and not self.waiting

    def mean(self, metric: str, folds: int) -> float:
        """The mean of a metric over the first folds, which must be done."""
        return math.fsum(self.scores[i][metric] for i in range(folds)) / folds

    def complete_folds(self) -> int:
        """How many folds are done, counted from the first without a gap."""
        return next(i for i in range(len(self.scores) + 1) if i not in self.scores)


def folder_of(number: int) -> str:
    """A trial's folder, relative to the sweep's."""
    return f"trials/{number:04d}"
