"""Launch a training function on every usable device, and bring back what it returned."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

from nbtoolkit.config.aliases import refuse_other_launchers_names
from nbtoolkit.config.schema import Config, ConfigLike, as_config
from nbtoolkit.environment.deadline import check_deadline, time_limit
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.kernel_mlflow import tracking_place, with_kernel_uri
from nbtoolkit.environment.plan import Evidence, make_plan
from nbtoolkit.environment.variables import kernel_environment
from nbtoolkit.errors import LaunchError
from nbtoolkit.host import detect_host
from nbtoolkit.launcher.fork_servers import fork_server, let_outlive, track
from nbtoolkit.launcher.options import Start, Where, check_call
from nbtoolkit.launcher.remote import submit_to_cluster
from nbtoolkit.launcher.run_handle import RunHandle, StartedRun
from nbtoolkit.launcher.run_result import RunResult, pack_at_deadline
from nbtoolkit.launcher.train_function import Train, task_name
from nbtoolkit.run.events import Event
from nbtoolkit.run.kept_answers import measured_speed
from nbtoolkit.run.output import CellOutput, Display, choose_screen, displays, find_display
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.payload import JobSpec, RunRequest, pack_content, pack_function
from nbtoolkit.run.resume import ChosenRun, choose_run, roll_back, write_header
from nbtoolkit.run.transport import Connection

# --- submission ---
# From the kernel to a supervisor: pack function and environment, hand them to the fork server.


_OWNER = "nbtoolkit.launcher.supervisor_process:supervise"
"""The main function of a run's supervisor."""


def submit(
    train: Callable[..., Any], request: RunRequest, run: ChosenRun, *, detach: bool
) -> StartedRun:
    """Start the run's supervisor.

    Raises:
        CannotPickle: the function captured something that cannot be pickled.
        LaunchError: the fork server did not start.
    """
    from nbtoolkit.tracking.tracker import choose_tracking

    line: Connection | None = None
    try:
        tracking = choose_tracking(request.job.config.to_dict()["tracking"])
        server = fork_server(
            tracking=tracking.on
        )  # first: it imports torch while the function is packed
        notes = (*request.notes, *(("warning", note) for note in tracking.notes))
        request, environment = replace(request, notes=notes), kernel_environment()
        packed = pickle.dumps(request)
        with pack_function(train, environment) as payload, pack_content(packed) as content:
            line = server.start(_OWNER, payload, content, run.lock)
        if detach:
            let_outlive(run.paths)
        tracked = partial(track, run.paths.folder) if tracking.on else None
        if tracked is not None:
            tracked()
    except BaseException as error:
        if line is not None:
            line.close()  # the run ends: a traceback that the notebook keeps would hold it open
        if isinstance(
            error, LaunchError
        ):  # it did not start; an interrupt may have come when it had
            roll_back(run)
        raise
    return StartedRun(line=line, tracked=tracked, detached=detach)


# --- launch ---


@overload
def launch(
    train: Train,
    config: ConfigLike = None,
    *,
    processes: int | None = None,
    start: Start = "forkserver",
    where: Where = "local",
    name: str | None = None,
    resume: str | os.PathLike[str] = "auto",
    wait: Literal[True] = True,
    detach: bool = False,
    display: Display = "auto",
    on_event: Callable[[Event], None] | None = None,
) -> RunResult: ...


@overload
def launch(
    train: Train,
    config: ConfigLike = None,
    *,
    processes: int | None = None,
    start: Start = "forkserver",
    where: Where = "local",
    name: str | None = None,
    resume: str | os.PathLike[str] = "auto",
    wait: Literal[False],
    detach: bool = False,
    display: Display = "auto",
    on_event: Callable[[Event], None] | None = None,
) -> RunHandle: ...


