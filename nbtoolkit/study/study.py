"""Open Optuna's study of a sweep for its one writer, warm-started where wished.

Trials that were running when a session died are taken up again: the same number, parameters and
folder, hence the same checkpoint. Imports Optuna: load it late.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages import JournalStorage
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from nbtoolkit.errors import SweepError
from nbtoolkit.run.paths import reading
from nbtoolkit.study.samplers import Seeded, make_pruner, make_sampler
from nbtoolkit.study.storage import FILE, open_journal, read_study

if TYPE_CHECKING:
    from nbtoolkit.study.space import Space
    from nbtoolkit.study.sweep_config import SweepConfig


# --- warm start ---
# Warm start: complete trials of another study, for the sampler to learn from.


def import_trials(study: optuna.Study, sweep_config: SweepConfig, space: Space) -> int:
    """Add another study's complete trials to a new one.

    Trials whose parameters the space cannot take are left out. The others keep their values, and
    are marked by the user attribute ``warm_start``.

    Returns:
        How many were added.

    Raises:
        SweepError: there is no such study, it is another objective's, or none of its trials fits.
    """
    source = str(sweep_config.warm_start)
    other = _load(source)
    if other.directions != study.directions:
        raise SweepError(
            f"warm_start: the study {source} has other directions",
            allowed=f"a study that would {', '.join(sweep_config.directions)}",
        )
    complete = other.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    fitting = [trial for trial in complete if _fits(trial, space)]
    if not fitting:
        raise SweepError(
            f"warm_start: none of the {len(complete)} complete trials in {source} fits the space",
            allowed=f"trials with values of {', '.join(space.searched)}",
            do="take warm_start out, or widen the space",
        )
    study.add_trials([_imported(trial, space, source) for trial in fitting])
    return len(fitting)


def _load(source: str) -> optuna.Study:
    path = Path(source).expanduser()
    files = [path / FILE, path / "study.db"] if path.is_dir() else [path]  # the second: of 0.1
    file = next(filter(Path.is_file, files), None)
    if file is None:
        raise SweepError(
            f"warm_start: there is no study {source}",
            allowed="a sweep's folder, or a study's file: Optuna's journal, or SQLite",
        )
    return read_study(file)


def _fits(trial: FrozenTrial, space: Space) -> bool:
    """Whether the space could have drawn these parameters, and all of them."""
    distributions = space.distributions()
    if set(trial.params) - set(distributions):
        return False
    try:
        meant = space.meant(trial.params)
        inside = [distributions[name].to_internal_repr(one) for name, one in trial.params.items()]
    except (KeyError, ValueError, TypeError):
        return False  # one is missing, or of another kind
    ranged = zip(trial.params, inside, strict=True)
    return set(trial.params) <= set(meant) and all(
        distributions[name]._contains(one) for name, one in ranged
    )


def _imported(trial: FrozenTrial, space: Space, source: str) -> FrozenTrial:
    distributions = space.distributions()
    return create_trial(
        state=TrialState.COMPLETE,
        params=trial.params,
        distributions={name: distributions[name] for name in trial.params},
        values=trial.values,
        user_attrs={"warm_start": source, "number": trial.number},
    )


# --- study ---


_IDENTITY, _PREPARED, IMPORTED = "identity", "prepared", "imported"


class SearchStudy:
    """An open study: asks and tells, for one program. Made by :func:`open_study`."""

    def __init__(self, study: optuna.Study, storage: JournalStorage, space: Space) -> None:
        self.optuna, self._storage, self._space = study, storage, space
        self._trials: dict[int, Trial] = {}
        self._steps: dict[int, set[int]] = {}

    @property
    def imported(self) -> int:
        """How many trials came from a warm start; they are the first, and do not count."""
        return int(self.optuna.user_attrs.get(IMPORTED, 0))

    def trials(self) -> list[FrozenTrial]:
        """This sweep's own trials by number, those that wait too. They must not be changed."""
        return self.optuna.get_trials(deepcopy=False)[self.imported :]

    def ask(self) -> tuple[int, dict[str, Any]]:
        """Begin a trial: its number, and its parameters as the study holds them."""
        return self._with_params(self.optuna.ask())

    def resume(self, number: int) -> tuple[int, dict[str, Any]]:
        """Go on with a trial that was running when its session died."""
        trial_id = self._id_of(number)
        begun = self._with_params(Trial(self.optuna, trial_id))
        self._steps[number] = set(self._storage.get_trial(trial_id).intermediate_values)
        return begun

    def reports(self, number: int) -> dict[int, float]:
        """What a running trial has reported, by step."""
        return dict(self._storage.get_trial(self._id_of(number)).intermediate_values)

    def report(self, number: int, value: float, step: int | None) -> tuple[int, bool]:
        """Store what a running trial reports; a step that it reported before counts once.

        Returns:
            The step (the next one where there was none), and whether the pruner ends the trial.
        """
        trial, steps = self._trials[number], self._steps[number]
        at = max(steps, default=-1) + 1 if step is None else step
        if at not in steps:
            steps.add(at)
            trial.report(value, at)
        return at, trial.should_prune()

    def tell(
        self, number: int, state: TrialState, values: Sequence[float], notes: Mapping[str, Any]
    ) -> None:
        """End a trial.

        Args:
            number: the trial's.
            state: ``COMPLETE``, ``PRUNED`` or ``FAIL``.
            values: one for each metric, of a complete one.
            notes: become the trial's user attributes.
        """
        trial = self._trials.pop(number)
        self._steps.pop(number)
        for key, value in notes.items():
            trial.set_user_attr(key, value)
        complete = state == TrialState.COMPLETE
        self.optuna.tell(trial, list(values) if complete else None, state=state)

    def constrain(self, number: int, amounts: Mapping[str, float]) -> None:
        """Store by how much limits are exceeded (0 or less: kept)."""
        trial = self._trials[number]
        trial.set_user_attr("constraints", dict(amounts))
        if hasattr(trial, "set_constraint"):  # Optuna 5
            for name, amount in amounts.items():
                trial.set_constraint(name, amount)

    def note(self, number: int, key: str, value: Any) -> None:
        """Store a user attribute of a running trial."""
        self._trials[number].set_user_attr(key, value)

    def notes(self, number: int) -> dict[str, Any]:
        """The user attributes of a trial."""
        return dict(self._storage.get_trial(self._id_of(number)).user_attrs)

    def remember(self, key: str, value: Any) -> None:
        """Store a user attribute of the study."""
        self.optuna.set_user_attr(key, value)

    def remembered(self) -> dict[str, Any]:
        """The user attributes of the study."""
        return dict(self.optuna.user_attrs)

    def _with_params(self, trial: Trial) -> tuple[int, dict[str, Any]]:
        self._space.suggest(trial)
        number = trial.number
        self._trials[number], self._steps[number] = trial, set()
        # Read back, so that what is trained with is what is stored.
        frozen = self._storage.get_trial(self._id_of(number))
        return number, self._space.meant(frozen.params)

    @functools.cached_property
    def _id(self) -> int:
        return self._storage.get_study_id_from_name(self.optuna.study_name)

    def _id_of(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, number)


