"""Select what the next session needs of an output folder, and what to leave out if space is short.

    never left out   settings, events and result of every run; studies; values of folds; small
                     files of other kinds; of unfinished runs the newest and the best checkpoint
    left out last    the best checkpoint of finished runs (the oldest run's first); of a sweep its
                     winner's
    then             return values, MLflow's database and files, other files
    left out first   output of ranks, samples; the weights of trials that did not win

Never carried: older checkpoints, weights of trials that were pruned or failed, locks, caches. Left
out and listed: what file_rules.py refuses, links, other files that are not regular, and what cannot
be read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from nbtoolkit.run.attempts import completed, kind_of, opening_event, readable_last_event
from nbtoolkit.run.checkpoints.checkpoint_store import CheckpointStore, StoredCheckpoint
from nbtoolkit.run.events import EventReader, TrialChanged
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.sessions.bundle import SUFFIX, PackedRun, size_in_bundle
from nbtoolkit.sessions.carried_files import (
    ARTIFACTS,
    BESIDE,
    ELSEWHERE,
    MLFLOW,
    NOT_REGULAR,
    UNREADABLE,
    is_database,
    is_run,
    may_hold_credentials,
    printable,
    refusal,
    run_folder_of,
    size_of,
)

Priority = Literal["needed", "best", "values", "tracking", "other", "log", "also-ran"]

PRIORITIES: tuple[Priority, ...] = get_args(Priority)
"""From what is never left out to what is left out first."""

DESCRIPTIONS: dict[Priority, str] = {
    "needed": "records",
    "best": "best checkpoints of finished runs",
    "values": "return values",
    "tracking": "MLflow's database and files (nbtoolkit.tracking.replay writes them again)",
    "other": "other files",
    "log": "output of ranks, samples, TensorBoard and W&B files",
    "also-ran": "weights of trials that did not win",
}

# Files of a run that belong to the process of one attempt.
_PROCESS_FILES = ("owner.lock", "tracking.lock", "stop", "commands")
_RECORDS = (
    *("config.yaml", "events.jsonl", "tracking.json", "error.pkl", "sweep.yaml", "folds.json"),
    *("study.jsonl", "annotations.json"),
)
_LOGS = ("ranks", "samples", "tensorboard", "wandb")
_WITHOUT_JOBS = ("checkpoints", "values", *_LOGS)
_SMALL = 2**20  # bytes up to which a file of another kind is a record: a pipeline's state


@dataclass(frozen=True)
class Item:
    """Files that are carried together or not at all.

    Attributes:
        priority: how important they are.
        run: the run they belong to; empty for none.
        files: their paths.
        size: bytes they take in a bundle.
        copied: bytes of their largest database, which is copied beside the bundle to be packed.
    """

    priority: Priority
    run: str
    files: tuple[Path, ...]
    size: int
    copied: int = 0


def choose_items(items: Iterable[Item], room: int) -> tuple[list[Item], list[Item]]:
    """Choose the items that fit.

    Args:
        items: all of them.
        room: bytes available.

    Returns:
        What is carried, and what is left out. ``needed`` items are never left out, even if they
        do not fit.
    """
    ranked = sorted(items, key=lambda item: item.run, reverse=True)  # the newest run first
    ranked.sort(key=lambda item: PRIORITIES.index(item.priority))
    kept: list[Item] = []
    left_out: list[Item] = []
    copied = 0  # one database at a time, when everything else is in the bundle
    for item in ranked:
        largest = max(copied, item.copied)
        if item.size + largest <= room or item.priority == "needed":
            kept.append(item)
            room, copied = room - item.size, largest
        else:
            left_out.append(item)
    return kept, left_out


@dataclass
class OutputContents:
    """The content of an output folder. Made by :meth:`scan`.

    Attributes:
        folder: the folder that names begin at.
        runs: its runs, sweeps and cross-validations.
        items: the files to carry.
        left_out: reason -> the files that are not carried, by their paths below the folder.
    """

    folder: Path
    runs: list[PackedRun] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def scan(cls, folder: Path, base: Path | None = None) -> OutputContents:
        """Scan an output folder. Files may appear and disappear meanwhile.

        Args:
            folder: the folder.
            base: the folder above it that names begin at; None: the folder itself.
        """
        contents = cls(base or folder)
        for parent, folders, names in contents._walk(folder):
            if is_run(parent):
                folders.clear()
                contents._add_run(parent)
            else:
                contents._add_files_of_no_run(parent, names)
        return contents

    def _walk(self, folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
        """Like os.walk, without hidden folders and temporary files.

        It lists links to folders, which it does not follow, and what it cannot read.
        """
        for parent, folders, names in os.walk(folder, onerror=self._unreadable):
            for name in folders:
                if os.path.islink(os.path.join(parent, name)):
                    self._leave_out(Path(parent, name), NOT_REGULAR)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            yield Path(parent), folders, sorted(name for name in names if not _is_temporary(name))

    def _unreadable(self, error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            self._leave_out(Path(error.filename), UNREADABLE)

    def _leave_out(self, file: Path, reason: str) -> None:
        names = self.left_out.setdefault(reason, [])
        if self._name(file) not in names:
            names.append(self._name(file))

    def _name(self, file: Path) -> str:
        return file.relative_to(self.folder).as_posix()

    # --- runs ---

    def _add_run(self, folder: Path) -> None:
        """Add a run, a sweep or a cross-validation, with its trials and folds."""
        paths, run = RunPaths(folder), self._name(folder)
        status = _status(paths)
        self.runs.append(
            PackedRun(folder=printable(run), status=printable(status), alive=_is_alive(paths))
        )
        self._add_run_folder(folder, run, finished=completed(paths))
        kind = kind_of(opening_event(paths))
        if kind == "cv":
            for job in _jobs(folder):
                finished = completed(RunPaths(job))
                self._add_run_folder(job, run, finished=finished, values="needed")
        elif kind == "sweep":
            winners = _winners(paths)
            for job in _jobs(folder):
                self._add_trial(folder, job, run, winners)

    def _add_trial(self, sweep: Path, job: Path, run: str, winners: set[str]) -> None:
        """Add a trial, or a fold of one."""
        key, status = job.relative_to(sweep).as_posix(), _status(RunPaths(job))
        won = any(key == winner or key.startswith(f"{winner}/") for winner in winners)
        best: Priority | None = "best" if won else "also-ran" if status == "completed" else None
        # The study holds how these ended: they do not run again.
        finished = status in ("completed", "pruned", "failed")
        self._add_run_folder(job, run, finished=finished, best=best)

    def _add_run_folder(
        self,
        folder: Path,
        run: str,
        *,
        finished: bool,
        values: Priority = "values",
        best: Priority | None = "best",
    ) -> None:
        """Add the files of one run folder, without those of the jobs below it.

        Args:
            folder: the folder.
            run: the run that it belongs to.
            finished: whether it does not run again.
            values: the priority of its return values.
            best: the priority of its best checkpoint once it is finished; None: it is not carried.
        """
        by_priority: list[tuple[Priority, Path]] = []
        for file in self._files(folder):
            top = file.relative_to(folder).parts[0]
            if top != "checkpoints" and top not in _PROCESS_FILES:
                by_priority.append((values if top == "values" else _priority(top), file))
        self._add_items(run, by_priority)
        checkpoints = best if finished else "needed"
        if checkpoints is not None:
            for files in _checkpoints(folder / "checkpoints", finished=finished):
                self._add_item(checkpoints, run, files)

    def _files(self, run_folder: Path) -> Iterator[Path]:
        """The files of a run, without those of the jobs below it."""
        for parent, folders, names in self._walk(run_folder):
            folders[:] = [n for n in folders if n != "elastic" and not is_run(parent / n)]
            yield from (parent / name for name in names)

    # --- files of no run ---

    def _add_files_of_no_run(self, folder: Path, names: list[str]) -> None:
        by_priority: list[tuple[Priority, Path]] = []
        for name in names:
            file = folder / name
            if name.endswith((SUFFIX, ".lock")):
                continue
            if run_folder_of(file, self.folder) is None and refusal(name) is None:
                self._leave_out(file, ELSEWHERE if os.path.isfile(file) else NOT_REGULAR)
            else:
                by_priority.append((_priority_outside_runs(file), file))
        self._add_items("", by_priority)

    # --- items ---

    def _add_items(self, run: str, files: Iterable[tuple[Priority, Path]]) -> None:
        """Add one item for each priority."""
        by_priority: dict[Priority, list[Path]] = {}
        for priority, file in files:
            by_priority.setdefault(priority, []).append(file)
        for priority, group in by_priority.items():
            self._add_item(priority, run, group)

    def _add_item(self, priority: Priority, run: str, files: Iterable[Path]) -> None:
        """Add those of the files that may be carried."""
        carried: list[Path] = []
        size = copied = 0
        for file in files:
            reason, file_size = refusal(self._name(file)), 0
            try:
                info = file.lstat()
                if reason is None and not stat.S_ISREG(info.st_mode):  # opening a FIFO would block
                    reason = NOT_REGULAR
                if reason is None:
                    database = is_database(file)
                    file_size = size_of(file) if database else info.st_size
                    copied = max(copied, file_size if database else 0)
            except FileNotFoundError:  # a checkpoint that was replaced, a temporary file
                if priority != "needed":
                    continue
            except OSError:
                reason = reason or UNREADABLE
            if reason is not None:
                self._leave_out(file, reason)
                continue
            carried.append(file)
            size += size_in_bundle(self._name(file), file_size)
        if carried:
            self.items.append(Item(priority, run, tuple(carried), size, copied))


def _status(paths: RunPaths) -> str:
    """How a run ended, or ``"unfinished"``."""
    ended = readable_last_event(paths)
    return "unfinished" if ended is None else ended.status


def _is_alive(paths: RunPaths) -> bool:
    with contextlib.suppress(OSError):
        return paths.lock.is_file() and paths.owned()
    return False


def _priority(top: str) -> Priority:
    """The priority of a file of a run, by the first part of its path below the run's folder."""
    if top in _RECORDS:
        return "needed"
    return "log" if top in _LOGS else "other"


