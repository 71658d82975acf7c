"""Pickle the call of a launch or a search into the run's folder, and submit it to a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbtoolkit.config.schema import Config
from nbtoolkit.environment.variables import kernel_environment
from nbtoolkit.errors import CannotPickle, ConfigError, LaunchError, PlanError
from nbtoolkit.host import detect_host
from nbtoolkit.run.paths import RunPaths, atomic_file, folder_error
from nbtoolkit.run.remote_job import (
    CALL_FILE,
    JOB_MARK,
    events_size,
    find_cluster,
    write_job,
)
from nbtoolkit.run.resume import ChosenRun, roll_back, write_submitted
from nbtoolkit.wire.payload import PackedFunction, load_function, pack_function, unpack

Call = Callable[[], object]


def submit_to_cluster(
    where: str,
    train: Callable[..., Any],
    config: Config,
    *,
    choose: Callable[[], ChosenRun],
    call: Callable[[RunPaths, int | None], Call],
    is_search: bool = False,
    **identity: Any,
) -> ChosenRun:
    """Choose the run's folder, write the call into it, and submit the job that makes it.

    The folder and the working directory must be on storage that the machines of the cluster share.

    Args:
        where: a name of :data:`~nbtoolkit.run.remote_job.CLUSTERS`.
        train: the training function.
        config: the resolved configuration.
        choose: finds or creates the run.
        call: makes the call from the run's paths and the ranks of the machine (None: by itself).
        is_search: whether the call is a sweep or a cross-validation.
        identity: further fields of the first event.

    Returns:
        The run, whose lock is released: the job will hold it.

    Raises:
        NbtoolkitError: the cluster is not here, the settings do not fit it, the function cannot be
            pickled, or the cluster refuses the job.
    """
    host = detect_host()
    if host.is_rank:
        raise PlanError(
            f'where="{where}" in one rank of several ({host.rank_reason})',
            allowed="a notebook, a script or the command line, once",
            do="call it without torchrun or srun: the cluster starts the ranks",
        )
    if config.distributed.strategy == "measured":
        raise ConfigError(
            f'distributed.strategy: measured, and where="{where}": a calibration is kept for the '
            "devices of the machine that made it",
            allowed="a strategy by name, or auto",
            do="set distributed.strategy: ddp, or another that nb.calibrate shows there",
        )
    cluster = find_cluster(where)
    ranks = cluster.check(config, search=is_search)
    with choose() as run:
        try:
            write_submitted(run, config, host, train, **identity)
            _keep_call(run.paths, call(run.paths, ranks), train)
        except BaseException:
            roll_back(run)
            raise
    try:
        size = events_size(run.paths)
        write_job(run.paths, where, cluster.submit(run.paths, config, search=is_search), size)
    except BaseException:
        roll_back(run)
        raise
    return run


def _keep_call(paths: RunPaths, call: Call, train: Callable[..., Any]) -> None:
    try:
        write_packed(call, paths.folder / CALL_FILE)
    except CannotPickle:
        with pack_function(train, kernel_environment()):  # its error names what it has captured
            pass
        raise
    except OSError as error:
        raise folder_error(paths.folder, error) from error


def write_packed(function: Callable[..., Any], file: Path) -> None:
    """Pickle a function into a file, for the machines of a cluster.

    Raises:
        CannotPickle: names what cannot be pickled.
        OSError: the file cannot be written.
    """
    with pack_function(function, kernel_environment()) as payload:
        size = os.fstat(payload).st_size
        done = 0
        with atomic_file(file) as target:
            while done < size:
                done += os.sendfile(target.fileno(), payload, done, size - done)


def load_packed(file: Path) -> Callable[..., Any]:
    """Unpickle a function of :func:`write_packed`.

    The process gets the working directory and the module path of the kernel, behind its own.

    Raises:
        OSError: the file or the working directory cannot be read here.
    """
    opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        packed = unpack(opened, PackedFunction)
        os.chdir(packed.environment.cwd)
        sys.path += [entry for entry in packed.environment.sys_path if entry not in sys.path]
        return load_function(opened, packed)
    finally:
        os.close(opened)


def load_call(paths: RunPaths) -> Call:
    """Unpickle the call of a run, in a process of its job.

    Raises:
        LaunchError: the folder cannot be read here.
    """
    os.environ[JOB_MARK] = str(paths.folder)
    if "inline" in os.environ.get("MPLBACKEND", ""):
        os.environ["MPLBACKEND"] = "agg"  # the notebook's backend needs its kernel
    try:
        return load_packed(paths.folder / CALL_FILE)
    except OSError as error:
        del os.environ[JOB_MARK]
        if error.filename is None:  # of a module that the function imports
            raise
        raise LaunchError(
            f"{os.uname().nodename} cannot read {error.filename}: {error.strerror}",
            allowed="a run's folder and a working directory on storage that all machines share",
            do="set runtime.output_dir to a folder on that storage, and start from one",
        ) from error
