"""Worth: what of an output folder the next session needs, and what goes first where room is short.

    never left out   settings, diary and result of every run; studies; values of folds; files of
                     other kinds that are small; what unfinished runs go on from: their newest
                     checkpoint and their best one
    left out last    the best checkpoint of finished runs (the oldest run's first), of a sweep its
                     winner's
    then             return values, MLflow's database and files, other files
    left out first   output of ranks, samples; the weights of trials that did not win

Never carried: older checkpoints, weights of trials that were pruned or failed, locks, caches.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbtoolkit.relay.bundle import SUFFIX, size_in_bundle
from nbtoolkit.relay.databases import BESIDE, MLFLOW, is_database, size_of
from nbtoolkit.relay.piece import Piece, Worth
from nbtoolkit.runtime.events import EventReader
from nbtoolkit.runtime.paths import RunPaths, read_json
from nbtoolkit.training.shelf import Entry, Shelf

# What in a run's folder is of this attempt's process only.
_OF_THE_PROCESS = ("owner.json", "owner.lock", "stop", "commands", "reserve")
_RECORDS = (
    *("config.yaml", "plan.json", "versions.json", "events.jsonl", "tracking.json"),
    *("result.json", "error.json", "error.pkl", "sweep.yaml", "folds.json", "study.db", "previous"),
)
_LOGS = ("ranks", "samples", "tensorboard")
_WITHOUT_JOBS = ("checkpoints", "values", *_LOGS)
_SMALL = 2**20  # a file of another kind that counts as a record: a pipeline's state


@dataclass(frozen=True)
class Contents:
    """What is in an output folder.

    Attributes:
        folder: the folder.
        runs: of each run (also a sweep, a cross-validation) its ``folder`` below this one, its
            ``status``, and whether it is ``alive``.
        pieces: what is worth carrying.
    """

    folder: Path
    runs: list[dict[str, Any]]
    pieces: list[Piece]


def look_into(folder: Path) -> Contents:
    """Find what is worth carrying of an output folder; files that come and go are no error."""
    runs: list[dict[str, Any]] = []
    pieces: list[Piece] = []
    for place, names in _walk(folder):
        paths = RunPaths(place)
        if not _is_run(place):
            pieces += _loose(folder, place, names)
        elif not any(place.is_relative_to(folder / run["folder"]) for run in runs):
            name = place.relative_to(folder).as_posix()
            runs.append({"folder": name, "status": _status(paths), "alive": paths.owned()})
            pieces += _of_run(folder, place, name)
    return Contents(folder, runs, [piece for piece in pieces if piece.files])


# --- what is there --------------------------------------------------------------------------------


def _walk(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """All folders, a run's before what is below it; nothing hidden."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(place), sorted(name for name in names if not _is_passing(name))
        if _is_run(Path(place)):
            folders.clear()


def _is_run(place: Path) -> bool:
    """Whether a folder is a run's; MLflow's copies of a run's files are not."""
    return (place / "versions.json").is_file() and (place / "events.jsonl").is_file()


def _status(paths: RunPaths) -> str:
    """How a run ended, or ``"unfinished"``."""
    if paths.error.exists():
        return "failed"
    return str((_read(paths.result) or {}).get("status", "unfinished"))


