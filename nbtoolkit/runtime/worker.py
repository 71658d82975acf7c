"""What each rank does: join the group, unpickle the function, call it, hand back its value."""

from __future__ import annotations

import base64
import builtins
import contextlib
import faulthandler
import gc
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from nbtoolkit.config_reads import reads_noted
from nbtoolkit.errors import Leave
from nbtoolkit.runtime.ahead import ImportNotes
from nbtoolkit.runtime.channel import OwnerChannel
from nbtoolkit.runtime.context import RunContext
from nbtoolkit.runtime.crossing import add_note, pack_error, pack_value
from nbtoolkit.runtime.forker import die_with_parent
from nbtoolkit.runtime.gloo import new_gloo_group, without_gloo_lines
from nbtoolkit.runtime.heartbeat import Heartbeat
from nbtoolkit.runtime.pasted import advice
from nbtoolkit.runtime.paths import RunPaths, folder_error, write_whole
from nbtoolkit.runtime.pilot import Job, default_signals, write_output_to
from nbtoolkit.runtime.plan import LaunchPlan
from nbtoolkit.runtime.rank_check import followed
from nbtoolkit.runtime.record import returned_numbers
from nbtoolkit.runtime.surroundings import RANK_MARK
from nbtoolkit.runtime.wire import Line

# Asks a rank for its stacks. A real-time signal, since users and schedulers have meanings of their
# own for SIGUSR1 and 2.
STACKS_SIGNAL = signal.SIGRTMIN + 7

# Gloo's end waits for its threads. Code that destroys the group (Accelerator.end_training does)
# leaves DDP as its last holder, whose end keeps the GIL, for which such a thread may wait: of a
# few launches one hung. Who holds the group here, never ends it; a forked process's end, which is
# os._exit, does. (An interpreter that is finalized aborts: not for ranks that torchrun started.)
_GROUPS: list[Any] = []


def run_rank(job: Job) -> None:
    """What the launcher starts in each rank's process. Errors go to the owner, not up."""
    rank = int(os.environ.get("RANK", 0))
    lines = _settle(job, rank)
    channel = _channel(job, lines)
    channel.send("phase", phase="started", pid=os.getpid())
    if job.plan.processes > 1 and channel.wait() is None:  # until all ranks are forked
        return None
    try:
        join_group(job.plan, rank)
    except Exception as error:  # any failure before the user's code is the owner's to judge
        return channel.send("group_failed", error=f"{type(error).__name__}: {error}")
    _hold_group()
    channel.send("phase", phase="group")
    work: Job | None = _following(job, rank, channel) if job.content.get("waits") else job
    while work is not None:
        channel = _channel(work, lines)
        work = _following(work, rank, channel) if _work(work, rank, channel) else None
    _leave_group()
    return None


def _work(job: Job, rank: int, channel: OwnerChannel) -> bool:
    """Call the function of one job; whether this process may take another one."""
    optimizers = followed(job.content["config"], job.plan.processes)
    context = RunContext(
        config=job.content["config"],
        plan=job.plan,
        paths=job.paths,
        channel=channel,
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        world_size=job.plan.processes,
        deadline=job.content["deadline"],
        params=job.content["params"],
        fold=job.content["fold"],
        optimizers=optimizers,
    )
    notes = ImportNotes(lambda names: channel.send("imports", names=names))
    if rank == 0:
        sys.meta_path.insert(
            0, notes
        )  # what is imported from here on, the launchpad imports for the next launch
    try:
        function = job.function or _load(job)
        channel.send("phase", phase="ready")
        if channel.wait() is not None:  # the owner's go; it comes when every rank is ready
            _call(function, context, channel, notes)
    except BaseException as error:
        _tell_error(job, rank, channel, error)
    finally:
        context.close()
        if notes in sys.meta_path:
            sys.meta_path.remove(notes)
        if optimizers is not None:
            optimizers.close()
    return bool(job.content.get("kept"))


def _following(job: Job, rank: int, channel: OwnerChannel) -> Job | None:
    """The next job of a group that is kept for several; None when there is none."""
    message = channel.wait()
    if message is None:
        return None
    content = {**job.content, **pickle.loads(Path(message["file"]).read_bytes())}
    following = replace(
        job, content=content, plan=content["plan"], paths=RunPaths(Path(content["folder"]))
    )
    _clear_memory()
    os.environ[RANK_MARK] = str(following.paths.folder)
    _write_into(following, rank)
    return following


