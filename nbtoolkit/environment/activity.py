"""Measure whether a process makes progress, and wait for it as long as it does.

A limit in wall time ends healthy processes on a slow machine: the import of torch takes 2 s from a
warm disk, and minutes from a cold one beside other work.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from nbtoolkit.environment.resources import STATE, children, process_fields

STALL_SECONDS = 60.0
"""A process without any progress for so long is given up."""

_LOOK_SECONDS = 0.5  # between two looks: one at the whole of /proc takes some milliseconds
_TELL_SECONDS = 10.0

# Page faults and CPU time of a process and of its reaped children: fields 10 to 17 of
# /proc/<pid>/stat (man 5 proc), counted from the state. Page faults count finer than CPU time,
# whose tick is 10 ms.
_WORK = slice(7, 15)


class Activity:
    """For how long a process has made no progress.

    Progress is CPU time, page faults and I/O. A process that waits for a disk (state D) or for a
    CPU (state R) is not idle either. Time in which nobody looked, because this process itself got
    no CPU, does not count.

    Args:
        pid: the process.
        descendants: whether the progress of its descendants counts too.
    """

    def __init__(self, pid: int, *, descendants: bool = True) -> None:
        self._pid, self._descendants = pid, descendants
        self._idle, self._looked_at = 0.0, time.monotonic()
        self._work, _ = self._look()

    def idle(self) -> float:
        """Seconds without progress; a process that has ended makes none."""
        gap = time.monotonic() - self._looked_at
        if gap >= _LOOK_SECONDS:
            work, waits = self._look()
            progress = waits or work != self._work
            self._idle = 0.0 if progress else self._idle + min(gap, 2 * _LOOK_SECONDS)
            self._work, self._looked_at = work, time.monotonic()
        return self._idle

    def _look(self) -> tuple[dict[int, list[str]], bool]:
        """What each process has done so far, and whether one waits for a disk or a CPU."""
        families = children() if self._descendants else {}
        work, waits, pids = {}, False, [self._pid]
        while pids:
            pid = pids.pop()
            pids += families.get(pid, ())
            if (fields := process_fields(pid)) is not None:
                work[pid] = [*fields[_WORK], _input_output(pid)]
                waits |= fields[STATE] in "DR"
        return work, waits


def wait_while_active(
    done: Callable[[float], object],
    activity: Activity,
    what: str,
    *,
    stalled: float = STALL_SECONDS,
    limit: float | None = None,
    tell: float = _TELL_SECONDS,
    say: Callable[[str], object] | None = None,
) -> bool:
    """Wait for something as long as the process that is to do it makes progress.

    Args:
        done: is given seconds, waits at most so long, and returns whether it is done.
        activity: of the process.
        what: what is waited for; said to the user when it takes long.
        stalled: seconds without any progress after which the wait ends.
        limit: seconds of wall time after which it ends in any case; None: no limit.
        tell: seconds after which the wait is told of; again each time three times as long has gone.
        say: shows a sentence to the user; None: writes it to stderr.

    Returns:
        Whether it is done.
    """
    begin = time.monotonic()
    while not done(_LOOK_SECONDS):
        waited, idle = time.monotonic() - begin, activity.idle()
        if idle >= stalled or (limit is not None and waited >= limit):
            return False
        if waited >= tell:
            tell = 3 * waited
            how = f"no progress for {idle:.0f} s" if idle >= 1 else "it makes progress"
            (say or _to_stderr)(f"waiting for {what}: {waited:.0f} s so far, {how}")
    return True


def has_ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether a process has ended, or does within so many seconds."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.poll() is not None


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _input_output(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/io").read_text()
    except OSError:  # it has ended, or this kernel does not tell: CPU time and page faults remain
        return ""
