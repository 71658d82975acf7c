"""Decide whether a launch starts a new run or resumes one. Who holds its lock owns the folder."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import LaunchError, ResumeError
from nbtoolkit.run.checkpoint_store import has_checkpoint
from nbtoolkit.run.events import RunStarted
from nbtoolkit.run.paths import (
    RunPaths,
    decides_result,
    find_run,
    fingerprint,
    folder_error,
    function_source,
    read_or_empty,
    runs_in,
    tell_made,
    write_json,
    write_whole,
)
from nbtoolkit.version import __version__

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.environment.launch_plan import LaunchPlan
    from nbtoolkit.host import Host

_REPORTED = ("torch", "accelerate", "numpy", "pydantic", "mlflow", "transformers")

_LOCK_TRIES = 3  # whoever asks whether a run is owned holds its lock for a moment


class RunLock:
    """A lock on a run, held by this process until released, dropped, or the process ends.

    A supervisor process that was given the descriptor holds the lock as long as it lives.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def release(self) -> None:
        """Give up this process's hold; twice does no harm."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.release()


# Files of a run that each attempt writes anew: before it starts, and when it has ended.
_DECIDED = ("config.yaml", "plan.json", "versions.json")
_ENDED = ("result.json", "error.json", "error.pkl")


@dataclass(frozen=True)
class ChosenRun:
    """A run folder, locked for this launch until the end of its ``with`` block."""

    paths: RunPaths
    lock: RunLock
    attempt: int
    """1 for a new run; 2 and more where one is gone on with."""

    def __enter__(self) -> ChosenRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    @property
    def resumed(self) -> bool:
        """Whether an earlier run is gone on with."""
        return self.attempt > 1

    @property
    def processes_before(self) -> int | None:
        """How many ranks the attempt before had; None for a new run."""
        plan = read_or_empty(self.paths.previous / "plan.json") if self.resumed else {}
        return int(plan["processes"]) if "processes" in plan else None


def choose_run(
    config: Config, train: Callable[..., Any], name: str | None, resume: str | os.PathLike[str]
) -> ChosenRun:
    """Find or make the run of this launch, and lock it.

    Args:
        config: the resolved configuration.
        train: the training function.
        name: part of a new run's id; the function's name when None.
        resume: ``"auto"`` (the newest ownerless run of equal fingerprint that saved a checkpoint
            and is not through: it was cut off, stopped, out of time, or failed; else a new one),
            ``"never"``, or a run's id or folder. The number of ranks may be another one.

    Raises:
        ResumeError: the named run differs, is owned, or cannot be gone on with.
        RunFolderError: the output folder cannot be written.
    """
    output_dir = Path(config.runtime.output_dir)
    if resume == "auto":
        chosen = _unfinished(output_dir, fingerprint(config.to_dict(), train))
    elif resume == "never":
        chosen = None
    else:
        chosen = _named(resume, output_dir, config, train)
    if chosen is None:
        paths = RunPaths.create(output_dir, name or str(getattr(train, "__name__", "run")))
        lock = lock_run(paths)
        assert lock is not None
        return ChosenRun(paths, lock, 1)
    put_aside(chosen.paths)
    return chosen


def put_aside(paths: RunPaths) -> None:
    """Keep how the last attempt was decided and ended, until the next one has started."""
    try:
        paths.owner.unlink(missing_ok=True)  # the one before: this launch's comes in a moment
        paths.previous.mkdir(exist_ok=True)
        for name in _DECIDED:
            with contextlib.suppress(FileNotFoundError):  # it was cut off while it began
                shutil.copy2(paths.folder / name, paths.previous / name)
        for name in _ENDED:
            (paths.previous / name).unlink(missing_ok=True)
            if (paths.folder / name).exists():
                os.replace(paths.folder / name, paths.previous / name)
        paths.stop.unlink(missing_ok=True)
        with paths.events.open("ab+") as events:  # read and written by all that follows
            events.seek(0)
            events.read(1)
    except OSError as error:  # damaged: a folder in a file's place, a file that cannot be read
        raise folder_error(paths.folder, error) from error


def _unfinished(output_dir: Path, wanted: str) -> ChosenRun | None:
    for paths in runs_in(output_dir):
        about = read_or_empty(paths.versions)
        fits = about.get("fingerprint") == wanted and has_checkpoint(paths.checkpoints)
        if not fits or paths.completed():
            continue
        lock = lock_run(paths)
        if lock is None:  # its supervisor lives, here or in another kernel
            continue
        if not paths.completed():  # else it ended between the look and the lock
            return ChosenRun(paths, lock, read_or_empty(paths.versions)["attempt"] + 1)
        lock.release()
    return None


def refuse_old_run(paths: RunPaths, about: Mapping[str, Any]) -> None:
    """Refuse to resume a run of version 0.1, whose settings have other names.

    Args:
        paths: the run's, or the search's.
        about: its ``versions.json``.

    Raises:
        ResumeError: it is one.
    """
    made_by = str(about.get("versions", {}).get("nbtoolkit", ""))
    if made_by.startswith("0.1."):
        raise ResumeError(
            f"{paths.run_id} was made by nbtoolkit {made_by}; version {__version__} shows it and "
            "does not resume it",
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
    about = read_or_empty(paths.versions)
    if not about:
        raise ResumeError(
            f"the run {paths.run_id} cannot be gone on with: {paths.versions} is damaged",
            allowed="a run whose folder is whole",
            do="launch with resume='never'; nb.load_model reads its checkpoints",
        )
    refuse_old_run(paths, about)
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
    if about["source"] != source_hash(train):
        raise ResumeError(
            f"the run {paths.run_id} was made by another function: the source of "
            f"{about['function']} differs",
            allowed="the same training function",
            do="launch with resume='never'",
        )
    if paths.completed() and config.train.epochs <= before.train.epochs:
        raise ResumeError(
            f"the run {paths.run_id} is complete",
            allowed=f"extending it: train.epochs above {before.train.epochs}",
            do="raise train.epochs, read its result with nb.attach(folder).result(), or launch "
            "with resume='never'",
        )
    lock = lock_run(paths)
    if lock is None:
        pid = read_or_empty(paths.owner).get("pid")
        who = f"owned by process {pid}" if pid else "another launch is starting it"
        raise ResumeError(
            f"the run {paths.run_id} is going on, {who}",
            do="attach to it with nb.attach(folder)",
        )
    return ChosenRun(paths, lock, read_or_empty(paths.versions)["attempt"] + 1)


def _differences(before: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """What differs and must not: all that decides the result, but for more epochs."""
    settings = config.to_dict()
    return {
        key: (old, new)
        for key, (old, new) in before.differences(config).items()
        if decides_result(key, settings) and not (key == "train.epochs" and new > old)
    }


def lock_run(paths: RunPaths) -> RunLock | None:
    """Lock a run; None: somebody holds it.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    try:
        # 0600: who could open it could hold it
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


