"""Select what the next session needs of an output folder, and what to leave out if space is short.

Always carried: settings, events, studies and values of every run, its other files, and of an
unfinished run the newest and the best checkpoint. If space is short, the groups of
:data:`DROPPED_FIRST` are left out, one after the other. Never carried: older checkpoints, and the
weights of trials that were pruned or failed.
"""

from __future__ import annotations

import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nbtoolkit.run.attempts import completed, kind_of, opening_event, readable_last_event
from nbtoolkit.run.checkpoints.checkpoint_store import CheckpointStore, StoredCheckpoint
from nbtoolkit.run.events import EventReader, TrialChanged
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.sessions.carried_files import (
    ELSEWHERE,
    NOT_REGULAR,
    SECRET,
    UNREADABLE,
    is_run,
    refusal,
    unit_files,
)

NEEDED = "records and checkpoints of unfinished runs"
LOSERS = "weights of trials that did not win"
LOGS = "output of ranks, TensorBoard and W&B files"
FINISHED = "best checkpoints of finished runs"
DROPPED_FIRST = (LOSERS, LOGS, FINISHED)

_LOG_FOLDERS = ("ranks", "tensorboard", "wandb")


@dataclass
class Contents:
    """What is carried of an output folder.

    Attributes:
        folder: the folder that names begin at.
        runs: the folders of its runs, sweeps and cross-validations.
        groups: the files of each group.
        sizes: the bytes that the files of each group take.
        left_out: reason -> files that are not carried, by their path below the folder.
    """

    folder: Path
    runs: list[str] = field(default_factory=list)
    groups: dict[str, list[Path]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    @property
    def files(self) -> list[Path]:
        """All files, those of a folder together."""
        return sorted(path for group in self.groups.values() for path in group)

    def add(self, file: Path, group: str) -> None:
        """Add a file, or say why it is not carried."""
        name = file.relative_to(self.folder).as_posix()
        reason = refusal(name)
        size = 0
        try:
            status = file.lstat()
            size = status.st_size
            if stat.S_ISDIR(status.st_mode):
                reason = UNREADABLE
            elif not stat.S_ISREG(status.st_mode):  # opening a FIFO would block
                reason = NOT_REGULAR
        except FileNotFoundError:
            return
        except OSError:
            reason = UNREADABLE
        if reason is not None:
            self.leave_out(name, reason)
            return
        self.groups.setdefault(group, []).append(file)
        self.sizes[group] = self.sizes.get(group, 0) + _size_in_tar(name, size)

    def leave_out(self, name: str, reason: str) -> None:
        """Record a file that is not carried."""
        self.left_out.setdefault(reason, []).append(name)

    def fit(self, room: int) -> dict[str, int]:
        """Leave out groups until the rest fits; return their sizes. ``NEEDED`` always stays."""
        dropped = {}
        for group in DROPPED_FIRST:
            if sum(self.sizes.values()) > room and group in self.groups:
                del self.groups[group]
                dropped[group] = self.sizes.pop(group)
        return dropped


def _size_in_tar(name: str, size: int) -> int:
    """Bytes that a file takes in a tar file; a long name takes headers of its own."""
    headers = tarfile.BLOCKSIZE if len(name) <= tarfile.LENGTH_NAME else 4 * tarfile.BLOCKSIZE
    return headers + -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def contents_of(folder: Path, base: Path) -> Contents:
    """Select what is carried of an output folder.

    Args:
        folder: the folder.
        base: the folder, or one above it, that names begin at.
    """
    contents = Contents(base)
    checkpoints: dict[Path, str] = {}  # file -> group, of the runs so far
    for file, unit in unit_files(folder, base):
        if unit is None:
            name = file.relative_to(base).as_posix()
            contents.leave_out(name, SECRET if refusal(name) == SECRET else _kind_of_stray(file))
            continue
        if unit.kind != "run":
            contents.add(file, NEEDED)
            continue
        run = unit.path.relative_to(base).as_posix()
        if run not in contents.runs[-1:]:
            contents.runs.append(run)
            checkpoints.update(_checkpoints_of_run(unit.path))
        group = _group(file, unit.path, checkpoints)
        if group is not None:
            contents.add(file, group)
    return contents


def _kind_of_stray(file: Path) -> str:
    if file.is_symlink():
        return NOT_REGULAR
    if file.is_dir():
        return UNREADABLE
    return ELSEWHERE if file.is_file() else NOT_REGULAR


def _group(file: Path, run: Path, checkpoints: dict[Path, str]) -> str | None:
    """Return the group of a run's file; None: it is an older checkpoint."""
    job = next(folder for folder in file.parents if folder == run or is_run(folder))
    top = file.relative_to(job).parts[0]
    if top == "checkpoints":
        return checkpoints.get(file)
    return LOGS if top in _LOG_FOLDERS else NEEDED


def _checkpoints_of_run(run: Path) -> dict[Path, str]:
    """Return the files of the checkpoints to carry, with their groups, also of trials and folds."""
    paths = RunPaths(run)
    files = _checkpoints(run, finished=completed(paths), group=FINISHED)
    kind = kind_of(opening_event(paths))
    winners = _winners(paths) if kind == "sweep" else set()
    for job in _jobs(run):
        if kind != "sweep":
            files |= _checkpoints(job, finished=completed(RunPaths(job)), group=FINISHED)
            continue
        ended = readable_last_event(RunPaths(job))
        status = "unfinished" if ended is None else ended.status
        won = not winners.isdisjoint({job, *job.parents})  # or it is a fold of a trial that won
        # The study holds how these ended: they do not run again.
        finished = status in ("completed", "pruned", "failed")
        if won or not finished or status == "completed":
            files |= _checkpoints(job, finished=finished, group=FINISHED if won else LOSERS)
    return files


def _jobs(folder: Path) -> Iterator[Path]:
    """Yield the folders of trials and folds below a run, at any depth."""
    for name in ("trials", "folds"):
        for job in sorted((folder / name).glob("[!.]*")):
            if is_run(job):
                yield job
            yield from _jobs(job)


def _winners(paths: RunPaths) -> set[Path]:
    """Return the trials whose weights a user may want: the best one, or the Pareto front."""
    ended = readable_last_event(paths)
    try:
        events = list(EventReader(paths.events).read())
        front = set(() if ended is None else ended.summary.get("front") or ())
    except (OSError, ValueError, TypeError):  # damaged
        return set()
    trials = [event for event in events if isinstance(event, TrialChanged)]
    winners = [trial for trial in trials if trial.number in front]
    winners += [trial for trial in trials if trial.best][-1:]
    return {paths.folder / trial.folder for trial in winners if trial.folder is not None}


def _checkpoints(run: Path, *, finished: bool, group: str) -> dict[Path, str]:
    """Return the files of the checkpoints of one run: those of ``ctx.save``, and of each fit.

    Args:
        run: the folder of a run, a trial or a fold.
        finished: whether it is never resumed: then one checkpoint of each kind is enough.
        group: the group of its checkpoints if it is finished.
    """
    folder = run / "checkpoints"
    saved = sorted(folder.glob("[!.]*.pt"))
    if finished:
        named_best = [file for file in saved if file.name == "best.pt"]
        saved = named_best or [file for file in saved if file.name == "last.pt"]
    files = [*saved, *_of_integrations(folder)]
    for store_folder in (folder, *sorted(folder.glob("fit-*"))):
        store = CheckpointStore(store_folder)
        best = next(filter(_is_whole, store.entries("best")), None)
        newest = next(filter(_is_whole, store.entries("step")), None)
        for checkpoint in [best or newest] if finished else [best, newest]:
            if checkpoint is not None:
                files += [checkpoint.folder / name for name in ("manifest.json", *checkpoint.files)]
    return dict.fromkeys(files, group if finished else NEEDED)


def _of_integrations(folder: Path) -> Iterator[Path]:
    """Yield other checkpoints, such as weights of Keras. Integrations remove older ones."""
    for entry in sorted(folder.glob("[!.]*")):
        if entry.is_dir() and not entry.name.startswith(("step-", "best-", "fit-")):
            yield from (file for file in sorted(entry.rglob("*")) if file.is_file())
        elif entry.is_file() and entry.suffix != ".pt":
            yield entry


def _is_whole(checkpoint: StoredCheckpoint) -> bool:
    """Whether its files have the sizes in its manifest; it does not compute their digests."""
    try:
        return all(
            (checkpoint.folder / name).stat().st_size == file["bytes"]
            for name, file in checkpoint.files.items()
        )
    except (OSError, LookupError, TypeError, AttributeError):  # gone, or damaged
        return False
