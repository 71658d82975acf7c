"""Run a rank in this process, inline in a kernel or as a rank of torchrun, srun and the like."""

from __future__ import annotations

import atexit
import gc
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.environment.deadline import time_limit
from nbtoolkit.environment.kernel_mlflow import tracking_place
from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.environment.variables import (
    omp_threads,
    plan_variables,
    temporary_variables,
    without_stale,
)
from nbtoolkit.errors import GroupStartFailed, RunStopped, TrackingError
from nbtoolkit.launcher.outcome import Failed, Finished, Outcome, record_end
from nbtoolkit.launcher.run_result import RunResult, refuse_deleted
from nbtoolkit.launcher.same_code import check_same_code
from nbtoolkit.run.attempts import last_event
from nbtoolkit.run.events import Event, EventReader, returned_numbers
from nbtoolkit.run.failure import raise_failure
from nbtoolkit.run.output import CellOutput, Display
from nbtoolkit.run.paths import RunPaths, folder_error
from nbtoolkit.run.record import RunRecord
from nbtoolkit.run.resume import ChosenRun, write_header
from nbtoolkit.wire.messages import Question, Reply, Statement
from nbtoolkit.wire.payload import JobSpec, RunRequest
from nbtoolkit.wire.serialization import add_note, pack_error
from nbtoolkit.wire.signals import SignalFlag, catch_termination_signals, describe_signal
from nbtoolkit.wire.tracebacks import show_users_part
from nbtoolkit.worker.advice import advice
from nbtoolkit.worker.attempt_store import attempt_store
from nbtoolkit.worker.channel import GroupChannel, RecordChannel
from nbtoolkit.worker.collectives import broadcast
from nbtoolkit.worker.context import RunContext
from nbtoolkit.worker.main import call_function, join_group, seed_everything
from nbtoolkit.worker.process_group import leave_group, torchrun_conditions

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.environment.deadline import Note
    from nbtoolkit.environment.hardware import Hardware
    from nbtoolkit.host import Host
    from nbtoolkit.tracking.service import TrackingProcess


Train = Callable[..., Any]


class InProcessRecorder(RecordChannel):
    """Replaces the supervisor in the process that trains: lock, events, tracking, callbacks.

    It is a context manager for the duration of the run, and releases the lock at the end.

    Args:
        run: the run's folder, locked.
        job: what the run trains.
        notes: levels and texts of notes on the launch.
        cell: shows notes.
        on_event: called with each event of this attempt.
    """

    def __init__(
        self,
        run: ChosenRun,
        job: JobSpec,
        notes: Sequence[Note],
        cell: CellOutput,
        on_event: Callable[[Event], None] | None,
    ) -> None:
        self._run = run
        self._cell = cell
        self._on_event = on_event
        self._thread = threading.get_ident()
        self._reader = EventReader(run.paths.events, run.events_size)
        run.own()
        super().__init__(RunRecord(run.paths, deadline=job.deadline))
        for level, text in notes:
            self.record.note(text, level)
        self.record.make_findable()
        self._tracking = self._track(job.config)

    def send(self, message: Statement) -> None:
        """Record the message, and forward the new events."""
        super().send(message)
        self._forward_events()

    def ask(self, question: Question) -> Reply:
        """Answer the question, and forward the new events."""
        reply = super().ask(question)
        self._forward_events()
        return reply

    def __enter__(self) -> InProcessRecorder:
        self._forward_events()
        return self

    def __exit__(self, *_: object) -> None:
        self._run.lock.release()
        try:
            self._forward_events()
        finally:
            self._end_tracking()

    def _forward_events(self) -> None:
        """Forward new events, but not from other threads (saving): the next call does it."""
        if threading.get_ident() != self._thread:
            return
        for event in self._reader.read():
            if self._on_event is not None:
                self._on_event(event)
            self._cell.event(event)

    def _track(self, config: Config) -> TrackingProcess | None:
        from nbtoolkit.tracking.service import TrackingProcess
        from nbtoolkit.tracking.tracker import choose_tracking

        choice = choose_tracking(config.to_dict()["tracking"])
        for note in choice.notes:
            self.record.note(note, level="warning")
        if not choice.on:
            return None
        return TrackingProcess([self._run.paths.folder])

    def _end_tracking(self) -> None:
        """Wait for the tracking; its errors do not fail the run."""
        if self._tracking is None:
            return
        try:
            self._tracking.wait(say=self._cell.say)
            self._tracking.check(self._run.paths.folder)
        except (TrackingError, TimeoutError) as error:
            self._cell.say(f"warning: the run is not completely tracked: {error}")


def run_inline(
    train: Train,
    request: RunRequest,
    run: ChosenRun,
    *,
    cell: CellOutput,
    on_event: Callable[[Event], None] | None,
) -> RunResult:
    """Run one rank in this process, where breakpoints work.

    Folder, events, tracking and result are those of any run. The output is this process's own, and
    no file receives it. During the run, environment variables and accelerate's state are the run's;
    so are the handlers of termination signals, in a script's main thread. All are restored at the
    end.

    Raises:
        BaseException: the exception of ``train``, unchanged. An interrupt ends the run as
            ``stopped``.
    """
    try:
        recorder = InProcessRecorder(run, request.job, request.notes, cell, on_event)
        record_inline(train, request, recorder)
    except Exception as error:
        show_users_part(error)
        raise
    refuse_deleted(run.paths)
    return RunResult(run.paths)


