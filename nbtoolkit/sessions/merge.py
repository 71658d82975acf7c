"""Merge unpacked runs into an output folder without overwriting anything newer.

The newer of two states of a run is found in their ``events.jsonl``: these files are append-only, so
the newer one begins with the older one. If neither does, both sessions resumed the same run, and
the run in the output folder stays.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal
from urllib.request import url2pathname

from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.resume import lock_run
from nbtoolkit.sessions.bundle import BLOCK
from nbtoolkit.sessions.carried_files import (
    ARTIFACTS,
    ELSEWHERE,
    LOCK,
    MLFLOW,
    OCCUPIED,
    describe,
    is_pipeline,
    may_write,
    refusal,
    run_folder_of,
    runs_below,
)
from nbtoolkit.tracking.service import replay_all

_WITH_PATHS = (".json", ".yaml", ".yml")  # of files of no run: those of pipelines hold paths

# Where MLflow stores absolute paths. Those in tags are ours (see tracking/mlflow_tracker.py).
_LOCATIONS = (("experiments", "artifact_location"), ("runs", "artifact_uri"))
_PATHS = (*_LOCATIONS, ("tags", "value"))


class Merger:
    """Moves unpacked run folders into an output folder.

    Args:
        staged: the folder with the unpacked files, on the same disk. :meth:`merge` takes files out
            of it.
        into: the output folder; it exists.
        source: the output folder that was packed. Paths that begin with it are changed.

    Attributes:
        new: runs that were not in the output folder.
        advanced: runs that were there in an older state.
        unchanged: runs that were left as they are.
        files: number of files written that belong to no run.
        tracked: runs that are new in an MLflow database.
        notes: for the user: what was not unpacked, and why.
    """

    def __init__(self, staged: Path, into: Path, source: Path) -> None:
        self._staged = staged
        self._into = into
        self._source = source
        self.new: list[str] = []
        self.advanced: list[str] = []
        self.unchanged: list[str] = []
        self.files = 0
        self.tracked: list[str] = []
        self.notes: list[str] = []

    def merge(self) -> None:
        """Move everything.

        Raises:
            OSError: the output folder cannot be written.
        """
        pipelines = self._remove_refused_files()
        runs = list(runs_below(self._staged))
        for run in runs:
            self._merge_run(run)
        for database in sorted(self._staged.rglob(MLFLOW)):
            self._merge_database(database)
        self._merge_other_files(runs)
        for folder in pipelines:
            # From now on the folder is a pipeline's, whatever other bundles hold.
            lock = self._into / folder / LOCK
            if not lock.exists():
                lock.touch()
        self._track(runs)

    def _remove_refused_files(self) -> list[Path]:
        """Remove what may not be written; returns the pipelines' folders, below the output folder.

        Files are removed at the end, because they decide what kind of folder they are in.
        """
        refused: list[tuple[str, Path]] = []
        pipelines: set[Path] = set()
        for file in _files(self._staged):
            name = file.relative_to(self._staged)
            reason = refusal(name.as_posix())
            run_folder = None if reason else run_folder_of(file, self._staged)
            if reason is None and run_folder is None:
                reason = ELSEWHERE
            elif run_folder is not None:
                if not may_write(self._into / name, run_folder, self._staged, self._into):
                    reason = OCCUPIED
                elif is_pipeline(run_folder):
                    pipelines.add(run_folder.relative_to(self._staged))
            if reason is not None:
                refused.append((reason, file))
        left_out: dict[str, list[str]] = {}
        for reason, file in refused:
            left_out.setdefault(reason, []).append(file.relative_to(self._staged).as_posix())
            file.unlink()
        self.notes += [f"not unpacked: {text}" for text in describe(left_out)]
        return sorted(pipelines)

    # --- runs ---

    def _merge_run(self, run: str) -> None:
        unpacked, existing = self._staged / run, self._into / run
        unpacked.chmod(0o700)  # as RunPaths.create makes it
        if not existing.exists():
            existing.parent.mkdir(parents=True, exist_ok=True)
            os.rename(unpacked, existing)
            self.new.append(run)
            return
        lock = lock_run(RunPaths(existing))
        if lock is None:
            self.unchanged.append(run)
            self.notes.append(f"{run} is running here: it was left as it is")
            return
        try:
            relation = _compare(unpacked, existing)
            if relation == "newer":
                # The older state is deleted with the staging folder.
                os.rename(existing, self._staged / f".before-{existing.name}")
                os.rename(unpacked, existing)
                self.advanced.append(run)
                return
            self.unchanged.append(run)
            if relation == "same":
                _add_missing_files(unpacked, existing)
            elif relation == "diverged":
                self.notes.append(
                    f"{run} was resumed here, too: it was left as it is (to get the other one, "
                    "unpack into another folder)"
                )
        finally:
            lock.release()

    # --- MLflow ---

    def _merge_database(self, database: Path) -> None:
        """Move MLflow's database and files if there are none; else :meth:`_track` adds the runs."""
        folder = database.parent.relative_to(self._staged)
        target = self._into / folder / MLFLOW
        exists = target.exists()
        if exists or not _move_database(database, target.parent):
            if not exists:
                self.notes.append(
                    f"not unpacked: {folder / MLFLOW} (damaged, or with paths that lead elsewhere; "
                    "nbtoolkit.tracking.replay(folder) writes its runs)"
                )
            shutil.rmtree(database.parent / ARTIFACTS, ignore_errors=True)
            database.unlink()
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(database, target)
        recorded = _recorded_runs(target)
        for run in map(Path, [*self.new, *self.advanced]):
            if run.parent == folder and run.name in recorded:
                self.tracked.append(str(run))

    def _track(self, runs: list[str]) -> None:
        """Add missing runs to the MLflow databases of the output folder, from their own events."""
        missing = []
        for run in runs:
            paths = RunPaths(self._into / run)
            database = paths.folder.parent / MLFLOW
            outdated = run in self.advanced and run not in self.tracked
            if not database.is_file() or not paths.events.is_file() or paths.owned():
                continue
            if outdated or paths.run_id not in _recorded_runs(database):
                if outdated:  # the file says how much another database has
                    paths.tracking.unlink(missing_ok=True)
                missing.append(run)
        for run, error in replay_all(self._into, missing).items():
            if error is None:
                self.tracked.append(run)
            else:
                self.notes.append(f"{run} is not in MLflow's database: {error}")

    # --- other files ---

    def _merge_other_files(self, runs: list[str]) -> None:
        """Move the files of no run that are missing or older in the output folder."""
        run_folders = [self._staged / run for run in runs]
        for file in list(_files(self._staged)):
            if any(file.is_relative_to(folder) for folder in run_folders):
                continue
            target, info = self._into / file.relative_to(self._staged), file.stat()
            if target.exists() and target.stat().st_mtime_ns >= info.st_mtime_ns:
                continue
            if file.suffix in _WITH_PATHS:
                self._move_paths(file)
                os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, target)
            self.files += 1

    def _move_paths(self, file: Path) -> None:
        """Change the paths in a text file to the new output folder."""
        before, after = f"{self._source}/", f"{self._into}/"
        text = file.read_text(errors="surrogateescape")
        if before in text:
            file.write_text(text.replace(before, after), errors="surrogateescape")


