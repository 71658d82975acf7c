"""Run ranks in this process, inline in a kernel, or as a rank of torchrun, Slurm or Ray."""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from nbtoolkit.config.validation import reads_noted
from nbtoolkit.environment.deadline import time_limit
from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.environment.variables import lend_variables, of_plan, omp_threads, without_stale
from nbtoolkit.errors import GroupStartFailed, RunStopped, TrackingError
from nbtoolkit.launcher.failures import raise_failure
from nbtoolkit.launcher.handle import RunResult, refuse_deleted
from nbtoolkit.run.events import Event, EventReader, RunRecord, returned_numbers
from nbtoolkit.run.messages import Question, Reply, Statement
from nbtoolkit.run.output import CellOutput, Display
from nbtoolkit.run.paths import RunPaths, boot_id, folder_error, write_json, write_whole
from nbtoolkit.run.rank_check import track_optimizers
from nbtoolkit.run.request import JobSpec, RunRequest
from nbtoolkit.run.resume import ChosenRun, write_header
from nbtoolkit.run.serialization import add_note, pack_error, pack_value
from nbtoolkit.run.signals import catch_termination_signals
from nbtoolkit.worker.channel import GroupChannel, RecordChannel
from nbtoolkit.worker.context import RunContext
from nbtoolkit.worker.main import advice

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.environment.hardware import Hardware
    from nbtoolkit.host import Host
    from nbtoolkit.tracking.service import TrackingProcess


# --- the record ---
# Keeps the record of a run that has no supervisor process, in the process that trains.


class InProcessRecorder(RecordChannel):
    """Does what a supervisor does for other runs: lock, events, trackers, listeners.

    Used in a ``with`` block that lasts as long as the run; at its end the lock is given back.

    Args:
        run: the run's folder, locked.
        request: what was decided.
        cell: shows notes.
        on_event: called with each event of this attempt.
    """

    def __init__(
        self,
        run: ChosenRun,
        request: RunRequest,
        cell: CellOutput,
        on_event: Callable[[Event], None] | None,
    ) -> None:
        before = run.paths.events.stat().st_size if run.resumed else 0
        self._run, self._cell, self._on_event = run, cell, on_event
        self._thread = threading.get_ident()
        self._reader = EventReader(run.paths.events, before)
        about = {"pid": os.getpid(), "boot_id": boot_id(), "since": time.time()}
        write_json(run.paths.owner, about, durable=False)
        job = request.job
        super().__init__(RunRecord(run.paths, deadline=job.deadline))
        self.record.write(request.header)
        for level, text in request.notes:
            self.record.note(text, level)
        self._tracking = self._track(job.config)

    def send(self, message: Statement) -> None:
        """See :class:`Channel`."""
        super().send(message)
        self._tell()

    def ask(self, question: Question) -> Reply:
        """See :class:`Channel`."""
        reply = super().ask(question)
        self._tell()
        return reply

    def __enter__(self) -> InProcessRecorder:
        self._tell()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._run.lock.release()
        try:
            self._tell()
        finally:
            self._end_tracking()

    def _tell(self) -> None:
        """Hand on the events that are new; what another thread writes (it saves) has time."""
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
        service = TrackingProcess()
        service.track(self._run.paths.folder)
        return service

    def _end_tracking(self) -> None:
        """Wait for the trackers; what fails there is no matter of the run."""
        if self._tracking is None:
            return
        try:
            self._tracking.wait(say=self._cell.say)
        except (TrackingError, TimeoutError) as error:
            self._cell.say(f"warning: the run is not wholly tracked: {error}")
        finally:
            self._tracking.close()


# --- inline ---
# A run of one rank in this very process. Breakpoints work, exceptions pass as they are.


Train = Callable[..., Any]


