"""Decide whether a launch starts a new run or resumes one, and lock the run's folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.config.schema import load_config
from nbtoolkit.environment.kernel_mlflow import active_run
from nbtoolkit.environment.plan import OutOfMemory
from nbtoolkit.errors import LaunchError, ResumeError
from nbtoolkit.run.checkpoints.checkpoint_store import has_checkpoint
from nbtoolkit.run.events import RunStarted
from nbtoolkit.run.fingerprint import (
    decides_result,
    fingerprint,
    function_name,
    settings_hash,
    source_hash,
)
from nbtoolkit.run.paths import (
    KIND_NAMES,
    RunPaths,
    announce_run,
    find_run,
    folder_error,
    kind_of,
    read_or_empty,
    runs_in,
    write_json,
    write_whole,
)
from nbtoolkit.run.remote_job import JOB_MARK, awaits_job
from nbtoolkit.run.versions_record import (
    changed_code,
    read_versions,
    refuse_old_run,
    refuse_other_function,
    versions,
    why_not_resumed,
)

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.environment.deadline import Note
    from nbtoolkit.environment.launch_plan import LaunchPlan
    from nbtoolkit.host import Host

_LOCK_TRIES = 3  # RunPaths.owned() holds the lock for a moment
# A job that starts again after a rank was lost: the others of its first start may still be ending.
_LOCK_TRIES_OF_JOB = 3000


class RunLock:
    """A lock on a run, held until it is released or deleted, or this process ends.

    A supervisor that inherits the descriptor holds the lock while it lives.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def release(self) -> None:
        """Release this process's hold; may be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.release()


# Files that each attempt rewrites: before it starts, and when it has ended.
_DECISIONS = ("config.yaml", "plan.json", "versions.json")
_RESULTS = ("result.json", "error.json", "error.pkl")


# Of a plan: what decides how much memory a rank has and needs.
_MEMORY = ("processes", "device_type", "device_names", "precision", "global_batch_size")


@dataclass(frozen=True)
class ChosenRun:
    """A run folder, locked for this launch until the end of the ``with`` block."""

    paths: RunPaths
    lock: RunLock
    attempt: int
    """1 for a new run, more for one that is resumed."""
    warning: str | None = None
    """What the user has to know about the choice: the code has changed since the last attempt."""

    @property
    def notes(self) -> tuple[Note, ...]:
        """The warning as a note of a run."""
        return () if self.warning is None else (("warning", self.warning),)

    def __enter__(self) -> ChosenRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    @property
    def resumed(self) -> bool:
        """Whether this is an earlier run."""
        return self.attempt > 1

    @property
    def processes_before(self) -> int | None:
        """The number of ranks of the attempt before; None for a new run."""
        plan = read_or_empty(self.paths.previous / "plan.json") if self.resumed else {}
        processes = plan.get("processes")
        return processes if isinstance(processes, int) else None

    def learned(self, plan: LaunchPlan) -> tuple[OutOfMemory, ...]:
        """What the attempt before has learned about the memory, if it had devices like these."""
        before, now = read_or_empty(self.paths.previous / "plan.json"), plan.to_dict()
        limit = before.get("too_large")
        same = all(before.get(name) == now[name] for name in _MEMORY)
        return (OutOfMemory(limit),) if self.resumed and same and isinstance(limit, int) else ()


def choose_run(
    config: Config, train: Callable[..., Any], name: str | None, resume: str | os.PathLike[str]
) -> ChosenRun:
    """Find or create the run of this launch, and lock it.

    Args:
        config: the resolved configuration.
        train: the training function.
        name: part of a new run's id; None: the function's name.
        resume: ``"auto"`` (the newest run with the same fingerprint and a checkpoint that is not
            finished and that no process owns; else a new run), ``"never"``, or a run's id or
            folder. The number of ranks may differ.

    Raises:
        ResumeError: the named run differs, is owned, or cannot be resumed.
        RunFolderError: the output folder cannot be written.
    """
    output_dir = Path(config.runtime.output_dir)
    left = None
    if resume == "auto":
        chosen = _newest_unfinished(output_dir, fingerprint(config.to_dict(), train))
        settings = settings_hash(config.to_dict())
        left = None if chosen else why_not_resumed(output_dir, "run", settings, train)
    elif resume == "never":
        chosen = None
    else:
        chosen = _named(resume, output_dir, config, train)
    if chosen is None:
        new = new_run(output_dir, name or str(getattr(train, "__name__", "run")))
        return replace(new, warning=left)
    return begin_attempt(chosen.paths, chosen.lock, train)


def new_run(output_dir: str | Path, name: str) -> ChosenRun:
    """Create a run folder and lock it.

    Raises:
        RunFolderError: the output folder cannot be written.
    """
    paths = RunPaths.create(output_dir, name)
    lock = lock_run(paths)
    assert lock is not None
    return ChosenRun(paths, lock, 1)


def begin_attempt(paths: RunPaths, lock: RunLock, train: Callable[..., Any]) -> ChosenRun:
    """Begin the next attempt of a locked run, or the one that was submitted to a cluster."""
    # Read before this attempt's record replaces it.
    record, warning = read_versions(paths), changed_code(paths, train)
    if record.get("submitted"):
        return ChosenRun(paths, lock, record["attempt"], warning)
    archive_attempt(paths)
    return ChosenRun(paths, lock, record["attempt"] + 1, warning)


def archive_attempt(paths: RunPaths) -> None:
    """Move the decisions and results of the last attempt to ``previous/``."""
    try:
        paths.owner.unlink(missing_ok=True)
        paths.previous.mkdir(exist_ok=True)
        for name in _DECISIONS:
            with contextlib.suppress(FileNotFoundError):  # the attempt ended while it started
                shutil.copy2(paths.folder / name, paths.previous / name)
        for name in _RESULTS:
            (paths.previous / name).unlink(missing_ok=True)
            if (paths.folder / name).exists():
                os.replace(paths.folder / name, paths.previous / name)
        paths.stop.unlink(missing_ok=True)
        with paths.events.open("ab+") as events:  # must be readable and writable from now on
            events.seek(0)
            events.read(1)
    except OSError as error:  # damaged: a folder in place of a file, an unreadable file
        raise folder_error(paths.folder, error) from error


def _newest_unfinished(output_dir: Path, wanted: str) -> ChosenRun | None:
    for paths in runs_in(output_dir):
        same = read_versions(paths).get("fingerprint") == wanted
        if not same or not has_checkpoint(paths.checkpoints) or paths.completed():
            continue
        lock = lock_run(paths)
        if lock is None:  # its supervisor lives, here or in another kernel
            continue
        if not paths.completed():  # else it ended before it was locked
            return ChosenRun(paths, lock, read_versions(paths)["attempt"] + 1)
        lock.release()
    return None


def find_named_run(run: str | os.PathLike[str], output_dir: Path) -> RunPaths:
    """The run with this id, or in this folder.

    Raises:
        ResumeError: there is no such run.
    """
    try:
        return find_run(run, output_dir)
    except LaunchError as error:
        allowed = f'"auto", "never", {error.allowed}'
        raise ResumeError(error.what, allowed=allowed, do=error.do) from None


def _named(
    run: str | os.PathLike[str], output_dir: Path, config: Config, train: Callable[..., Any]
) -> ChosenRun:
    paths = find_named_run(run, output_dir)
    versions_record = read_versions(paths)
    if not versions_record:
        raise ResumeError(
            f"cannot resume the run {paths.run_id}: {paths.versions} is damaged",
            allowed="a run with an undamaged folder",
            do="launch with resume='never'; nb.load_model reads its checkpoints",
        )
    if (kind := kind_of(versions_record)) != "run":
        raise ResumeError(
            f"{paths.folder} is a {KIND_NAMES[kind]}, not a run",
            allowed="a run of nb.launch",
            do="resume it with nb.sweep or nb.cross_validate, which made it",
        )
    refuse_old_run(paths)
    before = load_config(paths.config, env=None)
    if changes := changed_settings(before, config, may_train_longer=True):
        raise ResumeError(
            f"the run {paths.run_id} was made with another configuration: {changes}",
            allowed="a larger train.epochs; another number of processes (with train.batch_size); "
            "other output, tracking and checkpoint settings",
            do="load the run's own config.yaml, or launch with resume='never'",
        )
    refuse_other_function(paths, train)
    if paths.completed() and config.train.epochs <= before.train.epochs:
        raise ResumeError(
            f"the run {paths.run_id} is complete",
            allowed=f"extending it: train.epochs above {before.train.epochs}",
            do="increase train.epochs, read its result with nb.attach(folder).result(), or launch "
            "with resume='never'",
        )
    lock = lock_run(paths)
    if lock is None:
        pid = read_or_empty(paths.owner).get("pid")
        who = f"owned by process {pid}" if pid else "another launch is starting it"
        raise ResumeError(
            f"the run {paths.run_id} is still running, {who}",
            do="attach to it with nb.attach(folder)",
        )
    return ChosenRun(paths, lock, read_versions(paths)["attempt"] + 1)


def changed_settings(before: Config, config: Config, *, may_train_longer: bool = False) -> str:
    """The settings that decide the result and have changed, as text; empty: there are none.

    Args:
        before: the configuration of the run.
        config: the configuration of the launch.
        may_train_longer: do not count a larger ``train.epochs``.
    """
    settings = config.to_dict()
    return "; ".join(
        f"{key}: {old!r} then, {new!r} now"
        for key, (old, new) in before.differences(config).items()
        if decides_result(key, settings)
        and not (may_train_longer and key == "train.epochs" and new > old)
    )


def lock_run(paths: RunPaths) -> RunLock | None:
    """Lock a run; None: another process holds its lock, or a job of a cluster will.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    try:
        # 0600: another user who can open the file could lock it.
        lock = RunLock(os.open(paths.lock, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise folder_error(paths.folder, error) from error
    if awaits_job(paths):
        lock.release()
        return None
    own = os.environ.get(JOB_MARK) == str(paths.folder)
    for _ in range(_LOCK_TRIES_OF_JOB if own else _LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        time.sleep(0.01)
    lock.release()
    return None


def roll_back(run: ChosenRun) -> None:
    """Undo a launch that did not start: remove its new folder, or restore the earlier attempt."""
    if not run.resumed:
        shutil.rmtree(run.paths.folder, ignore_errors=True)
        return
    for file in run.paths.previous.iterdir():
        os.replace(file, run.paths.folder / file.name)


def write_header(
    run: ChosenRun,
    config: Config,
    plan: LaunchPlan,
    host: Host,
    train: Callable[..., Any],
    **more: object,
) -> RunStarted:
    """Write the decisions, before anything starts; returns the attempt's first event.

    Args:
        run: the chosen run.
        config: the resolved configuration.
        plan: what the launch will do.
        host: where it runs.
        train: the training function.
        more: further or replaced fields of ``versions.json``.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    record = _versions_record(run, config, host, train, more)
    header = RunStarted(
        run_id=run.paths.run_id,
        attempt=run.attempt,
        fingerprint=str(record["fingerprint"]),
        function=function_name(train),
        host=host.kind,
        versions=versions(),
        config=config.to_dict(),
        plan=plan.to_dict(),
        mlflow_parent=active_run(config),
    )
    _write_decisions(run, config, record, header.plan)
    return header


def write_submitted(
    run: ChosenRun, config: Config, host: Host, train: Callable[..., Any], **more: object
) -> None:
    """Write what is known of an attempt that a job of a cluster will begin.

    Args:
        run: the chosen run.
        config: the resolved configuration.
        host: where it is submitted.
        train: the training function.
        more: further or replaced fields of ``versions.json``.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    record = _versions_record(run, config, host, train, {**more, "submitted": True})
    _write_decisions(run, config, record, None)


def _versions_record(
    run: ChosenRun,
    config: Config,
    host: Host,
    train: Callable[..., Any],
    more: Mapping[str, object],
) -> dict[str, object]:
    return {
        "run_id": run.paths.run_id,
        "attempt": run.attempt,
        "created": time.time(),
        "fingerprint": more.get("fingerprint") or fingerprint(config.to_dict(), train),
        "function": function_name(train),
        "source": source_hash(train),
        "settings": settings_hash(config.to_dict()),
        "host": host.kind,
        "versions": versions(),
        **more,
    }


def _write_decisions(
    run: ChosenRun, config: Config, record: Mapping[str, object], plan: Mapping[str, Any] | None
) -> None:
    try:
        write_whole(run.paths.config, config.to_yaml(), durable=False)
        if plan is not None:
            write_json(run.paths.plan, plan, durable=False)
        write_json(run.paths.versions, record, durable=False)
    except OSError as error:
        roll_back(run)
        raise folder_error(run.paths.folder, error) from error
    announce_run(run.paths.folder)
