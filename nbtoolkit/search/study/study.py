"""Open the Optuna study of a sweep, for its one writer (the scheduler) or for reading.

Trials that were running when a session died resume with the same number, parameters and folder,
hence from the same checkpoint. The study is stored in Optuna's journal, a file with one line of
JSON per change. Others may read it meanwhile, also in a folder that is read-only. This module
imports Optuna: import it late.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from nbtoolkit.errors import SweepError
from nbtoolkit.run.events import TrialChanged
from nbtoolkit.run.paths import reading
from nbtoolkit.search.study.samplers import TrialSamplers, Violations, limits_of, make_pruner

if TYPE_CHECKING:
    from nbtoolkit.search.folds.folds import Folds
    from nbtoolkit.search.study.space import Params, Space
    from nbtoolkit.search.study.sweep_config import SweepConfig

FILE = "study.jsonl"
_STATES = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
_FOLD = "fold-"
_IDENTITY = "identity"
_PREPARED = "prepared"
IMPORTED = "imported"
_ADDED = "added"


class SearchStudy:
    """An open study. Made by :func:`open_study`."""

    def __init__(
        self, study: optuna.Study, storage: BaseStorage, sweep_config: SweepConfig, space: Space
    ) -> None:
        self.optuna = study
        self._storage = storage
        self._sweep_config = sweep_config
        self._space = space
        self.imported = int(study.user_attrs.get(IMPORTED, 0))
        """The number of trials from a warm start. They are the first ones, and do not count."""
        # First trials and a warm start's, which no sampler draws.
        not_drawn = self.imported + len(sweep_config.first_trials)
        self._samplers = TrialSamplers(sweep_config, space, offset=not_drawn)
        self._running: dict[int, Trial] = {}

    @property
    def added(self) -> int:
        """The number of trials that handles have added."""
        return int(self.optuna.user_attrs.get(_ADDED, 0))

    def add(self, count: int) -> None:
        """Add trials."""
        self.optuna.set_user_attr(_ADDED, self.added + count)

    def trials(self) -> list[FrozenTrial]:
        """Return this sweep's own trials by number, with those that wait; do not change them."""
        return self.optuna.get_trials(deepcopy=False)[self.imported :]

    def trial(self, number: int) -> FrozenTrial:
        """Return a trial. It must not be changed."""
        return self.optuna.get_trials(deepcopy=False)[number]

    @property
    def trials_started(self) -> int:
        """The number of trials started, in all sessions."""
        return sum(trial.state != TrialState.WAITING for trial in self.trials())

    @property
    def some_ended(self) -> bool:
        """Whether a trial has ended."""
        return any(trial.state.is_finished() for trial in self.trials())

    def counts(self) -> Counter[str]:
        """Return the number of trials that have ended, by state."""
        return Counter(state_of(trial) for trial in self.trials() if trial.state.is_finished())

    def best(self) -> list[FrozenTrial]:
        """Return the best trial, or the Pareto front of several metrics; empty if there is none."""
        return best_of(self.trials(), self._sweep_config.directions)

    def last_failure(self) -> str:
        """Return the failed trial that has ended last, and why; empty if there is none."""
        failed = [trial for trial in self.trials() if trial.state == TrialState.FAIL]
        if not failed:
            return ""
        last = max(failed, key=lambda trial: trial.datetime_complete or trial.number)
        return f"trial {last.number}, {last.user_attrs.get('reason', '')}"

    def scores(self, number: int) -> dict[int, dict[str, float]]:
        """Return the metrics of a trial's finished folds, by fold."""
        notes = self.trial(number).user_attrs
        folds = [name.removeprefix(_FOLD) for name in notes if name.startswith(_FOLD)]
        return {int(fold): notes[f"{_FOLD}{fold}"] for fold in sorted(folds, key=int)}

    def reports(self, number: int) -> dict[int, float]:
        """Return what a trial has reported, by step."""
        return dict(self.trial(number).intermediate_values)

    def summary(self) -> dict[str, Any]:
        """Return the state of the sweep, for its last event.

        Returns:
            ``best`` (number of the best trial), ``best_value``, ``best_params``, ``best_folder``,
            ``front`` (with several metrics), ``infeasible`` (if no trial meets the constraints),
            ``counts`` by state, ``metrics`` and ``directions``.
        """
        best = self.best()
        several = len(self._sweep_config.directions) > 1
        winner = best[0] if best and not several else None
        return {
            "metrics": list(self._sweep_config.metrics),
            "directions": list(self._sweep_config.directions),
            "counts": dict(self.counts()),
            "best": None if winner is None else winner.number,
            "best_value": None if winner is None else winner.value,
            "best_params": None if winner is None else self._space.decode(winner.params),
            "best_folder": None if winner is None else folder_of(winner.number),
            "front": [trial.number for trial in best] if several else None,
            "infeasible": "" if best else self._violations(),
        }

    def _violations(self) -> str:
        """How many trials violate a constraint, and which comes nearest; empty: none."""
        violations = Violations(limits_of(self._sweep_config))
        for trial in self.trials():
            if trial.state == TrialState.COMPLETE and state_of(trial) == "infeasible":
                notes = trial.user_attrs
                violations.add(trial.number, notes["reason"], notes["constraints"])
        return violations.text()

    def ask(self) -> tuple[int, Params]:
        """Begin a trial; returns its number, and its parameters as the study holds them."""
        trials = self.optuna.get_trials(deepcopy=False)
        waiting = (trial.number for trial in trials if trial.state == TrialState.WAITING)
        self._set_sampler(next(waiting, len(trials)))
        return self._suggest(self.optuna.ask())

    def resume(self, number: int) -> tuple[int, Params]:
        """Continue a trial that was running when its session died."""
        self._set_sampler(number)
        return self._suggest(Trial(self.optuna, self._id_of(number)))

    def report(self, number: int, value: float, step: int | None) -> tuple[int, bool]:
        """Store a report of a running trial; a repeated step is ignored.

        Returns:
            The step (by default the next one), and whether the pruner ends the trial.
        """
        trial = self._running[number]
        steps = self.trial(number).intermediate_values
        at = max(steps, default=-1) + 1 if step is None else step
        if at not in steps:
            trial.report(value, at)
        return at, trial.should_prune()

    def tell(
        self, number: int, state: TrialState, values: Sequence[float], attrs: Mapping[str, object]
    ) -> None:
        """End a trial.

        Args:
            number: the trial's.
            state: ``COMPLETE``, ``PRUNED`` or ``FAIL``.
            values: one for each metric, of a complete trial.
            attrs: user attributes to store with it.
        """
        trial = self._running.pop(number)
        for key, value in attrs.items():
            trial.set_user_attr(key, value)
        complete = state == TrialState.COMPLETE
        self.optuna.tell(trial, list(values) if complete else None, state=state)

    def constrain(self, number: int, excess: Mapping[str, float]) -> None:
        """Store by how much a trial exceeds each limit (0 or less if it does not)."""
        trial = self._running[number]
        trial.set_user_attr("constraints", dict(excess))
        if hasattr(trial, "set_constraint"):  # Optuna 5
            for name, amount in excess.items():
                trial.set_constraint(name, amount)

    def add_fold(self, number: int, fold: int, metrics: Mapping[str, float]) -> None:
        """Store the metrics of a running trial's finished fold."""
        self._running[number].set_user_attr(f"{_FOLD}{fold}", dict(metrics))

    def add_seconds(self, number: int, seconds: float) -> None:
        """Store how long a running trial has taken so far, for the session that resumes it."""
        self._running[number].set_user_attr("seconds", seconds)

    def _set_sampler(self, number: int) -> None:
        """Give the trial that begins next a sampler of its own."""
        self.optuna.sampler = self._samplers.of(number)

    def _id_of(self, number: int) -> int:
        study_id = self._storage.get_study_id_from_name(self.optuna.study_name)
        return self._storage.get_trial_id_from_study_id_trial_number(study_id, number)

    def _suggest(self, trial: Trial) -> tuple[int, Params]:
        self._space.suggest(trial)
        number = trial.number
        self._running[number] = trial
        # Read back, so that the trial trains with exactly what is stored.
        return number, self._space.decode(self.trial(number).params)


