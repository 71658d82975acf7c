"""Run the trials of a sweep on a pool, from the first one to the end of the budget.

The study is the state of the sweep: what has ended, what is best, how many trials have begun is
asked of it. This module imports Optuna: import it late.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from optuna.trial import TrialState

from nbtoolkit.config.aliases import similar_name
from nbtoolkit.errors import NbtoolkitError
from nbtoolkit.run.events import RETURNED, FoldChanged, IntermediateReported
from nbtoolkit.run.identity import Identity
from nbtoolkit.search.pool import (
    EventWriter,
    JobEnded,
    JobReported,
    JobResult,
    MetricsNamed,
    ParametersUnread,
    Pool,
    PoolEvent,
    SearchEnd,
    SearchJob,
)
from nbtoolkit.search.study.samplers import OUT_OF_MEMORY, broken, learns_from, limits_of
from nbtoolkit.search.study.study import FILE, folder_of, identity_of, open_study, trial_event
from nbtoolkit.search.study.table import STOPPED_BY_HAND
from nbtoolkit.search.sweep_errors import (
    no_such_metric,
    no_value,
    too_many_failures,
    unread_parameters,
)
from nbtoolkit.search.time_budget import TimeBudget
from nbtoolkit.wire.messages import SearchCommand

_RETRIED = ("raised", "died", "hung")
"""Faults worth a retry; out of memory, NaN and timeouts would occur again."""

_CALM = 0.1
"""Seconds after a job's start in which no trial is asked for ahead: the start needs the CPU."""


def run_sweep(pool: Pool, events: EventWriter) -> SearchEnd:
    """Run the trials of a sweep, new or resumed.

    Raises:
        SweepError: the study in the folder belongs to another search, no trial has a value, too
            many have failed, or none will have a value.
    """
    return Sweep(pool, events).run()


class OpenTrial:
    """A trial that has not ended: its jobs that run or wait, and why it ends."""

    def __init__(
        self, number: int, params: Mapping[str, Any], waiting: Iterable[int | None], seconds: float
    ) -> None:
        self.number = number
        self.params = dict(params)
        self.key = folder_of(number)
        self.waiting = list(waiting)
        """The folds whose jobs wait for a slot; None: the job of a trial without folds."""
        self.running: dict[str, SearchJob] = {}
        self.begun = False
        """Whether a job of it has started in this session."""
        self.seconds = seconds
        """Of all its jobs, in all sessions."""
        self.attempts = 0
        """Number of retries of its jobs."""
        self.leaving: str | None = None
        """State in which the trial ends after its last job; None while it continues."""
        self.reason: str | None = None
        self.best: dict[int | None, float] = {}
        """Best report of each job in this session, by fold."""
        self.metrics: dict[str, float] = {}
        """The metrics of a trial without folds whose job is complete; the study has a fold's."""
        self.first_step = 0
        """Step of the first report: 1 for ``nb.fit``; Optuna's pruners expect 0."""

    @property
    def over(self) -> bool:
        """True if no job of the trial runs or waits."""
        return not self.running and not self.waiting

    def next_job(self, timeout: float | None, *, judged: bool) -> SearchJob:
        """Return its next waiting job."""
        fold = self.waiting.pop(0)
        job = SearchJob(
            key=self.key if fold is None else f"{self.key}/fold-{fold}",
            overrides=self.params,
            params=self.params,
            fold=fold,
            timeout=timeout,
            judged=judged,
        )
        self.running[job.key] = job
        return job


