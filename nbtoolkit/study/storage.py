"""Store a sweep's study in a file, Optuna's journal, one line of JSON for each change.

A sweep's study has one writer, its scheduler; anybody may read the file meanwhile, also from a
folder that cannot be written. Imports Optuna: load it late.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from nbtoolkit.errors import SweepError

FILE = "study.jsonl"
_SQLITE = b"SQLite format 3\0"


class FileLock(JournalFileOpenLock):
    """The lock of a journal: ``flock`` on the file itself.

    Optuna's own locks are files that a killed process leaves behind; the next one waits for 30 s.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._fd = -1

    def acquire(self) -> bool:
        """Wait until nobody else writes."""
        self._fd = os.open(self._file, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        """Let others write."""
        os.close(self._fd)


class ReadOnlyBackend(JournalFileBackend):
    """A journal that is only read."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Refuse a change.

        Raises:
            SweepError: always.
        """
        raise SweepError(
            "the study of a sweep was opened for reading, and was asked to change",
            allowed="its trials, parameters and values",
            do="copy it with optuna.copy_study, and change the copy",
        )


def open_journal(file: Path) -> JournalStorage:
    """Open a study's file for writing, or make it; the caller holds the sweep's lock.

    Args:
        file: the journal. A last line that a killed session left unfinished is taken off: Optuna
            passes over it only as long as nothing follows.
    """
    if file.exists():
        with file.open("rb+") as opened:
            content = opened.read()
            opened.truncate(content.rfind(b"\n") + 1)
    return JournalStorage(JournalFileBackend(str(file), FileLock(file)))


def read_study(file: Path) -> optuna.Study:
    """The only study in a file: a journal, or the SQLite file of version 0.1.

    Raises:
        SweepError: there is none, it holds several, or it cannot be read.
    """
    try:
        storage = _storage(file)
        names = optuna.get_all_study_names(storage)
    except Exception as error:  # a damaged journal raises what its lines make of it
        raise SweepError(
            f"the study {file.name} cannot be read: {type(error).__name__}: {error}",
            allowed="the file that a sweep writes",
        ) from error
    if len(names) != 1:
        raise SweepError(
            f"the study {file.name} holds {len(names)} studies",
            allowed="a file with one study",
        )
    return optuna.load_study(study_name=names[0], storage=storage)


def _storage(file: Path) -> BaseStorage:
    with file.open("rb") as opened:  # both would make a file that is not there
        if opened.read(len(_SQLITE)) != _SQLITE:
            return JournalStorage(ReadOnlyBackend(str(file)))
    from sqlalchemy.pool import NullPool

    url = f"sqlite:///file:{file.absolute()}?mode=ro&uri=true"
    return RDBStorage(url, engine_kwargs={"poolclass": NullPool})
