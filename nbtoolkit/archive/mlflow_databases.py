"""Copy SQLite files that may be open, and correct MLflow's paths after a move."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path
from urllib.request import url2pathname

_MAGIC = b"SQLite format 3\0"
BESIDE = ("-wal", "-shm", "-journal")
"""Suffixes of the files beside an open database."""

MLFLOW = "mlflow.db"

_LOCK_TIMEOUT = 20.0  # seconds; writers hold a lock for milliseconds
_BUSY = (5, 6)  # SQLITE_BUSY, SQLITE_LOCKED (the module has these names from Python 3.11 on)

# Where MLflow stores absolute paths. Those in tags are ours (see tracking/mlflow_tracker.py).
_LOCATIONS = (("experiments", "artifact_location"), ("runs", "artifact_uri"))
_PATHS = (*_LOCATIONS, ("tags", "value"))


def is_database(path: Path) -> bool:
    """Whether a file is an SQLite database."""
    if path.suffix != ".db":
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def size_of(database: Path) -> int:
    """Bytes that a copy may have: those of the file and of its write-ahead log."""
    log = Path(f"{database}-wal")
    return database.stat().st_size + (log.stat().st_size if log.exists() else 0)


def copy_database(source: Path, target: Path) -> None:
    """Copy a database as it is at one moment, while others may write to it.

    SQLite's own backup includes the write-ahead log and waits for writers
    (https://www.sqlite.org/backup.html). The copy has no log beside it.

    Raises:
        sqlite3.Error: the source is damaged, or was locked for 20 s.
        OSError: the copy cannot be written.
    """
    writable = os.access(source.parent, os.W_OK)
    if not writable and Path(f"{source}-wal").exists():
        _copy_read_only(source, target)  # reading a log needs a file beside the database
        return
    uri = f"{source.absolute().as_uri()}?{'mode=rw' if writable else 'immutable=1'}"
    end = time.monotonic() + _LOCK_TIMEOUT

    def progress(status: int, remaining: int, total: int) -> None:
        if status in _BUSY and time.monotonic() > end:  # backup() alone retries without limit
            raise sqlite3.OperationalError(f"{source} is locked")

    with (
        closing(sqlite3.connect(uri, uri=True, timeout=1)) as reading,
        closing(sqlite3.connect(target)) as writing,
    ):
        reading.backup(writing, progress=progress)
        writing.execute("pragma journal_mode = delete")


def _copy_read_only(source: Path, target: Path) -> None:
    """Copy a dead session's database, with its log, from a folder that is read-only."""
    with tempfile.TemporaryDirectory(prefix="nbtoolkit-archive-") as folder:
        copy = Path(folder) / source.name
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{source}{suffix}", f"{copy}{suffix}")
        copy_database(copy, target)


def move_paths(database: Path, new: Path) -> bool:
    """Change the paths in an MLflow database to its new folder.

    The old folder is read from the experiments: their files lie in ``mlartifacts`` beside it.

    Args:
        database: the file; changed in place.
        new: the folder it will be in.

    Returns:
        Whether the database is safe to use there: it is undamaged, and no local path in it leads
        elsewhere (MLflow shows and deletes the files that its database names).
    """
    try:
        with closing(sqlite3.connect(database)) as connection, connection:
            query = "select distinct artifact_location from experiments"
            for (location,) in connection.execute(query).fetchall():
                folder, separator, _ = str(location).rpartition("/mlartifacts")
                if not separator or not folder.startswith("file://"):
                    continue  # on a server, or in a folder of the user's choice
                old = url2pathname(folder.removeprefix("file://"))
                for before, after in ((folder, new.as_uri()), (old, str(new))):
                    _replace_prefix(connection, before, after)
            locations = [
                str(location)
                for table, column in _LOCATIONS
                for (location,) in connection.execute(f"select {column} from {table}")
            ]
    except sqlite3.Error:
        return False
    prefix = f"{new.as_uri()}/"
    local = [path for path in locations if path.startswith("file:") or "://" not in path]
    return all(path.startswith(prefix) and ".." not in path for path in local)


def _replace_prefix(database: sqlite3.Connection, before: str, after: str) -> None:
    for table, column in _PATHS:
        database.execute(
            f"update {table} set {column} = ? || substr({column}, ?) "
            f"where substr({column}, 1, ?) = ?",
            (after, len(before) + 1, len(before) + 1, f"{before}/"),
        )


def recorded_runs(database: Path) -> set[str]:
    """Ids of our runs in an MLflow database; empty if it cannot be read."""
    query = "select value from tags where key = 'nbtoolkit.run_id'"
    uri = f"{database.absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            return {value for (value,) in connection.execute(query)}
    except sqlite3.Error:
        return set()