class Sweep:
    """One session of a sweep.

    Args:
        pool: runs the jobs.
        events: receives the events of trials and notes.

    Raises:
        SweepError: the study in the folder belongs to another search.
    """

    def __init__(self, pool: Pool, events: EventWriter) -> None:
        request = pool.request
        assert request.search.sweep_config is not None
        self._pool = pool
        self._events = events
        self._sweep_config = sweep_config = request.search.sweep_config
        folds = request.search.folds
        self._folds = None if folds is None else len(folds)
        self._space = space = sweep_config.make_space()
        self._study = open_study(
            request.paths.folder / FILE, sweep_config, space, identity_of(sweep_config, folds)
        )
        self._limits = limits_of(sweep_config)
        self._learns_from = learns_from(sweep_config)
        self._time = TimeBudget(sweep_config.budget.reserve_for_refit, self._folds, events)
        self._paused = False
        self._started_at = 0.0
        self._open: dict[int, OpenTrial] = {}
        self._resume_trials()

    def run(self) -> SearchEnd:
        """Run trials until none is left, the time is up or a handle ends the sweep."""
        self.start_jobs()
        while not self.over:
            events = self._pool.wait()
            failed = [event for event in events if isinstance(event, JobEnded) and event.failed]
            if self._folds is None and not failed:
                # A trial that was asked for ahead starts before the ends of others are recorded,
                # which takes 10 ms. With folds, the next job depends on them.
                self.start_jobs(asked_only=True)
            for event in events:
                self.handle(event)
            self.start_jobs()
            if not events:
                self.ask_ahead()
        return self.finish()

    @property
    def over(self) -> bool:
        """True if no job runs and none will start."""
        if self._pool.running:
            return False
        ended = self._pool.leaving is not None or self._time.up
        return ended or not self._trials_left

    def start_jobs(self, *, asked_only: bool = False) -> None:
        """Start jobs as long as the pool has room for them.

        Args:
            asked_only: ask for no new trials.

        Raises:
            SweepError: too many trials have failed, and no job runs.
        """
        while self._pool.leaving is None and self._pool.free:
            trial = self._next_trial(asked_only)
            if trial is None:
                return
            self._start_job(trial)

    def _next_trial(self, asked_only: bool) -> OpenTrial | None:
        """Return a trial with a job to start: one that has begun, or a new one."""
        if self._too_many_failed() or self._paused or self._time.up:
            return None
        left = self._pool.seconds_left()
        trial = next((trial for trial in self._open.values() if trial.waiting), None)
        if trial is None and asked_only:
            return None
        if trial is None:
            slots = len(self._pool.running) + self._pool.free
            if not self._more_to_begin or not self._time.suffices_for_new(left, slots):
                return None
            trial = self._ask()
        return trial if self._time.suffices(trial.params, left) else None

    def _start_job(self, trial: OpenTrial) -> None:
        if not trial.begun:
            trial.begun = True
            self._write_trial(trial.number)
        judged = self._sweep_config.pruner != "none" or self._folds is not None
        job = trial.next_job(self._sweep_config.budget.trial_timeout, judged=judged)
        if job.fold is not None:
            self._write_fold(trial, job.fold, "running")
        self._started_at = time.monotonic()
        self._pool.start(job)

    def _ask(self) -> OpenTrial:
        """Ask the study for a new trial; if this session dies, the next one runs it."""
        number, params = self._study.ask()
        jobs = [None] if self._folds is None else range(self._folds)
        self._open[number] = trial = OpenTrial(number, params, jobs, 0.0)
        return trial

    def ask_ahead(self) -> None:
        """Ask for the next trial while all slots are busy, if it depends on no running trial."""
        busy = self._pool.running and not self._pool.free
        calm = time.monotonic() - self._started_at > _CALM
        ended = self._paused or self._time.up or self._pool.leaving is not None
        if ended or not busy or not calm or self._folds is not None:
            return
        waiting = sum(1 for trial in self._open.values() if trial.waiting)
        learns = self._study.trials_started + self._study.imported >= self._learns_from
        if waiting < len(self._pool.running) and self._more_to_begin and not learns:
            self._ask()

    def _resume_trials(self) -> None:
        """Open the trials that an earlier session left running, with the folds that they lack."""
        if self._study.trials_started:
            self._events.note(f"the study already has {self._study.trials_started} trials")
        self._failed_before = self._study.counts()["failed"]
        for trial in self._study.trials():
            if trial.state == TrialState.COMPLETE:
                seconds = float(trial.user_attrs.get("seconds", 0.0))
                params = self._space.decode(trial.params)
                self._time.note(params, seconds / (self._folds or 1))
            elif trial.state == TrialState.RUNNING:
                self._resume(trial.number)

    def _resume(self, number: int) -> None:
        _, params = self._study.resume(number)
        self._events.note(f"trial {number} was interrupted and resumes")
        done = self._study.scores(number)
        jobs = [None] if self._folds is None else [i for i in range(self._folds) if i not in done]
        seconds = float(self._study.trial(number).user_attrs.get("seconds", 0.0))
        self._open[number] = trial = OpenTrial(number, params, jobs, seconds)
        if trial.over:  # all its folds were done when its session died
            self._settle(trial)

    @property
    def _total(self) -> int | None:
        """The number of trials over all sessions; None: as many as time allows."""
        n_trials = self._sweep_config.budget.n_trials
        total = None if n_trials is None else n_trials + self._study.added
        if self._sweep_config.study.sampler == "grid":
            points = len(self._space.grid())
            total = min(total or points, points)
        return total

    @property
    def _more_to_begin(self) -> bool:
        return self._total is None or self._study.trials_started < self._total

    @property
    def _trials_left(self) -> bool:
        return bool(self._open) or self._more_to_begin

    def _too_many_failed(self) -> bool:
        """Return True if no more trials may start; raise the error once no job runs."""
        allowed = self._sweep_config.budget.max_failures
        failed = self._study.counts()["failed"] - self._failed_before
        if allowed is None or failed <= allowed:
            return False
        if self._pool.running:
            return True
        self._leave_open_trials("failed")
        raise too_many_failures(failed, allowed, self._study.last_failure())

    def handle(self, event: PoolEvent) -> None:
        """Follow an event of the pool."""
        match event:
            case JobReported():
                self._on_report(event.job, event.metrics, event.step)
            case MetricsNamed():
                self._on_names(event)
            case ParametersUnread():
                self._on_unread(event.job, event.names)
            case JobEnded():
                self._on_end(event.job, event.result)
            case SearchCommand():
                self._on_command(event)

    def _trial_of(self, job: SearchJob) -> OpenTrial | None:
        """Return the trial of a running job."""
        return next((trial for trial in self._open.values() if job.key in trial.running), None)

    def _on_report(self, job: SearchJob, metrics: Mapping[str, float], step: int | None) -> None:
        """Judge a report: the trial may end by it."""
        trial = self._trial_of(job)
        if trial is None or trial.leaving is not None:
            return
        self._refuse_misspelt(trial, list(metrics))
        given = [name for name in self._sweep_config.metrics if name in metrics]
        if wrong := missing(metrics, given):
            self._leave(trial, "failed", f"{wrong} at step {step}" if step is not None else wrong)
        elif len(self._sweep_config.metrics) == 1 and given:
            self._judge(job, trial, metrics[given[0]], step)

    def _judge(self, job: SearchJob, trial: OpenTrial, value: float, step: int | None) -> None:
        direction = self._sweep_config.directions[0]
        trial.best[job.fold] = better(direction, value, trial.best.get(job.fold))
        if job.fold is None:
            at, pruned = self._report(trial, value, step, first=trial.first_step)
            if pruned:
                name = self._sweep_config.metrics[0]
                self._leave(trial, "pruned", f"at step {at}, with {name} {value:.6g}")

    def _report(
        self, trial: OpenTrial, value: float, step: int | None, *, first: int = 0
    ) -> tuple[int, bool]:
        """Store a report; return its step, and True if the pruner ends the trial.

        Optuna's pruners count steps from 0 (``n_warmup_steps`` in MedianPruner's documentation).
        ``nb.fit`` counts finished epochs, so its ``first`` step is 1.
        """
        at, pruned = self._study.report(trial.number, value, None if step is None else step - first)
        at += first if step is not None else 0
        self._events.write(IntermediateReported(number=trial.number, step=at, value=value))
        return at, pruned

    def _leave(self, trial: OpenTrial, state: str, reason: str) -> None:
        """End a trial after its running jobs, which stop; the first reason counts."""
        if trial.leaving is None:
            trial.leaving = state
            trial.reason = reason
        trial.waiting.clear()
        for key in trial.running:
            self._pool.stop(key, trial.reason or reason)

    def _on_names(self, named: MetricsNamed) -> None:
        """Fail early if the sweep's metric is a misspelling of one that the job will report."""
        if (trial := self._trial_of(named.job)) is not None:
            trial.first_step = named.first_step
            self._refuse_misspelt(trial, named.names, named.stems)

    def _on_unread(self, job: SearchJob, names: Sequence[str]) -> None:
        """End the sweep if its first trial never read a parameter: no trial depends on it."""
        trial = self._trial_of(job)
        if trial is None or self._study.some_ended:
            return
        self._end_with(trial, f"the function has not read {', '.join(names)}")
        raise unread_parameters(names)

    def _refuse_misspelt(
        self, trial: OpenTrial, names: Sequence[str], stems: Sequence[str] = ()
    ) -> None:
        if self._study.some_ended:
            return
        for metric in self._sweep_config.metrics:
            near = similar_name(metric, names)
            if near is not None and not metric.startswith(tuple(f"{stem}_" for stem in stems)):
                self._give_up(trial, metric, names, near)

    def _give_up(
        self, trial: OpenTrial, metric: str, names: Iterable[str], near: str | None
    ) -> NoReturn:
        """End the sweep, because no trial will have a value."""
        available = ", ".join(names) or "none"
        self._end_with(trial, f"no {metric} among the reported metrics: {available}")
        raise no_such_metric(metric, available, near)

    def _end_with(self, trial: OpenTrial, fault: str) -> None:
        """End the sweep with a failed trial."""
        self._end_trial(trial, "failed", fault)
        self._leave_open_trials("failed")

    def _on_end(self, job: SearchJob, result: JobResult) -> None:
        """Take the result of a job that has ended."""
        trial = self._trial_of(job)
        assert trial is not None
        trial.running.pop(job.key)
        trial.seconds += result.seconds
        if result.status in ("stopped", "deadline") and trial.leaving is None:
            trial.waiting.insert(0, job.fold)  # the next session resumes it
            self._time.up = self._time.up or result.status == "deadline"
        elif result.status == "completed":
            self._on_completed(trial, job, result)
        elif result.status == "failed" and not self._retried(trial, job, result):
            state = "infeasible" if result.fault == "oom" else "failed"
            self._leave(trial, state, result.error or f"the job {result.fault or 'failed'}")
        elif result.status == "pruned":
            self._leave(trial, "pruned", "the function ended itself as pruned")
        if job.fold is not None and result.status != "completed":
            self._write_fold(trial, job.fold, result.status, None, result.seconds)
        if trial.over:
            self._settle(trial)

    def _on_completed(self, trial: OpenTrial, job: SearchJob, result: JobResult) -> None:
        if trial.leaving == "pruned" and job.fold is None:
            trial.leaving = trial.reason = None  # it completed before it could leave
        metrics = dict(result.metrics)
        if len(self._sweep_config.metrics) == 1 and RETURNED in metrics:
            metrics.setdefault(self._sweep_config.metrics[0], metrics[RETURNED])
        if self._sweep_config.study.trial_value == "best":
            self._put_best(trial, job, metrics)
        if wrong := missing(metrics, self._needed):
            absent = [name for name in self._sweep_config.metrics if name not in metrics]
            if absent and not self._study.counts()["complete"]:
                self._give_up(trial, absent[0], metrics, similar_name(absent[0], metrics))
            self._leave(trial, "failed", wrong)
            return
        if trial.leaving is None:
            self._time.note(trial.params, result.seconds)
        needed = {name: float(metrics[name]) for name in self._needed}
        if job.fold is None:
            trial.metrics = needed
        else:
            self._study.add_fold(trial.number, job.fold, needed)
            self._write_fold(trial, job.fold, "complete", needed, result.seconds)
            self._compare_folds(trial, job.fold)

    def _put_best(self, trial: OpenTrial, job: SearchJob, metrics: dict[str, float]) -> None:
        """Use the best report as the value; the study has those of earlier sessions."""
        name = self._sweep_config.metrics[0]
        direction = self._sweep_config.directions[0]
        seen = [] if job.fold is not None else [*self._study.reports(trial.number).values()]
        for value in [*seen, trial.best.get(job.fold)]:
            if value is not None and not missing(metrics, [name]):
                metrics[name] = better(direction, value, metrics[name])

    def _compare_folds(self, trial: OpenTrial, fold: int) -> None:
        """Report the running mean over folds, so that the pruner compares trials on equal folds.

        Wilcoxon's test compares fold by fold, in any order.
        """
        if len(self._sweep_config.metrics) > 1:
            return
        metric = self._sweep_config.metrics[0]
        scores = self._study.scores(trial.number)
        if self._sweep_config.pruner == "wilcoxon":
            new = [(fold, scores[fold][metric])]
        else:
            gap = next(i for i in range(len(scores) + 1) if i not in scores)
            steps = range(len(self._study.reports(trial.number)), gap)
            new = [(step, _mean(scores, metric, step + 1)) for step in steps]
        for step, value in new:
            _, pruned = self._report(trial, value, step)
            if pruned and not trial.over:
                self._leave(
                    trial, "pruned", f"after {len(scores)} folds, with {metric} {value:.6g}"
                )

    def _retried(self, trial: OpenTrial, job: SearchJob, result: JobResult) -> bool:
        left = self._sweep_config.budget.retries - trial.attempts
        if result.fault not in _RETRIED or left <= 0 or trial.leaving is not None:
            return False
        self._events.note(f"{job.key} {result.fault} and is retried: {result.error}", "warning")
        trial.attempts += 1
        trial.waiting.insert(0, job.fold)
        return True

    def _settle(self, trial: OpenTrial) -> None:
        """Record the result of a trial that is over."""
        if trial.leaving is not None:
            self._end_trial(trial, trial.leaving, trial.reason or "")
            return
        metrics = trial.metrics
        if self._folds is not None:
            scores = self._study.scores(trial.number)
            metrics = {name: _mean(scores, name, self._folds) for name in self._needed}
        excess = {limit.name: limit.excess(metrics[limit.metric]) for limit in self._limits}
        if excess:
            self._study.constrain(trial.number, excess)
        values = [metrics[name] for name in self._sweep_config.metrics]
        self._tell(trial, TrialState.COMPLETE, values, broken(self._limits, metrics))

    def _end_trial(self, trial: OpenTrial, state: str, reason: str) -> None:
        """End a trial without a value: pruned, failed or infeasible (out of memory)."""
        if state == "infeasible":
            self._study.constrain(trial.number, {OUT_OF_MEMORY: 1.0})
        # Samplers learn from pruned trials, and forget failed ones.
        final = TrialState.FAIL if state == "failed" else TrialState.PRUNED
        self._tell(trial, final, [], reason)

    def _tell(
        self, trial: OpenTrial, state: TrialState, values: Sequence[float], reason: str | None
    ) -> None:
        del self._open[trial.number]
        notes: dict[str, object] = {"seconds": trial.seconds, "identity": self._identity(trial)}
        if reason is not None:
            notes["reason"] = reason
        self._study.tell(trial.number, state, values, notes)
        self._write_trial(trial.number)

    def _identity(self, trial: OpenTrial) -> str | None:
        """Hash what decides a trial's result: its settings with the seed, the code and the folds.

        Trials of several studies with equal identities are the same trial. None: its parameters
        make no valid configuration.
        """
        request = self._pool.request
        try:
            settings = request.config.with_overrides(trial.params).to_dict()
        except NbtoolkitError:
            return None
        folds = request.search.folds
        settings["folds"] = None if folds is None else folds.hash
        return Identity.of_parts(request.header.function, settings, request.header.code).hash

    @property
    def _needed(self) -> list[str]:
        """The metrics that a job must report: objectives and constraints."""
        limited = [limit.metric for limit in self._limits]
        return list(dict.fromkeys([*self._sweep_config.metrics, *limited]))

    def _write_trial(self, number: int, waits: str | None = None) -> None:
        """Write the event of a trial's present state."""
        trial = self._study.trial(number)
        ended = trial.state == TrialState.COMPLETE
        best = ended and number in [leader.number for leader in self._study.best()]
        self._events.write(trial_event(trial, self._space, best=best, waits=waits))

    def _write_fold(
        self,
        trial: OpenTrial,
        fold: int,
        state: str,
        metrics: Mapping[str, float] | None = None,
        seconds: float | None = None,
    ) -> None:
        self._events.write(
            FoldChanged(
                number=trial.number,
                fold=fold,
                state=state,
                metrics=dict(metrics or {}),
                seconds=seconds,
                folder=f"{trial.key}/fold-{fold}",
            )
        )

    def _on_command(self, command: SearchCommand) -> None:
        """Follow a command: pause, resume, ``add_trials`` or ``stop_trial``."""
        match command:
            case SearchCommand(op="pause" | "resume" as op):
                self._paused = op == "pause"
            case SearchCommand(op="add_trials", n=int(count)):
                self._study.add(count)
            case SearchCommand(op="stop_trial", n=int(number)) if number in self._open:
                trial = self._open[number]
                self._leave(trial, "pruned", STOPPED_BY_HAND)
                if trial.over:
                    self._settle(trial)

    def finish(self) -> SearchEnd:
        """Leave unfinished trials to another session, and return the status and the summary.

        Raises:
            SweepError: no trial has a value.
        """
        early = "deadline" if self._cut_short else "completed"
        status = self._pool.leaving or early
        self._leave_open_trials(status)
        summary = self._study.summary()
        if summary["infeasible"]:
            self._events.note(summary["infeasible"], "warning")
        elif (
            status == "completed"
            and self._study.trials_started
            and not summary["counts"].get("complete")
        ):
            raise no_value(summary["counts"], self._study.last_failure())
        return SearchEnd(status, summary)

    @property
    def _cut_short(self) -> bool:
        """True if only the time limit ended the sweep: a later session should run the rest."""
        known = self._total is not None or self._pool.request.imposed
        return self._time.up and known and self._trials_left

    def _leave_open_trials(self, status: str) -> None:
        """Leave the open trials to the next session: they stay running in the study."""
        for trial in self._open.values():
            self._study.add_seconds(trial.number, trial.seconds)
            self._write_trial(trial.number, waits=f"the sweep ended as {status}")


def _mean(scores: Mapping[int, Mapping[str, float]], metric: str, folds: int) -> float:
    """Return the mean of a metric over the first ``folds`` folds, which must be finished."""
    return math.fsum(scores[index][metric] for index in range(folds)) / folds


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


def better(direction: str, value: float, other: float | None) -> float:
    """Return the better of two values."""
    if other is None:
        return value
    return max(value, other) if direction == "maximize" else min(value, other)
