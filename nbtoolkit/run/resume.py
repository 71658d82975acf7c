"""Decide whether a launch starts a new run or resumes one, and lock the run's folder.

The fingerprint of a run is a hash of the settings and the function that decide its result.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from nbtoolkit.environment.plan import OutOfMemory
from nbtoolkit.errors import LaunchError, ResumeError
from nbtoolkit.run.checkpoint_store import has_checkpoint
from nbtoolkit.run.events import RunStarted
from nbtoolkit.run.paths import (
    RunPaths,
    announce_run,
    find_run,
    folder_error,
    read_or_empty,
    runs_in,
    write_json,
    write_whole,
)
from nbtoolkit.version import __version__

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


# Of a plan: what decides how much memory a rank has and needs.
_MEMORY = ("processes", "device_type", "device_names", "precision", "global_batch_size")


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
    if resume == "auto":
        chosen = _newest_unfinished(output_dir, fingerprint(config.to_dict(), train))
    elif resume == "never":
        chosen = None
    else:
        chosen = _named(resume, output_dir, config, train)
    if chosen is None:
        return new_run(output_dir, name or str(getattr(train, "__name__", "run")))
    archive_attempt(chosen.paths)
    return chosen


def new_run(output_dir: str | Path, name: str) -> ChosenRun:
    """Create a run folder and lock it.

    Raises:
        RunFolderError: the output folder cannot be written.
    """
    paths = RunPaths.create(output_dir, name)
    lock = lock_run(paths)
    assert lock is not None
    return ChosenRun(paths, lock, 1)


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

    paths = find_named_run(run, output_dir)
    versions_record = read_versions(paths)
    if not versions_record:
        raise ResumeError(
            f"cannot resume the run {paths.run_id}: {paths.versions} is damaged",
            allowed="a run with an undamaged folder",
            do="launch with resume='never'; nb.load_model reads its checkpoints",
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


@functools.lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions of Python, the platform and the libraries that matter to a result."""
    known = {"python": platform.python_version(), "platform": platform.platform()}
    known["nbtoolkit"] = __version__  # the distribution of that name on PyPI is another project's
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            known[name] = importlib.metadata.version(name)
    return known


# --- identity of a run ---


# Settings that do not change what a run computes (up to the order of sums), and so are not part of
# its fingerprint. The number of ranks is among them, since the batch of a step is global.
_NOT_IDENTITY = (
    "task",
    "tracking.",
    "runtime.",
    "checkpoint.",
    "distributed.",
    "train.num_workers",
    "train.profile",
)
_IDENTITY = (
    "distributed.sync_batchnorm",
    "distributed.compression",
    "distributed.powersgd_rank",
    "distributed.local_sgd_steps",
    "checkpoint.monitor",  # early stopping and the plateau schedule depend on the best value
    "checkpoint.mode",
    "checkpoint.weights",  # which weights predict at the end
)
_STEP_SIZE = ("distributed.world_size", "train.gradient_accumulation_steps")


def function_source(function: Callable[..., Any]) -> str:
    """A function as text: its source (or byte code) and the plain values bound to it.

    Bound values are the arguments of a partial, defaults, closure variables and the attributes of
    an object.
    """
    if isinstance(function, functools.partial):
        bound = function.args, sorted(function.keywords.items())
        return f"{function_source(function.func)} {bound!r}"
    routine = inspect.isroutine(function) or inspect.isclass(function)
    text = _code_text(function if routine else type(function))
    return " ".join([text, *map(repr, _bound_values(function))])


def _code_text(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        if code is None:
            return repr(getattr(function, "__qualname__", type(function)))
        constants = [value for value in code.co_consts if isinstance(value, (int, float, str))]
        return f"{code.co_code.hex()} {code.co_names} {constants}"


def _bound_values(function: Callable[..., Any]) -> list[tuple[str, int | float | str]]:
    """The numbers and texts in which two functions with the same source may differ, by name."""
    owner = getattr(function, "__self__", function)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    bound = list(getattr(owner, "__dict__", {}).items())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell: not assigned yet
            bound.append((name, cell.cell_contents))
    bound += [("default", value) for value in getattr(function, "__defaults__", None) or ()]
    return [(name, value) for name, value in bound if isinstance(value, (int, float, str))]


def fingerprint(config: Mapping[str, object], function: Callable[..., Any]) -> str:
    """Hash what decides the result of a run, to 16 hex digits.

    Args:
        config: the resolved configuration as plain Python; output and tracking keys do not count.
        function: the training function; its source counts, the name of its module does not.
    """
    flat = _flat(config)
    kept = {key: value for key, value in flat.items() if decides_result(key, config)}
    text = json.dumps(kept, sort_keys=True, default=str) + "\n" + function_source(function)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def decides_result(key: str, config: Mapping[str, Any]) -> bool:
    """Whether a setting changes what a run computes.

    Args:
        key: its dotted name.
        config: the resolved configuration as plain Python: with ``train.batch_size_per_device`` the
            number of ranks and accumulation steps decides the batch size of a step.
    """
    if key in _STEP_SIZE:
        return (config.get("train") or {}).get("batch_size_per_device") is not None
    return key in _IDENTITY or not key.startswith(_NOT_IDENTITY)


def source_hash(train: Callable[..., Any]) -> str:
    """Hash the function's source, to 16 hex digits."""
    return fingerprint({}, train)


def _flat(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested settings by dotted name."""
    flat: dict[str, object] = {}
    for key, value in config.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else None
        flat.update(inner or {f"{prefix}{key}": value})
    return flat
