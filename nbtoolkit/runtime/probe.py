"""Is this process fork-safe? Found by trying, in a child, what a rank would do.

Counting threads does not answer it (numpy alone leaves some that are harmless), and neither does
``torch.cuda.is_initialized()`` (it stays False after some imports that break every fork).
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from dataclasses import dataclass

PROBE_SECONDS = 5.0


@dataclass(frozen=True)
class ProbeResult:
    """Whether a forked child could work, and what it said."""

    ok: bool
    reason: str


def probe_fork(*, device: bool, seconds: float = PROBE_SECONDS) -> ProbeResult:
    """Fork a child that computes in parallel (and allocates on the first GPU when ``device``).

    Args:
        device: also try a CUDA allocation.
        seconds: limit; a child that hangs is killed.
    """
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python 3.12 warns on fork beside threads: we test just that
        pid = os.fork()
    if pid == 0:
        _child(write_end, device)
    os.close(write_end)
    try:
        status = _wait(pid, seconds)
        said = os.read(read_end, 4096).decode(errors="replace") if status is not None else ""
    finally:
        os.close(read_end)
    if status is None:
        return ProbeResult(
            False,
            f"a forked child hung for {seconds:g} s in a parallel operation (OpenMP was used here)",
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


def _wait(pid: int, seconds: float) -> int | None:
    """The child's exit code (negative: its signal); None when it had to be killed."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None