def _clear_memory() -> None:
    """Give back what the job before held: models and batches, also those in reference cycles."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _channel(job: Job, lines: tuple[Line, Line]) -> OwnerChannel:
    alone = job.plan.processes == 1 and not job.content.get("judged")
    return OwnerChannel(*lines, alone=alone)


def _call(
    function: Callable[..., Any], context: RunContext, channel: OwnerChannel, notes: ImportNotes
) -> None:
    seed_everything(context.seed)
    try:
        with Heartbeat(channel, context.world_size), reads_noted() as reads:
            value = function(context.config, context)
    except Leave as leave:
        channel.send("left", status=leave.status)
        return
    packed, path = pack_value(value), context.paths.value(context.rank)
    try:
        write_whole(path, packed, durable=False)
    except OSError as error:
        raise folder_error(path, error) from error
    _flush()
    context.tell_unread(reads)
    notes.tell_submodules()
    weights = context.weights()
    channel.send("phase", phase="done", numbers=returned_numbers(value), weights=weights)


def _tell_error(job: Job, rank: int, channel: OwnerChannel, error: BaseException) -> None:
    """Hand the error to the owner, then wait: an early exit would raise errors in the others."""
    advised = advice(error)
    if advised is not None:
        add_note(error, advised)
    packed = pack_error(error) | {"advice": advised}
    with contextlib.suppress(OSError):  # a full disk takes no log; the owner hears of it below
        sys.stderr.write(packed["traceback"])
        _flush()
    packed["exit"] = isinstance(error, (SystemExit, KeyboardInterrupt))
    said: dict[str, str] = {}
    try:
        write_whole(job.paths.rank_error(rank), pickle.dumps(packed), durable=False)
    except OSError:
        said = {"packed": base64.b64encode(pickle.dumps(packed)).decode()}
    channel.send("error", **said)
    channel.wait()
    os._exit(1)


def _load(job: Job) -> Callable[..., Any]:
    from nbtoolkit.runtime.payload import load_function

    return load_function(job.payload_fd, job.content)


# --- before the user's code ---


def _settle(job: Job, rank: int) -> tuple[Line, Line]:
    """Make a freshly forked process a rank: signals, output, stacks, its lines to the owner."""
    default_signals()
    die_with_parent(signal.SIGKILL)
    tempfile.tempdir = None
    _write_into(job, rank)
    mine = job.rank_fds[rank :: job.plan.processes]
    for fd in set(job.rank_fds).difference(mine):
        os.close(fd)
    text_mode()
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
    line, quiet = (Line(socket.socket(fileno=fd)) for fd in mine)
    return line, quiet


def _write_into(job: Job, rank: int) -> None:
    """From here on output and stacks go into the job's folder."""
    write_output_to(job.paths.log(rank))
    stacks = open(job.paths.stacks(rank), "w")  # noqa: SIM115  (kept open)
    faulthandler.enable(stacks)
    faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)
    for before in _keep:
        before.close()
    _keep[:] = [stacks]


_keep: list[Any] = []


def text_mode() -> None:
    """What notebooks draw as widgets is text here: tqdm writes lines, ``display()`` prints."""
    _leave_notebook()
    if not hasattr(builtins, "display"):
        setattr(builtins, "display", _display)  # noqa: B010  (IPython puts it there for cells)
    notebook_bars = types.ModuleType(
        "tqdm.notebook", "Text bars: this process has no notebook front end."
    )
    setattr(notebook_bars, "__getattr__", _text_bar)  # noqa: B010
    sys.modules["tqdm.notebook"] = notebook_bars


def _leave_notebook() -> None:
    """In a rank forked from a notebook, what would talk to the front end falls back to text."""
    shells = sys.modules.get("IPython.core.interactiveshell")
    if shells is not None and shells.InteractiveShell.initialized():
        type(
            shells.InteractiveShell.instance()
        ).clear_instance()  # display() prints where there is no shell
    bars = sys.modules.get("tqdm.notebook")
    widget_bar = getattr(bars, "tqdm_notebook", None)
    if isinstance(
        widget_bar, type
    ):  # tqdm.auto's class derives from it: without its own methods it is the text bar
        for name in {*vars(widget_bar)} - {"__module__", "__doc__"}:
            delattr(widget_bar, name)


def _text_bar(name: str) -> Any:
    import tqdm.std

    names = {"tqdm": "tqdm", "tqdm_notebook": "tqdm", "trange": "trange", "tnrange": "trange"}
    if name not in names:
        raise AttributeError(name)
    return getattr(tqdm.std, names[name])


def _display(*objects: Any, **_: Any) -> None:
    for item in objects:
        print(repr(item))


def join_group(plan: LaunchPlan, rank: int) -> None:
    """Form the default process group and prove it with an all-reduce on each back end.

    Raises:
        Exception: whatever torch.distributed raises; nothing of the user's ran yet.
    """
    if plan.processes == 1:
        return
    import torch
    import torch.distributed as dist

    if plan.device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():  # a script under torchrun may have joined already
        limit = timedelta(seconds=plan.group_timeout)
        # NCCL says on stdout what hinders it (NCCL_DEBUG): that is written at once
        with without_gloo_lines() if plan.backend == "gloo" else contextlib.nullcontext():
            dist.init_process_group(plan.backend, timeout=limit)
    ones = torch.ones(1, device="cuda" if plan.backend == "nccl" else "cpu")
    dist.all_reduce(ones)
    if plan.backend != "gloo":
        group = new_gloo_group()
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
    if int(ones.item()) != plan.processes:
        raise RuntimeError(
            f"the first all-reduce of {plan.processes} ranks gave {ones.item()} on rank {rank}"
        )
    if plan.device_type == "cpu":
        _tell_accelerate()


def _hold_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        _GROUPS.append(dist.group.WORLD)


def _tell_accelerate() -> None:
    """Make accelerate's state: a bare ``PartialState()`` on the CPU sees one rank (1.15)."""
    from accelerate import PartialState

    PartialState(cpu=True, backend="gloo")


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch alike on all ranks, so that models start equal everywhere."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


# --- after it ---


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    _flush()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
