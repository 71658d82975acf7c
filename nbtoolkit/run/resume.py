"""Decide whether a launch starts a new run or resumes one, and lock the run's folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.config.schema import Config
from nbtoolkit.environment.kernel_mlflow import active_run
from nbtoolkit.environment.plan import BatchTooLarge
from nbtoolkit.errors import LaunchError, ResumeError, RunFileError
from nbtoolkit.run.attempts import (
    as_recorded,
    completed,
    failed,
    first_event,
    kind_of,
    newest_plan,
    opening_event,
    readable_first_event,
    run_config,
)
from nbtoolkit.run.checkpoints.checkpoint_store import has_checkpoint
from nbtoolkit.run.events import RECORD, EventLog, RunStarted, RunSubmitted
from nbtoolkit.run.identity import Identity, changed_functions, decides_result, function_name
from nbtoolkit.run.paths import (
    KIND_NAMES,
    RUN_ID,
    Kind,
    RunPaths,
    announce_run,
    find_run,
    folder_error,
    open_regular,
    runs_in,
    sign_lock,
    write_whole,
)
from nbtoolkit.run.remote_job import JOB_MARK, awaits_job, events_size
from nbtoolkit.run.versions import versions

if TYPE_CHECKING:
    from nbtoolkit.environment.deadline import Note
    from nbtoolkit.environment.launch_plan import LaunchPlan
    from nbtoolkit.host import Host

_LOCK_TRIES = 3  # 10 ms apart: an owner that has written its last event is about to end
# RunPaths.owned() shares the lock for a moment; on a busy machine, the moment takes 50 ms and more.
_LOCK_TRIES_OF_LOOKS = 300
# A job that starts again after a rank was lost: the others of its first start may still be ending.
_LOCK_TRIES_OF_JOB = 3000


class RunLock:
    """A lock on a run, held until it is released or deleted, or this process ends.

    A supervisor that inherits the descriptor holds the lock while it lives.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def release(self) -> None:
        """Release this process's hold; may be called twice."""
        fd = self._fd
        self._fd = -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.release()


# Of a plan: what decides how much memory a rank has and needs.
_MEMORY = ("processes", "device_type", "device_names", "precision", "global_batch_size")


@dataclass(frozen=True)
class ChosenRun:
    """A run folder, locked for this launch until the end of the ``with`` block."""

    paths: RunPaths
    lock: RunLock
    attempt: int
    """1 for a new run, more for one that is resumed."""
    events_size: int = 0
    """Bytes of the events before this attempt."""
    plan_before: Mapping[str, object] = field(default_factory=dict)
    """The launch plan of the attempt before; empty for a new run."""
    warnings: tuple[str, ...] = ()
    """What the user has to know about the choice, such as code that has changed."""

    @property
    def notes(self) -> tuple[Note, ...]:
        """The warnings as notes of a run."""
        return tuple(("warning", text) for text in self.warnings)

    def __enter__(self) -> ChosenRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def own(self) -> None:
        """Write the pid of this process, which is in charge of the run, into the lock.

        Raises:
            RunFolderError: the lock cannot be written.
        """
        try:
            sign_lock(self.lock.fileno())
        except OSError as error:
            raise folder_error(self.paths.folder, error) from error

    @property
    def resumed(self) -> bool:
        """Whether this is an earlier run."""
        return self.attempt > 1

    @property
    def processes_before(self) -> int | None:
        """The number of ranks of the attempt before; None for a new run."""
        processes = self.plan_before.get("processes")
        return processes if isinstance(processes, int) else None

    def learned(self, plan: LaunchPlan) -> tuple[BatchTooLarge, ...]:
        """Return what the last attempt learned about the memory, if it had devices like these."""
        before = self.plan_before
        now = plan.to_dict()
        limit = before.get("too_large")
        same = all(before.get(name) == now[name] for name in _MEMORY)
        return (BatchTooLarge(limit),) if self.resumed and same and isinstance(limit, int) else ()


