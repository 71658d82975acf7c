"""Classify how a worker group ended, and raise a rank's exception in the kernel."""

from __future__ import annotations

import base64
import itertools
import signal
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from nbtoolkit.environment.plan import GroupFailure, OutOfMemory, PortBusy, may_accumulate_more
from nbtoolkit.environment.resources import memory_kills
from nbtoolkit.errors import LaunchError, PlanError, RunFileError, WorkerDied, WorkerHung
from nbtoolkit.launcher.worker_group import RankView, WorkerGroup
from nbtoolkit.run import messages
from nbtoolkit.run.attempts import last_event
from nbtoolkit.run.paths import RunPaths, reading
from nbtoolkit.run.serialization import (
    PackedError,
    add_note,
    as_worker_error,
    for_the_cell,
    one_line,
    pack_error,
    recorded_error,
    unpack_error,
)
from nbtoolkit.run.tracebacks import show_users_part, user_line

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.environment.launch_plan import LaunchPlan
    from nbtoolkit.launcher.supervisor import RunSupervisor

_CALLED_FROM = "/nbtoolkit/worker/main.py"


# --- raising in the kernel ---


_MEMORY_ERRORS = ("MemoryError", "OutOfMemoryError")
_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a run raised because memory ran out, on a device or on the machine.

    Any SIGKILL counts: other senders of that signal are rare, and look the same afterwards.
    """
    if isinstance(error, LaunchError):  # which only guesses at the cause
        return False
    return _ran_out(type(error).__name__, str(error), kills=None)


def ran_out_of_memory(error: PackedError, kills: int | None) -> bool:
    """Whether memory ran out on a rank.

    Args:
        error: the rank's.
        kills: the kernel's count of kills for memory before (:func:`memory_kills`). A SIGKILL is
            one of them if the count has risen, or is unknown.
    """
    return _ran_out(error.type.rpartition(".")[2], error.text, kills)


def memory_ran_out(text: str) -> bool:
    """Whether an error's text is one of torch's or the system's about memory."""
    return any(words in text.lower() for words in _NO_MEMORY)


def _ran_out(kind: str, text: str, kills: int | None) -> bool:
    if kind == "WorkerDied":  # all that the kernel's killer leaves
        return "signal SIGKILL" in text and (kills is None or memory_kills() != kills)
    return kind in _MEMORY_ERRORS or memory_ran_out(text)


def raise_failure(paths: RunPaths) -> NoReturn:
    """Raise the exception of a failed run, with its own type, and rank, cell line and log as notes.

    If it cannot be unpickled, raise a :class:`WorkerError` with its text.

    Raises:
        RunFileError: neither can be read.
    """
    __tracebackhide__ = True
    try:
        error = _failure(paths)
    except RunFileError:
        ended = last_event(paths)
        if ended is None or ended.error is None:
            raise
        error = as_worker_error(recorded_error(ended))
    _show_notes(error)
    show_users_part(error)
    raise error


def _show_notes(error: BaseException) -> None:
    """Print the exception's notes; the traceback of IPython 7 (Kaggle, Colab) omits them."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.version_info[0] < 8 and ipython.get_ipython() is not None:
        print(*getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)


def _failure(paths: RunPaths) -> BaseException:
    with reading(paths.error_pickle):
        packed = PackedError.decode(paths.error_pickle.read_bytes())
        error = unpack_error(for_the_cell(packed))
        if packed.rank is not None:
            location = user_line(packed.stack)
            where = f"rank {packed.rank}" + (f", {cell_name(*location)}" if location else "")
            add_note(error, f"[nbtoolkit] {where}; log: {paths.log(packed.rank)}")
        for note in packed.notes:
            add_note(error, f"[nbtoolkit] {note}")
    return error


def cell_name(filename: str, line: int) -> str:
    """Return ``Cell In[3], line 5`` for code of a cell of this kernel, else ``file:line``."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    compiler = getattr(shell, "compile", None)
    if compiler is not None and hasattr(compiler, "format_code_name"):
        name = compiler.format_code_name(filename)
        if name is not None:
            return f"{name[0]} {name[1]}, line {line}"
    elif shell is not None and compiler is not None:
        # IPython 7 (Kaggle, Colab) derives a cell's file name from its text. The history lacks the
        # text's last newline.
        cells = list(enumerate(shell.history_manager.input_hist_raw))
        for number, text in reversed(cells):
            names = (compiler.get_code_name(f"{text}{end}", text, number) for end in ("", "\n"))
            if filename in names:
                return f"Cell In[{number}], line {line}"
    return f"{filename}:{line}"


