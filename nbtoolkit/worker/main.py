"""Run one rank, from joining the group to returning the function's value."""

from __future__ import annotations

import base64
import builtins
import contextlib
import faulthandler
import multiprocessing.util
import os
import random
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from nbtoolkit.config import reads
from nbtoolkit.environment.installed import ImportRecorder
from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.errors import RunStopped
from nbtoolkit.run.events import returned_numbers
from nbtoolkit.run.output import error_lines
from nbtoolkit.run.paths import RunPaths, folder_error, write_whole
from nbtoolkit.wire import messages
from nbtoolkit.wire.payload import JobSpec
from nbtoolkit.wire.serialization import add_note, pack_error, pack_value
from nbtoolkit.wire.signals import ignore_warning_signals
from nbtoolkit.wire.transport import Connection, GroupDescriptors
from nbtoolkit.worker.advice import advice
from nbtoolkit.worker.channel import SupervisorChannel, heartbeat
from nbtoolkit.worker.collectives import new_gloo_group, without_gloo_lines
from nbtoolkit.worker.context import RunContext
from nbtoolkit.worker.forking import die_with_parent, end_process
from nbtoolkit.worker.process_group import torchrun_conditions
from nbtoolkit.worker.written_files import written_files

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Asks a rank for its stacks. A real-time signal, since users and clusters use SIGUSR1 and SIGUSR2.
STACKS_SIGNAL = signal.SIGRTMIN + 7

# A reference keeps the process group alive until os._exit. Destroying a gloo group waits for its
# threads. In code that destroys it (Accelerator.end_training does) DDP holds the last reference and
# drops it with the GIL, which such a thread may wait for: one of a few launches hung. Not for ranks
# that torchrun started: a finalized interpreter aborts.
_kept_groups: list[object] = []

_stacks_file: IO[str] | None = None


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What every rank of a group receives from its agent."""

    spec: JobSpec
    load: Callable[[], Callable[..., Any]]
    """Returns the training function."""
    group: GroupDescriptors
    """The agent's and the ranks' ends of their connections."""


def run_rank(job: RankJob) -> None:
    """Run one rank; the launcher's entry point. Errors go to the supervisor."""
    rank = int(os.environ.get("RANK", 0))
    connection, telemetry = _set_up_process(job, rank)
    plan = job.spec.plan
    async_reports = plan.processes == 1 and not job.spec.synchronous_reports
    channel = SupervisorChannel(connection, telemetry, async_reports=async_reports)
    channel.send(messages.PhaseReached(phase="started", pid=os.getpid()))
    if plan.processes > 1 and channel.wait() is None:  # until all ranks are forked
        return
    try:
        join_group(plan, rank)
    except Exception as error:  # before the user's code; the supervisor decides what to do
        channel.send(messages.GroupNotJoined(error=f"{type(error).__name__}: {error}"))
        return
    _keep_group()
    channel.send(messages.PhaseReached(phase="group"))
    _run_job(job, rank, channel)
    _leave_group()
    if plan.processes > 1:
        # The exit closes the connections to the other ranks, which may still communicate: an error
        # of theirs would hide that this rank has returned.
        channel.wait()
        _end_process()


def _run_job(job: RankJob, rank: int, channel: SupervisorChannel) -> None:
    """Call the function."""
    spec = job.spec
    context = RunContext(
        spec,
        channel,
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        world_size=spec.plan.processes,
    )
    imports = ImportRecorder()
    if rank == 0:
        sys.meta_path.insert(0, imports)
    try:
        with torchrun_conditions(context):
            function = job.load()
            if rank == 0:
                function = _noting_imports(function, imports, channel)
            if spec.in_search:  # others run in the same working directory
                function = _noting_files(function, spec.paths, channel)
            channel.send(messages.PhaseReached(phase="ready"))
            # The supervisor sends Go when every rank is ready.
            if spec.plan.processes == 1 or channel.wait() is not None:
                _call_and_report(function, context, channel)
    except BaseException as error:
        _report_error(spec.paths, rank, channel, error)
    finally:
        if imports in sys.meta_path:
            sys.meta_path.remove(imports)


def call_function(function: Callable[..., Any], context: RunContext) -> Any:
    """Call the training function, and write its value to the run's folder.

    A child that the function forks ends where the function ends in the child.
    """
    context.track_optimizers()
    process = os.getpid()
    try:
        with reads.noting(context.config, context._params):
            value = function(context.config, context)
    finally:
        if os.getpid() != process:
            end_process(sys.exc_info()[1])
        context.close()
    packed = pack_value(value)
    path = context.paths.value(context.rank)
    try:
        # The study has a trial's numbers, and nothing reads its value.
        write_whole(path, packed, durable=not context._params)
    except OSError as error:
        raise folder_error(path, error) from error
    return value


def _noting_files(
    function: Callable[..., Any], paths: RunPaths, channel: SupervisorChannel
) -> Callable[..., Any]:
    """Return the function.

    At its end the supervisor is told which files it wrote outside its folder.
    """

    @wraps(function)
    def noting(config: object, ctx: object) -> object:
        with written_files(paths.folder) as files:
            try:
                return function(config, ctx)
            finally:
                if files:
                    channel.send(messages.FilesWritten(paths=files))

    return noting


def _noting_imports(
    function: Callable[..., Any], imports: ImportRecorder, channel: SupervisorChannel
) -> Callable[..., Any]:
    """Return the function; at its end the modules that it imported are told, for later launches."""

    @wraps(function)
    def noting(config: object, ctx: object) -> object:
        try:
            return function(config, ctx)
        finally:
            if names := imports.names():
                channel.send(messages.ModulesImported(names=names))

    return noting


