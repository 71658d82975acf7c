"""Warm start: complete trials of another study, for the sampler to learn from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from nbtoolkit.errors import SweepError

if TYPE_CHECKING:
    from nbtoolkit.search.space import Space
    from nbtoolkit.search.wishes import Wishes


def import_trials(study: optuna.Study, wishes: Wishes, space: Space) -> int:
    """Add another study's complete trials to a new one.

    Trials whose parameters the space cannot take are left out. The others keep their values, and
    are marked by the user attribute ``warm_start``.

    Returns:
        How many were added.

    Raises:
        SweepError: there is no such study, it is another objective's, or none of its trials fits.
    """
    other, storage = _load(str(wishes.warm_start))
    try:
        return _import(other, study, wishes, space)
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _import(other: optuna.Study, study: optuna.Study, wishes: Wishes, space: Space) -> int:
    source = str(wishes.warm_start)
    if other.directions != study.directions:
        raise SweepError(
            f"warm_start: the study {source} has other directions",
            allowed=f"a study that would {', '.join(wishes.directions)}",
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


def _load(source: str) -> tuple[optuna.Study, RDBStorage]:
    path = Path(source).expanduser()
    file = path / "study.db" if path.is_dir() else path
    if not file.is_file():
        raise SweepError(
            f"warm_start: there is no study {source}",
            allowed="a sweep's folder, or a study's SQLite file",
        )
    storage = RDBStorage(f"sqlite:///{file.absolute()}")
    summaries = optuna.get_all_study_summaries(storage=storage)
    if len(summaries) != 1:
        raise SweepError(
            f"warm_start: {source} holds {len(summaries)} studies",
            allowed="a file with one study",
        )
    return optuna.load_study(study_name=summaries[0].study_name, storage=storage), storage


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
