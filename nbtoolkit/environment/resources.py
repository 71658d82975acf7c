"""Measure disk space, lock files, and watch the state and progress of other processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from nbtoolkit.environment.grace import REPORT_SECONDS, STALL_SECONDS
from nbtoolkit.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def free_space(folder: Path) -> int:
    """Return the free bytes below a folder, which need not exist yet."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def size_text(count: int) -> str:
    """Format bytes: ``"1.4 GB"``, ``"12.0 MB"``."""
    if count >= 10**9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.1f} MB" if count >= 10**5 else f"{count / 1e3:.1f} kB"


def read_size(size: int | str) -> int:
    """Convert a size to bytes: a number, or a string such as ``"15GB"``, ``"800 MB"``, ``"2GiB"``.

    Raises:
        ConfigError: ``size`` is not a size.
    """
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    unit = (_UNITS | _BINARY).get(match[2].upper()) if match else None
    if match and unit:
        return round(float(match[1]) * unit)
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    raise ConfigError(
        f"{size!r} is not a size",
        allowed="bytes, or a string with a unit: B, kB, MB, GB, TB, KiB, MiB, GiB, TiB",
        do='write "15GB", for example',
    )


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file (flock) until it is closed; return False if another process prevents it.

    Args:
        descriptor: the open file. NFS locks no folders, and wants a file that is open for writing,
            for a shared lock one that is open for reading (Linux, flock(2)).
        shared: others may have a shared lock at the same time.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# Indices into the result of `process_fields`, whose first item is field 3 of man 5 proc.
STATE = 0
PARENT = 1
USER_TIME = 11
SYSTEM_TIME = 12
START_TIME = 19
EXIT_CODE = 49

_TICKS = os.sysconf("SC_CLK_TCK")


def memory_kills() -> int | None:
    """Return how many processes this machine's kernel has killed for memory; None: it is unknown.

    Kills at a cgroup's limit count, too.
    """
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def process_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the state on; None if the process is gone.

    Read by hand, since psutil has neither a zombie's exit code nor page faults. Supervisors call it
    many times per second: without a buffer it takes 15 us, psutil 60 us or more.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read(4096).decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):  # the second while the process is being reaped
        return None
    return text.rpartition(")")[2].split()


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    fields = process_fields(pid)
    return fields is not None and fields[STATE] not in "ZX"


def exit_code(pid: int) -> int | None:
    """Return the exit code of a zombie (negative: a signal); None for another process."""
    fields = process_fields(pid)
    if fields is None or fields[STATE] != "Z":
        return None
    return os.waitstatus_to_exitcode(int(fields[EXIT_CODE]))


def children() -> dict[int, list[int]]:
    """Return the children of every process: pid -> pids."""
    families: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := process_fields(int(name))):
            families.setdefault(int(fields[PARENT]), []).append(int(name))
    return families


def tree_seconds(pid: int, families: dict[int, list[int]]) -> float:
    """Return the CPU seconds of a process and its descendants, as ``families`` lists them."""
    fields = process_fields(pid)
    seconds = (int(fields[USER_TIME]) + int(fields[SYSTEM_TIME])) / _TICKS if fields else 0.0
    return seconds + sum(tree_seconds(child, families) for child in families.get(pid, ()))


# Seconds between two samples; one of all of /proc takes some milliseconds.
_SAMPLE_SECONDS = 0.5

# Page faults and CPU time of a process and of its reaped children: fields 10 to 17 of man 5 proc.
# Page faults are finer than CPU time, whose tick is 10 ms.
_WORK = slice(7, 15)


class Activity:
    """Measures how long a process has made no progress.

    Progress is CPU time, page faults and I/O. A process that waits for a disk (state D) or for a
    CPU (state R) is not idle. Time in which this process itself got no CPU does not count.

    Args:
        pid: the process.
        descendants: whether progress of its descendants counts too.
    """

    def __init__(self, pid: int, *, descendants: bool = True) -> None:
        self._pid = pid
        self._descendants = descendants
        self._idle = 0.0
        self._sampled_at = time.monotonic()
        self._work, _ = self._sample()

    def idle(self) -> float:
        """Return the seconds without progress; a process that has ended makes none."""
        gap = time.monotonic() - self._sampled_at
        if gap >= _SAMPLE_SECONDS:
            work, waits = self._sample()
            progress = waits or work != self._work
            self._idle = 0.0 if progress else self._idle + min(gap, 2 * _SAMPLE_SECONDS)
            self._work = work
            self._sampled_at = time.monotonic()
        return self._idle

    def _sample(self) -> tuple[dict[int, list[str]], bool]:
        """Return the work of each process so far, and whether one waits for a disk or a CPU."""
        families = children() if self._descendants else {}
        work = {}
        waits = False
        pids = [self._pid]
        while pids:
            pid = pids.pop()
            pids += families.get(pid, ())
            if (fields := process_fields(pid)) is not None:
                work[pid] = [*fields[_WORK], io_counters(pid)]
                waits |= fields[STATE] in "DR"
        return work, waits


def wait_while_active(
    done: Callable[[float], object],
    activity: Activity,
    awaited: str,
    *,
    stalled: float = STALL_SECONDS,
    limit: float | None = None,
    report_after: float = REPORT_SECONDS,
    say: Callable[[str], object] | None = None,
) -> bool:
    """Wait for a result as long as the process that produces it makes progress.

    Args:
        done: waits at most the given seconds, and returns whether the result is there.
        activity: the activity of the process.
        awaited: names the result in messages.
        stalled: seconds without progress after which the wait ends.
        limit: seconds of wall time after which the wait ends; None: no limit.
        report_after: seconds until the first message; each further one comes after three times the
            time waited.
        say: shows a message to the user; default: writes it to stderr.

    Returns:
        Whether the result is there.
    """
    start = time.monotonic()
    while not done(_SAMPLE_SECONDS):
        waited = time.monotonic() - start
        idle = activity.idle()
        if idle >= stalled or (limit is not None and waited >= limit):
            return False
        if waited >= report_after:
            report_after = 3 * waited
            how = f"no progress for {idle:.0f} s" if idle >= 1 else "it makes progress"
            (say or _to_stderr)(f"waiting for {awaited}: {waited:.0f} s so far, {how}")
    return True


def has_ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait at most so many seconds for a process; return whether it has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.poll() is not None


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def io_counters(pid: int) -> str:
    """Return what a process has read and written so far, as text to compare; empty if unknown."""
    try:
        return Path(f"/proc/{pid}/io").read_text()
    except OSError:  # the process has ended, or the kernel has no such file
        return ""
