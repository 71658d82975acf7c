"""Is this process fork-safe? Found by trying, in a child, what a rank would do.

Counting threads does not answer it (numpy alone leaves some that are harmless), and neither does
``torch.cuda.is_initialized()`` (it stays False after some imports that break every fork).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from dataclasses import dataclass

from nbtoolkit.runtime.activity import STALL_SECONDS, Activity
from nbtoolkit.runtime.processes import tree_seconds

PROBE_SECONDS = 5.0  # without progress: a child that hangs waits for threads that it has not got
_CPU_SECONDS = 30.0  # or it turns in a loop (OMP_WAIT_POLICY=active): 5 ms is what it needs
_READY = b"\0"  # the child has imported what it needs


@dataclass(frozen=True)
class ProbeResult:
    """Whether a forked child could work, and what it said."""

    ok: bool
    reason: str


def probe_fork(*, device: bool, seconds: float = PROBE_SECONDS) -> ProbeResult:
    """Fork a child that computes in parallel (and allocates on the first GPU when ``device``).

    Args:
        device: also try a CUDA allocation.
        seconds: a child that makes no progress for so long, once it has imported torch, hangs. It
            is killed then. A slow one is waited for.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python 3.12 warns on fork beside threads: we test just that
        pid = os.fork()
    if pid == 0:
        _child(write_end, device)
    os.close(write_end)
    try:
        status, said = _wait(pid, read_end, seconds)
    finally:
        os.close(read_end)
    if status is None:
        return ProbeResult(
            False,
            "a forked child hung in a parallel operation (OpenMP was used here): no progress for "
            f"{seconds:g} s",
        )
    if status != 0:
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        return ProbeResult(False, f"a forked child failed: {said or how}")
    return ProbeResult(
        True,
        "a forked child computed in parallel" + (" and allocated on the GPU" if device else ""),
    )


def _child(write_end: int, device: bool) -> None:
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        import torch

        os.write(write_end, _READY)
        # Large enough that torch splits it over its OpenMP team (grain size 32768).
        matrix = torch.ones(512, 512)
        float((matrix @ matrix).exp().clamp(max=1.0).sum())
        if device:
            torch.ones(1, device="cuda").item()
        code = 0
    except BaseException as error:
        os.write(write_end, f"{type(error).__name__}: {error}".encode()[:4000])
    finally:
        os._exit(code)


def _wait(pid: int, read_end: int, seconds: float) -> tuple[int | None, str]:
    """The child's exit code (negative: its signal; None: it hung and was killed) and its words."""
    activity = Activity(pid, descendants=False)
    said, begun = b"", None
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        with contextlib.suppress(BlockingIOError):
            said += os.read(read_end, 4096)
        if done:
            return os.waitstatus_to_exitcode(status), said.lstrip(_READY).decode(errors="replace")
        used = tree_seconds(pid, {})
        if begun is None and said:
            begun = used
        stalled = STALL_SECONDS if begun is None else seconds
        if activity.idle() >= stalled or (begun is not None and used - begun >= _CPU_SECONDS):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None, ""
        time.sleep(0.002)
