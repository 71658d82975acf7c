"""Record the trials of a sweep in its study and in its events.

Imports Optuna; import this module inside functions only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from nbtoolkit.folds.folds import Folds
from nbtoolkit.run.events import FoldChanged, IntermediateReported, TrialChanged
from nbtoolkit.search.algorithm import EventWriter, RunningTrial, folder_of
from nbtoolkit.study.samplers import OUT_OF_MEMORY, Violations, broken, learns_from, limits_of
from nbtoolkit.study.study import FILE, IMPORTED, open_study
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


class Leaderboard:
    """Ranks complete trials that satisfy the constraints.

    Args:
        directions: ``"maximize"`` or ``"minimize"`` for each metric.
    """

    def __init__(self, directions: Sequence[str]) -> None:
        self._signs = [-1.0 if one == "maximize" else 1.0 for one in directions]
        self.values: dict[int, tuple[float, ...]] = {}

    def add(self, number: int, values: Sequence[float]) -> bool:
        """Add a trial; return True if it is better than all earlier ones."""
        new = self._ranked(values)
        beaten = any(self._beats(self._ranked(other), new) for other in self.values.values())
        self.values[number] = tuple(values)
        return not beaten

    def best(self) -> int | None:
        """Return the best trial, the oldest of equal ones; None if there is no trial."""
        return min(self.values, key=lambda n: (self._ranked(self.values[n]), n), default=None)

    def front(self) -> list[int]:
        """Return the numbers of the Pareto-optimal trials, in ascending order."""
        ranked = {n: self._ranked(values) for n, values in self.values.items()}
        return sorted(
            n
            for n, values in ranked.items()
            if not any(other != values and self._beats(other, values) for other in ranked.values())
        )

    def _ranked(self, values: Sequence[float]) -> tuple[float, ...]:
        """Return the values with signs such that lower is better."""
        return tuple(sign * v for sign, v in zip(self._signs, values, strict=True))

    def _beats(self, one: Sequence[float], other: Sequence[float]) -> bool:
        """Return True if ``one`` is at least as good in every metric."""
        return all(a <= b for a, b in zip(one, other, strict=True))


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
        SweepError: the study belongs to another search.
    """

    def __init__(
        self,
        sweep_config: SweepConfig,
        folds: Folds | None,
        folder: Path,
        events: EventWriter,
    ) -> None:
        self.sweep_config, self._events = sweep_config, events
        self.folds = None if folds is None else len(folds)
        identity = _identity(sweep_config, folds)
        space = sweep_config.make_space()
        self.study = open_study(folder / FILE, sweep_config, space, identity)
        self._learns_from = learns_from(sweep_config)
        self.limits = limits_of(sweep_config)
        self.leaderboard = Leaderboard(sweep_config.directions)
        self.costs = DurationEstimator()
        self.counts: Counter[str] = Counter()
        self.params: dict[int, dict[str, Any]] = {}
        """Parameters of each trial, constants included."""
        self.interrupted: list[int] = []
        """Numbers of the trials that an earlier session left running."""
        self.last_failure = ""
        self.begun = 0
        """Number of trials started, in all sessions."""
        self.added = self.study.added
        """Number of trials that handles have added."""
        self._asked: list[tuple[int, dict[str, Any]]] = []
        self._violations = Violations(self.limits)
        for trial in self.study.trials():
            self._replay(trial)

    @property
    def needed(self) -> list[str]:
        """The metrics that a job must report: objectives and constraints."""
        limited = [limit.metric for limit in self.limits]
        return list(dict.fromkeys([*self.sweep_config.metrics, *limited]))

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
        number, params = self._asked.pop(0) if self._asked else self.study.ask()
        self.begun += 1
        return self._running(RunningTrial(number, params, self.folds))

    def resume(self) -> RunningTrial:
        """Resume the oldest interrupted trial."""
        number, params = self.study.resume(self.interrupted.pop(0))
        notes = self.study.user_attrs(number)
        finished = (i for i in range(self.folds or 0) if f"fold-{i}" in notes)
        scores = {i: notes[f"fold-{i}"] for i in finished}
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
        metrics: Mapping[str, float] | None = None,
        seconds: float | None = None,
    ) -> None:
        """Record the state of a fold; the study keeps the metrics of a complete one."""
        event = FoldChanged(
            number=trial.number,
            fold=fold,
            state=state,
            metrics=dict(metrics or {}),
            seconds=seconds,
            folder=f"{trial.key}/fold-{fold}",
        )
        if state == "complete":
            self.study.set_user_attr(trial.number, f"fold-{fold}", event.metrics)
        self._events.write(event)

    def complete(self, trial: RunningTrial, metrics: Mapping[str, float]) -> None:
        """End a trial with its metrics: complete, or infeasible if it violates a constraint."""
        values = [float(metrics[name]) for name in self.sweep_config.metrics]
        excess = {one.name: one.excess(metrics[one.metric]) for one in self.limits}
        if excess:
            self.study.constrain(trial.number, excess)
        reason = broken(self.limits, metrics)
        self._violations.add(trial.number, reason, excess)
        notes = {"seconds": trial.seconds, **({"reason": reason} if reason else {})}
        self.study.tell(trial.number, TrialState.COMPLETE, values, notes)
        best = reason is None and self.leaderboard.add(trial.number, values)
        self._end(trial, "infeasible" if reason else "complete", reason, values, best=best)

    def end(self, trial: RunningTrial, state: str, reason: str) -> None:
        """End a trial without a value: pruned, failed or infeasible (out of memory)."""
        if state == "infeasible":
            self.study.constrain(trial.number, {OUT_OF_MEMORY: 1.0})
        notes = {"seconds": trial.seconds, "reason": reason}
        self.study.tell(trial.number, _STATES[state], (), notes)
        if state == "failed":
            self.last_failure = f"trial {trial.number}, {reason}"
        self._end(trial, state, reason)

    def wait(self, trial: RunningTrial, reason: str) -> None:
        """Leave a trial to the next session: it stays open in the study."""
        self.study.set_user_attr(trial.number, "seconds_before", trial.seconds)
        self._event(trial.number, "waiting", reason=reason, seconds=trial.seconds)

    def summary(self) -> dict[str, Any]:
        """Return the state of the sweep, for the last event."""
        several = len(self.sweep_config.metrics) > 1
        best = None if several else self.leaderboard.best()
        return {
            "metrics": list(self.sweep_config.metrics),
            "directions": list(self.sweep_config.directions),
            "counts": dict(self.counts),
            "best": best,
            "best_value": None if best is None else self.leaderboard.values[best][0],
            "best_params": None if best is None else self.params[best],
            "best_folder": None if best is None else folder_of(best),
            "front": self.leaderboard.front() if several else None,
            "infeasible": "" if self.leaderboard.values else self._violations.text(),
        }

    def add(self, count: int) -> None:
        """Add trials to the total."""
        self.study.add(count)
        self.added = self.study.added

    def _running(self, trial: RunningTrial) -> RunningTrial:
        self.params[trial.number] = trial.params
        self._event(trial.number, "running")
        return trial

    def _end(
        self,
        trial: RunningTrial,
        state: str,
        reason: str | None,
        values: Sequence[float] = (),
        *,
        best: bool = False,
    ) -> None:
        self.counts[state] += 1
        about = {"reason": reason, "seconds": trial.seconds, "best": best}
        self._event(trial.number, state, values=values, **about)

    def _event(
        self, number: int, state: str, *, values: Sequence[float] = (), **about: Any
    ) -> None:
        event = TrialChanged(
            number=number,
            state=state,
            params=dict(self.params[number]),
            value=values[0] if len(values) == 1 else None,
            values=list(values),
            folder=folder_of(number),
            **about,
        )
        self._events.write(event)

    # --- earlier sessions ---

    def _replay(self, trial: FrozenTrial) -> None:
        """Note a trial that an earlier session has started."""
        if trial.state == TrialState.WAITING:
            return  # one of first_trials, not started
        self.begun += 1
        if trial.state == TrialState.RUNNING:
            self.interrupted.append(trial.number)
            return
        params = self.sweep_config.make_space().decode(trial.params)
        self.params[trial.number] = params
        reason = trial.user_attrs.get("reason")
        self.counts[_state(trial)] += 1
        if trial.state == TrialState.COMPLETE:
            seconds = float(trial.user_attrs.get("seconds", 0.0))
            self.costs.note(params, seconds / (self.folds or 1))
            if reason is None:
                self.leaderboard.add(trial.number, trial.values)
            else:
                excess = trial.user_attrs.get("constraints", {})
                self._violations.add(trial.number, reason, excess)


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
    imported = int(study.user_attrs.get(IMPORTED, 0))
    trials = study.get_trials(deepcopy=False)[imported:]
    return [_ended(trial, sweep_config) for trial in trials if trial.state.is_finished()]


def _ended(trial: FrozenTrial, sweep_config: SweepConfig) -> TrialChanged:
    """Return the event of a trial that has ended."""
    complete, attrs = trial.state == TrialState.COMPLETE, trial.user_attrs
    return TrialChanged(
        t=trial.datetime_complete.timestamp() if trial.datetime_complete else 0.0,
        number=trial.number,
        state=_state(trial),
        params=sweep_config.make_space().decode(trial.params),
        value=trial.value if complete and len(sweep_config.metrics) == 1 else None,
        values=trial.values if complete else [],
        seconds=attrs.get("seconds"),
        reason=attrs.get("reason"),
        folder=folder_of(trial.number),
    )


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
