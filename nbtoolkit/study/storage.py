"""Store the study of a sweep in Optuna's journal, a file with one line of JSON per change.

The study has one writer, the sweep's scheduler. Others may read the file meanwhile, also in a
folder that is read-only. This module imports Optuna: import it late.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from nbtoolkit.errors import SweepError

FILE = "study.jsonl"
_SQLITE = b"SQLite format 3\0"


class FileLock(JournalFileOpenLock):
    """Locks a journal with ``flock`` on the file itself.

    Optuna's own locks are files: a killed process leaves its lock, and the next one waits for 30 s.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._fd = -1

    def acquire(self) -> bool:
        """Wait for the lock."""
        self._fd = os.open(self._file, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        """Release the lock."""
        os.close(self._fd)


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
    """Open the only study in a file for reading: a journal, or an SQLite file of version 0.1.

    Raises:
        SweepError: there is no study or more than one, or the file cannot be read.
    """
    try:
        storage = _storage(file)
        names = optuna.get_all_study_names(storage)
    except Exception as error:  # a damaged journal may raise anything
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
    with file.open("rb") as opened:  # both storages would create a missing file
        if opened.read(len(_SQLITE)) != _SQLITE:
            return JournalStorage(ReadOnlyBackend(str(file)))
    from sqlalchemy.pool import NullPool

    url = f"sqlite:///file:{file.absolute()}?mode=ro&uri=true"
    return RDBStorage(url, engine_kwargs={"poolclass": NullPool})
