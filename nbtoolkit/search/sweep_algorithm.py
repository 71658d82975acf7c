"""Decide which trials of a sweep run, judge their reports, and end the sweep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from nbtoolkit.config.aliases import similar_name
from nbtoolkit.environment.installed import install_line
from nbtoolkit.errors import MissingExtra, SweepError
from nbtoolkit.run.events import RETURNED
from nbtoolkit.run.messages import SearchCommand
from nbtoolkit.search.algorithm import JobResult, RunningTrial, SearchJob
from nbtoolkit.search.time_budget import TimeBudget
from nbtoolkit.study.table import STOPPED_BY_HAND

if TYPE_CHECKING:
    from nbtoolkit.search.algorithm import EventWriter, SearchRequest
    from nbtoolkit.search.study_recorder import StudyRecorder

_RETRIED = ("raised", "died", "hung")
"""Faults worth a retry; out of memory, NaN and timeouts would occur again."""


def make_algorithm(request: SearchRequest, record: EventWriter) -> SweepAlgorithm:
    """Make the algorithm of a sweep, new or resumed.

    Args:
        request: the search.
        record: receives events.

    Raises:
        SweepError: the study in the folder belongs to another search.
        MissingExtra: Optuna is not installed.
    """
    try:
        from nbtoolkit.search.study_recorder import StudyRecorder
    except ImportError as error:
        what = f"a sweep needs Optuna: {error}"
        raise MissingExtra(what, do=install_line("search")) from error
    search = request.search
    assert search.sweep_config is not None
    recorder = StudyRecorder(search.sweep_config, search.folds, request.paths.folder, record)
    return SweepAlgorithm(recorder, record, imposed=request.imposed)


class SweepAlgorithm:
    """The search algorithm of one session of a sweep (:class:`SearchAlgorithm`).

    Args:
        recorder: the open study.
        events: receives notes.
        imposed: the deadline is the end of the host's session, not the user's own limit.
    """

    def __init__(
        self,
        recorder: StudyRecorder,
        events: EventWriter,
        *,
        imposed: bool = False,
    ) -> None:
        self._recorder = recorder
        self._events = events
        self._sweep_config = recorder.sweep_config
        self._imposed = imposed
        self._jobs: dict[str, RunningTrial] = {}
        """The trial of each running job."""
        self._live: dict[str, RunningTrial] = {}
        """Trials with jobs that run or wait, by folder."""
        grid = self._sweep_config.study.sampler == "grid"
        self._points = len(self._sweep_config.make_space().grid()) if grid else None
        self._time = TimeBudget(recorder, events)
        self._paused = self._stopped = False
        self._failed_before = recorder.counts["failed"]
        if recorder.begun:
            self._events.note(f"the study already has {recorder.begun} trials")

    # --- the next job ---

    @property
    def done(self) -> bool:
        """True if no job runs and none will start."""
        if self._jobs:
            return False
        return self._stopped or self._time.up or not self._trials_left

    @property
    def cut_short(self) -> bool:
        """True if only the time limit ended the sweep: a later session can resume it."""
        return self._time.up and self._owed and self._trials_left

    @property
    def _trials_left(self) -> bool:
        recorder = self._recorder
        begun = self._live or recorder.interrupted or recorder.asked
        return bool(begun or self._more_to_start)

    @property
    def _owed(self) -> bool:
        """True if a later session should run the trials that this one had no time for."""
        known = self._sweep_config.budget.n_trials is not None or self._points is not None
        return known or self._imposed

    @property
    def ready(self) -> bool:
        """True if a trial was asked for; with folds, the next job depends on the one before."""
        return self._recorder.folds is None and self._recorder.asked > 0

    def prepare(self, jobs: int) -> None:
        """Ask for the next trial if its parameters do not depend on running ones."""
        if self._paused or self._stopped or self._time.up or self._recorder.learns:
            return
        if self._recorder.asked < jobs and self._more_to_start:
            self._recorder.ask_ahead()

    def next(self, left: float | None) -> SearchJob | None:
        """Return the next job: of a started trial, an interrupted one, or a new one.

        Args:
            left: seconds until the sweep's deadline; None for no limit.

        Raises:
            SweepError: too many trials have failed, and no job runs.
        """
        if self._too_many_failed():
            return None
        if self._paused or self._stopped or self._time.up:
            return None
        trial = self._trial(left)
        if trial is None or not self._time.suffices(trial.params, left):
            return None
        judged = self._sweep_config.pruner != "none" or trial.folds is not None
        job = trial.next_job(self._sweep_config.budget.trial_timeout, judged)
        self._jobs[job.key] = trial
        self._time.note_running(len(self._jobs))
        if job.fold is not None:
            self._recorder.fold(trial, job.fold, "running")
        return job

    def _trial(self, left: float | None) -> RunningTrial | None:
        """Return a trial with a waiting job; None if there is none."""
        for started in self._live.values():
            if started.waiting:
                return started
        while self._recorder.interrupted:
            trial = self._enter(self._recorder.resume())
            if not trial.over:
                return trial
            self._settle(trial)  # all its folds were done when its session died
        more = self._more_to_start or self._recorder.asked
        if not more or not self._time.suffices_for_new(left):
            return None
        return self._enter(self._recorder.begin())

    def _enter(self, trial: RunningTrial) -> RunningTrial:
        self._live[trial.key] = trial
        return trial

    @property
    def _total(self) -> int | None:
        """The number of trials over all sessions; None: as many as time allows."""
        n_trials = self._sweep_config.budget.n_trials
        total = None if n_trials is None else n_trials + self._recorder.added
        if self._points is not None:
            total = min(total or self._points, self._points)
        return total

    @property
    def _more_to_start(self) -> bool:
        total = self._total
        return total is None or self._recorder.begun + self._recorder.asked < total

    def _too_many_failed(self) -> bool:
        """Return True if no more trials may start; raise the error once no job runs."""
        allowed = self._sweep_config.budget.max_failures
        failed = self._recorder.counts["failed"] - self._failed_before
        if allowed is None or failed <= allowed:
            return False
        if not self._jobs:
            last = self._recorder.last_failure
            self.close("failed")
            raise SweepError(
                f"too many trials have failed ({failed}); the last: {last}",
                allowed=f"budget.max_failures: {allowed}",
                do="look into its folder, fix the cause, and sweep again: the study resumes",
            )
        return True

    # --- reports ---

    def on_report(
        self, job: SearchJob, metrics: Mapping[str, float], step: int | None
    ) -> str | None:
        """Judge a report: ``"pruned"`` ends the job, None lets it continue."""
        trial = self._jobs.get(job.key)
        if trial is None:
            return None  # the job ended while its report was on the way
        if trial.leaving is None:
            if not self._recorder.counts:
                self._refuse_misspelt(trial, list(metrics))
            given = [name for name in self._sweep_config.metrics if name in metrics]
            if wrong := missing(metrics, given):
                trial.leave("failed", f"{wrong} at step {step}" if step is not None else wrong)
            elif len(self._sweep_config.metrics) == 1 and given:
                self._judge(job, trial, metrics[given[0]], step)
        return None if trial.leaving is None else "pruned"

    def on_announcement(
        self, job: SearchJob, names: Sequence[str], stems: Sequence[str], first_step: int
    ) -> None:
        """Fail early if the sweep's metric is a misspelling of one that the job will report."""
        if (trial := self._jobs.get(job.key)) is not None:
            trial.first_step = first_step
            self._refuse_misspelt(trial, names, stems)

    def on_unread(self, job: SearchJob, names: Sequence[str]) -> None:
        """End the sweep if its first trial never read a parameter: no trial depends on it."""
        trial = self._jobs.get(job.key)
        if trial is None or self._recorder.counts:
            return
        listed = ", ".join(names)
        self._end_with(trial, f"the function has not read {listed}")
        raise SweepError(
            f"the space has {listed}, and the first trial has ended without reading it",
            allowed="parameters that the function reads in every trial; `when` names the choices "
            "for which it reads them",
            do=f"read config.{names[0]} or ctx.params, correct the name, or remove it",
        )

    def _refuse_misspelt(
        self, trial: RunningTrial, names: Sequence[str], stems: Sequence[str] = ()
    ) -> None:
        for metric in self._sweep_config.metrics:
            near = similar_name(metric, names)
            if near is not None and not metric.startswith(tuple(f"{stem}_" for stem in stems)):
                self._give_up(trial, metric, names, near)

    def _give_up(
        self, trial: RunningTrial, metric: str, names: Iterable[str], near: str | None
    ) -> NoReturn:
        """End the sweep, because no trial will have a value."""
        available = ", ".join(names) or "none"
        self._end_with(trial, f"no {metric} among the reported metrics: {available}")
        raise SweepError(
            f"study.metric is {metric!r}, but the first trial has the metrics: {available}",
            allowed="a metric that every trial reports or returns",
            do=f"set study.metric: {near}"
            if near
            else f"report or return {metric}, or name another one under study.metric",
        )

    def _end_with(self, trial: RunningTrial, fault: str) -> None:
        """End the sweep with a failed trial."""
        self._live.pop(trial.key, None)
        self._recorder.end(trial, "failed", fault)
        self.close("failed")

    def _judge(self, job: SearchJob, trial: RunningTrial, value: float, step: int | None) -> None:
        direction = self._sweep_config.directions[0]
        trial.best[job.fold] = better(direction, value, trial.best.get(job.fold))
        if job.fold is None:
            first = trial.first_step
            at, pruned = self._recorder.intermediate(trial, value, step, first=first)
            if pruned:
                trial.leave(
                    "pruned", f"at step {at}, with {self._sweep_config.metrics[0]} {value:.6g}"
                )

    # --- results ---

    def on_end(self, job: SearchJob, result: JobResult) -> None:
        """Receive the result of a job that has ended."""
        trial = self._jobs.pop(job.key)
        trial.running.pop(job.key)
        trial.seconds += result.seconds
        if result.status in ("stopped", "deadline") and trial.leaving is None:
            self._put_back(trial, job, result)
        elif result.status == "completed":
            self._completed(trial, job, result)
        elif result.status == "failed" and not self._retried(trial, job, result):
            state = "infeasible" if result.fault == "oom" else "failed"
            trial.leave(state, result.error or f"the job {result.fault or 'failed'}")
        elif result.status == "pruned":
            trial.leave("pruned", "the function ended itself as pruned")
        if job.fold is not None and result.status != "completed":
            self._recorder.fold(trial, job.fold, result.status, None, result.seconds)
        if trial.over:
            self._settle(trial)

    def _completed(self, trial: RunningTrial, job: SearchJob, result: JobResult) -> None:
        if trial.leaving == "pruned" and job.fold is None:
            trial.leaving = trial.reason = None  # it completed before it could leave
        metrics = dict(result.metrics)
        if len(self._sweep_config.metrics) == 1 and RETURNED in metrics:
            metrics.setdefault(self._sweep_config.metrics[0], metrics[RETURNED])
        if self._sweep_config.study.trial_value == "best":
            self._put_best(trial, job, metrics)
        needed = self._recorder.needed
        if wrong := missing(metrics, needed):
            absent = [name for name in self._sweep_config.metrics if name not in metrics]
            if absent and not self._recorder.counts["complete"]:
                self._give_up(trial, absent[0], metrics, similar_name(absent[0], metrics))
            trial.leave("failed", wrong)
            return
        if trial.leaving is None:
            self._recorder.costs.note(trial.params, result.seconds)
        trial.scores[job.fold or 0] = {name: float(metrics[name]) for name in needed}
        if job.fold is not None:
            scores = trial.scores[job.fold]
            self._recorder.fold(trial, job.fold, "complete", scores, result.seconds)
            self._compare_folds(trial, job.fold)

    def _put_best(self, trial: RunningTrial, job: SearchJob, metrics: dict[str, float]) -> None:
        """Use the best report as the value; the study has those of earlier sessions."""
        name, direction = self._sweep_config.metrics[0], self._sweep_config.directions[0]
        seen = (
            [] if job.fold is not None else [*self._recorder.study.reports(trial.number).values()]
        )
        for value in [*seen, trial.best.get(job.fold)]:
            if value is not None and not missing(metrics, [name]):
                metrics[name] = better(direction, value, metrics[name])

    def _compare_folds(self, trial: RunningTrial, fold: int) -> None:
        """Report the running mean over folds, so that the pruner compares trials on equal folds.

        Wilcoxon's test compares fold by fold, in any order.
        """
        if len(self._sweep_config.metrics) > 1 or trial.folds is None:
            return
        metric = self._sweep_config.metrics[0]
        if self._sweep_config.pruner == "wilcoxon":
            new = [(fold, trial.scores[fold][metric])]
        else:
            steps = range(trial.folds_reported, trial.complete_folds())
            new = [(step, trial.mean(metric, step + 1)) for step in steps]
            trial.folds_reported = trial.complete_folds()
        for step, value in new:
            _, pruned = self._recorder.intermediate(trial, value, step)
            if pruned and not trial.over:
                trial.leave("pruned", f"after {len(trial.scores)} folds, with {metric} {value:.6g}")

    def _retried(self, trial: RunningTrial, job: SearchJob, result: JobResult) -> bool:
        left = self._sweep_config.budget.retries - trial.attempts
        if result.fault not in _RETRIED or left <= 0 or trial.leaving is not None:
            return False
        self._events.note(f"{job.key} {result.fault} and is retried: {result.error}", "warning")
        trial.retry(job)
        return True

    def _put_back(self, trial: RunningTrial, job: SearchJob, result: JobResult) -> None:
        """Leave a job that was stopped with the whole sweep to the next session."""
        trial.waiting.insert(0, job.fold)
        if result.status == "deadline":
            self._time.up = True

    def _settle(self, trial: RunningTrial) -> None:
        """Record the result of a trial that is over."""
        self._live.pop(trial.key, None)
        if trial.leaving is not None:
            self._recorder.end(trial, trial.leaving, trial.reason or "")
        else:
            count = trial.folds or 1
            self._recorder.complete(trial, {m: trial.mean(m, count) for m in self._recorder.needed})

    # --- commands ---

    def on_command(self, command: SearchCommand) -> None:
        """Follow a command: pause, resume, stop, ``add_trials`` or ``stop_trial``."""
        match command:
            case SearchCommand(op="pause" | "resume" as op):
                self._paused = op == "pause"
            case SearchCommand(op="stop"):
                self._stopped = True
            case SearchCommand(op="add_trials", n=int(count)):
                self._recorder.add(count)
            case SearchCommand(op="stop_trial", n=int(number)):
                self._stop_trial(number)

    def _stop_trial(self, number: int) -> None:
        for trial in [one for one in self._live.values() if one.number == number]:
            trial.leave("pruned", STOPPED_BY_HAND)
            if trial.over:
                self._settle(trial)

    def close(self, status: str) -> dict[str, Any]:
        """Leave unfinished trials to another session, and return the summary.

        Returns:
            ``best`` (number of the best trial), ``best_value``, ``best_params``, ``best_folder``,
            ``front`` (with several metrics), ``infeasible`` (if no trial meets the constraints),
            ``counts`` by state, ``metrics`` and ``directions``.
        """
        for trial in self._live.values():
            self._recorder.wait(trial, f"the sweep ended as {status}")
        summary = self._recorder.summary()
        without_values = self._recorder.begun and not self._recorder.leaderboard.values
        if summary["infeasible"]:
            self._events.note(summary["infeasible"], "warning")
        elif status == "completed" and without_values:
            raise self._without_a_value()
        return summary

    def _without_a_value(self) -> SweepError:
        counts = ", ".join(f"{count} {state}" for state, count in self._recorder.counts.items())
        failure = self._recorder.last_failure
        last = f"; the last failure: {failure}" if failure else ""
        return SweepError(
            f"no trial of the sweep has a value: {counts or 'none has ended'}{last}",
            allowed="one complete trial or more",
            do="look into the trials' folders, fix the cause, and sweep again, or sweep with more "
            "time: the study resumes",
        )


# --- metrics ---


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