@refuse_other_launchers_names
def launch(
    train: Train,
    config: ConfigLike = None,
    *,
    processes: int | None = None,
    start: Start = "forkserver",
    where: Where = "local",
    name: str | None = None,
    resume: str | os.PathLike[str] = "auto",
    wait: bool = True,
    detach: bool = False,
    display: Display = "auto",
    on_event: Callable[[Event], None] | None = None,
) -> RunResult | RunHandle:
    """Run ``train(config, ctx)`` in new processes, one per device, and return the run's result.

    Args:
        train: the training function; it may be defined in a cell.
        config: a Config, a path to a YAML file, or a dict; None: the defaults.
        processes: the number of ranks; replaces ``distributed.world_size``. More than one rank is
            possible on the CPU, too.
        start: how the ranks start. ``"forkserver"``: a clean process forks them. ``"inline"``: this
            process is the only rank, so that breakpoints work.
        where: ``"local"``: on this machine. ``"slurm"`` or ``"ray"``: in a cluster job, which
            outlives this process and has the settings of ``cluster`` (see docs/cluster.md).
        name: a part of the run's id; default: the function's name.
        resume: ``"auto"`` resumes the newest run that has the same configuration and function, is
            unfinished, has a checkpoint, and is not running; else it starts a new run. ``"never"``
            starts a new run. A run's id or folder resumes this run.
        wait: False returns a :class:`RunHandle` at once.
        detach: whether the run outlives this process; see :func:`attach`.
        display: how to show the progress, besides rank 0's output. ``"auto"``: a live view in a
            notebook, one line per minute under papermill, a bar in a terminal, plain lines
            elsewhere. ``"widgets"``: a live view with ipywidgets. ``"text"``: plain lines.
            ``"off"``: nothing, not even rank 0's output.
        on_event: called with each event of the run while this process waits for the run.

    Returns:
        The :class:`RunResult`; with ``wait=False`` a :class:`RunHandle`.

    Raises:
        NbtoolkitError: the launch could not be planned or started (see :mod:`nbtoolkit.errors`), or
            a rank died or hung.
        KeyboardInterrupt: the wait was interrupted; the ranks have ended.
        Exception: the exception of the training function, with its own type, from the rank that
            failed first.
    """
    __tracebackhide__ = True
    check_call(
        train,
        {
            "processes": processes,
            "start": start,
            "where": where,
            "name": name,
            "resume": resume,
            "wait": wait,
            "detach": detach,
            "display": display,
            "on_event": on_event,
        },
    )
    screen = choose_screen(display, find_display())
    config = as_config(config, processes).with_overrides({"task": task_name(train)})
    config = with_kernel_uri(config)
    check_deadline(config)
    if where != "local":
        handle = _launch_remote(train, config, where, name, resume, display, on_event)
        return handle.result() if wait else handle
    host, hardware = detect_host(), detect_hardware()
    choose = partial(choose_run, config, train, name, resume)
    if host.is_rank:
        from nbtoolkit.launcher.in_process import run_in_place

        result = run_in_place(
            train,
            config,
            host,
            hardware,
            choose=choose,
            display=display,
            on_event=on_event,
        )
        if host.rank == 0:
            say = CellOutput(result.paths, display).say
            pack_at_deadline(result.status, result.paths, say)
        return result if wait else RunHandle(result.paths)
    speed = measured_speed(train, config, start)
    evidence: tuple[Evidence, ...] = () if speed is None else (speed,)
    plan = make_plan(config, host, hardware, evidence, start=start)
    with choose() as run:
        if learned := run.learned(plan):
            plan = make_plan(config, host, hardware, (*evidence, *learned), start=start)
        header = write_header(run, config, plan, host, train, detached=detach)
        limit = time_limit(config)
        job = JobSpec(paths=run.paths, plan=plan, config=config, deadline=limit.deadline)
        request = RunRequest(
            job=job,
            host=host,
            hardware=hardware,
            header=header,
            notes=(*run.notes, *limit.notes),
            speed=speed,
        )
        cell = CellOutput(run.paths, display, offset=_size(run.paths.log(0)))
        cell.begin(plan, run, tracking_place(config))
        if start == "inline":
            from nbtoolkit.launcher.in_process import run_inline

            result = run_inline(train, request, run, cell=cell, on_event=on_event)
            pack_at_deadline(result.status, result.paths, cell.say)
            return result

        shown = displays().show(cell, run.paths, screen)
        started = submit(train, request, run, detach=detach)
        handle = RunHandle(
            run.paths, started, cell=shown, on_event=on_event, offset=run.events_size
        )
    # From here on the supervisor alone holds the run's lock.
    if wait:
        return handle.result()
    shown.open(waits=False)
    return handle


def _launch_remote(
    train: Train,
    config: Config,
    where: str,
    name: str | None,
    resume: str | os.PathLike[str],
    display: Display,
    on_event: Callable[[Event], None] | None,
) -> RunHandle:
    """Submit the job that launches on the machines of a cluster; return the handle on its run."""

    def call(paths: RunPaths, ranks: int | None) -> Callable[[], RunResult]:
        folder = paths.folder
        return partial(launch, train, config, processes=ranks, resume=folder, display="off")

    choose = partial(choose_run, config, train, name, resume)
    run = submit_to_cluster(where, train, config, choose=choose, call=call)
    cell = CellOutput(run.paths, display, offset=_size(run.paths.log(0)))
    cell.say(f"{where} -> {run.paths.folder}{tracking_place(config)}")
    for warning in run.warnings:
        cell.say(f"warning: {warning}")
    shown = displays().show(cell, run.paths, choose_screen(display, find_display()))
    return RunHandle(run.paths, cell=shown, on_event=on_event, offset=run.events_size)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
