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
"""Ends of the names of files that belong to an open database beside them."""

MLFLOW = "mlflow.db"

_LOCKED_SECONDS = 20.0  # writers hold a lock for milliseconds
_BUSY = (5, 6)  # SQLITE_BUSY, SQLITE_LOCKED (the module names them from Python 3.11 on)

# Where MLflow keeps absolute paths; those of tags are ours (see tracking/mlflow_tracker.py).
_PATHS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("tags", "value"),
)


def is_database(path: Path) -> bool:
    """Whether a file is an SQLite database."""
    if path.suffix != ".db":
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def size_of(database: Path) -> int:
    """Bytes that a copy may have: the file's, and what its log may add."""
    log = Path(f"{database}-wal")
    return database.stat().st_size + (log.stat().st_size if log.exists() else 0)


def copy_database(source: Path, target: Path) -> None:
    """Copy a database as it is at one moment, while others may write to it.

    SQLite's own backup reads the write-ahead log, too, and waits for who is writing
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
    end = time.monotonic() + _LOCKED_SECONDS

    def progress(status: int, remaining: int, total: int) -> None:
        if status in _BUSY and time.monotonic() > end:  # backup() alone tries for ever
            raise sqlite3.OperationalError(f"{source} is locked")

    one = closing(sqlite3.connect(uri, uri=True, timeout=1))
    with one as reading, closing(sqlite3.connect(target)) as writing:
        reading.backup(writing, progress=progress)
        writing.execute("pragma journal_mode = delete")


def _copy_read_only(source: Path, target: Path) -> None:
    """Copy a dead session's database, with its log, from a folder that nobody can write to."""
    with tempfile.TemporaryDirectory(prefix="nbtoolkit-relay-") as folder:
        for end in ("", "-wal"):
            shutil.copyfile(f"{source}{end}", Path(folder) / f"{source.name}{end}")
        copy_database(Path(folder) / source.name, target)


def move_paths(database: Path, new: Path) -> bool:
    """Let the paths in an MLflow database follow it.

    Where it was written is read from its experiments: their files lie in ``mlartifacts`` beside it.

    Args:
        database: the file; changed in place.
        new: the folder it will be in.

    Returns:
        Whether it may be used there: it is whole, and no local path in it leads elsewhere (MLflow
        shows and deletes the files that its database names).
    """
    try:
        with closing(sqlite3.connect(database)) as opened, opened:
            query = "select distinct artifact_location from experiments"
            for (location,) in opened.execute(query).fetchall():
                folder, found, _ = str(location).rpartition("/mlartifacts")
                if not found or not folder.startswith("file://"):
                    continue  # a server's, or a place of the user's own
                old = url2pathname(folder.removeprefix("file://"))
                for was, now in ((folder, new.as_uri()), (old, str(new))):
                    _replace_beginning(opened, was, now)
            places = [
                str(place)
                for table, column in _PATHS[:2]
                for (place,) in opened.execute(f"select {column} from {table}")
            ]
    except sqlite3.Error:
        return False
    inside = f"{new.as_uri()}/"
    local = [place for place in places if place.startswith("file:") or "://" not in place]
    return all(place.startswith(inside) and ".." not in place for place in local)


def _replace_beginning(database: sqlite3.Connection, was: str, now: str) -> None:
    for table, column in _PATHS:
        database.execute(
            f"update {table} set {column} = ? || substr({column}, ?) "
            f"where substr({column}, 1, ?) = ?",
            (now, len(was) + 1, len(was) + 1, f"{was}/"),
        )


def runs_known(database: Path) -> set[str]:
    """Ids of our runs that an MLflow database has; none where it cannot be read."""
    query = "select value from tags where key = 'nbtoolkit.run_id'"
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as db:
            return {value for (value,) in db.execute(query)}
    except sqlite3.Error:
        return set()
