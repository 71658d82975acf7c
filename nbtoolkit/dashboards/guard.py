"""Run a dashboard in a process group of its own, and end all of it with the kernel.

It is started as a file and uses the standard library only, which takes 10 MB and 20 ms. Its
standard input is a pipe whose other end the kernel holds: it ends when the pipe closes. A process
that the kernel forked may hold a copy of that end, so it also checks that the kernel is its parent.

    guard.py <the kernel's pid> <the dashboard's folder> <command> ...
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from types import FrameType

LOOK_SECONDS = 0.5
"""Between two checks of kernel and dashboard."""

GRACE_SECONDS = 3.0
"""From SIGTERM to SIGKILL."""


def main(kernel: int, folder: str, command: list[str]) -> int:
    """Run the command until it ends, the pipe closes or the kernel dies; return its exit code."""
    signal.signal(signal.SIGTERM, _exit)
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while os.getppid() == kernel and program.poll() is None:
            if select.select([0], [], [], LOOK_SECONDS)[0]:
                break  # nothing is ever written to the pipe: it was closed
    finally:
        _end(program)
        if os.getppid() != kernel:  # else the kernel reads the log, and then removes it
            shutil.rmtree(folder, ignore_errors=True)
    return program.returncode


def _end(program: subprocess.Popen[bytes]) -> None:
    """End the whole group: MLflow's server has a process of its own below the command."""
    _signal(program.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(GRACE_SECONDS)
    _signal(program.pid, signal.SIGKILL)
    program.wait()


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(group, number)


def _exit(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
