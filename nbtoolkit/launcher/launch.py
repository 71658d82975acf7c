"""Launch a training function on every usable device, and bring back what it returned."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from nbtoolkit.config.schema import Config, ConfigLike, as_config
from nbtoolkit.environment.deadline import check_deadline, time_limit
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.plan import Evidence, make_plan
from nbtoolkit.environment.variables import kernel_environment, standby_shape
from nbtoolkit.errors import LaunchError
from nbtoolkit.host import detect_host
from nbtoolkit.launcher.arguments import check_call, task_name
from nbtoolkit.launcher.fork_launch import ForkedAgent
from nbtoolkit.launcher.forkserver_client import fork_server
from nbtoolkit.launcher.handle import (
    RunHandle,
    RunResult,
    StartedRun,
    pack_at_deadline,
    say_speed,
)
from nbtoolkit.launcher.measured import calibrate_long, measure_auto
from nbtoolkit.run.events import Event
from nbtoolkit.run.kept_answers import measured_speed
from nbtoolkit.run.output import CellOutput, Display, choose_screen, displays, find_display
from nbtoolkit.run.payload import pack_content, pack_function
from nbtoolkit.run.request import JobSpec, RunRequest
from nbtoolkit.run.resume import ChosenRun, choose_run, roll_back, write_header

if TYPE_CHECKING:
    from nbtoolkit.worker.context import RunContext


# --- submission ---
# From the kernel to a supervisor: pack function and environment, hand them to the fork server.


_OWNER = "nbtoolkit.launcher.supervisor:supervise"
"""The main function of a run's supervisor."""


def submit(
    train: Callable[..., Any], request: RunRequest, run: ChosenRun, *, detach: bool
) -> StartedRun:
    """Start the run's supervisor.

    Raises:
        CannotPickle: the function captured something that cannot be pickled.
        ForkRefused: ``start="fork"``, and this process is not fork-safe.
        LaunchError: the fork server did not start.
    """
    from nbtoolkit.tracking.tracker import choose_tracking

    forked: ForkedAgent | None = None
    try:
        tracking = choose_tracking(request.job.config.to_dict()["tracking"])
        server = fork_server(
            tracking=tracking.on
        )  # first: it imports torch while the function is packed
        notes = (*request.notes, *(("warning", note) for note in tracking.notes))
        request, environment = replace(request, notes=notes), kernel_environment()
        if request.job.plan.start == "fork":
            forked = ForkedAgent(train, request.job, environment)
            request = replace(request, agent_pid=forked.pid)
        function, group = (None, forked.descriptors) if forked else (train, None)
        packed = pickle.dumps(request)
        waits = request.job.config.runtime.standby_seconds > 0 and not detach
        shape = standby_shape(environment, request.job.plan) if waits else ""
        with pack_function(function, environment) as payload, pack_content(packed) as content:
            line = server.run(
                _OWNER, payload, content, run.lock, detached=detach, group=group, shape=shape
            )
        if detach:
            server.let_outlive(run.paths)
        tracked = partial(server.track, run.paths.folder) if tracking.on else None
        if tracked is not None:
            tracked()
    except BaseException as error:
        if forked is not None:
            forked.kill()
        if isinstance(
            error, LaunchError
        ):  # it did not start; an interrupt may have come when it had
            roll_back(run)
        raise
    finally:
        if forked is not None:
            forked.close()
    return StartedRun(line=line, tracked=tracked, forked=forked, detached=detach)


# --- launch ---


Start = Literal["forkserver", "fork", "inline"]
Train = Callable[[Config, "RunContext"], Any]


@overload
def launch(
    train: Train,
    config: ConfigLike = None,
    *,
    processes: int | None = None,
    start: Start = "forkserver",
    where: Literal["local"] = "local",
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
    where: Literal["local"] = "local",
    name: str | None = None,
    resume: str | os.PathLike[str] = "auto",
    wait: Literal[False],
    detach: bool = False,
    display: Display = "auto",
    on_event: Callable[[Event], None] | None = None,
) -> RunHandle: ...


def launch(
    train: Train,
    config: ConfigLike = None,
    *,
    processes: int | None = None,
    start: Start = "forkserver",
    where: Literal["local"] = "local",
    name: str | None = None,
    resume: str | os.PathLike[str] = "auto",
    wait: bool = True,
    detach: bool = False,
    display: Display = "auto",
    on_event: Callable[[Event], None] | None = None,
) -> RunResult | RunHandle:
    """Run ``train(config, ctx)`` in its own processes, one per device, and return its result.

    Args:
        train: the training function; it may be defined in a cell.
        config: a Config, a path to YAML, or a dict; None for the defaults.
        processes: number of ranks; replaces ``distributed.world_size``. More than one implies DDP,
            also on the CPU.
        start: ``"forkserver"`` (a clean process forks the ranks), ``"fork"`` (ranks forked from
            this process, for functions that cannot be pickled; refused where that is not safe),
            ``"inline"`` (this process, one rank: breakpoints work).
        where: ``"local"``.
        name: part of the run's id; default: the function's name.
        resume: ``"auto"`` resumes the newest run of equal configuration and function that is
            unfinished, not running, and has a checkpoint; ``"never"`` starts a new run; a run's id
            or folder resumes that one.
        wait: False returns a :class:`RunHandle` at once.
        detach: the run outlives this process; see :func:`attach`.
        display: progress, besides rank 0's output. ``"auto"``: a live view in a notebook, one line
            per minute under papermill, a bar in a terminal. ``"widgets"``; ``"text"``; ``"off"``
            shows nothing, not even output.
        on_event: called with each event of the run while this process waits for it.

    Returns:
        The :class:`RunResult` (a :class:`RunHandle` with ``wait=False``).

    Raises:
        NbtoolkitError: the launch could not be planned or started (see errors.py), or a rank died
            or hung.
        KeyboardInterrupt: the wait was interrupted; the ranks have ended.
        Exception: the training function's exception, with its own type, from the rank that failed
            first.
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
    check_deadline(config)
    config = measure_auto(train, config, resume, display)
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
    speed = measured_speed(train, config)
    if speed is None:
        speed = calibrate_long(train, config, host, hardware, start, display)
    evidence: tuple[Evidence, ...] = () if speed is None else (speed,)
    plan = make_plan(config, host, hardware, evidence, start=start)
    with choose() as run:
        if learned := run.learned(plan):
            plan = make_plan(config, host, hardware, (*evidence, *learned), start=start)
        header = write_header(run, config, plan, host, train)
        limit = time_limit(config)
        job = JobSpec(paths=run.paths, plan=plan, config=config, deadline=limit.deadline)
        request = RunRequest(
            job=job, host=host, hardware=hardware, header=header, notes=limit.notes, speed=speed
        )
        offset = _size(run.paths.events) if run.resumed else 0  # none: it was cut off at once
        cell = CellOutput(run.paths, display, offset=_size(run.paths.log(0)))
        cell.begin(plan, run)
        if start == "inline":
            from nbtoolkit.launcher.in_process import run_inline

            result = run_inline(train, request, run, cell=cell, on_event=on_event)
            say_speed(result, cell.say)
            pack_at_deadline(result.status, result.paths, cell.say)
            return result

        shown = displays().show(cell, run.paths, screen)
        started = submit(train, request, run, detach=detach)
        handle = RunHandle(run.paths, started, cell=shown, on_event=on_event, offset=offset)
    shown.open(waits=wait)
    # From here on the supervisor alone holds the run's lock.
    return handle.result() if wait else handle


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