# --- classification ---


# Failures within so many seconds have one cause: a dead rank breaks its neighbours' connections
# within milliseconds.
_TOGETHER = 0.15
# Seconds that the agent gets to report a dead rank's exit code; it takes 0.1 on a quiet machine.
_CODE_SECONDS = 6.0

# The usual causes of signals in training.
_MEANINGS = {
    signal.SIGKILL: "killed from outside, usually by the kernel because memory ran out",
    signal.SIGSEGV: "a crash in native code, usually of incompatible versions or after a fork",
    signal.SIGBUS: "usually a full /dev/shm (container: --shm-size=8g; or num_workers: 0), or a "
    "mapped file cut short",
    signal.SIGABRT: "native code aborted: often a CUDA device-side assert or NCCL's watchdog",
    signal.SIGTERM: "terminated from outside",
    signal.SIGFPE: "an arithmetic fault in native code, usually an integer division by zero",
    signal.SIGILL: "an instruction this CPU does not have: a wheel built for another CPU",
}


_TOGETHER_CALLS = (
    "all ranks make calls that wait for other ranks (nb.predict, a model in DDP, collectives, "
    "ctx.report), in the same order"
)
_ALONE = "to use a model on one rank only, call ctx.unwrap(model)(...)"


@dataclass(frozen=True)
class Failure:
    """The packed error that the launch raises, and the rank that failed first."""

    error: PackedError
    rank: int | None
    notes: list[str] = field(default_factory=list)
    out_of_memory: bool = False
    cause: Literal["raised", "died", "final"] = "raised"
    """Whether the user's code raised, a rank died or hung, or another attempt cannot help."""

    @property
    def brief(self) -> str:
        """The failure in a few words."""
        kind = self.error.type.rpartition(".")[2]
        if kind == "WorkerDied":
            return self.error.text.partition(" (")[0]
        if kind == "WorkerHung":
            return f"rank {self.rank} hung"
        return f"rank {self.rank} raised {one_line(self.error.type, self.error.text)}"


def classify(
    worker_group: WorkerGroup, supervisor: RunSupervisor
) -> str | Failure | GroupFailure | PortBusy | None:
    """Return how a worker group ended: a status or a failure; None while it runs."""
    if supervisor.killed_on_request and (
        worker_group.exited is not None or all(rank.over for rank in worker_group.ranks)
    ):
        return supervisor.record.leaving or "stopped"
    result = worker_group.agent_result
    if isinstance(result, messages.RanksNotStarted):
        return PortBusy(worker_group.port) if result.busy else GroupFailure(result.error)
    failed = [rank for rank in worker_group.ranks if rank.phase in ("failed", "dead")]
    if failed:
        return _classify_failed(worker_group, supervisor, failed)
    if all(rank.over for rank in worker_group.ranks):
        finals = [rank.last_word for rank in worker_group.ranks]
        left = [final.status for final in finals if isinstance(final, messages.FunctionLeft)]
        return left[0] if left else "completed"
    return None


