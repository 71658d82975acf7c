"""Record the trials of a sweep in its study and in its events.

Imports Optuna; import this module inside functions only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from nbtoolkit.folds.folds import Folds
from nbtoolkit.run.events import FoldChanged, IntermediateReported, TrialChanged
from nbtoolkit.search.algorithm import EventWriter, RunningTrial, folder_of
from nbtoolkit.search.leaderboard import Leaderboard
from nbtoolkit.study.samplers import OUT_OF_MEMORY, broken, learns_from, limits_of
from nbtoolkit.study.storage import FILE
from nbtoolkit.study.study import IMPORTED, open_study
from nbtoolkit.study.sweep_config import SweepConfig


class DurationEstimator:
    """Estimates the duration of a job from finished ones.

    A parameter such as ``train.epochs`` scales the estimate. The estimate is a median: a first
    trial that loads data, or one on a busy device, must not count for more than one.
    """

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._whole: list[float] = []

    def note(self, params: Mapping[str, Any], seconds: float) -> None:
        """Note the duration of a finished job."""
        self._seconds.append(seconds / _length(params))
        self._whole.append(seconds)

    def predict(self, params: Mapping[str, Any]) -> float | None:
        """Return the expected seconds of a job; None before the first has finished."""
        return median(self._seconds) * _length(params) if self._seconds else None

    def usual(self) -> float | None:
        """Return the median seconds of all jobs; None before the first has finished."""
        return median(self._whole) if self._whole else None


def _length(params: Mapping[str, Any]) -> float:
    """Return the number of epochs or steps among the parameters; 1 without one."""
    for name, value in params.items():
        last = name.rpartition(".")[2]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if last in ("epochs", "max_steps", "n_epochs", "num_epochs") and number and value > 0:
            return float(value)
    return 1.0


_STATES = {
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
    "infeasible": TrialState.PRUNED,  # which samplers learn from, and FAIL they forget
}


class StudyRecorder:
    """Reads and writes the study of a sweep, and writes its events.

    Args:
        sweep_config: the sweep's settings.
        folds: the folds of each trial; None for none.
        folder: the sweep's folder.
        events: receives an event for each change.

    Raises:
        SweepError: the study in the folder belongs to another search.
    """

    def __init__(
        self, sweep_config: SweepConfig, folds: Folds | None, folder: Path, events: EventWriter
    ) -> None:
        self.sweep_config, self._events = sweep_config, events
        self.folds = None if folds is None else len(folds)
        space = sweep_config.make_space()
        self.study = open_study(folder / FILE, sweep_config, space, _identity(sweep_config, folds))
        self._learns_from = learns_from(sweep_config)
        self.limits = limits_of(sweep_config)
        self.leaderboard = Leaderboard(sweep_config.directions)
        self.costs = DurationEstimator()
        self.counts: Counter[str] = Counter()
        self._params: dict[int, dict[str, Any]] = {}
        self.interrupted: list[int] = []
        """Numbers of the trials that an earlier session left running."""
        self.last_failure = ""
        self.begun = 0
        """Number of trials started, in all sessions."""
        self._asked: list[tuple[int, dict[str, Any]]] = []
        for trial in self.study.trials():
            self._replay(trial)
        self._replay_repeats()

    @property
    def needed(self) -> list[str]:
        """The metrics that a job must report: objectives and constraints."""
        return list(
            dict.fromkeys([*self.sweep_config.metrics, *(one.metric for one in self.limits)])
        )

    @property
    def asked(self) -> int:
        """Number of trials that were asked for and not started."""
        return len(self._asked)

    @property
    def learns(self) -> bool:
        """True if the next trial's parameters depend on the results of others."""
        return self.begun + self.asked + self.study.imported >= self._learns_from

    def ask_ahead(self) -> None:
        """Ask for the next trial; if this session dies, the next one runs it."""
        self._asked.append(self.study.ask())

    def begin(self) -> RunningTrial:
        """Start a new trial."""
        self.begun += 1
        number, params = self._asked.pop(0) if self._asked else self.study.ask()
        return self._running(RunningTrial(number, params, self.folds))

    def resume(self) -> RunningTrial:
        """Resume the oldest interrupted trial."""
        number, params = self.study.resume(self.interrupted.pop(0))
        notes = self.study.user_attrs(number)
        scores = {i: notes[f"fold-{i}"] for i in range(self.folds or 0) if f"fold-{i}" in notes}
        trial = RunningTrial(number, params, self.folds, scores)
        trial.seconds = float(notes.get("seconds_before", 0.0))
        self.study.set_user_attr(number, "sessions", int(notes.get("sessions", 1)) + 1)
        self._events.note(f"trial {number} was interrupted and resumes")
        return self._running(trial)

    def intermediate(
        self, trial: RunningTrial, value: float, step: int | None, *, first: int = 0
    ) -> tuple[int, bool]:
        """Record a report; return its step, and True if the pruner ends the trial.

        Optuna's pruners count steps from 0 (``n_warmup_steps`` in MedianPruner's documentation).
        ``nb.fit`` counts finished epochs, so its ``first`` step is 1.
        """
        at, pruned = self.study.report(trial.number, value, None if step is None else step - first)
        at += first if step is not None else 0
        self._events.write(IntermediateReported(number=trial.number, step=at, value=value))
        return at, pruned

    def fold(
        self,
        trial: RunningTrial,
        fold: int,
        state: str,
        metrics: Mapping[str, float],
        seconds: float,
    ) -> None:
        """Record the result of a fold."""
        if state == "complete":
            self.study.set_user_attr(trial.number, f"fold-{fold}", dict(metrics))
        self.fold_event(trial, fold, state, metrics, seconds)

    def fold_event(
        self,
        trial: RunningTrial,
        fold: int,
        state: str,
        metrics: Mapping[str, float] | None = None,
        seconds: float | None = None,
    ) -> None:
        """Write an event on a fold."""
        event = FoldChanged(
            number=trial.number,
            fold=fold,
            state=state,
            metrics=dict(metrics or {}),
            seconds=seconds,
            folder=f"{trial.key}/fold-{fold}",
        )
        self._events.write(event)

    def complete(self, trial: RunningTrial, metrics: Mapping[str, float]) -> None:
        """End a trial with its metrics: complete, or infeasible if it violates a constraint."""
        values = [float(metrics[name]) for name in self.sweep_config.metrics]
        excess = {one.name: one.excess(metrics[one.metric]) for one in self.limits}
        if excess:
            self.study.constrain(trial.number, excess)
        reason = broken(self.limits, metrics)
        notes = {"seconds": trial.seconds, **({"reason": reason} if reason else {})}
        self.study.tell(trial.number, TrialState.COMPLETE, values, notes)
        best = reason is None and self.leaderboard.add(trial.number, values)
        self._end(trial, "infeasible" if reason else "complete", values, reason, best)

    def end(self, trial: RunningTrial, state: str, reason: str) -> None:
        """End a trial without a value: pruned, failed or infeasible (out of memory)."""
        if state == "infeasible":
            self.study.constrain(trial.number, {OUT_OF_MEMORY: 1.0})
        notes = {"seconds": trial.seconds, "reason": reason}
        self.study.tell(trial.number, _STATES[state], (), notes)
        if state == "failed":
            self.last_failure = f"trial {trial.number}, {reason}"
        self._end(trial, state, None, reason, best=False)

    def wait(self, trial: RunningTrial, reason: str) -> None:
        """Leave a trial to the next session: it stays open in the study."""
        self.study.set_user_attr(trial.number, "seconds_before", trial.seconds)
        self._event(trial.number, "waiting", trial.params, reason=reason, seconds=trial.seconds)

    def repeated(self, number: int, seed: int, value: float) -> None:
        """Record the value of a re-evaluation."""
        self.study.optuna.set_user_attr(f"repeat:{number}:{seed}", value)
        self.leaderboard.repeats.setdefault(number, {})[seed] = value
        self._events.note(f"trial {number} re-evaluated with seed {seed}: {value:.6g}")

    def not_repeated(self, number: int, seed: int, reason: str) -> None:
        """Record a failed re-evaluation."""
        self._events.note(
            f"trial {number}, re-evaluated with seed {seed}, failed: {reason}", "warning"
        )

    def name_winner(self) -> None:
        """Write the best trial's event again, with the mean of its re-evaluations."""
        best = self.leaderboard.best()
        if best is not None:
            values, params = [self.leaderboard.value(best)], self._params[best]
            self._event(best, "complete", params, values=values, best=True)

    def params(self, number: int) -> dict[str, Any]:
        """Return a trial's parameters, constants included."""
        return self._params[number]

    def summary(self) -> dict[str, Any]:
        """Return the state of the sweep, for ``result.json``."""
        best = self.leaderboard.best()
        several = len(self.sweep_config.metrics) > 1
        return {
            "metrics": list(self.sweep_config.metrics),
            "directions": list(self.sweep_config.directions),
            "counts": dict(self.counts),
            "best": None if several else best,
            "best_value": None if several or best is None else self.leaderboard.value(best),
            "best_params": None if several or best is None else self._params[best],
            "best_folder": None if several or best is None else folder_of(best),
            "front": self.leaderboard.front() if several else None,
            "repeats": {str(n): {str(s): v for s, v in by.items()} for n, by in self._repeats()},
        }

    def _repeats(self) -> list[tuple[int, dict[int, float]]]:
        return sorted(self.leaderboard.repeats.items())

    def _running(self, trial: RunningTrial) -> RunningTrial:
        self._params[trial.number] = trial.params
        self._event(trial.number, "running", trial.params)
        return trial

    def _end(
        self,
        trial: RunningTrial,
        state: str,
        values: list[float] | None,
        reason: str | None,
        best: bool,
    ) -> None:
        self.counts[state] += 1
        self._event(
            trial.number,
            state,
            trial.params,
            values=values,
            reason=reason,
            seconds=trial.seconds,
            best=best,
        )

    def _event(
        self,
        number: int,
        state: str,
        params: Mapping[str, Any],
        *,
        values: list[float] | None = None,
        reason: str | None = None,
        seconds: float | None = None,
        best: bool = False,
    ) -> None:
        event = TrialChanged(
            number=number,
            state=state,
            params=dict(params),
            value=values[0] if values and len(values) == 1 else None,
            values=values or [],
            seconds=seconds,
            reason=reason,
            folder=folder_of(number),
            best=best,
        )
        self._events.write(event)

    # --- earlier sessions ---

    def _replay(self, trial: FrozenTrial) -> None:
        if trial.state == TrialState.WAITING:
            return  # one of first_trials, not started
        self.begun += 1
        if trial.state == TrialState.RUNNING:
            self.interrupted.append(trial.number)
            return
        params = self.sweep_config.make_space().decode(trial.params)
        self._params[trial.number] = params
        reason = trial.user_attrs.get("reason")
        self.counts[_state(trial)] += 1
        if trial.state == TrialState.COMPLETE:
            seconds = float(trial.user_attrs.get("seconds", 0.0))
            self.costs.note(params, seconds / (self.folds or 1))
            if reason is None:
                self.leaderboard.add(trial.number, trial.values)

    def _replay_repeats(self) -> None:
        for key, value in self.study.optuna.user_attrs.items():
            if key.startswith("repeat:"):
                _, number, seed = key.split(":")
                self.leaderboard.repeats.setdefault(int(number), {})[int(seed)] = value


