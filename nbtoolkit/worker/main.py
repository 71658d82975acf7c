"""Run one rank, from joining the group to returning the function's value."""

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
import traceback
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from nbtoolkit.config.validation import record_reads
from nbtoolkit.environment.installed import ImportRecorder
from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.variables import RANK_MARK
from nbtoolkit.errors import RunStopped
from nbtoolkit.run import messages
from nbtoolkit.run.events import returned_numbers
from nbtoolkit.run.paths import RunPaths, folder_error, write_whole
from nbtoolkit.run.rank_check import followed
from nbtoolkit.run.request import JobSpec
from nbtoolkit.run.serialization import add_note, pack_error, pack_value
from nbtoolkit.run.signals import ignore_warnings
from nbtoolkit.run.transport import Connection
from nbtoolkit.worker.channel import Heartbeat, OwnerChannel
from nbtoolkit.worker.collectives import new_gloo_group, without_gloo_lines
from nbtoolkit.worker.context import RunContext
from nbtoolkit.worker.forking import die_with_parent

# --- code pasted from scripts ---
# Code pasted from scripts for torchrun or a shell: what to delete, where it cannot work.


_SET_BY_TORCHRUN = {
    "RANK": "ctx.rank",
    "LOCAL_RANK": "ctx.local_rank",
    "WORLD_SIZE": "ctx.world_size",
    "MASTER_ADDR": "nothing: the ranks have met",
    "MASTER_PORT": "nothing: the ranks have met",
}
_GROUP = ("initialize the default process group twice", "environment variable RANK expected")


def advice(error: BaseException) -> str | None:
    """What to do about an error of such code; None: it is another one.

    Args:
        error: what a training function raised.
    """
    if isinstance(error, SystemExit):
        return _about_arguments(error)
    if isinstance(error, KeyError) and (name := next(iter(error.args), None)) in _SET_BY_TORCHRUN:
        return (
            f"os.environ[{name!r}] is torchrun's, and there is none on one process: put "
            f"{_SET_BY_TORCHRUN[str(name)]} in its place"
        )
    if "process group has not been initialized" in str(error):
        return (
            "one process has no process group, and needs none: ctx.rank and ctx.world_size are "
            "always there (DistributedSampler(data, ctx.world_size, ctx.rank)), ctx.prepare wraps "
            "the model, ctx.accelerator.reduce and .gather work on one process, too"
        )
    if any(said in str(error) for said in _GROUP):
        return (
            "delete init_process_group(...): several ranks have their process group when the "
            "function begins, one needs none (destroy_process_group() may go, too)"
        )
    return None


def _about_arguments(error: SystemExit) -> str | None:
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if not any(file.endswith("argparse.py") for file in files):
        return None
    return (
        "argparse read the arguments that the notebook's own process was started with: "
        "parser.parse_args([]) takes the defaults; settings come with config"
    )


# --- worker ---


# Asks a rank for its stacks. A real-time signal, since users and clusters have meanings of their
# own for SIGUSR1 and 2.
STACKS_SIGNAL = signal.SIGRTMIN + 7

# Gloo's end waits for its threads. Code that destroys the group (Accelerator.end_training does)
# leaves DDP as its last holder, whose end keeps the GIL, for which such a thread may wait: of a
# few launches one hung. Who holds the group here, never ends it; a forked process's end, which is
# os._exit, does. (An interpreter that is finalized aborts: not for ranks that torchrun started.)
_GROUPS: list[Any] = []


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What every rank of a group gets from its agent."""

    spec: JobSpec
    """Their first job."""
    load: Callable[[], Callable[..., Any]]
    """Returns the training function."""
    group: messages.GroupDescriptors
    """The agent's and the ranks' ends of their lines."""


def run_rank(job: RankJob) -> None:
    """What the launcher starts in each rank's process. Errors go to the supervisor, not up."""
    rank = int(os.environ.get("RANK", 0))
    lines, plan = _settle(job, rank), job.spec.plan
    channel = OwnerChannel(*lines, alone=plan.processes == 1)
    channel.send(messages.PhaseReached(phase="started", pid=os.getpid()))
    if plan.processes > 1 and channel.wait() is None:  # until all ranks are forked
        return None
    try:
        join_group(plan, rank)
    except Exception as error:  # any failure before the user's code is the supervisor's to judge
        return channel.send(messages.GroupNotJoined(error=f"{type(error).__name__}: {error}"))
    _hold_group()
    channel.send(messages.PhaseReached(phase="group"))
    work: JobSpec | None = job.spec
    state = ProcessState() if job.spec.reuse_workers else None
    while work is not None:
        alone = work.plan.processes == 1 and not work.reports_judged
        channel = OwnerChannel(*lines, alone=alone)
        _work(job, work, rank, channel)
        if state is None:
            break
        state.restore()
        work = _next_job(rank, channel)
    _leave_group()
    return None