def open_study(
    file: Path, sweep_config: SweepConfig, space: Space, identity: Mapping[str, Any]
) -> SearchStudy:
    """Open a sweep's study, or make it.

    Args:
        file: its journal; the folder exists.
        sweep_config: objective, sampler, pruner, first trials, warm start.
        space: what is searched.
        identity: what must be the same whenever the study is gone on with, as plain values.

    Raises:
        SweepError: the study in the file was made with another space, objective or folds.
        RunFileError: the file is damaged.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    name = sweep_config.study.name
    with reading(file):
        storage = open_journal(file)
        known = {one.study_name: one for one in optuna.get_all_study_summaries(storage=storage)}
    if name in known and not known[name].user_attrs.get(_PREPARED):
        optuna.delete_study(study_name=name, storage=storage)  # cut off before its first trial
        known.pop(name)
    if name in known:
        study = optuna.load_study(study_name=name, storage=storage)
        _refuse_another(study, identity, file)
    else:
        directions = list(sweep_config.directions)
        study = optuna.create_study(study_name=name, storage=storage, directions=directions)
        _prepare(study, sweep_config, space, identity)
    drawn_from = int(study.user_attrs[IMPORTED]) + len(sweep_config.first_trials)
    sampler = Seeded(lambda number: make_sampler(sweep_config, space, number, drawn_from))
    study = optuna.load_study(
        study_name=name, storage=storage, sampler=sampler, pruner=make_pruner(sweep_config)
    )
    return SearchStudy(study, storage, space)


def _prepare(
    study: optuna.Study, sweep_config: SweepConfig, space: Space, identity: Mapping[str, Any]
) -> None:
    """Write what comes before the first trial; the last line says that all of it is there."""
    imported = import_trials(study, sweep_config, space) if sweep_config.warm_start else 0
    study.set_user_attr(IMPORTED, imported)
    for point in sweep_config.first_trials:
        study.enqueue_trial(space.stored(point))
    study.set_user_attr(_IDENTITY, dict(identity))
    study.set_user_attr(_PREPARED, True)


def _refuse_another(study: optuna.Study, identity: Mapping[str, Any], file: Path) -> None:
    was = study.user_attrs.get(_IDENTITY, {})
    lines = [
        f"\n    {name}: was {was.get(name)!r}, is {identity.get(name)!r}"
        for name in dict.fromkeys([*was, *identity])
        if was.get(name) != identity.get(name)
    ]
    if lines:
        raise SweepError(
            f"the study in {file} was made for another search:{''.join(lines)}",
            allowed="a study is gone on with as it was made (its budget and placement may change)",
            do='set them back, or begin anew with resume="never"',
        )