def _classify_failed(
    worker_group: WorkerGroup, supervisor: RunSupervisor, failed: list[RankView]
) -> Failure | GroupFailure | PortBusy | None:
    """Find the cause among the failed ranks; None while others may still follow."""
    first = min(rank.ended_at or 0.0 for rank in failed)
    if time.monotonic() - first < _TOGETHER:
        return None
    dead = [
        rank for rank in failed if rank.phase == "dead" and (rank.ended_at or 0) - first < _TOGETHER
    ]
    if dead and not supervisor.killed_on_request:
        return _classify_dead(worker_group, supervisor.paths, dead, first)
    cause = min(failed, key=lambda rank: rank.ended_at or 0.0)
    final = cause.last_word
    if isinstance(final, messages.GroupNotJoined):
        if "EADDRINUSE" in final.error:
            return PortBusy(worker_group.port)
        return GroupFailure(f"rank {cause.rank}: {final.error}")
    return _user_error(supervisor.paths, cause)


def _user_error(paths: RunPaths, cause: RankView) -> Failure:
    """Return the exception that the training function raised on a rank."""
    final = cause.last_word
    # The message holds the exception if the rank could not write the file: its disk was full.
    packed_text = final.packed if isinstance(final, messages.FunctionRaised) else None
    raw = (
        base64.b64decode(packed_text) if packed_text else paths.rank_error(cause.rank).read_bytes()
    )
    packed = PackedError.decode(raw)
    if packed.exit:
        kind = packed.type.removeprefix("builtins.")
        died = WorkerDied(
            f"rank {cause.rank} ended itself with {kind}({packed.text})",
            allowed="the training function returns a value or raises an Exception",
            do=packed.advice or "return instead of calling sys.exit()",
        )
        packed = replace(pack_error(died), stack=packed.stack)
        return Failure(packed, cause.rank, cause="final")
    return Failure(packed, cause.rank)


def _classify_dead(
    worker_group: WorkerGroup, paths: RunPaths, dead: list[RankView], first: float
) -> Failure | GroupFailure | None:
    """Explain ranks that ended without a final message; None while their exit code is unknown."""
    waited = time.monotonic() - first
    if worker_group.exited is not None and len(worker_group.ranks) == 1:
        dead[0].code = worker_group.exited
    # elastic ends the others with SIGTERM within milliseconds after one has died.
    rank = min(dead, key=lambda rank: (rank.code == -signal.SIGTERM, rank.code is None))
    if rank.code is None and waited < _CODE_SECONDS:
        if waited > 1.0:
            # elastic reports the codes after all ranks have ended, and a rank blocked in C++
            # ignores its SIGTERM.
            worker_group.kill_ranks()
        return None
    what = f"rank {rank.rank} died with {describe(rank.code)}"
    # A rank that dies in a later phase dies of the user's code, such as a module it imports.
    if rank.reached in ("none", "started"):
        return GroupFailure(f"{what} before the ranks had formed their group")
    trace = _last_stack(paths.stacks(rank.rank))
    error = WorkerDied(
        what + (f"\n  Its last stack:\n{trace}" if trace else ""),
        allowed="the training function returns a value or raises an Exception",
        do=f"read the end of {paths.log(rank.rank)}",
    )
    return Failure(pack_error(error), rank.rank, cause="died")


def describe(code: int | None) -> str:
    """Describe an exit code and its usual cause."""
    if code is None:
        return "an unknown exit code"
    if code >= 0:
        return f"exit code {code} and no exception (os._exit, or native code that called exit)"
    meaning = _MEANINGS.get(signal.Signals(-code), "a signal from outside or native code")
    return f"signal {signal.Signals(-code).name} ({meaning})"


