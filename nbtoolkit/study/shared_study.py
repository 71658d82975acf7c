"""A study on a server that several machines share: each trial belongs to one machine at a time.

The study's lock (:meth:`~nbtoolkit.study.study_server.StudyServer.lock`) makes the number of trials
exact: a machine holds it while it takes a trial. A machine that ends or dies leaves a trial without
signs of life; another one then records it as failed, and adds a trial with the same parameters.
Import this module late: it imports Optuna.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import optuna
from optuna.storages import fail_stale_trials
from optuna.trial import FrozenTrial, TrialState, create_trial

from nbtoolkit.study.samplers import make_pruner
from nbtoolkit.study.study import SearchStudy, open_journal, prepare_study

if TYPE_CHECKING:
    from nbtoolkit.study.parameter import Params
    from nbtoolkit.study.space import Space
    from nbtoolkit.study.study_server import StudyServer
    from nbtoolkit.study.sweep_config import SweepConfig

OWNER, REASON, REPEATS = "sweep", "reason", "repeats"
"""User attributes: the run id of the sweep that has the trial's folder; why a trial ended; the
number of the trial that it repeats."""

# Optuna 4.0 raises RuntimeError itself; later versions raise this class of it.
_Finished: type[RuntimeError] = getattr(optuna.exceptions, "UpdateFinishedTrialError", RuntimeError)
_HISTORY = "retry_history"  # as Optuna's own callback names it; its dashboard reads it
_MOST_REPEATS = 3
_Args = ParamSpec("_Args")
_Value = TypeVar("_Value")


def history(trial: FrozenTrial) -> list[int]:
    """Return the numbers of the trials that a trial repeats, the last one last; usually none."""
    return list(trial.system_attrs.get(_HISTORY, ()))


def repeated(trials: Sequence[FrozenTrial]) -> set[int]:
    """Return the numbers of the trials that another trial repeats: they do not count."""
    return {history(trial)[-1] for trial in trials if history(trial)}


def _patient(
    method: Callable[Concatenate[SharedStudy, _Args], _Value],
) -> Callable[Concatenate[SharedStudy, _Args], _Value]:
    """Wrap a method that may be called again after the server did not answer."""

    @functools.wraps(method)
    def call(study: SharedStudy, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Value:
        return study.server.patiently(lambda: method(study, *args, **kwargs))

    return call


class SharedStudy(SearchStudy):
    """A study that other machines use, too. Made by :func:`open_shared`.

    Args:
        study: Optuna's.
        server: where it is.
        sweep_config: the sweep's settings.
        space: what is searched.
        owner: the run id of this machine's sweep.
    """

    shared = True

    def __init__(
        self,
        study: optuna.Study,
        server: StudyServer,
        sweep_config: SweepConfig,
        space: Space,
        owner: str,
    ) -> None:
        super().__init__(study, server.storage, sweep_config, space)
        self.server, self._owner = server, owner
        self._looked_at = float("-inf")

    def owns(self, trial: FrozenTrial) -> bool:
        """Whether a trial's folder is in this machine's sweep."""
        return bool(trial.user_attrs.get(OWNER) == self._owner)

    def started(self, trials: Sequence[FrozenTrial]) -> int:
        """Return the number of trials that have started; one and its repeats count once."""
        return sum(t.state != TrialState.WAITING and not history(t) for t in trials)

    def ask(self, total: int | None = None) -> tuple[int, Params] | None:
        """Begin a trial, unless ``total`` have started; one to repeat comes first."""
        number = self._take(total)
        return None if number is None else self.resume(number)

    trials = _patient(SearchStudy.trials)
    reports = _patient(SearchStudy.reports)
    user_attrs = _patient(SearchStudy.user_attrs)

    @_patient
    def _take(self, total: int | None) -> int | None:
        """Take a waiting trial, or a new one.

        Wherever a machine dies here, the trial waits, or runs without further signs of life.
        """
        with self.server.lock():
            trials = SearchStudy.trials(self)
            waiting = [trial for trial in trials if trial.state == TrialState.WAITING]
            waiting.sort(key=lambda trial: (not history(trial), trial.number))
            if not (waiting and history(waiting[0])):
                if total is not None and self.started(trials) >= total:
                    return None
                if not waiting:
                    self.optuna.enqueue_trial({})
                    waiting = SearchStudy.trials(self)[len(trials) :]
            number = waiting[0].number
            trial_id = self._id_of(number)
            self.server.storage.record_heartbeat(trial_id)
            taken = self._storage.set_trial_state_values(trial_id, TrialState.RUNNING)
            if taken:
                self._storage.set_trial_user_attr(trial_id, OWNER, self._owner)
        if not taken:  # the server had ended the lock, which lasted too long
            return self._take(total)
        self.server.start(number, trial_id)
        return number

    @_patient
    def keep(self, number: int) -> None:
        """Give signs of life for a trial that was interrupted, and resumes later."""
        self.server.start(number, self._id_of(number))

    @_patient
    def resume(self, number: int) -> tuple[int, Params]:
        """Continue a trial of this machine."""
        return super().resume(number)

    @_patient
    def report(self, number: int, value: float, step: int | None) -> tuple[int, bool]:
        """Store a report; a trial that was taken over ends."""
        try:
            return super().report(number, value, step)
        except _Finished:
            self._lose(number)
            return step or 0, True

    @_patient
    def tell(
        self, number: int, state: TrialState, values: Sequence[float], attrs: Mapping[str, object]
    ) -> None:
        """End a trial; the result of one that was taken over is dropped."""
        try:
            super().tell(number, state, values, attrs)
        except (_Finished, ValueError):  # ValueError: of Optuna's tell()
            stored = self._stored(number)
            if not stored.state.is_finished():
                raise
            complete = state == TrialState.COMPLETE
            if stored.state != state or (complete and stored.values != list(values)):
                self._lose(number)  # else the server had stored it, and its answer was lost
        self.server.trials.pop(number, None)

    @_patient
    def constrain(self, number: int, excess: Mapping[str, float]) -> None:
        """Store by how much a trial exceeds each limit."""
        try:
            super().constrain(number, excess)
        except _Finished:
            self._lose(number)

    @_patient
    def set_user_attr(self, number: int, key: str, value: object) -> None:
        """Store a user attribute of a running trial."""
        try:
            super().set_user_attr(number, key, value)
        except _Finished:
            self._lose(number)

    @property
    def added(self) -> int:
        """The number of trials that handles have added, on all machines."""
        return self.server.patiently(lambda: super(SharedStudy, self).added)

    def add(self, count: int) -> None:
        """Add trials."""
        self.server.patiently(lambda: super(SharedStudy, self).add(count))

    def take_over(self) -> None:
        """Have the trials of dead machines repeated; looks once per sign of life."""
        if time.monotonic() - self._looked_at > self.server.heartbeat and self.server.may_judge:
            self._looked_at = time.monotonic()
            self._take_over()

    @_patient
    def _take_over(self) -> None:
        with self.server.lock(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna calls it experimental
            fail_stale_trials(self.optuna)
            trials = SearchStudy.trials(self)
            done = repeated(trials)
            for trial in trials:
                # A machine that records a failure gives the reason.
                dead = trial.state == TrialState.FAIL and REASON not in trial.user_attrs
                if dead and trial.number not in done and len(history(trial)) < _MOST_REPEATS:
                    self.optuna.add_trial(_repeat(trial))

    def close(self, file: Path) -> None:
        """Copy the study to a journal, to read without the server, and leave the server."""
        self._copy(file.with_name(f".{file.name}.new")).replace(file)
        self.server.close()

    @_patient
    def _copy(self, file: Path) -> Path:
        file.unlink(missing_ok=True)
        name, journal = self.optuna.study_name, open_journal(file)
        storage = self.server.storage
        optuna.copy_study(from_study_name=name, from_storage=storage, to_storage=journal)
        return file

    def _id_of(self, number: int) -> int:
        study_id = self._storage.get_study_id_from_name(self.optuna.study_name)
        return self._storage.get_trial_id_from_study_id_trial_number(study_id, number)

    def _lose(self, number: int) -> None:
        self.lost.add(number)
        self.server.trials.pop(number, None)

    def _offset(self, number: int) -> int:
        """Repeats are not drawn, and their numbers not counted."""
        trials = SearchStudy.trials(self)
        return self._not_drawn + sum(t.number < number and bool(history(t)) for t in trials)


def _repeat(trial: FrozenTrial) -> FrozenTrial:
    """Return a trial that waits, with the parameters and finished folds of a dead one."""
    numbers = [*history(trial), trial.number]
    attrs: dict[str, Any] = {"failed_trial": numbers[0], _HISTORY: numbers}
    attrs_kept = {key: value for key, value in trial.user_attrs.items() if key != OWNER}
    return create_trial(
        state=TrialState.WAITING,
        params=trial.params,
        distributions=trial.distributions,
        user_attrs={**attrs_kept, REPEATS: trial.number},
        system_attrs={**trial.system_attrs, **attrs},
    )


def open_shared(
    server: StudyServer,
    sweep_config: SweepConfig,
    space: Space,
    identity: Mapping[str, object],
    owner: str,
) -> SharedStudy:
    """Open a study on a server; the first machine creates it.

    Raises:
        SweepError: the study has another space, objective or folds, or the server is away.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    place = f"study.storage, named {sweep_config.study.name!r},"

    def prepare() -> optuna.Study:
        with server.lock():
            prepare_study(server.storage, sweep_config, space, identity, place)
        return optuna.load_study(
            study_name=sweep_config.study.name,
            storage=server.storage,
            pruner=make_pruner(sweep_config),
        )

    try:
        study = server.patiently(prepare)
        return server.patiently(lambda: SharedStudy(study, server, sweep_config, space, owner))
    except BaseException:
        server.close()
        raise
