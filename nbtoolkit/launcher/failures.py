"""Classify how a worker group ended, and raise a rank's exception in the kernel."""

from __future__ import annotations

import base64
import itertools
import pickle
import signal
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nbtoolkit.environment.plan import GroupFailure, PortBusy
from nbtoolkit.errors import RunFileError, WorkerDied, WorkerHung
from nbtoolkit.launcher.worker_group import RankView, WorkerGroup
from nbtoolkit.run import messages
from nbtoolkit.run.paths import RunPaths, read_record, reading
from nbtoolkit.run.serialization import add_note, pack_error, stand_in, unpack_error, user_line

if TYPE_CHECKING:
    from nbtoolkit.launcher.supervisor import RunSupervisor

_CALLED_FROM = "/nbtoolkit/worker/main.py"


# --- failure ---
# A failed run's exception, raised in the kernel as its own type, with rank, cell line and log.


def raise_failure(paths: RunPaths) -> NoReturn:
    """Raise what ended the run; where the exception cannot be read, one with its text.

    Raises:
        RunFileError: neither can be read.
    """
    __tracebackhide__ = True
    try:
        error = _failure(paths)
    except RunFileError:
        told = read_record(paths.error)
        with reading(paths.error):
            error = stand_in(told or {})
    _show_notes(error)
    raise error


def _show_notes(error: BaseException) -> None:
    """IPython 7, which Kaggle and Colab have, leaves an exception's notes out of its traceback."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.version_info[0] < 8 and ipython.get_ipython() is not None:
        print(*getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)


def _failure(paths: RunPaths) -> BaseException:
    with reading(paths.error_pickle):
        packed = pickle.loads(paths.error_pickle.read_bytes())
        error = unpack_error(packed)
        if packed["rank"] is not None:
            place = user_line(packed)
            where = f"rank {packed['rank']}" + (f", {cell_name(*place)}" if place else "")
            add_note(error, f"[nbtoolkit] {where}; log: {paths.log(packed['rank'])}")
        for note in packed["notes"]:
            add_note(error, f"[nbtoolkit] {note}")
    return error


def cell_name(filename: str, line: int) -> str:
    """``Cell In[3], line 5`` for code of a cell of this kernel, else file and line."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    compiler = getattr(shell, "compile", None)
    if compiler is not None and hasattr(compiler, "format_code_name"):
        name = compiler.format_code_name(filename)
        if name is not None:
            return f"{name[0]} {name[1]}, line {line}"
    elif shell is not None and compiler is not None:
        # IPython 7 (Kaggle, Colab) names a cell's file after its text; the history has lost the
        # text's last newline.
        cells = list(enumerate(shell.history_manager.input_hist_raw))
        for number, text in reversed(cells):
            names = (compiler.get_code_name(f"{text}{end}", text, number) for end in ("", "\n"))
            if filename in names:
                return f"Cell In[{number}], line {line}"
    return f"{filename}:{line}"


# --- how a group ended ---


# Failures this close together have one cause: a dead rank breaks its neighbours' connections within
# milliseconds.
_TOGETHER = 0.15
_CODE_SECONDS = 6.0  # for the agent to tell a dead rank's exit code; 0.1 on a quiet machine

# What a signal usually means to somebody who trains models.
_MEANINGS = {
    signal.SIGKILL: "killed from outside, usually by the kernel because memory ran out",
    signal.SIGSEGV: "a crash in native code, usually of incompatible versions or after a fork",
    signal.SIGBUS: "usually a full /dev/shm (DataLoader workers) or a mapped file cut short",
    signal.SIGABRT: "native code gave up: often a CUDA device-side assert or NCCL's watchdog",
    signal.SIGTERM: "asked to end from outside",
    signal.SIGFPE: "an arithmetic fault in native code, usually an integer division by zero",
    signal.SIGILL: "an instruction this CPU does not have: a wheel built for another CPU",
}


_TOGETHER_CALLS = (
    "calls in which ranks wait for each other (nb.predict, a model in DDP, collectives, "
    "ctx.report) are made by all ranks, in the same order"
)
_ALONE = "to use a model on one rank alone call ctx.unwrap(model)(...)"