def record_inline(train: Train, request: RunRequest, recorder: InProcessRecorder) -> None:
    """Run one rank in this process with a recorder; see :func:`run_inline`."""
    local_rank = _device_index(request.job.plan, request.hardware)
    with recorder:
        ctx = RunContext(request.job, recorder, local_rank=local_rank)
        with temporary_variables(without_stale(os.environ)), own_accelerate_state():
            _train(train, ctx, recorder)


def _train(train: Train, ctx: RunContext, channel: RecordChannel | GroupChannel) -> None:
    """Set this process up as a rank's own, call the training function, and record the end."""
    variables = {**os.environ, **plan_variables(ctx.plan, ctx.paths.folder)}
    with catch_termination_signals(channel.signal_flag), temporary_variables(variables):
        seed_everything(ctx.seed)
        if ctx.device.type == "cuda":
            import torch

            torch.cuda.set_device(ctx.device)
        with torchrun_conditions(ctx):
            _call(train, ctx, channel.signal_flag, channel.record)


def _call(train: Train, ctx: RunContext, flag: SignalFlag, record: RunRecord | None) -> None:
    """Call the training function, and record how it ends; ``record``: on rank 0 only."""
    outcome = Finished("completed")
    try:
        with flag.interrupting():
            value = call_function(train, ctx)
        if ctx.world_size > 1:
            _wait_for_all(ctx.world_size, ctx.paths)
        if record is not None:
            ctx.warn_unused_settings()
            record.returned(returned_numbers(value))
    except RunStopped as stopped:  # on all ranks at the same report, or at a second SIGTERM
        outcome = Finished(stopped.status)
        if flag.repeated and record is not None:
            record.request_stop(stopped.status, describe_signal(flag.number))
    except KeyboardInterrupt:
        if record is not None:
            record.request_stop("stopped", "interrupted")
        _record(ctx, record, Finished("stopped"))
        raise
    except BaseException as error:
        if (advised := advice(error)) is not None:
            add_note(error, advised)
        with suppress(OSError):  # the disk may be the cause
            failed = Failed(error=pack_error(error), rank=ctx.rank, cause="raised")
            _record(ctx, record, failed)
        raise
    try:
        _record(ctx, record, outcome)
    except OSError as error:
        raise folder_error(ctx.paths.folder, error) from error


def _record(ctx: RunContext, record: RunRecord | None, outcome: Outcome) -> None:
    """Record the end of the run, unless another rank has recorded its failure before."""
    if ctx.world_size > 1 and ctx.paths.error_pickle.exists():
        return
    if isinstance(outcome, Failed):
        record = record or RunRecord(ctx.paths, deadline=None)
    if record is not None:
        record_end(record, outcome, ctx.plan)


def _device_index(plan: LaunchPlan, hardware: Hardware) -> int:
    """Return the index of the planned device in this process, which sees all devices."""
    indices = {device.uuid: device.index for device in hardware.devices}
    return indices.get(plan.devices[0], 0) if plan.devices else 0