def state_of(trial: FrozenTrial) -> str:
    """Return a trial's state, as events name it."""
    excess = trial.user_attrs.get("constraints", {})
    if trial.state.is_finished() and any(amount > 0 for amount in excess.values()):
        return "infeasible"
    return _STATES[trial.state]


def best_of(trials: Iterable[FrozenTrial], directions: Sequence[str]) -> list[FrozenTrial]:
    """Return the best of the trials that are complete and feasible.

    Args:
        trials: by number.
        directions: ``"maximize"`` or ``"minimize"`` for each metric.

    Returns:
        With one metric the best trial, the oldest of equal ones; with several the Pareto front;
        empty if there is none.
    """
    signs = [-1.0 if direction == "maximize" else 1.0 for direction in directions]
    points = {
        trial.number: tuple(sign * value for sign, value in zip(signs, trial.values, strict=True))
        for trial in trials
        if state_of(trial) == "complete"
    }
    best = _front(points) if len(signs) > 1 else sorted(points, key=points.__getitem__)[:1]
    return [trial for trial in trials if trial.number in best]


def _front(points: Mapping[int, tuple[float, ...]]) -> list[int]:
    """Return the points that no other one beats; lower is better in each value."""
    return [
        number
        for number, point in points.items()
        if not any(_beats(other, point) for other in points.values())
    ]