def _work(job: RankJob, spec: JobSpec, rank: int, channel: OwnerChannel) -> None:
    """Call the function of one job."""
    optimizers = followed(spec.config, spec.plan.processes)
    context = RunContext(
        spec,
        channel,
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        world_size=spec.plan.processes,
        optimizers=optimizers,
    )
    imports = ImportRecorder(lambda names: channel.send(messages.ModulesImported(names=names)))
    if rank == 0:
        # What is imported from here on, the fork server imports for the next launch.
        sys.meta_path.insert(0, imports)
    try:
        function = job.load()
        channel.send(messages.PhaseReached(phase="ready"))
        if channel.wait() is not None:  # the supervisor's go; it comes when every rank is ready
            _call(function, context, channel, imports)
    except BaseException as error:
        _tell_error(spec.paths, rank, channel, error)
    finally:
        context.close()
        if imports in sys.meta_path:
            sys.meta_path.remove(imports)
        if optimizers is not None:
            optimizers.close()


def _next_job(rank: int, channel: OwnerChannel) -> JobSpec | None:
    """The next job of a group that takes several; None when there is none."""
    message = channel.wait()
    if not isinstance(message, messages.JobAssigned):
        return None
    spec: JobSpec = pickle.loads(Path(message.file).read_bytes())
    os.environ[RANK_MARK] = str(spec.paths.folder)
    _write_into(spec.paths, rank)
    return spec


class ProcessState:
    """What a training function may change in its process and the next job must not see.

    The next job's function is unpickled anew, so the globals of a notebook are new, too; those of
    imported modules are not.
    """

    def __init__(self) -> None:
        import torch
        from torch.backends import cudnn

        self._folder, self._environ = os.getcwd(), dict(os.environ)
        self._path, self._filters = list(sys.path), list(warnings.filters)
        settings: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
            (torch.get_num_threads, torch.set_num_threads),
            (torch.get_default_dtype, torch.set_default_dtype),
            (torch.is_grad_enabled, torch.set_grad_enabled),
            (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        ]
        self._settings = [(read, read(), write) for read, write in settings]
        self._cudnn = cudnn.benchmark, cudnn.deterministic

    def restore(self) -> None:
        """Restore all of it, and free the memory that the job held."""
        import torch
        from torch.backends import cudnn

        with contextlib.suppress(OSError):
            os.chdir(self._folder)
        os.environ.clear()
        os.environ.update(self._environ)
        sys.path[:], warnings.filters[:] = self._path, self._filters  # type: ignore[index]
        for read, value, write in self._settings:
            if read() != value:
                write(value)
        cudnn.benchmark, cudnn.deterministic = self._cudnn
        torch.set_default_device(None)
        if "torch._dynamo" in sys.modules:
            # else the ninth model to be compiled hits its limit of recompilations, and runs eagerly
            torch.compiler.reset()
        gc.collect()  # models and batches may be in reference cycles
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _call(
    function: Callable[..., Any],
    context: RunContext,
    channel: OwnerChannel,
    imports: ImportRecorder,
) -> None:
    seed_everything(context.seed)
    try:
        with Heartbeat(channel, context.world_size), record_reads() as reads:
            value = function(context.config, context)
    except RunStopped as leave:
        channel.send(messages.FunctionLeft(status=leave.status))
        return
    packed, path = pack_value(value), context.paths.value(context.rank)
    try:
        write_whole(path, packed, durable=False)
    except OSError as error:
        raise folder_error(path, error) from error
    _flush()
    context.tell_unread(reads)
    imports.report_submodules()
    weights = context.weights()
    channel.send(messages.FunctionReturned(numbers=returned_numbers(value), weights=weights))


def _tell_error(paths: RunPaths, rank: int, channel: OwnerChannel, error: BaseException) -> None:
    """Send the error to the supervisor, then wait: an early exit raises errors in the others."""
    advised = advice(error)
    if advised is not None:
        add_note(error, advised)
    packed = pack_error(error) | {"advice": advised}
    with contextlib.suppress(OSError):  # a full disk takes no log; the supervisor hears of it below
        sys.stderr.write(packed["traceback"])
        _flush()
    packed["exit"] = isinstance(error, (SystemExit, KeyboardInterrupt))
    word = messages.FunctionRaised()
    try:
        write_whole(paths.rank_error(rank), pickle.dumps(packed), durable=False)
    except OSError:
        word = messages.FunctionRaised(packed=base64.b64encode(pickle.dumps(packed)).decode())
    channel.send(word)
    channel.wait()
    os._exit(1)


# --- before the user's code ---


def _settle(job: RankJob, rank: int) -> tuple[Connection, Connection]:
    """Make a forked process a rank: signals, output, stacks, connections to the supervisor."""
    default_signals()
    die_with_parent(signal.SIGKILL)
    tempfile.tempdir = None
    _write_into(job.spec.paths, rank)
    loud, quiet = job.group.connections, job.group.telemetry
    for fd in {*loud, *quiet} - {loud[rank], quiet[rank]}:
        os.close(fd)
    text_mode()
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
    return Connection(socket.socket(fileno=loud[rank])), Connection(
        socket.socket(fileno=quiet[rank])
    )


def _write_into(paths: RunPaths, rank: int) -> None:
    """From here on output and stacks go into the job's folder."""
    write_output_to(paths.log(rank))
    stacks = open(paths.stacks(rank), "w")  # noqa: SIM115  (kept open)
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


def write_output_to(path: Path) -> None:
    """Append this process's stdout and stderr, C libraries included, to a file; whole lines."""
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
    """Default signal handling, whatever was installed in the process this one was forked from.

    But a cluster's warning, which may reach every process of a job, is for the supervisor to
    heed.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGHUP", "SIGQUIT", "SIGCHLD"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    ignore_warnings()