def _compare(unpacked: Path, existing: Path) -> Literal["same", "newer", "older", "diverged"]:
    """What the unpacked run is, compared with the existing one."""
    events, existing_events = RunPaths(unpacked).events, RunPaths(existing).events
    size, existing_size = _size(events), _size(existing_events)
    if not _have_same_start(events, existing_events, min(size, existing_size)):
        return "diverged"
    if size == existing_size:
        return "same"
    return "newer" if size > existing_size else "older"


def _have_same_start(file: Path, other: Path, count: int) -> bool:
    """Whether the first ``count`` bytes of two files are equal."""
    if not count:  # one may not exist
        return True
    with file.open("rb") as first, other.open("rb") as second:
        while count > 0:
            size = min(BLOCK, count)
            if first.read(size) != second.read(size):
                return False
            count -= size
    return True


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _add_missing_files(unpacked: Path, existing: Path) -> None:
    """Add what an equal run lacks: it may have come from a smaller bundle before."""
    for file in _files(unpacked):
        target = existing / file.relative_to(unpacked)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(file, target)


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".before-"))
        yield from (Path(parent, name) for name in sorted(names))


# --- MLflow's database ---


def _move_database(database: Path, new: Path) -> bool:
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


def _recorded_runs(database: Path) -> set[str]:
    """Ids of our runs in an MLflow database; empty if it cannot be read."""
    query = "select value from tags where key = 'nbtoolkit.run_id'"
    uri = f"{database.absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            return {value for (value,) in connection.execute(query)}
    except sqlite3.Error:
        return set()
