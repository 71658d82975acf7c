"""Test whether a child that this process forks could train."""

from __future__ import annotations

import os
import signal
import time

from nbtoolkit.environment.resources import Activity, tree_seconds
from nbtoolkit.worker.forking import die_with_parent

PROBE_SECONDS = 5.0
"""A child without progress for this long hangs: it waits for threads that the fork lost."""
# CPU limit of a child that spins (OMP_WAIT_POLICY=active); a healthy one needs 5 ms.
_CPU_SECONDS = 30.0


def probe_fork(*, device: bool, seconds: float = PROBE_SECONDS) -> bool:
    """Fork a child that computes in parallel, and return whether it succeeds.

    Counting threads does not answer the question (NumPy alone leaves some that are harmless), nor
    does ``torch.cuda.is_initialized()`` (it stays False after some imports that break every fork).

    Args:
        device: also allocate on the first GPU.
        seconds: a child that makes no progress for this long is killed. A slow child is not.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _compute_and_exit(parent, device)
    activity = Activity(pid, descendants=False)
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        if activity.idle() >= seconds or tree_seconds(pid, {}) >= _CPU_SECONDS:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        time.sleep(0.002)


def _compute_and_exit(parent: int, device: bool) -> None:
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(signal.SIGKILL)  # a child that hangs would outlive a parent that is killed
        if os.getppid() == parent:
            _compute(device)
            code = 0
    finally:
        os._exit(code)


def _compute(device: bool) -> None:
    import torch

    # Large enough that torch splits it over its OpenMP threads (grain size 32768).
    matrix = torch.ones(512, 512)
    float((matrix @ matrix).exp().clamp(max=1.0).sum())
    if device:
        torch.ones(1, device="cuda").item()
