"""Inline: a run of one rank in this very process. Breakpoints work, exceptions pass as they are."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from nbtoolkit.config_reads import reads_noted
from nbtoolkit.errors import Leave
from nbtoolkit.runtime.cell import CellOutput
from nbtoolkit.runtime.choose import ChosenRun
from nbtoolkit.runtime.context import RunContext
from nbtoolkit.runtime.crossing import add_note, pack_error, pack_value
from nbtoolkit.runtime.events import Event
from nbtoolkit.runtime.keeper import Keeper
from nbtoolkit.runtime.pasted import advice
from nbtoolkit.runtime.paths import folder_error, write_whole
from nbtoolkit.runtime.plan import LaunchPlan
from nbtoolkit.runtime.record import RunRecord, returned_numbers
from nbtoolkit.runtime.result import RunResult, refuse_deleted
from nbtoolkit.runtime.signals import heeded
from nbtoolkit.runtime.surroundings import lend_variables, of_plan, without_stale
from nbtoolkit.runtime.timing import time_limit

if TYPE_CHECKING:
    from nbtoolkit.config import Config
    from nbtoolkit.runtime.hardware import Hardware

Train = Callable[..., Any]


def run_inline(
    train: Train,
    config: Config,
    plan: LaunchPlan,
    run: ChosenRun,
    header: dict[str, Any],
    *,
    hardware: Hardware,
    cell: CellOutput,
    on_event: Callable[[Event], None] | None,
) -> RunResult:
    """One rank, here; folder, events, tracking and result as with ranks of their own.

    Its output goes where this process's goes, and to no file. Variables and accelerate's state are
    the run's while it lasts, and then again what they were; so are the handlers of signals that
    announce an end, where this is a script's main thread (a kernel's are left alone).

    Raises:
        BaseException: what ``train`` raises, as it is. An interrupt ends the run as ``stopped``.
    """
    variables = {**without_stale(os.environ), **of_plan(plan, run.paths.folder)}
    with Keeper(run, config, plan, time_limit(config), header, cell, on_event) as keeper:
        ctx = RunContext(
            config=config,
            plan=plan,
            paths=run.paths,
            channel=keeper,
            local_rank=_device_index(plan, hardware),
            deadline=keeper.record.deadline,
        )
        with heeded(keeper.heard), lend_variables(variables), own_accelerate_state():
            settle(ctx)
            call(train, ctx, keeper.record)
    refuse_deleted(run.paths)
    return RunResult(run.paths)


def settle(ctx: RunContext) -> None:
    """Seeds and the current device, as in a rank of its own."""
    from nbtoolkit.runtime.worker import seed_everything

    seed_everything(ctx.seed)
    if ctx.device.type == "cuda":
        import torch

        torch.cuda.set_device(ctx.device)


def call(
    train: Train,
    ctx: RunContext,
    record: RunRecord | None,
    together: Callable[[], object] = lambda: None,
) -> None:
    """Call the function and write how the run ended, as far as that is this rank's to write.

    Args:
        train: the user's function.
        ctx: handed to it.
        record: the run's; None where another rank keeps it.
        together: waits for the other ranks; only when all are well is the run complete.
    """
    status = "completed"
    try:
        with reads_noted() as reads:
            value = train(ctx.config, ctx)
        _write_value(ctx, value)
        together()
        if record is not None:
            ctx.tell_unread(reads)
            record.returned(returned_numbers(value))
    except Leave as leave:  # on all ranks at the same report
        status = leave.status
    except KeyboardInterrupt:
        if record is not None:
            record.ask_to_stop("stopped", "interrupted")
            record.complete("stopped", ctx.world_size)
        raise
    except BaseException as error:
        if (advised := advice(error)) is not None:
            add_note(error, advised)
        _fail(ctx, record, error)
        raise
    if record is not None:
        _complete(record, status, ctx.world_size)


def _write_value(ctx: RunContext, value: Any) -> None:
    path, packed = ctx.paths.value(ctx.rank), pack_value(value)
    try:
        write_whole(path, packed, durable=False)
    except OSError as error:
        raise folder_error(path, error) from error


def _complete(record: RunRecord, status: str, processes: int) -> None:
    try:
        record.complete(status, processes)
    except OSError as error:
        raise folder_error(record.paths.folder, error) from error


def _fail(ctx: RunContext, record: RunRecord | None, error: BaseException) -> None:
    """Write the error down, unless a rank that failed first did; it is raised in any case."""
    if ctx.paths.error.exists():
        return
    with suppress(OSError):  # the disk may be what failed
        record = record or RunRecord(ctx.paths, deadline=None)
        record.fail(pack_error(error), rank=ctx.rank, notes=[])


def _device_index(plan: LaunchPlan, hardware: Hardware) -> int:
    """Where this process finds the planned device: here nothing hides the others."""
    places = {device.uuid: device.index for device in hardware.devices}
    return places.get(plan.devices[0], 0) if plan.devices else 0


@contextmanager
def own_accelerate_state() -> Iterator[None]:
    """Give the run an accelerate state of its own, and then back what was there.

    accelerate keeps one a process and refuses a second ``Accelerator`` with other settings: a run
    with another precision, or after an ``Accelerator`` of a cell, would fail.
    """
    before = [(state, dict(state)) for state in _accelerate_states()]
    for state, _ in before:
        state.clear()
    try:
        yield
    finally:
        for state in _accelerate_states():
            state.clear()
        for state, content in before:
            state.update(content)


def _accelerate_states() -> list[dict[str, Any]]:
    module = sys.modules.get("accelerate.state")
    names = ("PartialState", "AcceleratorState", "GradientState")
    return [getattr(module, name)._shared_state for name in names] if module is not None else []
