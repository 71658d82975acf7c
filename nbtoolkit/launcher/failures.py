"""Classify how the ranks of a worker group ended."""

from __future__ import annotations

import base64
import signal
import textwrap
import time
from dataclasses import replace
from pathlib import Path

from nbtoolkit.environment.plan import GroupNotFormed, PortBusy
from nbtoolkit.errors import WorkerDied
from nbtoolkit.launcher.outcome import Failed, Finished, Outcome
from nbtoolkit.launcher.worker_group import RankView, WorkerGroup
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.wire import messages
from nbtoolkit.wire.serialization import PackedError, pack_error
from nbtoolkit.wire.tracebacks import without_launcher

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


def classify(worker_group: WorkerGroup, paths: RunPaths) -> Outcome | None:
    """Return how a worker group ended; None while it runs, or its end is not yet clear."""
    result = worker_group.agent_result
    if isinstance(result, messages.RanksNotStarted):
        return PortBusy(worker_group.port) if result.busy else GroupNotFormed(result.error)
    failed = [rank for rank in worker_group.ranks if rank.phase in ("failed", "dead")]
    if failed:
        return _classify_failed(worker_group, paths, failed)
    if all(rank.over for rank in worker_group.ranks):
        finals = [rank.last_word for rank in worker_group.ranks]
        left = [final.status for final in finals if isinstance(final, messages.FunctionLeft)]
        return Finished(left[0] if left else "completed")
    return None


def _classify_failed(
    worker_group: WorkerGroup, paths: RunPaths, failed: list[RankView]
) -> Failed | GroupNotFormed | PortBusy | None:
    """Find the cause among the failed ranks; None while others may still follow."""
    first = min(rank.ended_at or 0.0 for rank in failed)
    if time.monotonic() - first < _TOGETHER:
        return None
    dead = [
        rank for rank in failed if rank.phase == "dead" and (rank.ended_at or 0) - first < _TOGETHER
    ]
    if dead:
        return _classify_dead(worker_group, paths, dead, first)
    cause = min(failed, key=lambda rank: rank.ended_at or 0.0)
    final = cause.last_word
    if isinstance(final, messages.GroupNotJoined):
        if "EADDRINUSE" in final.error:
            return PortBusy(worker_group.port)
        return GroupNotFormed(f"rank {cause.rank}: {final.error}")
    # The message holds the exception if the rank could not write the file: its disk was full.
    if isinstance(final, messages.FunctionRaised) and final.packed:
        return _raised(cause.rank, base64.b64decode(final.packed))
    return _raised(cause.rank, paths.rank_error(cause.rank).read_bytes())


def _raised(rank: int, content: bytes) -> Failed:
    """Return the failure for an exception that the training function raised on a rank."""
    error = PackedError.decode(content)
    if not error.exit:
        return Failed(error=error, rank=rank, cause="raised")
    died = WorkerDied(
        f"rank {rank} ended itself with {error.type}({error.text})",
        allowed="the training function returns a value or raises an Exception",
        do=error.advice or "return instead of calling sys.exit()",
    )
    return Failed(error=replace(pack_error(died), stack=error.stack), rank=rank, cause="final")


def _classify_dead(
    worker_group: WorkerGroup, paths: RunPaths, dead: list[RankView], first: float
) -> Failed | GroupNotFormed | None:
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
    problem = f"rank {rank.rank} died with {describe(rank.code)}"
    # A rank that dies in a later phase dies of the user's code, such as a module it imports.
    if rank.reached in ("none", "started"):
        return GroupNotFormed(f"{problem} before the ranks had formed their group")
    trace = _last_stack(paths.stacks(rank.rank))
    error = WorkerDied(
        problem + (f"\n  Its last stack:\n{trace}" if trace else ""),
        allowed="the training function returns a value or raises an Exception",
        do=f"read the end of {paths.log(rank.rank)}",
    )
    return Failed(error=pack_error(error), rank=rank.rank, cause="died")


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
