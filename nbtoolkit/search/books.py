"""Books: what a sweep writes about its trials: the study, the events, the standings.

Imports Optuna: load it late.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from nbtoolkit.runtime.events import Event
from nbtoolkit.search.costs import Costs
from nbtoolkit.search.limits import OUT_OF_MEMORY, broken, limits_of
from nbtoolkit.search.live_trial import LiveTrial, folder_of
from nbtoolkit.search.mounts import local_folder
from nbtoolkit.search.program import Diary
from nbtoolkit.search.samplers import learns_from
from nbtoolkit.search.standings import Standings
from nbtoolkit.search.study import FILE, IMPORTED, copy_study, open_study
from nbtoolkit.search.wishes import Wishes

_STATES = {
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
    "infeasible": TrialState.PRUNED,  # which samplers learn from, and FAIL they forget
}


class Books:
    """The study of one sweep, opened, with all that earlier sessions wrote.

    Args:
        wishes: what is wished of the sweep.
        content: see :mod:`nbtoolkit.search.sweep_program`.
        folder: the sweep's.
        diary: where events go.

    Raises:
        SweepError: the study in the folder was made for another search.
    """

    def __init__(
        self, wishes: Wishes, content: Mapping[str, Any], folder: Path, diary: Diary
    ) -> None:
        self.wishes, self._diary = wishes, diary
        folds = content.get("folds")
        self.folds: int | None = folds["count"] if folds else None
        local = content.get("local") or local_folder(folder)
        self._file, self._copy = _files(folder, local)
        space = wishes.make_space()
        self.study = open_study(self._file, wishes, space, _identity(wishes, folds))
        self._learns_from = learns_from(wishes)
        self.limits = limits_of(wishes)
        self.standings = Standings(wishes.directions)
        self.costs = Costs()
        self.counts: Counter[str] = Counter()
        self._params: dict[int, dict[str, Any]] = {}
        self.interrupted: list[int] = []
        """Trials that were running when an earlier session ended."""
        self.last_failure = ""
        self.begun = 0
        """Trials that were begun, in all sessions."""
        self._asked: list[tuple[int, dict[str, Any]]] = []
        for trial in self.study.trials():
            self._replay(trial)
        self._replay_repeats()

    @property
    def needed(self) -> list[str]:
        """The metrics that a job must report."""
        return list(dict.fromkeys([*self.wishes.metrics, *(one.metric for one in self.limits)]))

    @property
    def asked(self) -> int:
        """How many trials were asked for ahead, and not begun."""
        return len(self._asked)

    @property
    def learns(self) -> bool:
        """Whether the parameters of the next trial depend on how others ended."""
        return self.begun + self.asked + self.study.imported >= self._learns_from

    def ask_ahead(self) -> None:
        """Have the next trial's parameters drawn; a session that dies now leaves it to the next."""
        self._asked.append(self.study.ask())

    def begin(self) -> LiveTrial:
        """Begin a new trial."""
        self.begun += 1
        number, params = self._asked.pop(0) if self._asked else self.study.ask()
        return self._running(LiveTrial(number, params, self.folds))

    def take_up(self) -> LiveTrial:
        """Go on with the oldest trial that was interrupted."""
        number, params = self.study.take_up(self.interrupted.pop(0))
        notes = self.study.notes(number)
        scores = {i: notes[f"fold-{i}"] for i in range(self.folds or 0) if f"fold-{i}" in notes}
        trial = LiveTrial(number, params, self.folds, scores)
        trial.seconds = float(notes.get("seconds_before", 0.0))
        self.study.note(number, "sessions", int(notes.get("sessions", 1)) + 1)
        self._diary.note(f"trial {number} was interrupted; it is taken up again")
        return self._running(trial)

    def intermediate(
        self, trial: LiveTrial, value: float, step: int | None, *, first: int = 0
    ) -> tuple[int, bool]:
        """Write a report; the step, and whether the pruner ends the trial.

        Optuna's pruners take steps to begin at 0 (``n_warmup_steps`` of MedianPruner's
        documentation), ``nb.fit`` counts epochs that are done: ``first`` is 1.
        """
        at, pruned = self.study.report(trial.number, value, None if step is None else step - first)
        at += first if step is not None else 0
        self._diary.write("intermediate", number=trial.number, step=at, value=value)
        return at, pruned

    def fold(
        self, trial: LiveTrial, fold: int, state: str, metrics: Mapping[str, float], seconds: float
    ) -> None:
        """Write how a fold ended."""
        if state == "complete":
            self.study.note(trial.number, f"fold-{fold}", dict(metrics))
        self.fold_event(trial, fold, state, metrics, seconds)

    def fold_event(
        self,
        trial: LiveTrial,
        fold: int,
        state: str,
        metrics: Mapping[str, float] | None = None,
        seconds: float | None = None,
    ) -> None:
        """Write what became of a fold."""
        self._diary.write(
            "fold",
            number=trial.number,
            fold=fold,
            state=state,
            metrics=dict(metrics or {}),
            seconds=seconds,
            folder=f"{trial.key}/fold-{fold}",
        )

    def complete(self, trial: LiveTrial, metrics: Mapping[str, float]) -> None:
        """End a trial with its metrics: complete, or infeasible where it breaks a limit."""
        values = [float(metrics[name]) for name in self.wishes.metrics]
        excess = {one.name: one.excess(metrics[one.metric]) for one in self.limits}
        if excess:
            self.study.constrain(trial.number, excess)
        reason = broken(self.limits, metrics)
        notes = {"seconds": trial.seconds, **({"reason": reason} if reason else {})}
        self.study.tell(trial.number, TrialState.COMPLETE, values, notes)
        best = reason is None and self.standings.add(trial.number, values)
        self._end(trial, "infeasible" if reason else "complete", values, reason, best)

    def end(self, trial: LiveTrial, state: str, reason: str) -> None:
        """End a trial without a value: pruned, failed or infeasible (for lack of memory)."""
        if state == "infeasible":
            self.study.constrain(trial.number, {OUT_OF_MEMORY: 1.0})
        notes = {"seconds": trial.seconds, "reason": reason}
        self.study.tell(trial.number, _STATES[state], (), notes)
        if state == "failed":
            self.last_failure = f"trial {trial.number}, {reason}"
        self._end(trial, state, None, reason, best=False)

    def wait(self, trial: LiveTrial, reason: str) -> None:
        """A trial waits for another session: it stays open in the study."""
        self.study.note(trial.number, "seconds_before", trial.seconds)
        self._event(trial.number, "waiting", trial.params, reason=reason, seconds=trial.seconds)

    def repeated(self, number: int, seed: int, value: float) -> None:
        """A leader was trained again with another seed."""
        self.study.remember(f"repeat:{number}:{seed}", value)
        self.standings.repeats.setdefault(number, {})[seed] = value
        self._diary.note(f"trial {number} again, with seed {seed}: {value:.6g}")

    def not_repeated(self, number: int, seed: int, reason: str) -> None:
        """A repetition of a leader came to nothing."""
        self._diary.note(f"trial {number} again, with seed {seed}, failed: {reason}", "warning")

    def name_winner(self) -> None:
        """Write the best trial's event again, with the mean of its repetitions."""
        best = self.standings.best()
        if best is not None:
            values, params = [self.standings.value(best)], self._params[best]
            self._event(best, "complete", params, values=values, best=True)

    def params(self, number: int) -> dict[str, Any]:
        """A trial's parameters, constants too."""
        return self._params[number]

    def summary(self) -> dict[str, Any]:
        """Where the sweep stands, for ``result.json``."""
        best = self.standings.best()
        several = len(self.wishes.metrics) > 1
        return {
            "metrics": list(self.wishes.metrics),
            "directions": list(self.wishes.directions),
            "counts": dict(self.counts),
            "best": None if several else best,
            "best_value": None if several or best is None else self.standings.value(best),
            "best_params": None if several or best is None else self._params[best],
            "best_folder": None if several or best is None else folder_of(best),
            "front": self.standings.front() if several else None,
            "repeats": {str(n): {str(s): v for s, v in by.items()} for n, by in self._repeats()},
        }

    def save(self) -> None:
        """Copy the study into the sweep's folder, where it lives elsewhere."""
        if self._copy is not None:
            copy_study(self._file, self._copy)

    def close(self) -> None:
        """Close the study."""
        self.study.close()
        self.save()

    def _repeats(self) -> list[tuple[int, dict[int, float]]]:
        return sorted(self.standings.repeats.items())

    def _running(self, trial: LiveTrial) -> LiveTrial:
        self._params[trial.number] = trial.params
        self._event(trial.number, "running", trial.params)
        return trial

    def _end(
        self,
        trial: LiveTrial,
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
        self.save()

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
        self._diary.write(
            "trial",
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

    # --- what earlier sessions wrote ---

    def _replay(self, trial: FrozenTrial) -> None:
        if trial.state == TrialState.WAITING:
            return  # a first trial, not begun
        self.begun += 1
        if trial.state == TrialState.RUNNING:
            self.interrupted.append(trial.number)
            return
        params = self.wishes.make_space().meant(trial.params)
        self._params[trial.number] = params
        reason = trial.user_attrs.get("reason")
        self.counts[_state(trial)] += 1
        if trial.state == TrialState.COMPLETE:
            seconds = float(trial.user_attrs.get("seconds", 0.0))
            self.costs.note(params, seconds / (self.folds or 1))
            if reason is None:
                self.standings.add(trial.number, trial.values)

    def _replay_repeats(self) -> None:
        for key, value in self.study.remembered().items():
            if key.startswith("repeat:"):
                _, number, seed = key.split(":")
                self.standings.repeats.setdefault(int(number), {})[int(seed)] = value


def _state(trial: FrozenTrial) -> str:
    """How a trial ended."""
    if any(one > 0 for one in trial.user_attrs.get("constraints", {}).values()):
        return "infeasible"
    states = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned"}
    return states.get(trial.state, "failed")


def trials_in(study: optuna.Study, wishes: Wishes) -> list[Event]:
    """The trials that have ended, as the events that told of them.

    Args:
        study: of the sweep.
        wishes: of the sweep.
    """
    space, imported = wishes.make_space(), int(study.user_attrs.get(IMPORTED, 0))
    found: list[Event] = []
    for trial in study.get_trials(deepcopy=False)[imported:]:
        if trial.state.is_finished():
            complete = trial.state == TrialState.COMPLETE
            event = {
                "t": trial.datetime_complete.timestamp() if trial.datetime_complete else 0.0,
                "type": "trial",
                "number": trial.number,
                "state": _state(trial),
                "params": space.meant(trial.params),
                "value": trial.value if complete and len(wishes.metrics) == 1 else None,
                "values": trial.values if complete else [],
                "seconds": trial.user_attrs.get("seconds"),
                "reason": trial.user_attrs.get("reason"),
                "folder": folder_of(trial.number),
            }
            found.append(event)
    return found


def _identity(wishes: Wishes, folds: Mapping[str, Any] | None) -> dict[str, Any]:
    """What must be the same when a study is gone on with."""
    space = {f"space.{name}": one for name, one in wishes.make_space().to_dict().items()}
    return {
        **space,
        "metric": list(wishes.metrics),
        "direction": list(wishes.directions),
        "value": wishes.study.value,
        "constraints": wishes.constraints.to_dict(),
        "seed": wishes.study.seed,
        "folds": folds.get("hash") if folds else None,
    }


def _files(folder: Path, local: str | Path | None) -> tuple[Path, Path | None]:
    """Where the study is written, and where it is copied to (None: nowhere)."""
    kept = folder / FILE
    if local is None:
        return kept, None
    file = Path(local) / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    if kept.exists() and not (file.exists() and _written(file) >= _written(kept)):
        shutil.copy(kept, file)  # nobody writes: the sweep's lock is ours
    return file, kept


def _written(file: Path) -> float:
    return file.stat().st_mtime