def _state(trial: FrozenTrial) -> str:
    """Return the final state of a trial."""
    if any(one > 0 for one in trial.user_attrs.get("constraints", {}).values()):
        return "infeasible"
    states = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned"}
    return states.get(trial.state, "failed")


def trials_in(study: optuna.Study, sweep_config: SweepConfig) -> list[TrialChanged]:
    """Return the events of the trials that have ended, from the study.

    Args:
        study: the sweep's study.
        sweep_config: the sweep's settings.
    """
    space, imported = sweep_config.make_space(), int(study.user_attrs.get(IMPORTED, 0))
    found: list[TrialChanged] = []
    for trial in study.get_trials(deepcopy=False)[imported:]:
        if trial.state.is_finished():
            complete = trial.state == TrialState.COMPLETE
            event = TrialChanged(
                t=trial.datetime_complete.timestamp() if trial.datetime_complete else 0.0,
                number=trial.number,
                state=_state(trial),
                params=space.decode(trial.params),
                value=trial.value if complete and len(sweep_config.metrics) == 1 else None,
                values=trial.values if complete else [],
                seconds=trial.user_attrs.get("seconds"),
                reason=trial.user_attrs.get("reason"),
                folder=folder_of(trial.number),
            )
            found.append(event)
    return found


def _identity(sweep_config: SweepConfig, folds: Folds | None) -> dict[str, Any]:
    """Return what must not change when a study is resumed."""
    space = {f"space.{name}": one for name, one in sweep_config.make_space().to_dict().items()}
    return {
        **space,
        "metric": list(sweep_config.metrics),
        "direction": list(sweep_config.directions),
        "value": sweep_config.study.trial_value,
        "constraints": sweep_config.constraints.to_dict(),
        "seed": sweep_config.study.seed,
        "folds": None if folds is None else folds.hash,
    }
