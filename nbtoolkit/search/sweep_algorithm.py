"""Decide which trials run, how they are judged, and when the sweep ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from nbtoolkit.config.aliases import meant
from nbtoolkit.errors import MissingExtra, SweepError
from nbtoolkit.run.events import RETURNED
from nbtoolkit.run.messages import SearchCommand
from nbtoolkit.search.algorithm import (
    EventWriter,
    JobResult,
    RunningTrial,
    SearchJob,
    SearchRequest,
)
from nbtoolkit.search.leaderboard import better, missing
from nbtoolkit.search.time_budget import TimeBudget, TopKReevaluation

if TYPE_CHECKING:
    from nbtoolkit.search.study_recorder import StudyRecorder

_RETRIED = ("raised", "died", "hung")  # out of memory, NaN and a timeout come again
_HAND = "stopped by hand"


def make_algorithm(request: SearchRequest, record: EventWriter) -> SweepAlgorithm:
    """The program of a sweep, new or gone on with.

    Args:
        request: what is wished of it.
        record: where events go.

    Raises:
        SweepError: the study in the folder was made for another search.
        MissingExtra: Optuna is not installed.
    """
    try:
        from nbtoolkit.search.study_recorder import StudyRecorder
    except ImportError as error:
        what = f"a sweep needs Optuna: {error}"
        raise MissingExtra(what, do="pip install 'nbtoolkit-torch[search]'") from error
    assert request.sweep_config is not None
    study_recorder = StudyRecorder(
        request.sweep_config, request.folds, request.paths.folder, record
    )
    return SweepAlgorithm(study_recorder, record, seed=request.config.seed, imposed=request.imposed)


class SweepAlgorithm:
    """One session of a sweep; see :class:`~nbtoolkit.search.algorithm.SearchAlgorithm`.

    Args:
        study_recorder: the study, opened.
        diary: where notes go.
        seed: the configuration's, which repetitions differ from.
        imposed: its time ends with the host's session, before what was wished.
    """

    def __init__(
        self, study_recorder: StudyRecorder, diary: EventWriter, seed: int, *, imposed: bool = False
    ) -> None:
        self._study_recorder, self._diary, self._sweep_config = (
            study_recorder,
            diary,
            study_recorder.sweep_config,
        )
        self._imposed = imposed
        self._jobs: dict[str, RunningTrial] = {}
        """The trial of every job that runs."""
        self._live: dict[str, RunningTrial] = {}
        """Trials with jobs that run or wait, by folder."""
        self._repeats = TopKReevaluation(study_recorder, seed)
        self._added = int(study_recorder.study.optuna.user_attrs.get("added", 0))
        self._points = len(self._sweep_config.make_space().grid()) if self._grid else None
        # Where trials are counted, those that are missing come first, in the next session.
        self._time = TimeBudget(
            study_recorder, diary, lambda: 0 if self._owed else self._repeats.to_come
        )
        self._paused = self._stopped = False
        if study_recorder.begun:
            self._diary.note(f"the study has {study_recorder.begun} trials already")

    @property
    def _grid(self) -> bool:
        return self._sweep_config.study.sampler == "grid"

    # --- what is run next ---

    @property
    def done(self) -> bool:
        """Whether nothing runs, as far as it knows, and nothing will."""
        if self._jobs:
            return False
        if self._stopped or self._time.over:
            return True
        if self._time.up:
            return self._owed or not self._repeats.more
        more = bool(
            self._live
            or self._study_recorder.interrupted
            or self._study_recorder.asked
            or self._more_wished
        )
        return not more and not self._repeats.more

    @property
    def cut_short(self) -> bool:
        """Whether it is done for lack of time, and another session is to go on with it."""
        left = (
            self._live
            or self._study_recorder.interrupted
            or self._study_recorder.asked
            or self._more_wished
        )
        return self._time.up and self._owed and bool(left)

    @property
    def _owed(self) -> bool:
        """Whether trials are missing when the time is up: those counted, those cut off."""
        known = self._sweep_config.budget.n_trials is not None or self._points is not None
        return known or self._imposed

    @property
    def ready(self) -> bool:
        """Whether a trial was asked for ahead; folds wait for how the one before ended."""
        return self._study_recorder.folds is None and self._study_recorder.asked > 0

    def prepare(self, jobs: int) -> None:
        """Ask for a trial ahead, where its parameters do not depend on those that run."""
        study_recorder, idle = self._study_recorder, self._paused or self._stopped or self._time.up
        if (
            not idle
            and study_recorder.asked < jobs
            and not study_recorder.learns
            and self._more_wished
        ):
            study_recorder.ask_ahead()

    def next(self, left: float | None) -> SearchJob | None:
        """The next job: of a trial that has begun, of one that was interrupted, of a new one.

        Args:
            left: seconds until the sweep's deadline; None: there is none.

        Raises:
            SweepError: too many trials have failed, and nothing runs any more.
        """
        if self._too_many_failed():
            return None
        if self._paused or self._stopped or self._time.over:
            return None
        trial = self._trial_in_time(left) or self._repetition_in_time(left)
        if trial is None:
            return None
        judged = trial.seed is None and (
            self._sweep_config.pruner != "none" or trial.folds is not None
        )
        job = trial.next_job(self._sweep_config.budget.trial_timeout, judged)
        self._jobs[job.key] = trial
        self._time.running(len(self._jobs))
        if job.fold is not None and trial.seed is None:
            self._study_recorder.fold_event(trial, job.fold, "running")
        return job

    def _trial_in_time(self, left: float | None) -> RunningTrial | None:
        trial = None if self._time.up else self._trial(left)
        return trial if trial and self._time.suffices(trial.params, left) else None

    def _repetition_in_time(self, left: float | None) -> RunningTrial | None:
        trial = self._repetition()
        enough = trial and self._time.suffices_for_repetition(trial.params, left)
        return trial if enough else None

    def _trial(self, left: float | None) -> RunningTrial | None:
        """A trial with a job that waits; None: there is none now."""
        waiting = (one for one in self._live.values() if one.waiting and one.seed is None)
        if begun := next(waiting, None):
            return begun
        while self._study_recorder.interrupted:
            trial = self._enter(self._study_recorder.take_up())
            if not trial.over:
                return trial
            self._settle(trial)  # all its folds were done when its session died
        if self._more_wished or self._study_recorder.asked:
            return (
                self._enter(self._study_recorder.begin())
                if self._time.suffices_for_new(left)
                else None
            )
        return None

    def _repetition(self) -> RunningTrial | None:
        """A leader to be trained again, once no trial runs; None: there is none now."""
        trials = self._jobs if self._time.up else self._live
        if any(one.seed is None for one in trials.values()) or (self._time.up and self._owed):
            return None
        live = (one for one in self._live.values() if one.seed is not None and one.waiting)
        if begun := next(live, None):
            return begun
        repetition = self._repeats.next()
        return None if repetition is None else self._enter(repetition)

    def _enter(self, trial: RunningTrial) -> RunningTrial:
        self._live[trial.key] = trial
        return trial

    @property
    def _more_wished(self) -> bool:
        wished = self._sweep_config.budget.n_trials
        total = None if wished is None else wished + self._added
        if self._points is not None:
            total = min(total or self._points, self._points)
        return total is None or self._study_recorder.begun + self._study_recorder.asked < total

    def _too_many_failed(self) -> bool:
        """Whether to begin nothing more; the error is raised when nothing runs any more."""
        allowed, failed = (
            self._sweep_config.budget.max_failures,
            self._study_recorder.counts["failed"],
        )
        if allowed is None or failed <= allowed:
            return False
        if not self._jobs:
            last = self._study_recorder.last_failure
            self.close("failed")
            raise SweepError(
                f"{failed} trials have failed; the last: {last}",
                allowed=f"budget.max_failures: {allowed}",
                do="look into its folder; sweep again when it is mended: the study is gone on with",
            )
        return True

    # --- how jobs are judged ---

    def reported(
        self, job: SearchJob, metrics: Mapping[str, float], step: int | None
    ) -> str | None:
        """Judge a report: ``"pruned"`` lets the job's ranks leave, None lets them go on."""
        trial = self._jobs.get(job.key)
        if trial is None:
            return None  # it has ended: a report that was on its way
        if trial.leaving is None and trial.seed is None:
            if not self._study_recorder.counts:
                self._refuse_slips(trial, list(metrics))
            given = [name for name in self._sweep_config.metrics if name in metrics]
            if wrong := missing(metrics, given):
                trial.leave("failed", f"{wrong} at step {step}" if step is not None else wrong)
            elif len(self._sweep_config.metrics) == 1 and given:
                self._judge(job, trial, metrics[given[0]], step)
        return None if trial.leaving is None else "pruned"

    def announced(
        self, job: SearchJob, names: Sequence[str], stems: Sequence[str], first_step: int
    ) -> None:
        """Give up where a metric is a slip of one that the job will report."""
        if (trial := self._jobs.get(job.key)) is not None:
            trial.first_step = first_step
            self._refuse_slips(trial, names, stems)

    def _refuse_slips(
        self, trial: RunningTrial, names: Sequence[str], stems: Sequence[str] = ()
    ) -> None:
        for metric in self._sweep_config.metrics:
            near = meant(metric, names)
            if near is not None and not metric.startswith(tuple(f"{stem}_" for stem in stems)):
                self._give_up(trial, metric, names, near)

    def _give_up(
        self, trial: RunningTrial, metric: str, names: Iterable[str], near: str | None
    ) -> NoReturn:
        """End the sweep: no trial will have a value."""
        told = ", ".join(names) or "nothing"
        self._live.pop(trial.key, None)
        if trial.seed is None:
            self._study_recorder.end(
                trial, "failed", f"no {metric} among what was reported: {told}"
            )
        self.close("failed")
        raise SweepError(
            f"study.metric is {metric!r}, which the first trial does not have: it has {told}",
            allowed="a metric that every trial reports or returns",
            do=f"set study.metric: {near}"
            if near
            else f"report or return {metric}, or name another one under study.metric",
        )

    def _judge(self, job: SearchJob, trial: RunningTrial, value: float, step: int | None) -> None:
        direction = self._sweep_config.directions[0]
        trial.best[job.fold] = better(direction, value, trial.best.get(job.fold))
        if job.fold is None:
            first = trial.first_step
            at, pruned = self._study_recorder.intermediate(trial, value, step, first=first)
            if pruned:
                trial.leave(
                    "pruned", f"at step {at}, with {self._sweep_config.metrics[0]} {value:.6g}"
                )

    # --- how jobs end ---

    def ended(self, job: SearchJob, ending: JobResult) -> None:
        """Take a job's ending."""
        trial = self._jobs.pop(job.key)
        trial.running.pop(job.key)
        trial.seconds += ending.seconds
        if ending.status in ("stopped", "deadline") and trial.leaving is None:
            self._put_back(trial, job, ending)
        elif ending.status == "completed":
            self._completed(trial, job, ending)
        elif ending.status == "failed" and not self._tried_again(trial, job, ending):
            state = "infeasible" if ending.fault == "oom" else "failed"
            trial.leave(state, ending.error or f"the job {ending.fault or 'failed'}")
        elif ending.status == "pruned":
            trial.leave("pruned", "it left its function as pruned")
        if job.fold is not None and trial.seed is None and ending.status != "completed":
            self._study_recorder.fold_event(trial, job.fold, ending.status, None, ending.seconds)
        if trial.over:
            self._settle(trial)

    def _completed(self, trial: RunningTrial, job: SearchJob, ending: JobResult) -> None:
        if trial.leaving == "pruned" and job.fold is None:
            trial.leaving = trial.reason = None  # it was through before it could leave
        metrics = dict(ending.metrics)
        if len(self._sweep_config.metrics) == 1 and RETURNED in metrics:
            metrics.setdefault(self._sweep_config.metrics[0], metrics[RETURNED])
        if self._sweep_config.study.trial_value == "best":
            self._put_best(trial, job, metrics)
        needed = self._study_recorder.needed
        if wrong := missing(metrics, needed):
            absent = [name for name in self._sweep_config.metrics if name not in metrics]
            if absent and not self._study_recorder.counts["complete"]:
                self._give_up(trial, absent[0], metrics, meant(absent[0], metrics))
            trial.leave("failed", wrong)
            return
        if trial.leaving is None and trial.seed is None:
            self._study_recorder.costs.note(trial.params, ending.seconds)
        trial.scores[job.fold or 0] = {name: float(metrics[name]) for name in needed}
        if job.fold is not None and trial.seed is None:
            scores = trial.scores[job.fold]
            self._study_recorder.fold(trial, job.fold, "complete", scores, ending.seconds)
            self._compare_folds(trial, job.fold)

    def _put_best(self, trial: RunningTrial, job: SearchJob, metrics: dict[str, float]) -> None:
        """Let the best report count; those of earlier sessions are in the study."""
        name, direction = self._sweep_config.metrics[0], self._sweep_config.directions[0]
        seen = (
            []
            if job.fold is not None
            else [*self._study_recorder.study.reports(trial.number).values()]
        )
        for value in [*seen, trial.best.get(job.fold)]:
            if value is not None and not missing(metrics, [name]):
                metrics[name] = better(direction, value, metrics[name])

    def _compare_folds(self, trial: RunningTrial, fold: int) -> None:
        """Let the pruner compare trials on the same folds: by the mean of the first so many.

        Wilcoxon's test compares fold by fold, in any order.
        """
        if len(self._sweep_config.metrics) > 1 or trial.folds is None:
            return
        metric = self._sweep_config.metrics[0]
        if self._sweep_config.pruner == "wilcoxon":
            new = [(fold, trial.scores[fold][metric])]
        else:
            steps = range(trial.told, trial.complete_folds())
            new = [(step, trial.mean(metric, step + 1)) for step in steps]
            trial.told = trial.complete_folds()
        for step, value in new:
            _, pruned = self._study_recorder.intermediate(trial, value, step)
            if pruned and not trial.over:
                trial.leave("pruned", f"after {len(trial.scores)} folds, with {metric} {value:.6g}")

    def _tried_again(self, trial: RunningTrial, job: SearchJob, ending: JobResult) -> bool:
        left = self._sweep_config.budget.retries - trial.attempts
        if ending.fault not in _RETRIED or left <= 0 or trial.leaving is not None:
            return False
        self._diary.note(f"{job.key} {ending.fault}, and is tried again: {ending.error}", "warning")
        trial.again(job)
        return True

    def _put_back(self, trial: RunningTrial, job: SearchJob, ending: JobResult) -> None:
        """A job that was stopped with the whole sweep runs on in the next session."""
        trial.waiting.insert(0, job.fold)
        if ending.status == "deadline":
            self._time.up = True

    def _settle(self, trial: RunningTrial) -> None:
        """A trial is over: write what became of it."""
        self._live.pop(trial.key, None)
        if trial.seed is not None:
            self._repeats.ended(trial)
        elif trial.leaving is not None:
            self._study_recorder.end(trial, trial.leaving, trial.reason or "")
        else:
            count = trial.folds or 1
            self._study_recorder.complete(
                trial, {m: trial.mean(m, count) for m in self._study_recorder.needed}
            )

    # --- what others wish ---

    def obey(self, command: SearchCommand) -> None:
        """Pause, resume, stop, ``add_trials`` (n) or ``stop_trial`` (n)."""
        match command:
            case SearchCommand(op="pause" | "resume" as op):
                self._paused = op == "pause"
            case SearchCommand(op="stop"):
                self._stopped = True
            case SearchCommand(op="add_trials", n=int(count)):
                self._added += count
                self._study_recorder.study.optuna.set_user_attr("added", self._added)
            case SearchCommand(op="stop_trial", n=int(number)):
                self._stop_trial(number)

    def _stop_trial(self, number: int) -> None:
        for trial in [one for one in self._live.values() if one.number == number]:
            trial.leave("pruned", _HAND)
            if trial.over:
                self._settle(trial)

    def close(self, status: str) -> dict[str, Any]:
        """Leave what is unfinished for another session, and close the study.

        Returns:
            ``best`` (a number), ``best_value``, ``best_params``, ``best_folder``, ``front`` (with
            several metrics), ``counts`` by state, ``repeats``, ``metrics`` and ``directions``.
        """
        for trial in self._live.values():
            if trial.seed is None:
                self._study_recorder.wait(trial, f"the sweep ended as {status}")
        summary = self._study_recorder.summary()
        if (
            status == "completed"
            and self._study_recorder.begun
            and not self._study_recorder.leaderboard.values
        ):
            raise self._without_a_value()
        return summary

    def _without_a_value(self) -> SweepError:
        counts = ", ".join(
            f"{count} {state}" for state, count in self._study_recorder.counts.items()
        )
        last = (
            f"; the last failure: {self._study_recorder.last_failure}"
            if self._study_recorder.last_failure
            else ""
        )
        return SweepError(
            f"no trial of the sweep has a value: {counts or 'none has ended'}{last}",
            allowed="one complete trial or more",
            do="look into the trials' folders; sweep again when it is mended, or with more time: "
            "the study is gone on with",
        )
