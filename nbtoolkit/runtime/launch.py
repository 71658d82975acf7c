"""launch: run a training function on every usable device, once, and bring back what it returned."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from nbtoolkit.config import Config, ConfigLike, as_config
from nbtoolkit.runtime.call import check_call, task_name
from nbtoolkit.runtime.cell import CellOutput, Display
from nbtoolkit.runtime.choose import choose_run, write_header
from nbtoolkit.runtime.events import Event
from nbtoolkit.runtime.hardware import detect_hardware
from nbtoolkit.runtime.host import detect_host
from nbtoolkit.runtime.plan import make_plan
from nbtoolkit.runtime.result import RunHandle, RunResult, pack_at_deadline
from nbtoolkit.runtime.screen import choose_screen, look_around

if TYPE_CHECKING:
    from nbtoolkit.runtime.context import RunContext

Start = Literal["launchpad", "fork", "inline"]
Train = Callable[[Config, "RunContext"], Any]


@overload
def launch(
    train: Train,
    config: ConfigLike = None,
    *,
    processes: int | None = None,
    start: Start = "launchpad",
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
    start: Start = "launchpad",
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
    start: Start = "launchpad",
    where: Literal["local"] = "local",
    name: str | None = None,
    resume: str | os.PathLike[str] = "auto",
    wait: bool = True,
    detach: bool = False,
    display: Display = "auto",
    on_event: Callable[[Event], None] | None = None,
) -> RunResult | RunHandle:
    """Run ``train(config, ctx)`` in its own processes, one a device, and return what it returned.

    Args:
        train: the training function; it may be defined in a cell.
        config: a Config, a path to YAML, or a dict; the defaults when None.
        processes: number of ranks; beats ``distributed.world_size``. More than one implies DDP, on
            the CPU too.
        start: ``"launchpad"`` (a clean process that forks the ranks), ``"fork"`` (ranks forked from
            this process, for functions that cannot be pickled; refused where that is not safe),
            ``"inline"`` (this process, one rank: breakpoints work).
        where: ``"local"``.
        name: part of the run's id; default the function's name.
        resume: ``"auto"`` goes on with the newest unfinished, ownerless run of equal configuration
            and function that saved a checkpoint, and says so; ``"never"``; or a run's id or folder.
        wait: False returns a :class:`RunHandle` at once.
        detach: the run outlives this process; see :func:`attach`.
        display: besides rank 0's lines, how far the run is: ``"auto"`` takes what fits the place (a
            live view in a notebook, a line a minute under papermill, a bar in a terminal);
            ``"widgets"``; ``"text"``; ``"off"`` shows nothing, lines neither.
        on_event: called with each event of the run while this process waits for it.

    Returns:
        The :class:`RunResult` (a :class:`RunHandle` with ``wait=False``).

    Raises:
        NbtoolkitError: the launch could not be planned or started (see errors.py), or a rank died
            or hung.
        KeyboardInterrupt: the wait was interrupted; the ranks have ended.
        Exception: what the training function raised, with its own type, from the rank that failed
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
    screen = choose_screen(display, look_around())
    config = as_config(config, processes).with_overrides({"task": task_name(train)})
    host, hardware = detect_host(), detect_hardware()
    if host.is_rank:
        from nbtoolkit.runtime.in_place import run_in_place

        result = run_in_place(
            train,
            config,
            host,
            hardware,
            name=name,
            resume=resume,
            display=display,
            on_event=on_event,
        )
        if host.rank == 0:
            say = CellOutput(result.paths, display).say
            pack_at_deadline(result.status, result.paths, say)
        return result if wait else RunHandle(result.paths)
    plan = make_plan(config, host, hardware, start=start)
    with choose_run(config, train, name, resume) as run:
        header = write_header(run, config, plan, host, train)
        offset = _size(run.paths.events) if run.resumed else 0  # none: it was cut off at once
        cell = CellOutput(run.paths, display, offset=_size(run.paths.log(0)))
        cell.begin(plan, run)
        if start == "inline":
            from nbtoolkit.runtime.inline import run_inline

            result = run_inline(
                train, config, plan, run, header, hardware=hardware, cell=cell, on_event=on_event
            )
            pack_at_deadline(result.status, result.paths, cell.say)
            return result
        from nbtoolkit.runtime.takeoff import take_off
        from nbtoolkit.views.live import show_run

        shown = show_run(cell, run.paths, screen)
        line, tracked, forked = take_off(
            train, config, plan, run, header, host, hardware, detach=detach
        )
        handle = RunHandle(
            run.paths,
            line=line,
            cell=shown,
            on_event=on_event,
            tracked=tracked,
            offset=offset,
            forked=forked,
            detached=detach,
        )
    shown.open(waits=wait)
    return handle.result() if wait else handle  # from here on the owner alone holds the lock


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