def discard(run: ChosenRun) -> None:
    """A launch that did not start leaves no new folder behind, and an earlier run as it was."""
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
    **more: Any,
) -> RunStarted:
    """Write what was decided, before anything starts; returns the attempt's first event.

    Args:
        run: the chosen run.
        config: the resolved configuration.
        plan: what will be done.
        host: where.
        train: the training function.
        more: what else ``versions.json`` is to say, or to say otherwise.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    qualified_name = getattr(train, "__qualname__", repr(train))
    about: dict[str, Any] = {
        "run_id": run.paths.run_id,
        "attempt": run.attempt,
        "created": time.time(),
        "fingerprint": fingerprint(config.to_dict(), train),
        "function": f"{getattr(train, '__module__', '')}.{qualified_name}",
        "source": source_hash(train),
        "host": host.kind,
        "versions": versions(),
        **more,
    }
    try:
        write_whole(run.paths.config, config.to_yaml(), durable=False)
        write_json(run.paths.plan, plan.to_dict(), durable=False)
        write_json(run.paths.versions, about, durable=False)
    except OSError as error:
        discard(run)
        raise folder_error(run.paths.folder, error) from error
    tell_made(run.paths.folder)
    kept = ("run_id", "attempt", "fingerprint", "function", "host", "versions")
    fields = {key: about[key] for key in kept}
    return RunStarted(**fields, config=config.to_dict(), plan=plan.to_dict())


def source_hash(train: Callable[..., Any]) -> str:
    """16 hex digits over the function's source."""
    return fingerprint({}, train) if function_source(train) else ""


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions of Python and the libraries that matter to a result."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    # Not read from the distribution: one named nbtoolkit is another project.
    found["nbtoolkit"] = __version__
    for name in _REPORTED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