@dataclass(frozen=True)
class Failure:
    """The error the launch raises: packed, with the rank that failed first."""

    error: dict[str, Any]
    rank: int | None
    notes: list[str] = field(default_factory=list)


def classify(
    worker_group: WorkerGroup, supervisor: RunSupervisor
) -> str | Failure | GroupFailure | PortBusy | None:
    """The end of a worker group; None while it goes on."""
    if supervisor.killed_on_request and (
        worker_group.exited is not None or all(rank.over for rank in worker_group.ranks)
    ):
        return supervisor.record.leaving or "stopped"
    landed = worker_group.agent_result
    if isinstance(landed, messages.RanksNotStarted):
        return PortBusy(worker_group.port) if landed.busy else GroupFailure(landed.error)
    troubled = [rank for rank in worker_group.ranks if rank.phase in ("failed", "dead")]
    if troubled:
        return _trouble(worker_group, supervisor, troubled)
    if all(rank.over for rank in worker_group.ranks):
        words = [rank.last_word for rank in worker_group.ranks]
        left = [word.status for word in words if isinstance(word, messages.FunctionLeft)]
        return left[0] if left else "completed"
    return None


def _trouble(
    worker_group: WorkerGroup, supervisor: RunSupervisor, troubled: list[RankView]
) -> Failure | GroupFailure | PortBusy | None:
    first = min(rank.ended_at or 0.0 for rank in troubled)
    if time.monotonic() - first < _TOGETHER:
        return None
    dead = [
        rank
        for rank in troubled
        if rank.phase == "dead" and (rank.ended_at or 0) - first < _TOGETHER
    ]
    if dead and not supervisor.killed_on_request:
        return _death(worker_group, supervisor.paths, dead, first)
    cause = min(troubled, key=lambda rank: rank.ended_at or 0.0)
    word = cause.last_word
    if isinstance(word, messages.GroupNotJoined):
        busy = "EADDRINUSE" in word.error
        return (
            PortBusy(worker_group.port)
            if busy
            else GroupFailure(f"rank {cause.rank}: {word.error}")
        )
    return _error(supervisor.paths, cause)


def _error(paths: RunPaths, cause: RankView) -> Failure:
    """The user's own exception, as the rank wrote it."""
    word = cause.last_word
    # where its disk is full, in the message itself
    said = word.packed if isinstance(word, messages.FunctionRaised) else None
    raw = base64.b64decode(said) if said else paths.rank_error(cause.rank).read_bytes()
    packed: dict[str, Any] = pickle.loads(raw)
    if packed["exit"]:
        kind = packed["type"].removeprefix("builtins.")
        died = WorkerDied(
            f"rank {cause.rank} ended itself with {kind}({packed['text']})",
            allowed="the training function returns a value or raises an Exception",
            do=packed.get("advice") or "return instead of calling sys.exit()",
        )
        packed = {**pack_error(died), "frames": packed["frames"]}
    return Failure(packed, cause.rank)


def _death(
    worker_group: WorkerGroup, paths: RunPaths, dead: list[RankView], first: float
) -> Failure | GroupFailure | None:
    """A rank that ended without a word: wait for its exit code, then say what it usually means."""
    waited = time.monotonic() - first
    if worker_group.exited is not None and len(worker_group.ranks) == 1:
        dead[0].code = worker_group.exited
    # elastic ends the others with SIGTERM as soon as one is dead, within milliseconds
    rank = min(dead, key=lambda rank: (rank.code == -signal.SIGTERM, rank.code is None))
    if rank.code is None and waited < _CODE_SECONDS:
        if waited > 1.0:
            worker_group.kill_ranks()  # elastic tells codes once all are gone; C++ ignores SIGTERM
        return None
    what = f"rank {rank.rank} died with {describe(rank.code)}"
    if rank.reached in ("none", "started"):  # later it died of what the user's modules do at import
        return GroupFailure(f"{what} before the ranks had formed their group")
    trace = _last_stack(paths.stacks(rank.rank))
    error = WorkerDied(
        what + (f"\n  Its last stack:\n{trace}" if trace else ""),
        allowed="the training function returns a value or raises an Exception",
        do=f"read the end of {paths.log(rank.rank)}",
    )
    return Failure(pack_error(error), rank.rank)


