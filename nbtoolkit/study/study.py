"""Open the Optuna study of a sweep for its one writer, the scheduler.

Trials that were running when a session died resume with the same number, parameters and folder,
hence from the same checkpoint. This module imports Optuna: import it late.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from optuna.storages import JournalStorage
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from nbtoolkit.errors import SweepError
from nbtoolkit.run.paths import reading
from nbtoolkit.study.samplers import make_pruner, make_sampler
from nbtoolkit.study.storage import FILE, open_journal, read_study

if TYPE_CHECKING:
    from nbtoolkit.study.parameter import Params
    from nbtoolkit.study.space import Space
    from nbtoolkit.study.sweep_config import SweepConfig

_IDENTITY, _PREPARED, IMPORTED = "identity", "prepared", "imported"


class SearchStudy:
    """An open study. Made by :func:`open_study`."""

    def __init__(
        self, study: optuna.Study, storage: JournalStorage, sweep_config: SweepConfig, space: Space
    ) -> None:
        self.optuna = study
        self._storage = storage
        self._sweep_config = sweep_config
        self._space = space
        # first trials and a warm start's, which no sampler draws
        self._not_drawn = self.imported + len(sweep_config.first_trials)
        self._trials: dict[int, Trial] = {}
        self._steps: dict[int, set[int]] = {}

    @property
    def imported(self) -> int:
        """The number of trials from a warm start. They are the first ones, and do not count."""
        return int(self.optuna.user_attrs.get(IMPORTED, 0))

    def trials(self) -> list[FrozenTrial]:
        """This sweep's own trials by number, with those that wait. They must not be changed."""
        return self.optuna.get_trials(deepcopy=False)[self.imported :]

    def ask(self) -> tuple[int, Params]:
        """Begin a trial; returns its number, and its parameters as the study holds them."""
        trials = self.optuna.get_trials(deepcopy=False)
        waiting = (trial.number for trial in trials if trial.state == TrialState.WAITING)
        self._set_sampler(next(waiting, len(trials)))
        return self._suggest(self.optuna.ask())

    def resume(self, number: int) -> tuple[int, Params]:
        """Continue a trial that was running when its session died."""
        trial_id = self._id_of(number)
        self._set_sampler(number)
        number, params = self._suggest(Trial(self.optuna, trial_id))
        self._steps[number] = set(self._storage.get_trial(trial_id).intermediate_values)
        return number, params

    def reports(self, number: int) -> dict[int, float]:
        """What a running trial has reported, by step."""
        return dict(self._storage.get_trial(self._id_of(number)).intermediate_values)

    def report(self, number: int, value: float, step: int | None) -> tuple[int, bool]:
        """Store a report of a running trial; a repeated step is ignored.

        Returns:
            The step (by default the next one), and whether the pruner ends the trial.
        """
        trial, steps = self._trials[number], self._steps[number]
        at = max(steps, default=-1) + 1 if step is None else step
        if at not in steps:
            steps.add(at)
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
        trial = self._trials.pop(number)
        self._steps.pop(number)
        for key, value in attrs.items():
            trial.set_user_attr(key, value)
        complete = state == TrialState.COMPLETE
        self.optuna.tell(trial, list(values) if complete else None, state=state)

    def constrain(self, number: int, excess: Mapping[str, float]) -> None:
        """Store by how much a trial exceeds each limit (0 or less if it does not)."""
        trial = self._trials[number]
        trial.set_user_attr("constraints", dict(excess))
        if hasattr(trial, "set_constraint"):  # Optuna 5
            for name, amount in excess.items():
                trial.set_constraint(name, amount)

    def set_user_attr(self, number: int, key: str, value: object) -> None:
        """Store a user attribute of a running trial."""
        self._trials[number].set_user_attr(key, value)

    def user_attrs(self, number: int) -> Params:
        """The user attributes of a trial."""
        return dict(self._storage.get_trial(self._id_of(number)).user_attrs)

    def _set_sampler(self, number: int) -> None:
        """Give the trial that begins next a sampler of its own."""
        self.optuna.sampler = make_sampler(self._sweep_config, self._space, number, self._not_drawn)

    def _suggest(self, trial: Trial) -> tuple[int, Params]:
        self._space.suggest(trial)
        number = trial.number
        self._trials[number], self._steps[number] = trial, set()
        # Read back, so that the trial trains with exactly what is stored.
        frozen = self._storage.get_trial(self._id_of(number))
        return number, self._space.decode(frozen.params)

    @functools.cached_property
    def _id(self) -> int:
        return self._storage.get_study_id_from_name(self.optuna.study_name)

    def _id_of(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, number)


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
        summaries = optuna.get_all_study_summaries(storage=storage)
    existing = next((summary for summary in summaries if summary.study_name == name), None)
    if existing is not None and not existing.user_attrs.get(_PREPARED):
        optuna.delete_study(study_name=name, storage=storage)  # cut off before its first trial
        existing = None
    if existing is not None:
        _refuse_another(existing.user_attrs.get(_IDENTITY, {}), identity, file)
    else:
        _create(storage, sweep_config, space, identity)
    study = optuna.load_study(study_name=name, storage=storage, pruner=make_pruner(sweep_config))
    return SearchStudy(study, storage, sweep_config, space)


def _create(
    storage: JournalStorage,
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
        study.enqueue_trial(space.encode(point))
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


# --- warm start ---


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
    fitting = [trial for trial in complete if _fits(trial, space)]
    if not fitting:
        raise SweepError(
            f"warm_start: none of the {len(complete)} complete trials in {source} fits the space",
            allowed=f"trials with values of {', '.join(space.searched)}",
            do="remove warm_start, or widen the space",
        )
    distributions = space.distributions()
    for trial in fitting:
        imported = create_trial(
            params=trial.params,
            distributions={name: distributions[name] for name in trial.params},
            values=trial.values,
            user_attrs={"warm_start": source, "number": trial.number},
        )
        study.add_trial(imported)
    return len(fitting)


def _load(source: str) -> optuna.Study:
    path = Path(source).expanduser()
    # study.db: of version 0.1
    files = [path / FILE, path / "study.db"] if path.is_dir() else [path]
    file = next(filter(Path.is_file, files), None)
    if file is None:
        raise SweepError(
            f"warm_start: there is no study {source}",
            allowed="a sweep's folder, or the file of a study: Optuna's journal, or SQLite",
        )
    return read_study(file)


def _fits(trial: FrozenTrial, space: Space) -> bool:
    """Whether the space could have drawn exactly these parameters."""
    distributions = space.distributions()
    try:
        if set(trial.params) - set(space.decode(trial.params)):
            return False
        return all(
            distributions[name]._contains(distributions[name].to_internal_repr(value))
            for name, value in trial.params.items()
        )
    except (KeyError, ValueError, TypeError):
        return False  # a parameter is unknown or missing, or its value of another kind
