"""How did a flight end? A status, a failure with its rank, or evidence for a new plan."""

from __future__ import annotations

import base64
import pickle
import signal
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import WorkerDied, WorkerHung
from nbtoolkit.runtime.crossing import pack_error
from nbtoolkit.runtime.flight import Flight, RankView
from nbtoolkit.runtime.paths import RunPaths
from nbtoolkit.runtime.plan import GroupFailure, PortBusy
from nbtoolkit.runtime.watch import without_launcher

if TYPE_CHECKING:
    from nbtoolkit.runtime.carrier import Carrier

# Failures this close together have one cause: a dead rank breaks its neighbours' connections within
# milliseconds.
_TOGETHER = 0.15
_CODE_SECONDS = 6.0  # for the pilot to tell a dead rank's exit code; 0.1 on a quiet machine

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


def of(flight: Flight, carrier: Carrier) -> str | Failure | GroupFailure | PortBusy | None:
    """The end of a flight; None while it goes on."""
    if carrier.killed_on_request and (
        flight.exited is not None or all(rank.over for rank in flight.ranks)
    ):
        return carrier.record.leaving or "stopped"
    if flight.landed is not None and flight.landed["type"] == "not_started":
        busy = flight.landed["busy"]
        return PortBusy(flight.port) if busy else GroupFailure(flight.landed["error"])
    troubled = [rank for rank in flight.ranks if rank.phase in ("failed", "dead")]
    if troubled:
        return _trouble(flight, carrier, troubled)
    if all(rank.over for rank in flight.ranks):
        left = [
            rank.last_word["status"]
            for rank in flight.ranks
            if rank.phase == "left" and rank.last_word
        ]
        return left[0] if left else "completed"
    return None


def _trouble(
    flight: Flight, carrier: Carrier, troubled: list[RankView]
) -> Failure | GroupFailure | PortBusy | None:
    first = min(rank.ended_at or 0.0 for rank in troubled)
    if time.monotonic() - first < _TOGETHER:
        return None
    dead = [
        rank
        for rank in troubled
        if rank.phase == "dead" and (rank.ended_at or 0) - first < _TOGETHER
    ]
    if dead and not carrier.killed_on_request:
        return _death(flight, carrier.paths, dead, first)
    culprit = min(troubled, key=lambda rank: rank.ended_at or 0.0)
    word = culprit.last_word or {"type": "error"}
    if word["type"] == "group_failed":
        busy = "EADDRINUSE" in word["error"]
        return (
            PortBusy(flight.port) if busy else GroupFailure(f"rank {culprit.rank}: {word['error']}")
        )
    return _error(carrier.paths, culprit)


def _error(paths: RunPaths, culprit: RankView) -> Failure:
    """The user's own exception, as the rank wrote it."""
    said = (culprit.last_word or {}).get("packed")  # where its disk is full, in the message itself
    raw = base64.b64decode(said) if said else paths.rank_error(culprit.rank).read_bytes()
    packed: dict[str, Any] = pickle.loads(raw)
    if packed["exit"]:
        kind = packed["type"].removeprefix("builtins.")
        died = WorkerDied(
            f"rank {culprit.rank} ended itself with {kind}({packed['text']})",
            allowed="the training function returns a value or raises an Exception",
            do=packed.get("advice") or "return instead of calling sys.exit()",
        )
        packed = {**pack_error(died), "frames": packed["frames"]}
    return Failure(packed, culprit.rank)


def _death(
    flight: Flight, paths: RunPaths, dead: list[RankView], first: float
) -> Failure | GroupFailure | None:
    """A rank that ended without a word: wait for its exit code, then say what it usually means."""
    waited = time.monotonic() - first
    if flight.exited is not None and len(flight.ranks) == 1:
        dead[0].code = flight.exited
    # elastic ends the others with SIGTERM as soon as one is dead, within milliseconds
    rank = min(dead, key=lambda rank: (rank.code == -signal.SIGTERM, rank.code is None))
    if rank.code is None and waited < _CODE_SECONDS:
        if waited > 1.0:
            flight.kill_ranks()  # elastic tells codes once all are gone; C++ ignores SIGTERM
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
        allowed="silence while computing, or inside `with ctx.long(...)`; a larger hang_timeout",
        do=f"see in the stacks where the ranks' ways part, and {paths.log(ranks[0].rank)}",
    )
    return Failure(pack_error(error), ranks[0].rank)


def lone_call(
    asking: list[RankView], others: list[RankView], places: dict[int, str]
) -> dict[str, str]:
    """What ranks that wait in a common call are told when the others are not coming.

    Args:
        asking: the ranks in the call.
        others: ranks that have returned, or wait in a collective.
        places: the user's line at which those wait.
    """
    question = asking[0].asking or {}
    verb = {"report": "ctx.report", "check": "ctx.check"}.get(question["type"], "ctx.save")
    here = ", ".join(str(rank.rank) for rank in asking)
    there = ", ".join(f"{rank.rank} ({_where(rank, places)})" for rank in others)
    call = (
        f"{verb} at {question['where']} was called on rank {here} only; it waits for rank {there}"
    )
    if 0 not in places:
        return {
            "what": call,
            "allowed": f"{verb} is called by all ranks, in the same order",
            "do": "take the call out of `if ctx.is_main:` (rank 0 alone writes and counts anyway)",
        }
    return {
        "what": f"rank 0 waits at {places[0]} for the other ranks, but {call}",
        "allowed": _TOGETHER_CALLS,
        "do": f"take the call at {places[0]} out of `if ctx.is_main:`; {_ALONE}",
    }


def apart(places: dict[int, str], over: list[RankView]) -> Failure:
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


def different_calls(flight: Flight) -> dict[str, str]:
    """What ranks are told that wait for each other in different calls."""
    calls = [
        f"rank {rank.rank}: {rank.asking['type']} at {rank.asking['where']}"
        for rank in flight.ranks
        if rank.asking
    ]
    return {
        "what": "the ranks wait for each other in different calls: " + "; ".join(calls),
        "allowed": "ctx.report, ctx.check and ctx.save are called by all ranks, in the same order",
        "do": "make every rank take the same way through the function",
    }