def describe(code: int | None) -> str:
    """An exit code in words: what it is and what it usually means."""
    if code is None:
        return "an unknown exit code"
    if code >= 0:
        return f"exit code {code} and no exception (os._exit, or native code that called exit)"
    meaning = _MEANINGS.get(signal.Signals(-code), "a signal from outside or native code")
    return f"signal {signal.Signals(-code).name} ({meaning})"


def _last_stack(path: Path) -> str:
    """What faulthandler wrote when the rank crashed in native code; empty where it did not."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
    crash = text[text.find("Fatal Python error") :] if "Fatal Python error" in text else ""
    return textwrap.indent(without_launcher(crash), "    ")


def hung(ranks: list[RankView], stacks: str, timeout: float, paths: RunPaths) -> Failure:
    """The failure of ranks that the watch takes for hung."""
    names = " and ".join(str(rank.rank) for rank in ranks)
    error = WorkerHung(
        f"rank {names} sent nothing and used under 1% CPU for {timeout:g} s while another rank "
        f"waits for it\n{stacks}",
        allowed="silence while computing, or inside `with ctx.pause_hang_detection(...)`; "
        "a larger hang_timeout",
        do=f"see in the stacks where the ranks' ways part, and {paths.log(ranks[0].rank)}",
    )
    return Failure(pack_error(error), ranks[0].rank)


def lone_call(
    asking: list[RankView], others: list[RankView], places: dict[int, str]
) -> messages.CallRefused:
    """What ranks that wait in a common call are told when the others are not coming.

    Args:
        asking: the ranks in the call.
        others: ranks that have returned, or wait in a collective.
        places: the user's line at which those wait.
    """
    question = asking[0].asking
    assert question is not None
    verb = {"report": "ctx.report", "check": "ctx.raise_if_stopped"}.get(question.call, "ctx.save")
    here = ", ".join(str(rank.rank) for rank in asking)
    there = ", ".join(f"{rank.rank} ({_where(rank, places)})" for rank in others)
    call = f"{verb} at {question.where} was called on rank {here} only; it waits for rank {there}"
    if 0 not in places:
        return messages.CallRefused(
            what=call,
            allowed=f"{verb} is called by all ranks, in the same order",
            do="take the call out of `if ctx.is_main:` (rank 0 alone writes and counts anyway)",
        )
    return messages.CallRefused(
        what=f"rank 0 waits at {places[0]} for the other ranks, but {call}",
        allowed=_TOGETHER_CALLS,
        do=f"take the call at {places[0]} out of `if ctx.is_main:`; {_ALONE}",
    )


def stuck_apart(places: dict[int, str], over: list[RankView]) -> Failure:
    """The failure of ranks that wait for each other at different lines, or for one that is over."""
    where = [f"rank {rank} at {place}" for rank, place in places.items()]
    gone = [f"rank {rank.rank} has returned" for rank in over]
    error = WorkerHung(
        "the ranks wait for each other in different calls: " + "; ".join([*where, *gone]),
        allowed=_TOGETHER_CALLS,
        do=f"look there, and before, for a call that only some ranks make, as under "
        f"`if ctx.is_main:`, and let all ranks make it; {_ALONE}",
    )
    return Failure(pack_error(error), min(places))


def _where(rank: RankView, places: dict[int, str]) -> str:
    if rank.over:
        return "which has returned"
    return f"which waits in another collective, at {places[rank.rank]}"


def different_calls(questions: Sequence[messages.Question]) -> messages.CallRefused:
    """What ranks are told that wait for each other in different calls; each rank's question."""
    calls = [f"rank {rank}: {one.call} at {one.where}" for rank, one in enumerate(questions)]
    return messages.CallRefused(
        what="the ranks wait for each other in different calls: " + "; ".join(calls),
        allowed="ctx.report, ctx.raise_if_stopped and ctx.save are called by all ranks, "
        "in the same order",
        do="make every rank take the same way through the function",
    )


def without_launcher(stack: str) -> str:
    """A stack, newest call first, down to where the user's function was called."""
    mine = itertools.takewhile(lambda line: _CALLED_FROM not in line, stack.strip().splitlines())
    return "\n".join(mine)