def _beats(point: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return point != other and all(a <= b for a, b in zip(point, other, strict=True))


def trial_event(
    trial: FrozenTrial, space: Space, *, best: bool = False, waits: str | None = None
) -> TrialChanged:
    """Return the event of a trial's present state: the only one that is made of a trial.

    Args:
        trial: from the study.
        space: what is searched.
        best: it is the best trial so far.
        waits: why a running trial waits for another session; None: it runs.
    """
    state = state_of(trial) if waits is None else "waiting"
    attrs = trial.user_attrs
    values = trial.values or []
    return TrialChanged(
        number=trial.number,
        state=state,
        params=space.decode(trial.params),
        value=values[0] if len(values) == 1 else None,
        values=values,
        seconds=None if state == "running" else attrs.get("seconds"),
        reason=attrs.get("reason") if waits is None else waits,
        folder=folder_of(trial.number),
        best=best,
    )


def ended_trials(study: optuna.Study, space: Space) -> list[TrialChanged]:
    """Return the events of a study's trials that have ended, with the times of their ends."""
    imported = int(study.user_attrs.get(IMPORTED, 0))
    return [
        replace(trial_event(trial, space), t=trial.datetime_complete.timestamp())
        for trial in study.get_trials(deepcopy=False)[imported:]
        if trial.state.is_finished() and trial.datetime_complete
    ]


def folder_of(number: int) -> str:
    """Return a trial's folder, relative to the sweep's."""
    return f"trials/{number:04d}"


def identity_of(sweep_config: SweepConfig, folds: Folds | None) -> dict[str, Any]:
    """Return what must not change when a study is resumed."""
    space = {
        f"space.{name}": parameter
        for name, parameter in sweep_config.make_space().to_dict().items()
    }
    return {
        **space,
        "metric": list(sweep_config.metrics),
        "direction": list(sweep_config.directions),
        "value": sweep_config.study.trial_value,
        "constraints": sweep_config.constraints.to_dict(),
        "seed": sweep_config.study.seed,
        "folds": None if folds is None else folds.hash,
    }


def open_study(
    file: Path, sweep_config: SweepConfig, space: Space, identity: Mapping[str, object]
) -> SearchStudy:
    """Open a sweep's study, or create it.

    Args:
        file: its journal; the folder exists.
        sweep_config: objective, sampler, pruner, first trials, warm start.
        space: what is searched.
        identity: what must be the same whenever the study is resumed, as plain values.

    Raises:
        SweepError: the study in the file has another space, objective or folds.
        RunFileError: the file is damaged.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    name = sweep_config.study.name
    with reading(file):
        storage = open_journal(file)
        optuna.get_all_study_names(storage)
    _prepare(storage, sweep_config, space, identity, file)
    study = optuna.load_study(study_name=name, storage=storage, pruner=make_pruner(sweep_config))
    return SearchStudy(study, storage, sweep_config, space)


def _prepare(
    storage: BaseStorage,
    sweep_config: SweepConfig,
    space: Space,
    identity: Mapping[str, object],
    file: Path,
) -> None:
    """Create a study in a storage, or check that the one there is of the same search.

    Raises:
        SweepError: the study has another space, objective or folds.
    """
    name = sweep_config.study.name
    if name in optuna.get_all_study_names(storage):
        attrs = storage.get_study_user_attrs(storage.get_study_id_from_name(name))
        if attrs.get(_PREPARED):
            _refuse_another(attrs.get(_IDENTITY, {}), identity, file)
            return
        optuna.delete_study(study_name=name, storage=storage)  # cut off before its first trial
    _create(storage, sweep_config, space, identity)


def _create(
    storage: BaseStorage,
    sweep_config: SweepConfig,
    space: Space,
    identity: Mapping[str, object],
) -> None:
    """Create the study with all that precedes the first trial; ``_PREPARED`` marks it complete."""
    study = optuna.create_study(
        study_name=sweep_config.study.name,
        storage=storage,
        directions=list(sweep_config.directions),
    )
    imported = import_trials(study, sweep_config, space) if sweep_config.warm_start else 0
    study.set_user_attr(IMPORTED, imported)
    for point in sweep_config.first_trials:
        study.enqueue_trial(space.encode(point.to_dict()))
    study.set_user_attr(_IDENTITY, dict(identity))
    study.set_user_attr(_PREPARED, True)


def _refuse_another(
    stored: Mapping[str, object], identity: Mapping[str, object], file: Path
) -> None:
    lines = [
        f"\n    {name}: was {stored.get(name)!r}, is {identity.get(name)!r}"
        for name in dict.fromkeys([*stored, *identity])
        if stored.get(name) != identity.get(name)
    ]
    if lines:
        raise SweepError(
            f"the study in {file} was made for another search:{''.join(lines)}",
            allowed="the same space, objective and folds (budget and placement may change)",
            do='restore them, or start again with resume="never"',
        )


def import_trials(study: optuna.Study, sweep_config: SweepConfig, space: Space) -> int:
    """Add another study's complete trials to a new one, for the sampler to learn from.

    Trials with parameters outside the space are left out. The others keep their values, and
    have the user attribute ``warm_start``.

    Returns:
        The number of trials added.

    Raises:
        SweepError: there is no such study, it has other directions, or none of its trials fits.
    """
    source = str(sweep_config.warm_start)
    other = _load(source)
    if other.directions != study.directions:
        raise SweepError(
            f"warm_start: the study {source} has other directions",
            allowed=f"a study with these: {', '.join(sweep_config.directions)}",
        )
    complete = other.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    distributions = space.distributions
    fitting = 0
    for trial in complete:
        try:
            if set(trial.params) - set(space.decode(trial.params)):
                continue  # a condition of the space hides a parameter
            imported = create_trial(
                params=trial.params,
                distributions={name: distributions[name] for name in trial.params},
                values=trial.values,
                user_attrs={"warm_start": source, "number": trial.number},
            )
        except (KeyError, ValueError, TypeError):
            continue  # a parameter is unknown or missing, or the space never has its value
        study.add_trial(imported)
        fitting += 1
    if not fitting:
        raise SweepError(
            f"warm_start: none of the {len(complete)} complete trials in {source} fits the space",
            allowed=f"trials with values of {', '.join(space.distributions)}",
            do="remove warm_start, or widen the space",
        )
    return fitting


def _load(source: str) -> optuna.Study:
    path = Path(source).expanduser()
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise SweepError(
            f"warm_start: there is no study {source}",
            allowed="a sweep's folder, or the file of a study: Optuna's journal",
        )
    return read_study(file)


class FileLock(JournalFileOpenLock):
    """Locks a journal with ``flock`` on the file itself.

    Optuna's own locks are files: a killed process leaves its lock, and the next one waits for 30 s.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._fd = -1

    def acquire(self) -> bool:
        """Wait for the lock."""
        fd = os.open(self._file, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except BaseException:
            os.close(fd)
            raise
        # Only now: until then, another thread that shares this object holds the lock.
        self._fd = fd
        return True

    def release(self) -> None:
        """Release the lock."""
        fd = self._fd
        self._fd = -1
        os.close(fd)


class ReadOnlyBackend(JournalFileBackend):
    """Reads a journal, and refuses to write."""

    def append_logs(self, logs: list[dict[str, object]]) -> None:
        """Refuse to write.

        Raises:
            SweepError: always.
        """
        raise SweepError(
            "the study of a sweep cannot be changed: it was opened for reading",
            allowed="reading its trials, parameters and values",
            do="copy it with optuna.copy_study, and change the copy",
        )


def open_journal(file: Path) -> JournalStorage:
    """Open a journal for writing, or create it; the caller holds the sweep's lock.

    It removes a last line that a killed session left unfinished: Optuna skips such a line only as
    long as nothing follows it.
    """
    if file.exists():
        with file.open("rb+") as opened:
            opened.truncate(opened.read().rfind(b"\n") + 1)
    return JournalStorage(JournalFileBackend(str(file), FileLock(file)))


def read_study(file: Path) -> optuna.Study:
    """Open the only study in a journal for reading.

    Raises:
        SweepError: there is no study or more than one, or the file cannot be read.
    """
    try:
        with file.open("rb"):  # Optuna would create a missing file
            storage = JournalStorage(ReadOnlyBackend(str(file)))
        names = optuna.get_all_study_names(storage)
    except Exception as error:  # a damaged journal may raise anything
        raise SweepError(
            f"the study {file.name} cannot be read: {type(error).__name__}: {error}",
            allowed="the journal that a sweep writes",
            do="copy a study of another storage to a journal with optuna.copy_study",
        ) from error
    if len(names) != 1:
        raise SweepError(
            f"the study {file.name} holds {len(names)} studies",
            allowed="a file with one study",
        )
    return optuna.load_study(study_name=names[0], storage=storage)