def choose_run(
    config: Config, train: Callable[..., Any], name: str | None, resume: str | os.PathLike[str]
) -> ChosenRun:
    """Find or create the run of this launch, and lock it.

    Args:
        config: the resolved configuration.
        train: the training function.
        name: part of a new run's id; None: the function's name.
        resume: ``"auto"`` (the newest run of the same identity with a checkpoint that is not
            finished and that no process owns; else a new run), ``"never"``, or a run's id or
            folder. The number of ranks may differ.

    Raises:
        ResumeError: the named run differs, is owned, or cannot be resumed.
        RunFolderError: the output folder cannot be written.
    """
    output_dir = Path(config.runtime.output_dir)
    name = name or str(getattr(train, "__name__", "run"))
    if resume == "never":
        return new_run(output_dir, name)
    identity = Identity.of(config.to_dict(), train)
    if resume != "auto":
        return begin_attempt(*_named(resume, output_dir, config, train), identity)
    if (unfinished := _newest_unfinished(output_dir, identity)) is not None:
        return begin_attempt(*unfinished, identity)
    return new_run(output_dir, name, why_not_resumed(output_dir, "run", identity))


def new_run(output_dir: str | Path, name: str, warnings: tuple[str, ...] = ()) -> ChosenRun:
    """Create a run folder and lock it.

    Raises:
        RunFolderError: the output folder cannot be written.
    """
    paths = RunPaths.create(output_dir, name)
    lock = lock_run(paths)
    assert lock is not None
    return ChosenRun(paths, lock, 1, warnings=warnings)


def begin_attempt(paths: RunPaths, lock: RunLock, identity: Identity) -> ChosenRun:
    """Begin the next attempt of a locked run, or the one that was submitted to a cluster.

    Raises:
        RunFileError: the events cannot be read.
        RunFolderError: the folder cannot be written.
    """
    before = first_event(paths)
    assert before is not None
    submitted = not isinstance(before, RunStarted)
    try:
        os.ftruncate(lock.fileno(), 0)  # the pid of the owner before
        paths.stop.unlink(missing_ok=True)
    except OSError as error:
        raise folder_error(paths.folder, error) from error
    return ChosenRun(
        paths,
        lock,
        before.attempt if submitted else before.attempt + 1,
        events_size(paths),
        newest_plan(paths),
        _changed_code(paths, before, identity),
    )


def _changed_code(paths: RunPaths, before: RunSubmitted, identity: Identity) -> tuple[str, ...]:
    if not (names := changed_functions(before.code, identity.code)):
        return ()
    return (
        f"the code has changed since the last attempt of {paths.run_id}: {names}; it resumes with "
        "the code as it is now",
    )


def _newest_unfinished(output_dir: Path, identity: Identity) -> tuple[RunPaths, RunLock] | None:
    for paths in runs_in(output_dir):
        # In the order of what they cost: the first event may be far from the end of the file.
        if not has_checkpoint(paths.checkpoints) or completed(paths):
            continue
        first = readable_first_event(paths)
        if first is None or first.record != RECORD or first.identity != identity.hash:
            continue
        lock = lock_run(paths)
        if lock is None:  # its supervisor lives, here or in another kernel
            continue
        if not completed(paths):  # else it ended before it was locked
            return paths, lock
        lock.release()
    return None


def why_not_resumed(output_dir: str | Path, kind: Kind, identity: Identity) -> tuple[str, ...]:
    """Say which unfinished runs are not resumed, and why.

    Args:
        output_dir: the folder of the runs.
        kind: of the run.
        identity: of the launch.

    Returns:
        A sentence on the newest unfinished run of the function and these settings: its code has
        changed, it has no checkpoint (as when it did not fit into a bundle), or an earlier build
        has made it. A sentence on all runs that have been saved and whose record is damaged.
    """
    newest = _why_newest_not_resumed(Path(output_dir), kind, identity)
    damaged = ", ".join(_damaged(Path(output_dir)))
    sentences = [newest] if newest else []
    if damaged:
        sentences.append(
            f"not resumed, because the record is damaged: {damaged}; nb.load_model reads "
            "checkpoints"
        )
    return tuple(sentences)


