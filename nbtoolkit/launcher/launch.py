"""Launch a training function on every usable device, and bring back what it returned."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from nbtoolkit.config.aliases import refuse_other_launchers_names
from nbtoolkit.config.schema import Config, ConfigLike, as_config
from nbtoolkit.environment.deadline import check_deadline, time_limit
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.kernel_mlflow import tracking_place, with_kernel_uri
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.environment.variables import kernel_environment
from nbtoolkit.errors import LaunchError
from nbtoolkit.host import Host, detect_host
from nbtoolkit.launcher.fork_servers import fork_server, let_outlive, start_supervisor, track
from nbtoolkit.launcher.options import (
    LaunchOptions,
    SharedOptions,
    Start,
    check_call,
    takes_options,
)
from nbtoolkit.launcher.remote import submit_to_cluster
from nbtoolkit.launcher.run_handle import RunHandle, StartedRun
from nbtoolkit.launcher.run_result import RunResult, pack_at_deadline
from nbtoolkit.launcher.train_function import Train, task_name
from nbtoolkit.run.kept_answers import measured_speed
from nbtoolkit.run.output import CellOutput, Screen, choose_screen, displays, find_display
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.resume import ChosenRun, choose_run, roll_back, write_header
from nbtoolkit.wire.payload import JobSpec, RunRequest, pack_content, pack_function
from nbtoolkit.wire.transport import Connection

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nbtoolkit.environment.hardware import Hardware
    from nbtoolkit.environment.launch_plan import LaunchPlan
    from nbtoolkit.environment.placement import MeasuredSpeed


@overload
def launch(
    train: Train,
    config: ConfigLike = None,
    *,
    processes: int | None = None,
    start: Start = "forkserver",
    wait: Literal[True] = True,
    **shared: Unpack[SharedOptions],
) -> RunResult: ...


@overload
def launch(
    train: Train,
    config: ConfigLike = None,
    *,
    processes: int | None = None,
    start: Start = "forkserver",
    wait: Literal[False],
    **shared: Unpack[SharedOptions],
) -> RunHandle: ...


@refuse_other_launchers_names
@takes_options
def launch(
    train: Train,
    config: ConfigLike = None,
    *,
    processes: int | None = None,
    start: Start = "forkserver",
    wait: bool = True,
    **shared: Unpack[SharedOptions],
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
        display: how to show the progress. ``"html"``: a live page in the cell. ``"text"``: rank 0's
            lines, and one line per minute. ``"auto"``: the page in a notebook, lines elsewhere and
            under papermill, which also gets the page at the end. ``"off"``: nothing.
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
    options = LaunchOptions(processes=processes, start=start, wait=wait, **shared)
    check_call(train, options)
    screen = choose_screen(options.display, find_display())
    config = as_config(config, processes).with_overrides({"task": task_name(train)})
    config = with_kernel_uri(config)
    check_deadline(config)
    if options.where != "local":
        handle = _submit_job(train, config, options, screen)
        return handle.result() if wait else handle
    host = detect_host()
    if host.is_rank:
        return _join_ranks(train, config, options, host)
    planned = _plan(train, config, start, host)
    with choose_run(config, train, options.name, options.resume) as run:
        request = _claim(run, train, planned, options)
        cell = CellOutput(run.paths, options.display, offset=_size(run.paths.log(0)))
        cell.begin(request.job.plan, run, tracking_place(config))
        if start == "inline":
            return _train_here(train, request, run, cell, options)
        shown = displays().show(cell, run.paths, screen)
        started = submit(train, request, run, detach=options.detach)
        handle = RunHandle(
            run.paths,
            started,
            cell=shown,
            on_event=options.on_event,
            offset=run.events_size,
        )
    # From here on the supervisor alone holds the run's lock.
    if wait:
        return handle.result()
    shown.open(waits=False)
    return handle


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """The plan of a launch, with what it was made from."""

    config: Config
    host: Host
    hardware: Hardware
    start: Start
    speed: MeasuredSpeed | None
    plan: LaunchPlan


def _plan(train: Train, config: Config, start: Start, host: Host) -> _Planned:
    """Plan with what a calibration has measured; nothing is measured now."""
    hardware = detect_hardware()
    speed = measured_speed(train, config, start)
    evidence = () if speed is None else (speed,)
    plan = make_plan(config, host, hardware, evidence, start=start)
    return _Planned(
        config=config, host=host, hardware=hardware, start=start, speed=speed, plan=plan
    )


def _claim(run: ChosenRun, train: Train, planned: _Planned, options: LaunchOptions) -> RunRequest:
    """Write the first event of this attempt, whose plan counts what earlier attempts have shown."""
    config = planned.config
    host = planned.host
    plan = planned.plan
    if learned := run.learned(plan):
        known = () if planned.speed is None else (planned.speed,)
        evidence = (*known, *learned)
        plan = make_plan(config, host, planned.hardware, evidence, start=planned.start)
    header = write_header(run, config, plan, host, train, detached=options.detach)
    limit = time_limit(config)
    return RunRequest(
        job=JobSpec(paths=run.paths, plan=plan, config=config, deadline=limit.deadline),
        host=host,
        hardware=planned.hardware,
        header=header,
        notes=(*run.notes, *limit.notes),
        speed=planned.speed,
    )


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

    connection: Connection | None = None
    try:
        tracking = choose_tracking(request.job.config.to_dict()["tracking"])
        # First, since it imports torch while the function is packed.
        fork_server(tracking=tracking.on)
        notes = (*request.notes, *(("warning", note) for note in tracking.notes))
        request = replace(request, notes=notes)
        environment = kernel_environment()
        packed = pickle.dumps(request)
        with pack_function(train, environment) as payload, pack_content(packed) as content:
            connection = start_supervisor(_OWNER, payload, content, run.lock)
        if detach:
            let_outlive(run.paths)
        tracked = partial(track, run.paths.folder) if tracking.on else None
        if tracked is not None:
            tracked()
    except BaseException as error:
        if connection is not None:
            # The run ends: a traceback that the notebook keeps would hold it open.
            connection.close()
        if isinstance(error, LaunchError):  # it did not start; an interrupt may come when it has
            roll_back(run)
        raise
    return StartedRun(line=connection, tracked=tracked, detached=detach)


def _train_here(
    train: Train, request: RunRequest, run: ChosenRun, cell: CellOutput, options: LaunchOptions
) -> RunResult:
    """Train in this process (``start="inline"``)."""
    from nbtoolkit.launcher.in_process import run_inline

    result = run_inline(train, request, run, cell=cell, on_event=options.on_event)
    pack_at_deadline(result.status, result.paths, cell.say)
    return result


def _join_ranks(
    train: Train, config: Config, options: LaunchOptions, host: Host
) -> RunResult | RunHandle:
    """Train in this process, which torchrun, Slurm or Ray has started as a rank."""
    from nbtoolkit.launcher.in_process import run_in_place

    result = run_in_place(
        train,
        config,
        host,
        detect_hardware(),
        choose=partial(choose_run, config, train, options.name, options.resume),
        display=options.display,
        on_event=options.on_event,
    )
    if host.rank == 0:
        say = CellOutput(result.paths, options.display).say
        pack_at_deadline(result.status, result.paths, say)
    return result if options.wait else RunHandle(result.paths)


def _submit_job(train: Train, config: Config, options: LaunchOptions, screen: Screen) -> RunHandle:
    """Submit the job that launches on the machines of a cluster; return the handle on its run."""

    def call(paths: RunPaths, ranks: int | None) -> Callable[[], RunResult]:
        folder = paths.folder
        return partial(launch, train, config, processes=ranks, resume=folder, display="off")

    choose = partial(choose_run, config, train, options.name, options.resume)
    run = submit_to_cluster(options.where, train, config, choose=choose, call=call)
    cell = CellOutput(run.paths, options.display, offset=_size(run.paths.log(0)))
    cell.say(f"{options.where} -> {run.paths.folder}{tracking_place(config)}")
    for warning in run.warnings:
        cell.say(f"warning: {warning}")
    shown = displays().show(cell, run.paths, screen)
    return RunHandle(run.paths, cell=shown, on_event=options.on_event, offset=run.events_size)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
