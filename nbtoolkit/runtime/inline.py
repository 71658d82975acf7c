"""Runs without an owner: ``start="inline"`` (this process, breakpoints work), and ranks that torchrun or Slurm started."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import Leave
from nbtoolkit.runtime.channel import Channel, GroupChannel, RecordChannel
from nbtoolkit.runtime.choose import ChosenRun, choose_run, write_header
from nbtoolkit.runtime.context import RunContext
from nbtoolkit.runtime.crossing import pack_error, pack_value
from nbtoolkit.runtime.events import Event, EventReader
from nbtoolkit.runtime.paths import RunPaths, write_whole
from nbtoolkit.runtime.plan import LaunchPlan, make_plan
from nbtoolkit.runtime.record import RunRecord
from nbtoolkit.runtime.result import RunResult
from nbtoolkit.runtime.timing import deadline_of

if TYPE_CHECKING:
    from nbtoolkit.config import Config
    from nbtoolkit.runtime.hardware import Hardware
    from nbtoolkit.runtime.host import Host

Train = Callable[..., Any]


def run_inline(
    train: Train,
    config: Config,
    plan: LaunchPlan,
    run: ChosenRun,
    header: dict[str, Any],
    on_event: Callable[[Event], None] | None,
) -> RunResult:
    """One rank, here. Its exceptions pass as they are."""
    from nbtoolkit.runtime.worker import seed_everything

    record = RunRecord(run.paths, deadline=deadline_of(config))
    record.write("run", **header, plan=plan.to_dict())
    ctx = RunContext(config=config, plan=plan, paths=run.paths, channel=RecordChannel(record), deadline=record.deadline)
    seed_everything(config.seed)  # as in a rank: the same numbers, wherever it runs
    try:
        _call(train, ctx, record)
    finally:
        os.close(run.lock_fd)
        for event in EventReader(run.paths.events).read() if on_event is not None else ():
            if on_event is not None:
                on_event(event)
    _track(config, run.paths)
    return RunResult(run.paths)


def run_in_place(
    train: Train, config: Config, host: Host, hardware: Hardware, name: str | None
) -> RunResult:
    """One of the ranks that another launcher started: join the others, call ``train``; rank 0 keeps the run's folder."""
    from nbtoolkit.runtime.worker import join_group, seed_everything

    plan = make_plan(config, host, hardware)
    os.environ.update(rendezvous(host))
    join_group(plan, host.rank)
    run = choose_run(config, train, name, "never") if host.rank == 0 else None
    paths = RunPaths(Path(_agree(str(run.paths.folder) if run else None, host)))
    record = None
    if run is not None:
        record = RunRecord(paths, deadline=deadline_of(config))
        record.write("run", **write_header(run, config, plan, host, train), plan=plan.to_dict())
    own = RecordChannel(record) if record is not None else None
    channel: Channel = GroupChannel(host.rank, own) if host.world_size > 1 else own  # type: ignore[assignment]
    ctx = RunContext(
        config=config, plan=plan, paths=paths, channel=channel, rank=host.rank, local_rank=host.local_rank,
        world_size=host.world_size, deadline=deadline_of(config),
    )
    seed_everything(config.seed)
    if record is not None:
        _call(train, ctx, record)
    else:
        with suppress(Leave):  # rank 0 leaves at the same report, and writes the status
            write_whole(paths.value(ctx.rank), pack_value(train(config, ctx)), durable=False)
    _agree(None, host)  # rank 0 has written the result, the others their values
    if run is not None:
        os.close(run.lock_fd)
        _track(config, paths)
    return RunResult(paths)


def rendezvous(host: Host) -> dict[str, str]:
    """The variables that torch.distributed looks for, where the launcher did not set them (srun sets its own)."""
    wanted = {
        "RANK": str(host.rank),
        "LOCAL_RANK": str(host.local_rank),
        "WORLD_SIZE": str(host.world_size),
        "MASTER_ADDR": _first_node(os.environ.get("SLURM_STEP_NODELIST", "")) or "127.0.0.1",
        "MASTER_PORT": str(20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000),
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _first_node(nodes: str) -> str:
    """The first host of a Slurm node list: ``n[01-04],m2`` begins with ``n01``."""
    head, bracket, rest = nodes.partition("[")
    return head + re.split(r"[-,\]]", rest)[0] if bracket and "," not in head else nodes.split(",")[0]


def _call(train: Train, ctx: RunContext, record: RunRecord) -> None:
    try:
        value = train(ctx.config, ctx)
    except Leave as leave:
        record.complete(leave.status, ctx.world_size)
        return
    except BaseException as error:
        record.fail(pack_error(error), rank=ctx.rank, notes=[])
        raise
    write_whole(ctx.paths.value(ctx.rank), pack_value(value), durable=False)
    record.complete("completed", ctx.world_size)


def _agree(value: str | None, host: Host) -> str:
    """Rank 0's value on every rank; also a barrier."""
    if host.world_size == 1:
        return value or ""
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0] or ""


def _track(config: Config, paths: RunPaths) -> None:
    """Without a launchpad there is no tracking service: write what happened now."""
    if config.tracking.mlflow or config.tracking.tensorboard:
        from nbtoolkit.tracking import replay

        replay(paths.folder)


