"""Decide whether a launch starts a new run or resumes one, and lock the run's folder."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from nbtoolkit import __version__
from nbtoolkit.errors import LaunchError, ResumeError
from nbtoolkit.run.checkpoint_store import has_checkpoint
from nbtoolkit.run.events import RunStarted
from nbtoolkit.run.paths import (
    RunPaths,
    announce_run,
    decides_result,
    find_run,
    fingerprint,
    folder_error,
    function_source,
    read_or_empty,
    runs_in,
    write_json,
    write_whole,
)

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.environment.launch_plan import LaunchPlan
    from nbtoolkit.host import Host

_LIBRARIES = ("torch", "accelerate", "numpy", "pydantic", "mlflow", "transformers")

_LOCK_TRIES = 3  # RunPaths.owned() holds the lock for a moment


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


class VersionsRecord(TypedDict, total=False):
    """The content of ``versions.json``; ``kind`` and ``total`` are a search's."""

    run_id: str
    attempt: int
    created: float
    fingerprint: str
    function: str
    source: str
    host: str
    versions: dict[str, str]
    kind: str
    total: int | None


def read_versions(paths: RunPaths) -> VersionsRecord:
    """The content of ``versions.json``; empty if it is missing or cannot be read."""
    return cast("VersionsRecord", read_or_empty(paths.versions))


@dataclass(frozen=True)
class ChosenRun:
    """A run folder, locked for this launch until the end of the ``with`` block."""

    paths: RunPaths
    lock: RunLock
    attempt: int
    """1 for a new run, more for one that is resumed."""

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
    if resume == "auto":
        chosen = _newest_unfinished(output_dir, fingerprint(config.to_dict(), train))
    elif resume == "never":
        chosen = None
    else:
        chosen = _named(resume, output_dir, config, train)
    if chosen is None:
        paths = RunPaths.create(output_dir, name or str(getattr(train, "__name__", "run")))
        lock = lock_run(paths)
        assert lock is not None
        return ChosenRun(paths, lock, 1)
    archive_attempt(chosen.paths)
    return chosen


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


def refuse_old_run(paths: RunPaths) -> None:
    """Refuse to resume a run or search of version 0.1, whose settings have other names.

    Raises:
        ResumeError: version 0.1 made it.
    """
    version = str(read_versions(paths).get("versions", {}).get("nbtoolkit", ""))
    if version.startswith("0.1."):
        raise ResumeError(
            f"{paths.run_id} was made by nbtoolkit {version}; version {__version__} cannot resume "
            "it",
            allowed="nb.attach and nb.report show it, nb.load_model reads its weights",
            do="start a new one with resume='never'",
        )


def _named(
    run: str | os.PathLike[str], output_dir: Path, config: Config, train: Callable[..., Any]
) -> ChosenRun:
    from nbtoolkit.config.schema import load_config

    try:
        paths = find_run(run, output_dir)
    except LaunchError as error:
        raise ResumeError(
            error.what, allowed='"auto", "never", ' + error.allowed, do=error.do
        ) from None
    versions_record = read_versions(paths)
    if not versions_record:
        raise ResumeError(
            f"cannot resume the run {paths.run_id}: {paths.versions} is damaged",
            allowed="a run with an undamaged folder",
            do="launch with resume='never'; nb.load_model reads its checkpoints",
        )
    refuse_old_run(paths)
    before = load_config(paths.config, env=None)
    differences = _differences(before, config)
    if differences:
        shown = "; ".join(
            f"{key}: {old!r} then, {new!r} now" for key, (old, new) in differences.items()
        )
        raise ResumeError(
            f"the run {paths.run_id} was made with another configuration: {shown}",
            allowed="a larger train.epochs; another number of processes (with train.batch_size); "
            "other output, tracking and checkpoint settings",
            do="load the run's own config.yaml, or launch with resume='never'",
        )
    if versions_record["source"] != source_hash(train):
        raise ResumeError(
            f"the run {paths.run_id} was made by another function: the source of "
            f"{versions_record['function']} differs",
            allowed="the same training function",
            do="launch with resume='never'",
        )
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


def _differences(before: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """The settings that decide the result and differ, except more epochs: key -> (old, new)."""
    settings = config.to_dict()
    return {
        key: (old, new)
        for key, (old, new) in before.differences(config).items()
        if decides_result(key, settings) and not (key == "train.epochs" and new > old)
    }


def lock_run(paths: RunPaths) -> RunLock | None:
    """Lock a run; None: another process holds its lock.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    try:
        # 0600: another user who can open the file could lock it.
        lock = RunLock(os.open(paths.lock, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise folder_error(paths.folder, error) from error
    for _ in range(_LOCK_TRIES):
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
    function = getattr(train, "__qualname__", repr(train))
    header = RunStarted(
        run_id=run.paths.run_id,
        attempt=run.attempt,
        fingerprint=str(more.get("fingerprint") or fingerprint(config.to_dict(), train)),
        function=f"{getattr(train, '__module__', '')}.{function}",
        host=host.kind,
        versions=versions(),
        config=config.to_dict(),
        plan=plan.to_dict(),
    )
    record: dict[str, object] = {
        "run_id": header.run_id,
        "attempt": header.attempt,
        "created": time.time(),
        "fingerprint": header.fingerprint,
        "function": header.function,
        "source": source_hash(train),
        "host": header.host,
        "versions": header.versions,
        **more,
    }
    try:
        write_whole(run.paths.config, config.to_yaml(), durable=False)
        write_json(run.paths.plan, header.plan, durable=False)
        write_json(run.paths.versions, record, durable=False)
    except OSError as error:
        roll_back(run)
        raise folder_error(run.paths.folder, error) from error
    announce_run(run.paths.folder)
    return header


def source_hash(train: Callable[..., Any]) -> str:
    """16 hex digits over the function's source."""
    return fingerprint({}, train) if function_source(train) else ""


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions of Python, the platform and the libraries that matter to a result."""
    known = {"python": platform.python_version(), "platform": platform.platform()}
    known["nbtoolkit"] = __version__  # the distribution of that name on PyPI is another project's
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            known[name] = importlib.metadata.version(name)
    return known