def _why_newest_not_resumed(output_dir: Path, kind: Kind, identity: Identity) -> str:
    for paths in runs_in(output_dir):
        opening = opening_event(paths)
        if opening is None or opening.function != identity.function or kind_of(opening) != kind:
            continue
        first = readable_first_event(paths) or opening
        saved = kind != "run" or has_checkpoint(paths.checkpoints)
        runs = not isinstance(first, RunStarted) or paths.owned()
        if runs or completed(paths):
            return ""
        run = f"the unfinished {KIND_NAMES[kind]} {paths.run_id}"
        if first.record != RECORD:
            return f"not resumed: an earlier build of nbtoolkit made {run}" if saved else ""
        if identity.hash_with(first.code) != first.identity:
            return ""
        if names := changed_functions(first.code, identity.code):
            return (
                f"starts anew, because the code differs from that of {run}: {names}; "
                f"resume={paths.run_id!r} resumes it with the code as it is now"
                if saved
                else ""
            )
        if not saved and not failed(paths):
            return (
                f"not resumed: {run} has these settings and this code, but no checkpoint; "
                "this run starts at the beginning"
            )
        return ""
    return ""


def _damaged(output_dir: Path) -> list[str]:
    """Return the ids of the runs that have been saved, and have no first event that can be read."""
    if not os.path.isdir(output_dir):  # Path.is_dir raises if the name is too long
        return []
    folders = sorted(folder for folder in output_dir.iterdir() if RUN_ID.match(folder.name))
    runs = [RunPaths(folder) for folder in folders if os.access(folder, os.R_OK | os.X_OK)]
    saved = [paths for paths in runs if _is_saved(paths)]
    return [paths.run_id for paths in saved if opening_event(paths) is None]


def _is_saved(paths: RunPaths) -> bool:
    """Whether there is a checkpoint, or the study or the folds of a search."""
    searched = any((paths.folder / name).exists() for name in ("study.jsonl", "folds.json"))
    return searched or has_checkpoint(paths.checkpoints)


def find_named_run(run: str | os.PathLike[str], output_dir: Path) -> RunPaths:
    """Return the run with this id, or in this folder.

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
) -> tuple[RunPaths, RunLock]:
    paths = find_named_run(run, output_dir)
    first = resumable_first_event(paths)
    if (kind := kind_of(first)) != "run":
        raise ResumeError(
            f"{paths.folder} is a {KIND_NAMES[kind]}, not a run",
            allowed="a run of nb.launch",
            do="resume it with nb.sweep or nb.cross_validate, which made it",
        )
    before = run_config(paths)
    if changes := changed_settings(before, config, may_train_longer=True):
        raise ResumeError(
            f"the run {paths.run_id} was made with another configuration: {changes}",
            allowed="a larger train.epochs; another number of processes (with train.batch_size); "
            "other output, tracking and checkpoint settings",
            do="load the run's own config.yaml, or launch with resume='never'",
        )
    refuse_other_function(paths, first, train)
    if completed(paths) and config.train.epochs <= before.train.epochs:
        raise ResumeError(
            f"the run {paths.run_id} is complete",
            allowed=f"extending it: train.epochs above {before.train.epochs}",
            do="increase train.epochs, read its result with nb.attach(folder).result(), or launch "
            "with resume='never'",
        )
    lock = lock_run(paths)
    if lock is None:
        pid = paths.owner()
        who = f"owned by process {pid}" if pid else "another launch is starting it"
        raise ResumeError(
            f"the run {paths.run_id} is still running, {who}",
            do="attach to it with nb.attach(folder)",
        )
    return paths, lock


def resumable_first_event(paths: RunPaths) -> RunSubmitted:
    """Return the first event of a run or search that is to be resumed by its name.

    Raises:
        ResumeError: the record is damaged, or of an earlier build.
    """
    try:
        first = first_event(paths)
        damage = "it has no first event"
    except RunFileError as error:
        first = None
        damage = error.what
    if first is None:
        raise ResumeError(
            f"cannot resume {paths.run_id}: its record {paths.events} is damaged: {damage}",
            allowed="a run with an undamaged folder",
            do="launch with resume='never'; nb.load_model reads its checkpoints",
        )
    if first.record != RECORD:
        raise ResumeError(
            f"an earlier build of nbtoolkit made {paths.run_id}; this one cannot resume it",
            allowed="nb.attach and nb.report show it, nb.load_model reads its weights",
            do="start a new one with resume='never'",
        )
    return first


def refuse_other_function(paths: RunPaths, first: RunSubmitted, train: Callable[..., Any]) -> None:
    """Refuse to resume a run or search that a function of another name has made.

    Raises:
        ResumeError: the names differ.
    """
    before = first.function
    now = function_name(train)
    # The module of a notebook's function is __main__, and another one in a script.
    if before.rpartition(".")[2] != now.rpartition(".")[2]:
        raise ResumeError(
            f"{paths.run_id} was made by another function: {before}, not {now}",
            allowed="the function that made it, whose code may have changed",
            do="launch that function, or start anew with resume='never'",
        )


def changed_settings(before: Config, config: Config, *, may_train_longer: bool = False) -> str:
    """Return the settings that decide the result and have changed, as text; empty: there are none.

    Args:
        before: the configuration of the run.
        config: the configuration of the launch.
        may_train_longer: do not count a larger ``train.epochs``.
    """
    settings = config.to_dict()
    return "; ".join(
        f"{key}: {old!r} then, {new!r} now"
        for key, (old, new) in before.differences(as_recorded(config)).items()
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
        lock = RunLock(open_regular(paths.lock, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise folder_error(paths.folder, error) from error
    if awaits_job(paths):
        lock.release()
        return None
    is_job = os.environ.get(JOB_MARK) == str(paths.folder)
    owned = _LOCK_TRIES_OF_JOB if is_job else _LOCK_TRIES
    shared = _LOCK_TRIES_OF_LOOKS
    while owned and shared:
        if _try_lock(lock, fcntl.LOCK_EX):
            return lock
        if _try_lock(lock, fcntl.LOCK_SH):
            fcntl.flock(lock, fcntl.LOCK_UN)
            shared -= 1
        else:
            owned -= 1
        time.sleep(0.01)
    lock.release()
    return None


def _try_lock(lock: RunLock, kind: int) -> bool:
    """Lock without waiting; return whether it is done."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def roll_back(run: ChosenRun) -> None:
    """Undo a launch that did not start: remove its new folder, or its events of the attempt."""
    if not run.resumed:
        shutil.rmtree(run.paths.folder, ignore_errors=True)
        return
    os.truncate(run.paths.events, run.events_size)
    # config.yaml is for people, and the caller raises why the launch did not start.
    with contextlib.suppress(OSError):
        write_whole(run.paths.config, run_config(run.paths).to_yaml(), durable=False)