def _last_stack(path: Path) -> str:
    """Return the stack that faulthandler wrote at a crash in native code; empty if none."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
    crash = text[text.find("Fatal Python error") :] if "Fatal Python error" in text else ""
    return textwrap.indent(without_launcher(crash), "    ")


def hang_failure(
    hung: list[RankView],
    ranks: list[RankView],
    stacks: Mapping[int, str],
    timeout: float,
    paths: RunPaths,
) -> Failure:
    """Return the failure for hung ranks.

    Args:
        hung: the ranks that others wait for.
        ranks: all ranks.
        stacks: of each rank, as it has written them.
        timeout: the seconds for which they were idle.
        paths: of the run.
    """
    error = WorkerHung(
        f"{_names(hung)} sent nothing and used under 1% CPU for {timeout:g} s while another rank "
        f"waits for it or has returned\n{format_states(ranks, stacks)}",
        allowed="a rank that computes; a rank that waits inside `with "
        "ctx.pause_hang_detection(...)`; any wait shorter than runtime.hang_timeout",
        do=f"compare the ranks' stacks, and read {paths.log(hung[0].rank)}",
    )
    return Failure(pack_error(error), hung[0].rank, cause="died")


def start_failure(
    blocked: list[RankView], stacks: Mapping[int, str], timeout: float, paths: RunPaths
) -> Failure:
    """Return the failure for ranks that block while they load the training function."""
    error = WorkerHung(
        f"{_names(blocked)} did not start: idle for {timeout:g} s while loading the training "
        f"function and the modules that it imports\n"
        f"{format_states(blocked, stacks)}",
        allowed="modules that load without waiting for a lock, a download or a disk for longer "
        "than runtime.hang_timeout",
        do=f"find the import in the stack, and read {paths.log(blocked[0].rank)}",
    )
    return Failure(pack_error(error), blocked[0].rank, cause="died")


def deadlock_failure(waiting: list[RankView], over: list[RankView], paths: RunPaths) -> Failure:
    """Return the failure for ranks that wait in different calls, or for a rank that has ended."""
    what = "the ranks wait for each other in different calls: "
    if over:
        what = "a rank waits for a rank that has returned: "
    calls = [f"rank {rank.rank} {_state(rank)}" for rank in [*waiting, *over]]
    differences = _first_difference(waiting)
    error = WorkerHung(
        what + "; ".join(calls) + "".join(f"\n  {line}" for line in differences),
        allowed=_TOGETHER_CALLS,
        do=f"at these lines or before them, find a call that only some ranks make, for example "
        f"under `if ctx.is_main:`, and make it on all ranks; {_ALONE}; the ranks' stacks are in "
        f"{paths.stacks(waiting[0].rank)} and the other ranks' folders",
    )
    return Failure(pack_error(error), waiting[0].rank)


def refuse_lone_call(asking: list[RankView], others: list[RankView]) -> messages.CallRefused:
    """Return the reply to ranks that wait in a call which the other ranks cannot reach.

    Args:
        asking: the ranks in the call.
        others: ranks that have returned, or wait in a collective.
    """
    question = asking[0].asking
    assert question is not None
    verb = _verb(question)
    here = ", ".join(str(rank.rank) for rank in asking)
    there = ", ".join(f"{rank.rank} (which {_state(rank)})" for rank in others)
    call = f"{verb} at {question.where} was called on rank {here} only; it waits for rank {there}"
    first = others[0]
    if first.rank != 0 or first.over or not first.waits_at:
        return messages.CallRefused(
            what=call,
            allowed=f"all ranks call {verb}, in the same order",
            do="move the call out of `if ctx.is_main:`, so that all ranks make it",
        )
    return messages.CallRefused(
        what=f"rank 0 waits at {first.waits_at} for the other ranks, but {call}",
        allowed=_TOGETHER_CALLS,
        do=f"move the call at {first.waits_at} out of `if ctx.is_main:`; {_ALONE}",
    )


def _verb(question: messages.Question) -> str:
    return {"report": "ctx.report", "check": "ctx.raise_if_stopped"}.get(question.call, "ctx.save")


def _names(ranks: list[RankView]) -> str:
    return "rank " + " and ".join(str(rank.rank) for rank in ranks)


def _state(rank: RankView) -> str:
    """Return what a rank does, as it has said itself."""
    if rank.over:
        return "has returned"
    if rank.asking is not None:
        return f"waits in {_verb(rank.asking)} at {rank.asking.where}"
    if rank.waits_at:
        return f"waits in collective number {rank.collectives} at {rank.waits_at}"
    return f"has started {rank.collectives} collectives"


def _first_difference(ranks: list[RankView]) -> list[str]:
    """Return the first frame in which each rank differs, if the user's line is the same for all.

    The ranks are then in one call of a library, which does different things on them.
    """
    if len({rank.waits_at for rank in ranks}) > 1:
        return []
    for frames in itertools.zip_longest(*(rank.stack for rank in ranks), fillvalue="(no frame)"):
        if len(set(frames)) > 1:
            pairs = zip(ranks, frames, strict=True)
            return [f"rank {rank.rank}: {frame}" for rank, frame in pairs]
    return []


def format_states(ranks: list[RankView], stacks: Mapping[int, str]) -> str:
    """Return what each rank does, and its stack, as one text."""
    texts = [
        f"--- rank {rank.rank} {_state(rank)}; its stack ---\n"
        f"{without_launcher(stacks.get(rank.rank, '')) or '(none)'}"
        for rank in ranks
    ]
    return "\n".join(texts)


def refuse_different_calls(questions: Sequence[messages.Question]) -> messages.CallRefused:
    """Return the reply to ranks that wait for each other in different calls.

    Args:
        questions: the question of each rank, by rank.
    """
    calls = [
        f"rank {rank}: {question.call} at {question.where}"
        for rank, question in enumerate(questions)
    ]
    return messages.CallRefused(
        what="the ranks wait for each other in different calls: " + "; ".join(calls),
        allowed="all ranks call ctx.report, ctx.raise_if_stopped and ctx.save, in the same order",
        do="make every rank take the same path through the function",
    )


def without_launcher(stack: str) -> str:
    """Return a stack, innermost call first, without the callers of the user's function."""
    lines = itertools.takewhile(lambda line: _CALLED_FROM not in line, stack.strip().splitlines())
    return "\n".join(lines)


