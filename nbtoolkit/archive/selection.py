"""Select what the next session needs of an output folder, and what to leave out if space is short.

    never left out   settings, diary and result of every run; studies; values of folds; files of
                     other kinds that are small; what unfinished runs go on from: their newest
                     checkpoint and their best one
    left out last    the best checkpoint of finished runs (the oldest run's first), of a sweep its
                     winner's
    then             return values, MLflow's database and files, other files
    left out first   output of ranks, samples; the weights of trials that did not win

Never carried: older checkpoints, weights of trials that were pruned or failed, locks, caches. Left
out and named: what file_rules.py refuses, links, what is no plain file, what cannot be read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nbtoolkit.archive.bundle_format import SUFFIX, size_in_bundle
from nbtoolkit.archive.file_rules import (
    ARTIFACTS,
    ELSEWHERE,
    NOT_PLAIN,
    UNREADABLE,
    home_of,
    is_run,
    is_secret,
    refusal,
)
from nbtoolkit.archive.mlflow_databases import BESIDE, MLFLOW, is_database, size_of
from nbtoolkit.run.checkpoint_store import CheckpointStore, StoredCheckpoint
from nbtoolkit.run.events import EventReader, TrialChanged
from nbtoolkit.run.paths import RunPaths, read_or_empty

# --- items ---
# Files that are carried together or not at all, and which of them there is room for.


Worth = Literal["needed", "best", "values", "tracking", "other", "log", "also-ran"]

ORDER: tuple[Worth, ...] = ("needed", "best", "values", "tracking", "other", "log", "also-ran")
"""From what is never left out to what is left out first."""

SAID: dict[Worth, str] = {
    "needed": "records",
    "best": "best checkpoints of finished runs",
    "values": "return values",
    "tracking": "MLflow's database and files (nbtoolkit.tracking.replay writes them anew)",
    "other": "other files",
    "log": "output of ranks, samples and TensorBoard files",
    "also-ran": "weights of trials that did not win",
}


@dataclass(frozen=True)
class Item:
    """Files that are carried together or not at all.

    Attributes:
        worth: how much they matter.
        run: the run they belong to; the empty text: none.
        files: their paths.
        size: bytes they take in a bundle.
    """

    worth: Worth
    run: str
    files: tuple[Path, ...]
    size: int


def choose(pieces: Iterable[Item], room: int) -> tuple[list[Item], list[Item]]:
    """What is carried, and what is left out.

    Args:
        pieces: what is worth carrying.
        room: bytes there are for it.

    Returns:
        Both; what is ``needed`` is never left out, even if it does not fit.
    """
    ranked = sorted(pieces, key=lambda piece: piece.run, reverse=True)  # the newest run first
    ranked.sort(key=lambda piece: ORDER.index(piece.worth))
    kept: list[Item] = []
    left_out: list[Item] = []
    for piece in ranked:
        fits = piece.size <= room
        if fits or piece.worth == "needed":
            kept.append(piece)
            room -= piece.size
        else:
            left_out.append(piece)
    return kept, left_out


# --- what each file is worth ---


# What in a run's folder is of this attempt's process only.
_OF_THE_PROCESS = ("owner.json", "owner.lock", "stop", "commands", "reserve")
_RECORDS = (
    *("config.yaml", "plan.json", "versions.json", "events.jsonl", "tracking.json"),
    *("result.json", "error.json", "error.pkl", "sweep.yaml", "folds.json", "previous"),
    *("study.jsonl", "study.db"),
)
_LOGS = ("ranks", "samples", "tensorboard")
_WITHOUT_JOBS = ("checkpoints", "values", *_LOGS)
_SMALL = 2**20  # a file of another kind that counts as a record: a pipeline's state


@dataclass(frozen=True)
class OutputContents:
    """What is in an output folder.

    Attributes:
        folder: the folder.
        runs: of each run (also a sweep, a cross-validation) its ``folder`` below this one, its
            ``status``, and whether it is ``alive``.
        pieces: what is worth carrying.
        left_out: why -> the files that are not carried, by their paths below the folder.
    """

    folder: Path
    runs: list[dict[str, Any]]
    pieces: list[Item]
    left_out: dict[str, list[str]]


@dataclass(frozen=True)
class _Base:
    """The output folder that names begin at, and what is left out of it."""

    folder: Path
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def name(self, file: Path) -> str:
        return file.relative_to(self.folder).as_posix()

    def leave(self, file: Path, why: str) -> None:
        names = self.left_out.setdefault(why, [])
        if self.name(file) not in names:
            names.append(self.name(file))

    def walk(self, place: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
        """Like os.walk; links to folders are not followed, they and the unreadable are named."""
        for folder, folders, names in os.walk(place, onerror=self._unreadable):
            for name in folders:
                if os.path.islink(os.path.join(folder, name)):
                    self.leave(Path(folder, name), NOT_PLAIN)
            yield Path(folder), folders, names

    def _unreadable(self, error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            self.leave(Path(error.filename), UNREADABLE)

    def piece(self, worth: Worth, run: str, files: Iterable[Path]) -> Item:
        """Those of the files that may be carried."""
        there = []
        size = 0
        for file in files:
            why, found = refusal(self.name(file)), 0
            try:
                about = file.lstat()
                if why is None and not stat.S_ISREG(about.st_mode):  # to open a FIFO would wait
                    why = NOT_PLAIN
                if why is None:
                    found = size_of(file) if is_database(file) else about.st_size
            except FileNotFoundError:  # a checkpoint that was replaced, a temporary file
                if worth != "needed":
                    continue
            except OSError:
                why = why or UNREADABLE
            if why is not None:
                self.leave(file, why)
                continue
            there.append(file)
            size += size_in_bundle(self.name(file), found)
        return Item(worth, run, tuple(there), size)


def look_into(folder: Path, base: Path | None = None) -> OutputContents:
    """Find what is worth carrying of an output folder; files that come and go are no error.

    Args:
        folder: the folder.
        base: the folder above it that names begin at; None: itself.
    """
    runs: list[dict[str, Any]] = []
    pieces: list[Item] = []
    root = _Base(base or folder)
    for place, names in _walk(root, folder):
        paths = RunPaths(place)
        if not is_run(place):
            pieces += _loose(root, place, names)
        elif not any(place.is_relative_to(root.folder / run["folder"]) for run in runs):
            name = root.name(place)
            runs.append({"folder": name, "status": _status(paths), "alive": _alive(paths)})
            pieces += _of_run(root, place, name)
    return OutputContents(
        root.folder, runs, [piece for piece in pieces if piece.files], root.left_out
    )


# --- what is there --------------------------------------------------------------------------------


def _walk(base: _Base, folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """All folders, a run's before what is below it; nothing hidden."""
    for place, folders, names in base.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield place, sorted(name for name in names if not _is_passing(name))
        if is_run(place):
            folders.clear()


