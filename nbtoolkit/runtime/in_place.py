"""In place: this process is a rank that torchrun, Slurm or Ray started; rank 0 keeps the record."""

from __future__ import annotations

import atexit
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nbtoolkit.errors import GroupStartFailed
from nbtoolkit.runtime.cell import CellOutput, Display
from nbtoolkit.runtime.channel import GroupChannel
from nbtoolkit.runtime.choose import ChosenRun, choose_run, write_header
from nbtoolkit.runtime.context import RunContext
from nbtoolkit.runtime.events import Event
from nbtoolkit.runtime.failure import raise_failure
from nbtoolkit.runtime.inline import call, own_accelerate_state, settle
from nbtoolkit.runtime.keeper import Keeper
from nbtoolkit.runtime.paths import RunPaths
from nbtoolkit.runtime.plan import LaunchPlan, make_plan
from nbtoolkit.runtime.rank_check import followed
from nbtoolkit.runtime.result import RunResult
from nbtoolkit.runtime.signals import heeded
from nbtoolkit.runtime.surroundings import lend_variables, of_plan, omp_threads
from nbtoolkit.runtime.timing import time_limit

if TYPE_CHECKING:
    from nbtoolkit.config import Config
    from nbtoolkit.runtime.hardware import Hardware
    from nbtoolkit.runtime.host import Host

T = TypeVar("T")

_LET_GO_SECONDS = 0.1


def run_in_place(
    train: Callable[..., Any],
    config: Config,
    host: Host,
    hardware: Hardware,
    *,
    name: str | None,
    resume: str | os.PathLike[str],
    display: Display,
    on_event: Callable[[Event], None] | None,
) -> RunResult:
    """Join the other ranks and call ``train``; returns when all of them are through.

    SIGTERM, SIGUSR1 or SIGUSR2 to any rank: all of them leave at the next report, as ``deadline``.

    Every rank gets the same result, read from the run's folder: ranks on several machines need one
    that all of them see. Output goes where this process's goes.

    Raises:
        GroupStartFailed: the ranks did not find each other.
        BaseException: what ``train`` raises on this rank, as it is; the launcher ends the others.
    """
    plan = make_plan(config, host, hardware)
    threads = {"OMP_NUM_THREADS": omp_threads(os.environ, plan)}
    variables = {**os.environ, **threads, **rendezvous(host, hardware, os.environ)}
    with lend_variables(variables), own_accelerate_state(), ExitStack() as stack:
        _join(plan, host)
        run = _choose(train, config, host, name, resume)
        limit = time_limit(config)
        mine = ("", None) if run is None else (str(run.paths.folder), limit.deadline)
        folder, deadline = _agree(mine, host)
        paths, keeper = RunPaths(Path(folder)), None
        if run is not None:
            cell = CellOutput(paths, display)
            cell.begin(plan, run)
            header = write_header(run, config, plan, host, train)
            keeper = stack.enter_context(Keeper(run, config, plan, limit, header, cell, on_event))
        _run_rank(train, config, plan, paths, host, keeper, deadline)
        _meet(host, paths.ended)  # rank 0 has written the result
    return RunResult(paths)


def _choose(
    train: Callable[..., Any],
    config: Config,
    host: Host,
    name: str | None,
    resume: str | os.PathLike[str],
) -> ChosenRun | None:
    """The run, for rank 0; the others hear of it."""
    if host.rank != 0:
        return None
    run = choose_run(config, train, name, resume)
    for rank in range(host.world_size):
        run.paths.value(rank).unlink(missing_ok=True)  # an earlier attempt's
    return run


