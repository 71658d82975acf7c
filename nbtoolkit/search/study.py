"""Study: Optuna's record of a sweep in one SQLite file, with one writer.

Trials that were running when a session died are taken up again: the same number, parameters and
folder, hence the same checkpoint. Imports Optuna: load it late.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from nbtoolkit.errors import RunFolderError, SweepError
from nbtoolkit.runtime.paths import reading, write_whole
from nbtoolkit.search.pruners import make_pruner
from nbtoolkit.search.samplers import Seeded, make_sampler
from nbtoolkit.search.sole_writer import SoleWriter
from nbtoolkit.search.warm_start import import_trials

if TYPE_CHECKING:
    from nbtoolkit.search.space import Space
    from nbtoolkit.search.wishes import Wishes

FILE = "study.db"
_IDENTITY, _PREPARED, IMPORTED = "identity", "prepared", "imported"


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _writes(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let what SQLite cannot write be an error that says what to do."""

    @functools.wraps(method)
    def told(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except StorageInternalError as error:
            raise RunFolderError(
                f"the sweep's study cannot be written: {error.__cause__ or error}",
                allowed="a local disk with free space (SQLite's locks fail on most network disks)",
                do="free some space and sweep again: the study is gone on with",
            ) from error

    return told


class SearchStudy:
    """An open study: asks and tells, for one program. Made by :func:`open_study`."""

    def __init__(self, study: optuna.Study, storage: SoleWriter, space: Space) -> None:
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

    @_writes
    def ask(self) -> tuple[int, dict[str, Any]]:
        """Begin a trial: its number, and its parameters as the study holds them."""
        return self._begun(self.optuna.ask())

    @_writes
    def take_up(self, number: int) -> tuple[int, dict[str, Any]]:
        """Go on with a trial that was running when its session died."""
        trial_id = self._id_of(number)
        begun = self._begun(Trial(self.optuna, trial_id))
        self._steps[number] = set(self._storage.get_trial(trial_id).intermediate_values)
        return begun

    def reports(self, number: int) -> dict[int, float]:
        """What a running trial has reported, by step."""
        return dict(self._storage.get_trial(self._id_of(number)).intermediate_values)

    @_writes
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

    @_writes
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

    @_writes
    def constrain(self, number: int, amounts: Mapping[str, float]) -> None:
        """Store by how much limits are exceeded (0 or less: kept)."""
        trial = self._trials[number]
        trial.set_user_attr("constraints", dict(amounts))
        if hasattr(trial, "set_constraint"):  # Optuna 5
            for name, amount in amounts.items():
                trial.set_constraint(name, amount)

    @_writes
    def note(self, number: int, key: str, value: Any) -> None:
        """Store a user attribute of a running trial."""
        self._trials[number].set_user_attr(key, value)

    def notes(self, number: int) -> dict[str, Any]:
        """The user attributes of a trial."""
        return dict(self._storage.get_trial(self._id_of(number)).user_attrs)

    @_writes
    def remember(self, key: str, value: Any) -> None:
        """Store a user attribute of the study."""
        self.optuna.set_user_attr(key, value)

    def remembered(self) -> dict[str, Any]:
        """The user attributes of the study."""
        return dict(self.optuna.user_attrs)

    def close(self) -> None:
        """Close the file; what is in the write-ahead log goes into it."""
        self._storage.close()

    def _begun(self, trial: Trial) -> tuple[int, dict[str, Any]]:
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
    file: Path, wishes: Wishes, space: Space, identity: Mapping[str, Any]
) -> SearchStudy:
    """Open a sweep's study, or make it.

    Args:
        file: the SQLite file; its folder exists.
        wishes: objective, sampler, pruner, first trials, warm start.
        space: what is searched.
        identity: what must be the same whenever the study is gone on with, as plain values.

    Raises:
        SweepError: the study in the file was made with another space, objective or folds.
        RunFileError: the file is damaged.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    name = wishes.study.name
    with reading(file):
        storage = open_storage(file)
        known = {one.study_name: one for one in optuna.get_all_study_summaries(storage=storage)}
    if name in known and not known[name].user_attrs.get(_PREPARED):
        optuna.delete_study(study_name=name, storage=storage)  # cut off before its first trial
        known.pop(name)
    study = optuna.create_study(
        study_name=name,
        storage=storage,
        directions=list(wishes.directions),
        load_if_exists=True,
    )
    if name in known:
        _refuse_another(study, identity, file)
    else:
        _prepare(study, wishes, space, identity)
    drawn_from = int(study.user_attrs[IMPORTED]) + len(wishes.first_trials)
    sampler = Seeded(lambda number: make_sampler(wishes, space, number, drawn_from))
    own = SoleWriter(storage, name)
    study = optuna.load_study(
        study_name=name, storage=own, sampler=sampler, pruner=make_pruner(wishes)
    )
    return SearchStudy(study, own, space)


def open_storage(file: Path) -> RDBStorage:
    """Optuna's storage on a SQLite file, set so that a write costs about 1 ms.

    The write-ahead log leaves the fsync of each transaction out: a crash of the machine may lose
    the last trials, never the file (https://www.sqlite.org/wal.html).
    """
    from sqlalchemy import event

    copied = False
    if _empty is not None and not file.exists():
        write_whole(file, _empty, durable=False)  # a session killed here leaves no half of a file
        copied = True
    storage = RDBStorage(
        f"sqlite:///{file}",
        engine_kwargs={"connect_args": {"timeout": 60}},
        skip_compatibility_check=copied,  # it is this very Optuna's
    )

    @event.listens_for(storage.engine, "connect")
    def _fast(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    storage.engine.dispose()  # its first connection was made before
    return storage


_empty: bytes | None = None
"""A study's file without a study, where :func:`keep_tables` was called."""


def keep_tables(folder: Path) -> None:
    """From here on new files are copies of one that is made now: Optuna takes 50 ms for each.

    Args:
        folder: an empty one.
    """
    global _empty
    file = folder / "tables.db"
    RDBStorage(f"sqlite:///{file}").engine.dispose()
    _empty = file.read_bytes()


def copy_study(source: Path, target: Path) -> None:
    """Copy a study's file while it may be open: a reader of the copy sees all or nothing.

    Raises:
        OSError: the disk is full, not writable, ...
        sqlite3.Error: the source is no database.
    """
    fd, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(fd)
    try:
        with closing(sqlite3.connect(source)) as one, closing(sqlite3.connect(temporary)) as other:
            one.backup(other)
            other.execute("pragma journal_mode = delete")  # WAL needs memory maps: no network disk
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _prepare(
    study: optuna.Study, wishes: Wishes, space: Space, identity: Mapping[str, Any]
) -> None:
    """Write what comes before the first trial; the last line says that all of it is there."""
    imported = import_trials(study, wishes, space) if wishes.warm_start else 0
    study.set_user_attr(IMPORTED, imported)
    for point in wishes.first_trials:
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
