"""End the processes of a test's own services, whatever ends the test.

    python reaper.py SLURM_CONF=/tmp/slurm-x/slurm.conf

Standard input is a pipe from the test. When its last writer has gone, by a fixture's end, Ctrl-C or
SIGKILL, all processes with this variable in their environment are killed. Process groups do not
tell them: the daemons of a cluster start sessions of their own for each job.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SECONDS = 30.0


@contextmanager
def reaped(variable: str) -> Iterator[None]:
    """Kill what has this variable (``NAME=value``) when the block, or this process, ends."""
    # In a session of its own: Ctrl-C is not for it.
    program = [sys.executable, __file__, variable]
    with subprocess.Popen(program, stdin=subprocess.PIPE, start_new_session=True):
        yield


def kill_all(variable: str) -> None:
    """Kill until none is left: one that is killed may just have started another."""
    deadline = time.monotonic() + SECONDS
    while (pids := having(variable)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def having(variable: str) -> list[int]:
    """The processes that were started with a variable; zombies have none."""
    others = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in others if pid != os.getpid() and variable in environ(pid)]


def environ(pid: int) -> list[str]:
    """The variables with which a process was started; none where it has ended."""
    with suppress(OSError):
        return os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
    return []


if __name__ == "__main__":
    sys.stdin.buffer.read()
    kill_all(sys.argv[1])