# --- out of memory: more accumulation steps, or an error ---


def after_out_of_memory(
    failure: Failure, plan: LaunchPlan, config: Config, *, in_loop: bool, may_restart: bool
) -> Failure | OutOfMemory:
    """Return the evidence for another plan, or the failure with advice.

    Args:
        failure: a rank ran out of memory.
        plan: the plan under which it did.
        config: the run's.
        in_loop: the rank was in a loop that follows ``plan.accumulate``.
        may_restart: the run may start its ranks again.
    """
    failure, train = replace(failure, out_of_memory=True), config.train
    if may_accumulate_more(config):
        if in_loop and plan.batch_size_per_device == 1:
            return _one_sample(failure, plan)
        restarts = in_loop and may_restart
        return OutOfMemory(plan.batch_size_per_device) if restarts else failure
    per_device = train.batch_size_per_device is not None
    fixed = "batch_size_per_device" if per_device else "gradient_accumulation_steps"
    advice = (
        f"train.{fixed} is {getattr(train, fixed)}, which nothing changes: set a smaller batch, or "
        "train.batch_size with gradient_accumulation_steps: auto, which keeps the batch"
    )
    return replace(failure, notes=[*failure.notes, advice])


def _one_sample(failure: Failure, plan: LaunchPlan) -> Failure:
    error = PlanError(
        f"one sample per forward pass ran out of memory on rank {failure.rank} (batch "
        f"{plan.global_batch_size}: {plan.processes} x {plan.accumulate} accumulation steps of 1 "
        "sample); how much memory the model needs is unknown\n  "
        f"{one_line(failure.error.type, failure.error.text)}",
        allowed="a model whose weights, gradients and optimizer state fit into a device's memory, "
        "with the activations of one sample",
        do="use a smaller model or smaller inputs, train.activation_checkpointing: true, or a "
        "train.precision of 16 bits",
    )
    packed = replace(pack_error(error), stack=failure.error.stack, cause=failure.error)
    return replace(failure, error=packed, cause="final")