def write_header(
    run: ChosenRun,
    config: Config,
    plan: LaunchPlan,
    host: Host,
    train: Callable[..., Any],
    **more: Any,
) -> RunStarted:
    """Write the attempt's first event, before anything starts, and return it.

    Args:
        run: the chosen run.
        config: the resolved configuration.
        plan: what the launch will do.
        host: where it runs.
        train: the training function.
        more: further or replaced fields of the event.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    fields = {**_fields(run, config, host, train), **more}
    header = RunStarted(plan=plan.to_dict(), mlflow_parent=active_run(config), **fields)
    _begin_record(run, config, header)
    return header


def write_submitted(
    run: ChosenRun, config: Config, host: Host, train: Callable[..., Any], **more: Any
) -> None:
    """Write what is known of an attempt that a job of a cluster will begin.

    Args:
        run: the chosen run.
        config: the resolved configuration.
        host: where it is submitted.
        train: the training function.
        more: further or replaced fields of the event.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    fields = {**_fields(run, config, host, train), **more}
    _begin_record(run, config, RunSubmitted(detached=True, **fields))


def _fields(
    run: ChosenRun, config: Config, host: Host, train: Callable[..., Any]
) -> dict[str, Any]:
    """Return the fields that a submitted and a started attempt have in common."""
    identity = Identity.of(config.to_dict(), train)
    return {
        "record": RECORD,
        "run_id": run.paths.run_id,
        "attempt": run.attempt,
        "identity": identity.hash,
        "code": identity.code,
        "function": identity.function,
        "host": host.kind,
        "versions": versions(),
        "config": config.to_dict(),
    }


def write_first_event(paths: RunPaths, config: Config, first: RunSubmitted) -> None:
    """Write the first event of an attempt, and its settings for people.

    Raises:
        OSError: the folder cannot be written.
    """
    write_whole(paths.config, config.to_yaml(), durable=False)
    log = EventLog(paths.events)
    log.write(first)
    log.close(durable=False)


def _begin_record(run: ChosenRun, config: Config, first: RunSubmitted) -> None:
    try:
        write_first_event(run.paths, config, first)
    except OSError as error:
        roll_back(run)
        raise folder_error(run.paths.folder, error) from error
    announce_run(run.paths.folder)
