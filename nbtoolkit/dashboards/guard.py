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

LOOK_SECONDS = 0.5
"""Between two checks of kernel and dashboard."""

GRACE_SECONDS = 3.0
"""From SIGTERM to SIGKILL."""


def main(kernel: int, folder: str, command: list[str]) -> int:
    """Run the command until it ends, the pipe closes or the kernel dies; return its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while os.getppid() == kernel and program.poll() is None:
            if select.select([0], [], [], LOOK_SECONDS)[0]:
                break  # nothing is ever written to the pipe: it was closed
    finally:
        # The whole group: MLflow's server has a process of its own below the command.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(program.pid, number)
                program.wait(GRACE_SECONDS)
        if os.getppid() != kernel:  # else the kernel reads the log, and then removes it
            shutil.rmtree(folder, ignore_errors=True)
    return program.returncode


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