def run_inline(
    train: Train,
    request: RunRequest,
    run: ChosenRun,
    *,
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
    plan = request.job.plan
    variables = {**without_stale(os.environ), **of_plan(plan, run.paths.folder)}
    with InProcessRecorder(run, request, cell, on_event) as recorder:
        ctx = RunContext(request.job, recorder, local_rank=_device_index(plan, request.hardware))
        with (
            catch_termination_signals(recorder.signal_flag),
            lend_variables(variables),
            own_accelerate_state(),
        ):
            settle(ctx)
            call(train, ctx, recorder.record)
    refuse_deleted(run.paths)
    return RunResult(run.paths)


def settle(ctx: RunContext) -> None:
    """Seeds and the current device, as in a rank of its own."""
    from nbtoolkit.worker.main import seed_everything

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
            ctx.warn_unused_settings(reads)
            record.returned(returned_numbers(value))
    except RunStopped as leave:  # on all ranks at the same report
        status = leave.status
    except KeyboardInterrupt:
        if record is not None:
            record.request_stop("stopped", "interrupted")
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


# --- as a rank of torchrun or Slurm ---


T = TypeVar("T")

_LET_GO_SECONDS = 0.1


def run_in_place(
    train: Callable[..., Any],
    config: Config,
    host: Host,
    hardware: Hardware,
    *,
    choose: Callable[[], ChosenRun],
    display: Display,
    on_event: Callable[[Event], None] | None,
) -> RunResult:
    """Join the other ranks and call ``train``; returns when all of them are through.

    SIGTERM, SIGUSR1 or SIGUSR2 to any rank: all of them leave at the next report, as ``deadline``.

    Every rank gets the same result, read from the run's folder: ranks on several machines need one
    that all of them see. Output goes where this process's goes.

    Args:
        train: the training function.
        config: the resolved configuration.
        host: which rank this is.
        hardware: what it may use.
        choose: finds or makes the run; rank 0 calls it.
        display: what rank 0 shows.
        on_event: called with each event, by rank 0.

    Raises:
        GroupStartFailed: the ranks did not find each other.
        BaseException: what ``train`` raises on this rank, as it is; the launcher ends the others.
    """
    plan = make_plan(config, host, hardware)
    threads = {"OMP_NUM_THREADS": omp_threads(os.environ, plan)}
    variables = {**os.environ, **threads, **rendezvous(host, hardware, os.environ)}
    with lend_variables(variables), own_accelerate_state(), ExitStack() as stack:
        _join(plan, host)
        run = _choose(choose, host)
        limit = time_limit(config)
        mine = ("", None) if run is None else (str(run.paths.folder), limit.deadline)
        folder, deadline = _agree(mine, host)
        paths, recorder = RunPaths(Path(folder)), None
        job = JobSpec(paths=paths, plan=plan, config=config, deadline=deadline)
        if run is not None:
            cell = CellOutput(paths, display)
            cell.begin(plan, run)
            header = write_header(run, config, plan, host, train)
            request = RunRequest(
                job=job, host=host, hardware=hardware, header=header, notes=limit.notes
            )
            recorder = stack.enter_context(InProcessRecorder(run, request, cell, on_event))
        _run_rank(train, job, host, recorder)
        _meet(host, paths.ended)  # rank 0 has written the result
    return RunResult(paths)


def _choose(choose: Callable[[], ChosenRun], host: Host) -> ChosenRun | None:
    """The run, for rank 0; the others hear of it."""
    if host.rank != 0:
        return None
    run = choose()
    for rank in range(host.world_size):
        run.paths.value(rank).unlink(missing_ok=True)  # an earlier attempt's
    return run


def _run_rank(
    train: Callable[..., Any], job: JobSpec, host: Host, recorder: InProcessRecorder | None
) -> None:
    alone = host.world_size == 1
    channel = recorder if recorder is not None and alone else GroupChannel(recorder)
    optimizers = track_optimizers(job.config, host.world_size)
    ctx = RunContext(
        job,
        channel,
        rank=host.rank,
        local_rank=int(os.environ.get("LOCAL_RANK", host.local_rank)),
        world_size=host.world_size,
        optimizers=optimizers,
    )
    record = recorder.record if recorder is not None else None
    variables = {**os.environ, **of_plan(job.plan, job.paths.folder)}
    with (
        catch_termination_signals(channel.signal_flag),
        lend_variables(variables),
        ExitStack() as stack,
    ):
        stack.callback(ctx.close)
        if optimizers is not None:
            stack.callback(optimizers.close)
        settle(ctx)
        call(train, ctx, record, together=lambda: _all_well(host, job.paths))


def _join(plan: LaunchPlan, host: Host) -> None:
    """Form the group, unless the script has; it is left when the process ends."""
    import torch
    import torch.distributed as dist

    from nbtoolkit.worker.main import join_group

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