def _read(path: Path) -> Any:
    """A JSON file; None where a crash of the machine cut it short."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


# --- a run ----------------------------------------------------------------------------------------


def _of_run(base: Path, place: Path, run: str) -> Iterator[Piece]:
    """The pieces of a run, a sweep or a cross-validation, with its trials and folds."""
    about = _read(place / "versions.json") or {}
    paths = RunPaths(place)
    yield from _own(base, place, run, finished=paths.completed(), values="values")
    if about.get("kind") == "cv":
        for job in _jobs(place):
            over = RunPaths(job).completed()
            yield from _own(base, job, run, finished=over, values="needed")
    elif about.get("kind") == "sweep":
        winners = _winners(paths)
        for job in _jobs(place):
            yield from _of_trial(base, place, job, run, winners)


def _of_trial(base: Path, place: Path, job: Path, run: str, winners: set[str]) -> Iterator[Piece]:
    """The pieces of a trial, or of a fold of one."""
    paths, key = RunPaths(job), job.relative_to(place).as_posix()
    status = _status(paths)
    over = status in ("completed", "pruned", "failed")  # the study knows: it is not run again
    won = any(key == winner or key.startswith(f"{winner}/") for winner in winners)
    best: Worth | None = "best" if won else "also-ran" if status == "completed" else None
    yield from _own(base, job, run, finished=over, values="values", best=best)


def _own(
    base: Path, place: Path, run: str, *, finished: bool, values: Worth, best: Worth | None = "best"
) -> Iterator[Piece]:
    """The pieces of one folder of a run, without the jobs below it."""
    by_worth: dict[Worth, list[Path]] = {}
    for file in _files(place):
        first = file.relative_to(place).parts[0]
        if first == "checkpoints" or first in _OF_THE_PROCESS:
            continue
        worth: Worth = values if first == "values" else _worth(first)
        by_worth.setdefault(worth, []).append(file)
    for worth, files in by_worth.items():
        yield _piece(base, worth, run, files)
    kept: Worth | None = best if finished else "needed"
    if kept is not None:
        for found in _checkpoints(place / "checkpoints", finished=finished):
            yield _piece(base, kept, run, found)


def _worth(first: str) -> Worth:
    if first in _RECORDS:
        return "needed"
    return "log" if first in _LOGS else "other"


def _jobs(place: Path) -> Iterator[Path]:
    """The folders of trials and folds below a run, at any depth."""
    for folder, folders, _ in os.walk(place):
        folders[:] = sorted(name for name in folders if name not in _WITHOUT_JOBS)
        if folder != str(place) and _is_run(Path(folder)):
            yield Path(folder)


def _files(place: Path) -> Iterator[Path]:
    """The files of a run, without those of the jobs below it and without temporary ones."""
    for folder, folders, names in os.walk(place):
        where = Path(folder)
        folders[:] = [
            name
            for name in sorted(folders)
            if not name.startswith(".") and name != "elastic" and not _is_run(where / name)
        ]
        yield from (where / name for name in sorted(names) if not _is_passing(name))


def _is_passing(name: str) -> bool:
    """Whether a file is of no use later: half written, beside an open database, for one process."""
    return name.startswith(".") or name.endswith(BESIDE) or name == "job.pkl"


def _winners(paths: RunPaths) -> set[str]:
    """The trials whose weights somebody may want: those that were the best, or on the front."""
    summary = (_read(paths.result) or {}).get("summary") or {}
    if summary.get("best_folder"):
        return {summary["best_folder"]}
    events = [event for event in EventReader(paths.events).read() if event["type"] == "trial"]
    best = [event["folder"] for event in events if event.get("best")]
    front = set(summary.get("front") or ())
    return {event["folder"] for event in events if event["number"] in front} | set(best[-1:])


# --- checkpoints ----------------------------------------------------------------------------------


def _checkpoints(folder: Path, *, finished: bool) -> Iterator[list[Path]]:
    """The checkpoints worth carrying: files of ``ctx.save``, and those of each fit."""
    saved = sorted(folder.glob("[!.]*.pt"))
    if finished:
        best = [file for file in saved if file.name == "best.pt"]
        saved = best or [file for file in saved if file.name == "last.pt"]
    yield from ([file] for file in saved)
    for shelf in (folder, *sorted(folder.glob("fit-*"))):
        yield from _on_shelf(Shelf(shelf), finished=finished)


def _on_shelf(shelf: Shelf, *, finished: bool) -> Iterator[list[Path]]:
    best = next((entry for entry in shelf.entries("best") if _whole(entry)), None)
    newest = next((entry for entry in shelf.entries("step") if _whole(entry)), None)
    wanted = [best or newest] if finished else [newest, best]
    for entry in wanted:
        if entry is not None:
            names = ["manifest.json", *entry.about["files"]]
            yield [entry.folder / name for name in names]


def _whole(entry: Entry) -> bool:
    """Whether its files have the sizes that its manifest says (their digests are not looked at)."""
    try:
        return all(
            (entry.folder / name).stat().st_size == file["bytes"]
            for name, file in entry.about["files"].items()
        )
    except OSError:
        return False


# --- what belongs to no run -----------------------------------------------------------------------


def _loose(base: Path, place: Path, names: list[str]) -> Iterator[Piece]:
    inside = any(part == "mlartifacts" for part in place.relative_to(base).parts)
    by_worth: dict[Worth, list[Path]] = {}
    for name in names:
        file = place / name
        if name.endswith((SUFFIX, ".lock")) or file.is_symlink() or not file.is_file():
            continue
        by_worth.setdefault(_worth_of_loose(file, inside), []).append(file)
    for worth, files in by_worth.items():
        yield _piece(base, worth, "", files)


def _worth_of_loose(file: Path, inside_mlflow: bool) -> Worth:
    if inside_mlflow or file.name == MLFLOW:
        return "tracking"
    record = file.suffix in (".json", ".jsonl", ".yaml", ".yml") and file.stat().st_size <= _SMALL
    step = file.suffix == ".ipynb" and file.with_suffix(".done.json").exists()
    return "needed" if record or step else "other"  # a pipeline's step is done if its copy is there


def _piece(base: Path, worth: Worth, run: str, files: Iterable[Path]) -> Piece:
    there = []
    size = 0
    for file in files:
        try:
            found = size_of(file) if is_database(file) else file.stat().st_size
        except OSError:  # gone meanwhile: a checkpoint that was replaced, a temporary file
            if worth != "needed":
                continue
            found = 0
        there.append(file)
        size += size_in_bundle(file.relative_to(base).as_posix(), found)
    return Piece(worth, run, tuple(there), size)