def _priority_outside_runs(file: Path) -> Priority:
    if ARTIFACTS in file.parts or file.name == MLFLOW:
        return "tracking"
    small = os.path.isfile(file) and file.stat().st_size <= _SMALL
    record = file.suffix in (".json", ".jsonl", ".yaml", ".yml") and small
    # A pipeline's step is done if its executed copy exists.
    step = file.suffix == ".ipynb" and file.with_suffix(".done.json").exists()
    return "needed" if record or step else "other"


def _is_temporary(name: str) -> bool:
    """Whether a file is useless later: half written, beside an open database, of one process."""
    hidden = name.startswith(".") and not may_hold_credentials(name)  # those are listed
    return hidden or name.endswith(BESIDE) or name == "job.pkl"


def _jobs(run_folder: Path) -> Iterator[Path]:
    """The folders of trials and folds below a run, at any depth."""
    for parent, folders, _ in os.walk(run_folder):
        folders[:] = sorted(name for name in folders if name not in _WITHOUT_JOBS)
        if parent != str(run_folder) and is_run(Path(parent)):
            yield Path(parent)


def _winners(paths: RunPaths) -> set[str]:
    """The folders of trials whose weights a user may want: the best one, or the Pareto front."""
    ended = readable_last_event(paths)
    summary = {} if ended is None else ended.summary
    if isinstance(summary.get("best_folder"), str):
        return {summary["best_folder"]}
    try:
        events = list(EventReader(paths.events).read())
        front = set(summary.get("front") or ())
    except (OSError, ValueError, TypeError):  # damaged
        return set()
    trials = [event for event in events if isinstance(event, TrialChanged)]
    best = [trial for trial in trials if trial.best][-1:]
    winners = [*best, *(trial for trial in trials if trial.number in front)]
    return {trial.folder for trial in winners if trial.folder is not None}


