"""Launch a training function on every usable device, and bring back what it returned."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from nbtoolkit.config.aliases import refuse_other_launchers_names
from nbtoolkit.config.schema import Config, ConfigLike, as_config
from nbtoolkit.environment.deadline import check_deadline, time_limit
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.kernel_mlflow import tracking_place, with_kernel_uri
from nbtoolkit.environment.plan import Evidence, make_plan
from nbtoolkit.environment.variables import RANK_MARK, kernel_environment
from nbtoolkit.errors import LaunchError, NestedLaunch
from nbtoolkit.host import detect_host
from nbtoolkit.launcher.fork_servers import fork_server, let_outlive, track
from nbtoolkit.launcher.remote import submit_to_cluster
from nbtoolkit.launcher.run_handle import RunHandle, StartedRun
from nbtoolkit.launcher.run_result import RunResult, pack_at_deadline
from nbtoolkit.run.events import Event
from nbtoolkit.run.kept_answers import measured_speed
from nbtoolkit.run.output import CellOutput, Display, choose_screen, displays, find_display
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.payload import JobSpec, RunRequest, pack_content, pack_function
from nbtoolkit.run.remote_job import CLUSTERS
from nbtoolkit.run.resume import ChosenRun, choose_run, roll_back, write_header
from nbtoolkit.run.transport import Connection

if TYPE_CHECKING:
    from nbtoolkit.worker.context import RunContext


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


# --- arguments ---


CHOICES = {
    "start": ("forkserver", "inline"),
    "where": ("local", *CLUSTERS),
    "display": ("auto", "widgets", "text", "off"),
}


def check_call(train: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Validate the arguments of :func:`nbtoolkit.launch`.

    Args:
        train: the training function.
        arguments: the other arguments, by name.

    Raises:
        NestedLaunch: this process is a rank itself.
        LaunchError: an argument has an invalid value.
    """
    if RANK_MARK in os.environ:
        raise NestedLaunch(
            f"nb.launch was called inside a rank of the run {os.environ[RANK_MARK]}",
            allowed="launches from a notebook, a script or the command line",
            do="move the launch out of the training function, or behind `if __name__ == ...`",
        )
    check_function(train)
    _check_arguments(arguments)
    if arguments["start"] != "forkserver" and arguments["where"] != "local":
        raise LaunchError(
            f'start="{arguments["start"]}" ties the run to this process, and '
            f'where="{arguments["where"]}" runs it on other machines',
            allowed='where="local", or start="forkserver"',
            do="leave start out",
        )
    if arguments["start"] != "forkserver" and (arguments["detach"] or not arguments["wait"]):
        raise LaunchError(
            f'start="{arguments["start"]}" ties the run to this process: '
            "it cannot be detached or run in the background",
            allowed='wait=False and detach=True with start="forkserver"',
            do='use start="forkserver"',
        )


def task_name(train: Callable[..., Any]) -> str:
    """Return the name of a training function for the setting ``task``.

    Returns:
        ``"package.module:function"``, or ``"__main__:function"`` if no other process can import it:
        a function of a cell, a script, or inside another function.
    """
    module, name = getattr(train, "__module__", None), getattr(train, "__qualname__", None)
    found: Any = sys.modules.get(module or "")
    for part in (name or "").split("."):
        found = getattr(found, part, None)
    if found is train and module not in ("__main__", "__mp_main__"):
        return f"{module}:{name}"
    plain = getattr(train, "__name__", type(train).__name__)
    return f"__main__:{re.sub(r'[^a-zA-Z0-9_]', '', plain) or 'function'}"


def check_function(train: Callable[..., Any]) -> None:
    """Raise a LaunchError for what cannot be called as ``train(config, ctx)``."""
    if not callable(train):
        raise LaunchError(
            f"launch got {reprlib.repr(train)}, which is not a function",
            allowed="a function train(config, ctx)",
            do="pass the function itself: nb.launch(train, config), not nb.launch(train(...))",
        )
    called = train
    while isinstance(called, partial):
        called = called.func
    name = str(getattr(called, "__name__", type(called).__name__))
    plain = inspect.isroutine(called) or inspect.isclass(called)
    code = called if plain else type(called).__call__  # whose body a call runs
    if inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code):
        raise LaunchError(
            f"{name} is an async function: a rank calls it, and nothing would await it",
            allowed="a plain function train(config, ctx)",
            do=f"launch a plain function: def train(config, ctx): return asyncio.run({name}(...))",
        )
    if inspect.isgeneratorfunction(code):
        raise LaunchError(
            f"{name} is a generator function (there is a `yield` in it): calling it runs nothing",
            allowed="a plain function train(config, ctx) that returns its result",
            do="return a list, and use ctx.log or ctx.report for values of each step",
        )
    try:
        signature = inspect.signature(train)
    except (TypeError, ValueError):  # built-in functions may have none
        return
    try:
        signature.bind("config", "ctx")
    except TypeError as error:
        raise LaunchError(
            f"{name}{signature} cannot be called as {name}(config, ctx): {error}",
            allowed="a function train(config, ctx)",
            do="accept both arguments; pass further ones with functools.partial(train, lr=0.1)",
        ) from None


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    for argument in CHOICES:
        check_choice(argument, arguments[argument])
    processes, name = arguments["processes"], arguments["name"]
    resume, on_event = arguments["resume"], arguments["on_event"]
    whole = isinstance(processes, Integral) and not isinstance(processes, bool)
    counts = processes is None or (whole and processes >= 1)
    _check("processes", processes, counts, "a whole number of at least 1, or None")
    _check("name", name, name is None or isinstance(name, str), "a string, or None")
    named = isinstance(resume, (str, os.PathLike)) and resume != ""
    _check("resume", resume, named, '"auto" | "never" | a run\'s id or folder')
    listens = on_event is None or callable(on_event)
    _check("on_event", on_event, listens, "a function of one event, or None")


def check_choice(argument: str, value: object) -> None:
    """Validate an argument that has a fixed set of values.

    Args:
        argument: one of ``CHOICES``.
        value: its value.

    Raises:
        LaunchError: the value is none of the allowed ones.
    """
    known = CHOICES[argument]
    _check(argument, value, value in known, " | ".join(map(repr, known)))


def _check(argument: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise LaunchError(
            f"{argument}={reprlib.repr(value)} is not valid",
            allowed=allowed,
            do=f"choose one of these, or leave {argument} out",
        )


# --- launch ---


Start = Literal["forkserver", "inline"]
Where = Literal["local", "slurm", "ray"]
Train = Callable[[Config, "RunContext"], Any]


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
