"""Merge unpacked runs into an output folder without overwriting anything newer.

The newer of two states of a run is found in their ``events.jsonl``: these files are append-only, so
the newer one begins with the older one. If neither does, both sessions resumed the same run, and
the run in the output folder stays.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from nbtoolkit.archive.bundle_format import BLOCK
from nbtoolkit.archive.file_rules import (
    ARTIFACTS,
    ELSEWHERE,
    LOCK,
    OCCUPIED,
    describe,
    is_pipeline,
    may_write,
    refusal,
    run_folder_of,
    runs_below,
)
from nbtoolkit.archive.mlflow_databases import MLFLOW, move_paths, recorded_runs
from nbtoolkit.errors import RunFileError
from nbtoolkit.run.device_ledger import LEDGER, merge_ledger
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.resume import lock_run
from nbtoolkit.tracking.service import replay_all

_WITH_PATHS = (".json", ".yaml", ".yml")  # of files of no run: those of pipelines hold paths


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
        self._merge_ledger()
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
        if exists or not move_paths(database, target.parent):
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
        recorded = recorded_runs(target)
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
            if outdated or paths.run_id not in recorded_runs(database):
                if outdated:  # the file says how much another database has
                    paths.tracking.unlink(missing_ok=True)
                missing.append(run)
        for run, error in replay_all(self._into, missing).items():
            if error is None:
                self.tracked.append(run)
            else:
                self.notes.append(f"{run} is not in MLflow's database: {error}")

    # --- other files ---

    def _merge_ledger(self) -> None:
        """Add what the packed runs used, also those that were deleted since, each once."""
        try:
            merge_ledger(self._into, self._staged)
        except RunFileError as error:
            self.notes.append(f"not unpacked: {LEDGER} ({error})")
        (self._staged / LEDGER).unlink(missing_ok=True)

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