def _status(paths: RunPaths) -> str:
    """How a run ended, or ``"unfinished"``."""
    return "failed" if paths.error.exists() else _ended(paths)


def _ended(paths: RunPaths) -> str:
    """What its result says."""
    return str(read_or_empty(paths.result).get("status", "unfinished"))


def _finished(paths: RunPaths) -> bool:
    return _ended(paths) in ("completed", "pruned")


def _alive(paths: RunPaths) -> bool:
    with contextlib.suppress(OSError):
        return paths.lock.is_file() and paths.owned()
    return False


# --- a run ----------------------------------------------------------------------------------------


def _of_run(base: _Base, place: Path, run: str) -> Iterator[Item]:
    """The pieces of a run, a sweep or a cross-validation, with its trials and folds."""
    about = read_or_empty(place / "versions.json")
    paths = RunPaths(place)
    yield from _own(base, place, run, finished=_finished(paths), values="values")
    if about.get("kind") == "cv":
        for job in _jobs(place):
            over = _finished(RunPaths(job))
            yield from _own(base, job, run, finished=over, values="needed")
    elif about.get("kind") == "sweep":
        winners = _winners(paths)
        for job in _jobs(place):
            yield from _of_trial(base, place, job, run, winners)


def _of_trial(base: _Base, place: Path, job: Path, run: str, winners: set[str]) -> Iterator[Item]:
    """The pieces of a trial, or of a fold of one."""
    paths, key = RunPaths(job), job.relative_to(place).as_posix()
    status = _status(paths)
    over = status in ("completed", "pruned", "failed")  # the study knows: it is not run again
    won = any(key == winner or key.startswith(f"{winner}/") for winner in winners)
    best: Worth | None = "best" if won else "also-ran" if status == "completed" else None
    yield from _own(base, job, run, finished=over, values="values", best=best)


def _own(
    base: _Base,
    place: Path,
    run: str,
    *,
    finished: bool,
    values: Worth,
    best: Worth | None = "best",
) -> Iterator[Item]:
    """The pieces of one folder of a run, without the jobs below it."""
    by_worth: dict[Worth, list[Path]] = {}
    for file in _files(base, place):
        first = file.relative_to(place).parts[0]
        if first == "checkpoints" or first in _OF_THE_PROCESS:
            continue
        worth: Worth = values if first == "values" else _priority(first)
        by_worth.setdefault(worth, []).append(file)
    for worth, files in by_worth.items():
        yield base.piece(worth, run, files)
    kept: Worth | None = best if finished else "needed"
    if kept is not None:
        for found in _checkpoints(place / "checkpoints", finished=finished):
            yield base.piece(kept, run, found)


