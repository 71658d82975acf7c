"""Merge unpacked runs into an output folder without overwriting anything newer.

The newer of two states of a run is found in their ``events.jsonl``: these files are append-only, so
the newer one begins with the older one. If neither does, both sessions resumed the same run, and
the run in the output folder stays.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import IO, Literal

from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.resume import lock_run
from nbtoolkit.sessions.bundle import BLOCK
from nbtoolkit.sessions.carried_files import (
    ELSEWHERE,
    PICKLED_CODE,
    Unit,
    describe,
    unit_files,
)
from nbtoolkit.sessions.plain_pickles import NotPlain, check_plain
from nbtoolkit.tracking.service import replay_all

OCCUPIED = "something else has that name here"


class Merger:
    """Moves unpacked files into an output folder.

    Args:
        staged: the folder with the unpacked files, on the same disk. :meth:`merge` takes files out
            of it.
        into: the output folder; it exists.
        refused: reason -> files that were not unpacked so far.

    Attributes:
        new: runs that were not in the output folder.
        advanced: runs that were there in an older state.
        unchanged: runs that were left as they are: they are as new, newer, or running.
        conflicting: runs that both sessions resumed; they were left as they are.
        files: number of files written that belong to no run.
        tracked: runs that are new in an MLflow database.
        notes: for the user: what was not unpacked, and why.
    """

    def __init__(self, staged: Path, into: Path, refused: dict[str, list[str]]) -> None:
        self._staged = staged
        self._into = into
        self._refused = refused
        self.new: list[str] = []
        self.advanced: list[str] = []
        self.unchanged: list[str] = []
        self.conflicting: list[str] = []
        self.files = 0
        self.tracked: list[str] = []
        self.notes: list[str] = []

    def merge(self, *, trust: bool) -> None:
        """Move everything.

        Args:
            trust: move pickles of any content.

        Raises:
            OSError: the output folder cannot be written.
        """
        if not trust:
            self._remove_pickled_code()
        units: dict[Unit, list[Path]] = {}
        for file, unit in unit_files(self._staged, self._staged):
            if unit is None:
                self._refuse(file, ELSEWHERE)
            else:
                units.setdefault(unit, []).append(file)
        places = {
            unit: Unit(unit.kind, self._into / unit.path.relative_to(self._staged))
            for unit in units
        }
        # All are checked before the first is moved: a run makes the folder of its pipeline.
        free = {unit for unit, place in places.items() if self._is_free(place)}
        for unit, files in units.items():
            place = places[unit]
            if unit in free:
                self._merge_unit(place, unit, files)
            else:
                for file in files:
                    self._refuse(file, OCCUPIED)
        self._track()
        self.notes += [f"not unpacked: {text}" for text in describe(self._refused)]

    def _remove_pickled_code(self) -> None:
        for file, _ in list(unit_files(self._staged, self._staged)):
            try:
                check_plain(file)
            except NotPlain:
                self._refuse(file, PICKLED_CODE)
                file.unlink()

    def _refuse(self, file: Path, reason: str) -> None:
        name = file.relative_to(self._staged).as_posix()
        self._refused.setdefault(reason, []).append(name)

    def _is_free(self, place: Unit) -> bool:
        """Whether a unit may be written: nothing, or the same unit, is there; no link leads on."""
        parent = place.path.parent
        direct = parent.resolve() == self._into.resolve() / parent.relative_to(self._into)
        return direct and not place.path.is_symlink() and (place.may_be_new() or place.exists())

    def _merge_unit(self, place: Unit, unit: Unit, files: list[Path]) -> None:
        if unit.kind == "run":
            run = unit.path.relative_to(self._staged).as_posix()
            self._merge_run(run, unit.path, place.path, files)
            return
        for file in files:
            self.files += self._move_if_newer(file)

    def _merge_run(self, run: str, unpacked: Path, existing: Path, files: list[Path]) -> None:
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
            relation = compare_runs(unpacked, existing)
            if relation == "newer":
                # The older state is deleted with the staging folder.
                os.rename(existing, self._staged / f".before-{existing.name}")
                os.rename(unpacked, existing)
                self.advanced.append(run)
            elif relation == "diverged":
                self.conflicting.append(run)
                self.notes.append(
                    f"{run} was resumed here, too: it was left as it is (to get the other one, "
                    "unpack into another folder)"
                )
            else:
                self.unchanged.append(run)
                if relation == "same":  # it may have come from a smaller bundle before
                    for file in files:
                        if not (self._into / file.relative_to(self._staged)).exists():
                            self._move_if_newer(file)
        finally:
            lock.release()

    def _move_if_newer(self, file: Path) -> bool:
        """Move a file to the output folder, unless a file there is as new; no link leads on."""
        target = self._into / file.relative_to(self._staged)
        if target.exists() and int(target.stat().st_mtime) >= int(file.stat().st_mtime):
            return False
        parent = target.parent
        if parent.resolve() != self._into.resolve() / parent.relative_to(self._into):
            self._refuse(file, OCCUPIED)
            return False
        parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, target)
        return True

    def _track(self) -> None:
        """Write the runs that MLflow lacks to the databases here, from their events.

        A database in the bundle would have the ids and paths of another session.
        """
        missing = []
        for run in (*self.new, *self.advanced, *self.unchanged):
            paths = RunPaths(self._into / run)
            database = paths.folder.parent / "mlflow.db"
            if paths.owned() or (run in self.unchanged and not database.is_file()):
                continue
            if run in self.advanced:
                paths.tracking.unlink(missing_ok=True)  # it says how much another database has
                missing.append(run)
            elif paths.run_id not in _recorded_runs(database):
                missing.append(run)
        errors: dict[str, list[str]] = {}
        for run, error in replay_all(self._into, missing).items():
            if error is None:
                self.tracked.append(run)
            else:
                errors.setdefault(error, []).append(run)
        for error, runs in errors.items():
            self.notes.append(f"not in MLflow's database: {', '.join(runs)}: {error}")


Relation = Literal["same", "newer", "older", "diverged"]


def compare_runs(unpacked: Path, existing: Path) -> Relation:
    """Return what the unpacked run is, compared with the existing one."""
    events = RunPaths(unpacked).events
    here = RunPaths(existing).events
    with events.open("rb") as first, here.open("rb") as second:
        return compare(first, events.stat().st_size, second, here.stat().st_size)


def compare(first: IO[bytes], first_size: int, second: IO[bytes], second_size: int) -> Relation:
    """Return what the first of two append-only files is, compared with the second."""
    left = min(first_size, second_size)
    while left > 0:
        size = min(BLOCK, left)
        if first.read(size) != second.read(size):
            return "diverged"
        left -= size
    if first_size == second_size:
        return "same"
    return "newer" if first_size > second_size else "older"


def _recorded_runs(database: Path) -> set[str]:
    """Ids of our runs in an MLflow database, deleted ones too; empty if it cannot be read."""
    query = "select value from tags where key = 'nbtoolkit.run_id'"
    uri = f"{database.absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            return {value for (value,) in connection.execute(query)}
    except sqlite3.Error:
        return set()