def _call_and_report(
    function: Callable[..., Any],
    context: RunContext,
    channel: SupervisorChannel,
) -> None:
    seed_everything(context.seed)
    try:
        with heartbeat(channel, context.world_size):
            value = call_function(function, context)
    except RunStopped as stopped:
        channel.send(messages.FunctionLeft(status=stopped.status))
        return
    _flush()
    context.warn_unused_settings()
    weights = context.weights()
    channel.send(messages.FunctionReturned(numbers=returned_numbers(value), weights=weights))


def _report_error(
    paths: RunPaths, rank: int, channel: SupervisorChannel, error: BaseException
) -> None:
    """Send the error to the supervisor, then wait: an early exit raises errors in other ranks."""
    advised = advice(error)
    if advised is not None:
        add_note(error, advised)
    packed = replace(pack_error(error), advice=advised)
    _flush()
    with (
        contextlib.suppress(OSError),  # the disk may be full; the message below says so
        # Not to sys.stderr, which the function may have replaced.
        paths.log(rank).open("a", encoding="utf-8", errors="backslashreplace") as log,
    ):
        log.write(error_lines(packed.traceback))
    message = messages.FunctionRaised()
    try:
        write_whole(paths.rank_error(rank), packed.encode(), durable=False)
    except OSError:
        message = messages.FunctionRaised(packed=base64.b64encode(packed.encode()).decode())
    channel.send(message)
    channel.wait()
    os._exit(1)


def _set_up_process(job: RankJob, rank: int) -> tuple[Connection, Connection]:
    """Set up signals, output and stacks of a forked rank; returns its two connections."""
    default_signals()
    die_with_parent(signal.SIGKILL)
    tempfile.tempdir = None
    _redirect_output(job.spec.paths, rank)
    connections = job.group.connections
    telemetry = job.group.telemetry
    for fd in {*connections, *telemetry} - {connections[rank], telemetry[rank]}:
        os.close(fd)
    text_mode()
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
    return (
        Connection.inherited(connections[rank]),
        Connection.inherited(telemetry[rank]),
    )


def _redirect_output(paths: RunPaths, rank: int) -> None:
    """Write output and stacks to the run's folder from now on."""
    global _stacks_file
    write_output_to(paths.log(rank))
    _stacks_file = paths.stacks(rank).open("w")
    faulthandler.enable(_stacks_file)
    faulthandler.register(STACKS_SIGNAL, _stacks_file, all_threads=True)


def text_mode() -> None:
    """Replace a notebook's widgets by text: tqdm writes lines, ``display()`` prints."""
    if not hasattr(builtins, "display"):
        setattr(builtins, "display", _display)  # noqa: B010  (IPython adds it for cells)
    notebook_bars = types.ModuleType(
        "tqdm.notebook", "Text bars: this process has no notebook front end."
    )
    setattr(notebook_bars, "__getattr__", _text_bar)  # noqa: B010
    sys.modules["tqdm.notebook"] = notebook_bars


def _text_bar(name: str) -> object:
    import tqdm.std

    names = {"tqdm": "tqdm", "tqdm_notebook": "tqdm", "trange": "trange", "tnrange": "trange"}
    if name not in names:
        raise AttributeError(name)
    bar: object = getattr(tqdm.std, names[name])
    return bar


def _display(*objects: object, **_: object) -> None:
    for item in objects:
        print(repr(item))


def join_group(plan: LaunchPlan, rank: int, store: Store | None = None) -> None:
    """Form the default process group and test it with an all-reduce on each backend.

    Args:
        plan: has the backend, the number of ranks and the timeout.
        rank: of this process.
        store: where the ranks find each other; None for the one that the environment names.

    Raises:
        Exception: torch.distributed failed.
    """
    if plan.processes == 1:
        return
    import torch
    import torch.distributed as dist

    if plan.device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():  # a script under torchrun may have joined already
        limit = timedelta(seconds=plan.group_timeout)
        rendezvous: Any = (
            {"store": store, "rank": rank, "world_size": plan.processes} if store else {}
        )
        # NCCL writes its problems to stdout (NCCL_DEBUG), which must not be held back.
        with without_gloo_lines() if plan.backend == "gloo" else contextlib.nullcontext():
            dist.init_process_group(plan.backend, timeout=limit, **rendezvous)
    ones = torch.ones(1, device="cuda" if plan.backend == "nccl" else "cpu")
    dist.all_reduce(ones)
    if plan.backend != "gloo":
        group = new_gloo_group(plan.group_timeout)
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
    if int(ones.item()) != plan.processes:
        raise RuntimeError(
            f"the first all-reduce of {plan.processes} ranks gave {ones.item()} on rank {rank}"
        )
    if plan.device_type == "cpu":
        from accelerate import PartialState

        # A user's bare PartialState() on the CPU would see one rank (1.15).
        PartialState(cpu=True, backend="gloo")


def _keep_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        _kept_groups.append(dist.group.WORLD)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, with the same seed on all ranks so that models start equal."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    _flush()


def _end_process() -> None:
    """End this process as multiprocessing does; elastic would keep it until its next poll."""
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    threading._shutdown()  # type: ignore[attr-defined]
    _flush()
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # The function may have set it to None, or replaced or closed it.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()


def write_output_to(path: Path) -> None:
    """Append stdout and stderr of this process, those of C libraries too, to a file, by lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(
            number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def default_signals() -> None:
    """Reset the signal handlers that a forked process inherits.

    Ignores a cluster's warning, which may reach every process of a job: the supervisor handles it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGHUP", "SIGQUIT", "SIGCHLD"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    ignore_warning_signals()
