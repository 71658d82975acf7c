"""Merge unpacked runs into an output folder; nothing newer is overwritten.

Which of two states of a run is newer is read from their diaries: they are only ever appended to, so
the newer one begins with the older one. Where neither does, both sessions went on from the same
run, and the one that is there stays.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nbtoolkit.archive.file_rules import (
    ARTIFACTS,
    ELSEWHERE,
    LOCK,
    OCCUPIED,
    home_of,
    is_pipeline,
    may_hold,
    named,
    refusal,
    runs_below,
)
from nbtoolkit.archive.mlflow_databases import MLFLOW, move_paths, runs_known
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.resume import lock_run
from nbtoolkit.tracking.service import replay_all

Relation = Literal["same", "newer", "older", "apart"]

_BLOCK = 2**20
_REWRITTEN = (".json", ".yaml", ".yml")  # of files of no run: those of pipelines hold paths


@dataclass
class Merged:
    """What was done."""

    new: list[str] = field(default_factory=list)
    advanced: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    files: int = 0
    tracked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def merge(staged: Path, into: Path, source: Path) -> Merged:
    """Move what was unpacked into an output folder: run folders, and nothing else.

    Args:
        staged: what was unpacked, on the same disk; empty of all that is taken when this returns.
        into: the output folder; it exists.
        source: the output folder that was packed: paths that begin with it are changed.

    Raises:
        OSError: the folder cannot be written.
    """
    merged = Merged()
    pipelines = _sift(staged, into, merged)
    runs = list(runs_below(staged))
    for run in runs:
        _run(staged, into, run, merged)
    for database in sorted(staged.rglob(MLFLOW)):
        _mlflow(database, into, staged, merged)
    _others(staged, into, runs, source, merged)
    for folder in pipelines:
        lock = into / folder / LOCK
        if not lock.exists():  # from now on it is a pipeline's, whatever comes with other bundles
            lock.touch()
    _track(into, runs, merged)
    return merged


def _sift(staged: Path, into: Path, merged: Merged) -> list[Path]:
    """Remove what is not taken; returns the pipelines' folders, below the output folder."""
    left: dict[str, list[str]] = {}
    refused: list[Path] = []
    homes: set[Path] = set()
    for file in _files(staged):
        name = file.relative_to(staged)
        why = refusal(name.as_posix())
        if why is None:
            home = home_of(file, staged)
            why = ELSEWHERE if home is None else None
            if home and not may_hold(into / name, home, staged, into):
                why = OCCUPIED
            elif home and is_pipeline(home):
                homes.add(home.relative_to(staged))
        if why is not None:
            left.setdefault(why, []).append(name.as_posix())
            refused.append(file)
    for file in refused:  # only now: what a folder is, its files say
        file.unlink()
    merged.notes += [f"not taken: {text}" for text in named(left)]
    return sorted(homes)


# --- runs -----------------------------------------------------------------------------------------


def _run(staged: Path, into: Path, run: str, merged: Merged) -> None:
    theirs, ours = staged / run, into / run
    theirs.chmod(0o700)  # as RunPaths.create makes it
    if not ours.exists():
        ours.parent.mkdir(parents=True, exist_ok=True)
        os.rename(theirs, ours)
        merged.new.append(run)
        return
    lock = lock_run(RunPaths(ours))
    if lock is None:
        merged.unchanged.append(run)
        merged.notes.append(f"{run} goes on here: it was left as it is")
        return
    try:
        relation = relation_of(theirs, ours)
        if relation == "newer":
            _replace(theirs, ours, staged)
            merged.advanced.append(run)
            return
        merged.unchanged.append(run)
        if relation == "same":
            _fill(theirs, ours)
        elif relation == "apart":
            merged.notes.append(
                f"{run} was gone on with here, too: it was left as it is (to have the other one, "
                "unpack into another folder)"
            )
    finally:
        lock.release()


def relation_of(theirs: Path, ours: Path) -> Relation:
    """What the run in ``theirs`` is to the one in ``ours``, by their diaries."""
    one, other = RunPaths(theirs).events, RunPaths(ours).events
    their_size, our_size = _size(one), _size(other)
    if not _begin_alike(one, other, min(their_size, our_size)):
        return "apart"
    if their_size == our_size:
        return "same"
    return "newer" if their_size > our_size else "older"


def _begin_alike(one: Path, other: Path, count: int) -> bool:
    if not count:
        return True
    with one.open("rb") as first, other.open("rb") as second:
        while count > 0:
            block = min(_BLOCK, count)
            if first.read(block) != second.read(block):
                return False
            count -= block
    return True


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _replace(theirs: Path, ours: Path, staged: Path) -> None:
    """Put one folder in another's place; the older one goes with what is staged."""
    os.rename(ours, staged / f".before-{ours.name}")
    os.rename(theirs, ours)


def _fill(theirs: Path, ours: Path) -> None:
    """Put back what is missing of an equal run: it may have come from a smaller bundle before."""
    for file in _files(theirs):
        place = ours / file.relative_to(theirs)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            os.rename(file, place)


# --- MLflow ---------------------------------------------------------------------------------------


def _mlflow(database: Path, into: Path, staged: Path, merged: Merged) -> None:
    """Take MLflow's database and files where there is none; else its runs are written anew."""
    below = database.parent.relative_to(staged)
    place = into / below / MLFLOW
    taken = not place.exists() and move_paths(database, into / below)
    if not taken:
        if not place.exists():
            merged.notes.append(
                f"not taken: {below / MLFLOW} (damaged, or with paths that lead elsewhere; "
                "nbtoolkit.tracking.replay(folder) writes its runs)"
            )
        shutil.rmtree(database.parent / ARTIFACTS, ignore_errors=True)
        database.unlink()
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    os.rename(database, place)
    known = runs_known(place)
    here = [*merged.new, *merged.advanced]
    merged.tracked += [run for run in here if Path(run).parent == below and Path(run).name in known]


def _track(into: Path, runs: list[str], merged: Merged) -> None:
    """Write what the MLflow databases of an output folder lack: each run by its own record."""
    lacking = []
    for run in runs:
        paths = RunPaths(into / run)
        database = paths.folder.parent / MLFLOW
        behind = run in merged.advanced and run not in merged.tracked
        if not database.is_file() or not paths.events.is_file() or paths.owned():
            continue
        if behind or paths.run_id not in runs_known(database):
            if behind:  # it says how far another database is
                paths.tracking.unlink(missing_ok=True)
            lacking.append(run)
    for run, why in replay_all(into, lacking).items():
        if why is None:
            merged.tracked.append(run)
        else:
            merged.notes.append(f"{run} is not in MLflow's database: {why}")


# --- other files ----------------------------------------------------------------------------------


def _others(staged: Path, into: Path, runs: list[str], source: Path, merged: Merged) -> None:
    """Take the files of no run, where they are not there or older."""
    inside = [staged / run for run in runs]
    for file in list(_files(staged)):
        if any(file.is_relative_to(run) for run in inside):
            continue
        place, about = into / file.relative_to(staged), file.stat()
        if place.exists() and place.stat().st_mtime_ns >= about.st_mtime_ns:
            continue
        if file.suffix in _REWRITTEN:
            _follow(file, source, into)
            os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place)
        merged.files += 1


def _follow(file: Path, old: Path, new: Path) -> None:
    """Let the paths in a text follow the output folder."""
    text = file.read_text(errors="surrogateescape")
    if f"{old}/" in text:
        changed = text.replace(f"{old}/", f"{new}/")
        file.write_text(changed, errors="surrogateescape")


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".before-"))
        yield from (Path(place, name) for name in sorted(names))