# --- checkpoints ---


def _checkpoints(folder: Path, *, finished: bool) -> Iterator[list[Path]]:
    """The checkpoints to carry, as lists of files: those of ``ctx.save``, and of each fit."""
    saved = sorted(folder.glob("[!.]*.pt"))
    if finished:
        named_best = [file for file in saved if file.name == "best.pt"]
        saved = named_best or [file for file in saved if file.name == "last.pt"]
    yield from ([file] for file in saved)
    for store_folder in (folder, *sorted(folder.glob("fit-*"))):
        store = CheckpointStore(store_folder)
        best = next(filter(_is_whole, store.entries("best")), None)
        newest = next(filter(_is_whole, store.entries("step")), None)
        for checkpoint in [best or newest] if finished else [newest, best]:
            if checkpoint is not None:
                names = ["manifest.json", *checkpoint.files]
                yield [checkpoint.folder / name for name in names]


def _is_whole(checkpoint: StoredCheckpoint) -> bool:
    """Whether its files have the sizes in its manifest; it does not compute their digests."""
    try:
        return all(
            "/" not in name and (checkpoint.folder / name).stat().st_size == file["bytes"]
            for name, file in checkpoint.files.items()
        )
    except (OSError, LookupError, TypeError, AttributeError):  # gone, or damaged
        return False