def _run_rank(
    train: Callable[..., Any],
    config: Config,
    plan: LaunchPlan,
    paths: RunPaths,
    host: Host,
    keeper: Keeper | None,
    deadline: float | None,
) -> None:
    alone = host.world_size == 1
    channel = keeper if keeper is not None and alone else GroupChannel(keeper)
    optimizers = followed(config, host.world_size)
    ctx = RunContext(
        config=config,
        plan=plan,
        paths=paths,
        channel=channel,
        rank=host.rank,
        local_rank=int(os.environ.get("LOCAL_RANK", host.local_rank)),
        world_size=host.world_size,
        deadline=deadline,
        optimizers=optimizers,
    )
    record = keeper.record if keeper is not None else None
    variables = {**os.environ, **of_plan(plan, paths.folder)}
    with heeded(channel.heard), lend_variables(variables), ExitStack() as stack:
        stack.callback(ctx.close)
        if optimizers is not None:
            stack.callback(optimizers.close)
        settle(ctx)
        call(train, ctx, record, together=lambda: _all_well(host, paths))


def _join(plan: LaunchPlan, host: Host) -> None:
    """Form the group, unless the script has; it is left when the process ends."""
    import torch
    import torch.distributed as dist

    from nbtoolkit.runtime.worker import join_group

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
    ours = not dist.is_initialized()
    try:
        join_group(plan, host.rank)
    except Exception as error:
        raise GroupStartFailed(
            f"rank {host.rank} of {host.world_size} ({host.rank_reason}) could not join the others "
            f"at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: "
            f"{type(error).__name__}: {error}",
            allowed="as many ranks as WORLD_SIZE says, which reach that address and port",
            do="unset RANK and WORLD_SIZE if no launcher started this process",
        ) from error
    if ours and dist.is_initialized():
        atexit.register(_leave_group)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        # A thread of gloo's may still hold the last collective's tensor, and frees it under the
        # interpreter's lock; the group's end waits for that thread with the lock held (torch 2.6).
        time.sleep(_LET_GO_SECONDS)
        dist.destroy_process_group()


def rendezvous(host: Host, hardware: Hardware, environ: Mapping[str, str]) -> dict[str, str]:
    """What torch.distributed and accelerate look for where the launcher did not say it (srun).

    A task that sees one GPU (``srun --gpus-per-task=1``) has it as ``cuda:0``, whatever its number.
    """
    if host.world_size == 1:
        return {}
    step = int(environ.get("SLURM_JOB_ID", "0")) * 31 + int(environ.get("SLURM_STEP_ID", "0"))
    wanted = {
        "RANK": str(host.rank),
        "LOCAL_RANK": "0" if len(hardware.devices) == 1 else str(host.local_rank),
        "WORLD_SIZE": str(host.world_size),
        "LOCAL_WORLD_SIZE": str(host.local_world_size),
        "MASTER_ADDR": first_node(environ.get("SLURM_STEP_NODELIST", "")) or "127.0.0.1",
        "MASTER_PORT": str(20000 + step % 10000),  # equal on all ranks; two steps seldom meet
    }
    return {name: value for name, value in wanted.items() if name not in environ}


def first_node(nodes: str) -> str:
    """The first host of a Slurm node list: ``n[01-04,07],m2`` begins with ``n01``."""
    head, bracket, rest = nodes.partition("[")
    if bracket and "," not in head:
        return head + re.split(r"[-,\]]", rest)[0]
    return nodes.split(",")[0]


def _all_well(host: Host, paths: RunPaths) -> None:
    """Wait until every rank is through with the function; raise the error of one that failed."""
    values = [paths.value(rank) for rank in range(host.world_size)]
    _meet(host, lambda: paths.error.exists() or all(value.exists() for value in values))
    if paths.error.exists():
        raise_failure(paths)


def _meet(host: Host, together: Callable[[], bool]) -> None:
    """Wait for the other ranks: in the group, or by the run's files where the function ended it.

    ``Accelerator.end_training()`` does that, as the last line of many a training function.
    """
    import torch.distributed as dist

    if host.world_size == 1 or dist.is_initialized():
        _agree(None, host)
        return
    while not together():
        time.sleep(0.05)


def _agree(value: T, host: Host) -> T:
    """Rank 0's value on every rank; also a barrier."""
    if host.world_size == 1:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
