"""SoleWriter: a study's storage that is read from memory and written to memory and disk alike.

Optuna's storage on SQLite asks the file anew before each step of a trial, since others might write:
10 of the 16 ms that a trial's ask and tell take. A sweep's study has one writer, its conductor.

Imports Optuna: load it late.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from nbtoolkit.errors import SweepError


class SoleWriter(BaseStorage):
    """One study of a storage on disk; its own ids are those of its copy in memory.

    What cannot be written raises before the copy is touched.

    Args:
        disk: where the study is.
        name: the study's; nobody else writes to it as long as this lives.
    """

    def __init__(self, disk: RDBStorage, name: str) -> None:
        self._disk, self._memory = disk, InMemoryStorage()
        self._disk_study = study = disk.get_study_id_from_name(name)
        self._disk_trials: list[int] = []
        """The ids on disk, by the id in memory, which counts from 0."""
        self._study = self._memory.create_new_study(disk.get_study_directions(study), name)
        for key, value in disk.get_study_user_attrs(study).items():
            self._memory.set_study_user_attr(self._study, key, value)
        for key, value in disk.get_study_system_attrs(study).items():
            self._memory.set_study_system_attr(self._study, key, value)
        for trial in disk.get_all_trials(study, deepcopy=False):
            self._disk_trials.append(trial._trial_id)
            self._memory.create_new_trial(self._study, trial)

    def close(self) -> None:
        """Close the file; what is in the write-ahead log goes into it."""
        self._disk.remove_session()
        self._disk.engine.dispose()

    # --- written to both ---

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """See Optuna's :class:`BaseStorage`."""
        self._disk_trials.append(self._disk.create_new_trial(self._disk_study, template_trial))
        return self._memory.create_new_trial(study_id, template_trial)

    def set_trial_param(
        self,
        trial_id: int,
        param_name: str,
        param_value_internal: float,
        distribution: BaseDistribution,
    ) -> None:
        """See Optuna's :class:`BaseStorage`."""
        what = param_name, param_value_internal, distribution
        self._disk.set_trial_param(self._disk_trials[trial_id], *what)
        self._memory.set_trial_param(trial_id, *what)

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        """See Optuna's :class:`BaseStorage`."""
        self._disk.set_trial_state_values(self._disk_trials[trial_id], state, values)
        return self._memory.set_trial_state_values(trial_id, state, values)

    def set_trial_intermediate_value(
        self, trial_id: int, step: int, intermediate_value: float
    ) -> None:
        """See Optuna's :class:`BaseStorage`."""
        disk = self._disk_trials[trial_id]
        self._disk.set_trial_intermediate_value(disk, step, intermediate_value)
        self._memory.set_trial_intermediate_value(trial_id, step, intermediate_value)

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        """See Optuna's :class:`BaseStorage`."""
        self._disk.set_trial_user_attr(self._disk_trials[trial_id], key, value)
        self._memory.set_trial_user_attr(trial_id, key, value)

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """See Optuna's :class:`BaseStorage`."""
        self._disk.set_trial_system_attr(self._disk_trials[trial_id], key, value)
        self._memory.set_trial_system_attr(trial_id, key, value)

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        """See Optuna's :class:`BaseStorage`."""
        self._disk.set_study_user_attr(self._disk_study, key, value)
        self._memory.set_study_user_attr(study_id, key, value)

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        """See Optuna's :class:`BaseStorage`."""
        self._disk.set_study_system_attr(self._disk_study, key, value)
        self._memory.set_study_system_attr(study_id, key, value)

    def create_new_study(
        self, directions: Sequence[StudyDirection], study_name: str | None = None
    ) -> int:
        """It holds the one study that it was made for.

        Raises:
            SweepError: always.
        """
        raise _one_study(f"make the study {study_name!r}")

    def delete_study(self, study_id: int) -> None:
        """It holds the one study that it was made for.

        Raises:
            SweepError: always.
        """
        raise _one_study(f"delete the study {self.get_study_name_from_id(study_id)!r}")

    # --- read from memory ---

    def get_study_id_from_name(self, study_name: str) -> int:
        """See Optuna's :class:`BaseStorage`."""
        return self._memory.get_study_id_from_name(study_name)

    def get_study_name_from_id(self, study_id: int) -> str:
        """See Optuna's :class:`BaseStorage`."""
        return self._memory.get_study_name_from_id(study_id)

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        """See Optuna's :class:`BaseStorage`."""
        return self._memory.get_study_directions(study_id)

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """See Optuna's :class:`BaseStorage`."""
        return self._memory.get_study_user_attrs(study_id)

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """See Optuna's :class:`BaseStorage`."""
        return self._memory.get_study_system_attrs(study_id)

    def get_all_studies(self) -> list[Any]:
        """See Optuna's :class:`BaseStorage`."""
        return list(self._memory.get_all_studies())

    def get_trial_id_from_study_id_trial_number(self, study_id: int, trial_number: int) -> int:
        """See Optuna's :class:`BaseStorage`."""
        return self._memory.get_trial_id_from_study_id_trial_number(study_id, trial_number)

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """See Optuna's :class:`BaseStorage`."""
        return self._memory.get_trial(trial_id)

    def get_all_trials(
        self,
        study_id: int,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
    ) -> list[FrozenTrial]:
        """See Optuna's :class:`BaseStorage`."""
        return self._memory.get_all_trials(study_id, deepcopy, states)


def _one_study(what: str) -> SweepError:
    return SweepError(
        f"the storage of a sweep that runs was asked to {what}",
        allowed="trials of the one study that it was opened for",
        do="use optuna.storages.RDBStorage on the file, once the sweep has ended",
    )