def _priority(first: str) -> Worth:
    if first in _RECORDS:
        return "needed"
    return "log" if first in _LOGS else "other"


def _jobs(place: Path) -> Iterator[Path]:
    """The folders of trials and folds below a run, at any depth."""
    for folder, folders, _ in os.walk(place):
        folders[:] = sorted(name for name in folders if name not in _WITHOUT_JOBS)
        if folder != str(place) and is_run(Path(folder)):
            yield Path(folder)


def _files(base: _Base, place: Path) -> Iterator[Path]:
    """The files of a run, without those of the jobs below it and without temporary ones."""
    for where, folders, names in base.walk(place):
        folders[:] = [
            name
            for name in sorted(folders)
            if not name.startswith(".") and name != "elastic" and not is_run(where / name)
        ]
        yield from (where / name for name in sorted(names) if not _is_passing(name))


def _is_passing(name: str) -> bool:
    """Whether a file is of no use later: half written, beside an open database, for one process."""
    hidden = name.startswith(".") and not is_secret(name)  # those are named
    return hidden or name.endswith(BESIDE) or name == "job.pkl"


def _winners(paths: RunPaths) -> set[str]:
    """The trials whose weights somebody may want: those that were the best, or on the front."""
    summary = read_or_empty(paths.result).get("summary")
    summary = summary if isinstance(summary, dict) else {}
    if isinstance(summary.get("best_folder"), str):
        return {summary["best_folder"]}
    try:
        events = list(EventReader(paths.events).read())
        front = set(summary.get("front") or ())
    except (OSError, ValueError, TypeError):  # damaged
        return set()
    trials = [event for event in events if isinstance(event, TrialChanged)]
    best = [trial for trial in trials if trial.best][-1:]
    won = [*best, *(trial for trial in trials if trial.number in front)]
    return {trial.folder for trial in won if trial.folder is not None}


# --- checkpoints ----------------------------------------------------------------------------------


def _checkpoints(folder: Path, *, finished: bool) -> Iterator[list[Path]]:
    """The checkpoints worth carrying: files of ``ctx.save``, and those of each fit."""
    saved = sorted(folder.glob("[!.]*.pt"))
    if finished:
        best = [file for file in saved if file.name == "best.pt"]
        saved = best or [file for file in saved if file.name == "last.pt"]
    yield from ([file] for file in saved)
    for store in (folder, *sorted(folder.glob("fit-*"))):
        yield from _on_store(CheckpointStore(store), finished=finished)


def _on_store(store: CheckpointStore, *, finished: bool) -> Iterator[list[Path]]:
    best = next((entry for entry in store.entries("best") if _whole(entry)), None)
    newest = next((entry for entry in store.entries("step") if _whole(entry)), None)
    wanted = [best or newest] if finished else [newest, best]
    for entry in wanted:
        if entry is not None:
            names = ["manifest.json", *entry.manifest["files"]]
            yield [entry.folder / name for name in names]


def _whole(entry: StoredCheckpoint) -> bool:
    """Whether its files have the sizes that its manifest says (their digests are not looked at)."""
    try:
        return all(
            "/" not in name and (entry.folder / name).stat().st_size == file["bytes"]
            for name, file in entry.manifest["files"].items()
        )
    except (OSError, LookupError, TypeError, AttributeError):  # gone, or damaged
        return False


# --- what belongs to no run -----------------------------------------------------------------------


def _loose(base: _Base, place: Path, names: list[str]) -> Iterator[Item]:
    by_worth: dict[Worth, list[Path]] = {}
    for name in names:
        file = place / name
        if name.endswith((SUFFIX, ".lock")):
            continue
        if home_of(file, base.folder) is None and refusal(name) is None:
            base.leave(file, ELSEWHERE if os.path.isfile(file) else NOT_PLAIN)
            continue
        by_worth.setdefault(_priority_of_loose(file, ARTIFACTS in file.parts), []).append(file)
    for worth, files in by_worth.items():
        yield base.piece(worth, "", files)


def _priority_of_loose(file: Path, inside_mlflow: bool) -> Worth:
    if inside_mlflow or file.name == MLFLOW:
        return "tracking"
    small = os.path.isfile(file) and file.stat().st_size <= _SMALL
    record = file.suffix in (".json", ".jsonl", ".yaml", ".yml") and small
    step = file.suffix == ".ipynb" and file.with_suffix(".done.json").exists()
    return "needed" if record or step else "other"  # a pipeline's step is done if its copy is there