@contextmanager
def own_accelerate_state() -> Iterator[None]:
    """Give the run a fresh accelerate state, and restore the previous one afterwards.

    accelerate keeps one state per process and refuses a second ``Accelerator`` with other settings:
    a run with another precision, or after an ``Accelerator`` of a cell, would fail.
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
    """Return what accelerate keeps for this process; empty if it is not imported."""
    module = sys.modules.get("accelerate.state")
    names = ("PartialState", "AcceleratorState", "GradientState")
    return [getattr(module, name)._shared_state for name in names] if module is not None else []


def run_in_place(
    train: Train,
    config: Config,
    host: Host,
    hardware: Hardware,
    *,
    choose: Callable[[], ChosenRun],
    display: Display,
    on_event: Callable[[Event], None] | None,
) -> RunResult:
    """Join the other ranks, call ``train``, and return when all ranks have finished.

    If any rank gets SIGTERM, SIGUSR1 or SIGUSR2, all ranks leave at the next report with status
    ``deadline``.

    Every rank reads the same result from the run's folder, so ranks on several machines need a
    folder that all of them see. The output is this process's own.

    Args:
        train: the training function.
        config: the resolved configuration.
        host: says which rank this is.
        hardware: the devices that this rank may use.
        choose: finds or creates the run; only rank 0 calls it.
        display: the display of rank 0.
        on_event: called with each event, on rank 0 only.

    Raises:
        GroupStartFailed: the ranks could not form a process group.
        LaunchError: they do not run the same code.
        BaseException: the exception of ``train`` on this rank, unchanged; torchrun or Slurm ends
            the other ranks.
    """
    plan = make_plan(config, host, hardware)
    threads = {"OMP_NUM_THREADS": omp_threads(os.environ, plan)}
    variables = {**os.environ, **threads, **rendezvous(host, hardware, os.environ)}
    with temporary_variables(variables), own_accelerate_state(), ExitStack() as stack:
        _join(plan, host)
        check_same_code(train, host.world_size)
        run = _choose(choose, host)
        limit = time_limit(config)
        local = ("", None) if run is None else (str(run.paths.folder), limit.deadline)
        folder, deadline = broadcast(local, host.world_size)
        paths = RunPaths(Path(folder))
        recorder = None
        job = JobSpec(paths=paths, plan=plan, config=config, deadline=deadline)
        if run is not None:
            cell = CellOutput(paths, display)
            cell.begin(plan, run, tracking_place(config))
            write_header(run, config, plan, host, train)
            notes = (*run.notes, *limit.notes)
            recorder = stack.enter_context(InProcessRecorder(run, job, notes, cell, on_event))
        _run_rank(train, job, host, recorder)
        _barrier(host.world_size, lambda: last_event(paths) is not None)  # rank 0 has written it
    # A prepared optimizer is in a reference cycle. At the interpreter's end its gradients, which
    # are views of DDP's buckets, fail an assertion in torch 2.13: the process aborts.
    gc.collect()
    return RunResult(paths)


def _choose(choose: Callable[[], ChosenRun], host: Host) -> ChosenRun | None:
    """Choose the run on rank 0; None on the other ranks."""
    if host.rank != 0:
        return None
    run = choose()
    for rank in range(host.world_size):
        run.paths.value(rank).unlink(missing_ok=True)  # of an earlier attempt
    run.paths.error_pickle.unlink(missing_ok=True)
    return run


def _run_rank(train: Train, job: JobSpec, host: Host, recorder: InProcessRecorder | None) -> None:
    channel: RecordChannel | GroupChannel
    if recorder is not None and host.world_size == 1:
        channel = recorder
    else:
        channel = GroupChannel(recorder, job.plan.group_timeout)
    ctx = RunContext(
        job,
        channel,
        rank=host.rank,
        local_rank=int(os.environ.get("LOCAL_RANK", host.local_rank)),
        world_size=host.world_size,
    )
    _train(train, ctx, channel)


def _join(plan: LaunchPlan, host: Host) -> None:
    """Form the process group unless the script has; one formed here is left at exit."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
    formed_here = not dist.is_initialized()
    try:
        store = None
        if formed_here:
            store = attempt_store(host.rank, host.world_size, plan.group_timeout)
        join_group(plan, host.rank, store)
    except Exception as error:
        raise GroupStartFailed(
            f"rank {host.rank} of {host.world_size} ({host.rank_reason}) could not join the others "
            f"at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: "
            f"{type(error).__name__}: {error}",
            allowed="WORLD_SIZE ranks that all reach this address and port",
            do="unset RANK and WORLD_SIZE if no launcher started this process",
        ) from error
    if formed_here and dist.is_initialized():
        atexit.register(leave_group)


def rendezvous(host: Host, hardware: Hardware, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch.distributed and accelerate need and the launcher did not set.

    srun sets none of them.

    A task that sees one GPU (``srun --gpus-per-task=1``) has local rank 0, since the GPU is
    ``cuda:0`` there.
    """
    if host.world_size == 1:
        return {}
    step = int(environ.get("SLURM_JOB_ID", "0")) * 31 + int(environ.get("SLURM_STEP_ID", "0"))
    first = first_node(environ.get("SLURM_STEP_NODELIST", "")) or "127.0.0.1"
    variables = {
        "RANK": str(host.rank),
        "LOCAL_RANK": "0" if len(hardware.devices) == 1 else str(host.local_rank),
        "WORLD_SIZE": str(host.world_size),
        "LOCAL_WORLD_SIZE": str(host.local_world_size),
        "MASTER_ADDR": first,
        # The same on all ranks, and rarely the same for two steps.
        "MASTER_PORT": str(20000 + step % 10000),
    }
    return {name: value for name, value in variables.items() if name not in environ}


def first_node(nodes: str) -> str:
    """Return the first host of a Slurm node list: ``n01`` of ``n[01-04,07],m2``."""
    head, bracket, rest = nodes.partition("[")
    if bracket and "," not in head:
        return head + re.split(r"[-,\]]", rest)[0]
    return nodes.split(",")[0]


def _wait_for_all(ranks: int, paths: RunPaths) -> None:
    """Wait until the function has ended on all ranks; raise the error of a failed one."""
    values = [paths.value(rank) for rank in range(ranks)]
    failure = paths.error_pickle
    _barrier(ranks, lambda: failure.exists() or all(value.exists() for value in values))
    if failure.exists():
        raise_failure(paths)


def _barrier(ranks: int, reached: Callable[[], bool]) -> None:
    """Wait for the other ranks in the process group, or poll the run's files without one.

    A function that ends with ``Accelerator.end_training()`` has destroyed the group.

    Args:
        ranks: their number.
        reached: checks the files.
    """
    import torch.distributed as dist

    if ranks == 1 or dist.is_initialized():
        broadcast(None, ranks)
        return
    while not reached():
        time.sleep(0.05)
