"""Measure free disk space, and read other processes' state from /proc."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from nbtoolkit.errors import ConfigError

# --- disk ---
# How much room a folder has, and sizes as people write them.


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def free_space(folder: Path) -> int:
    """Bytes that may still be written below a folder, which need not be there yet."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def size_text(count: int) -> str:
    """Bytes in words: ``"1.4 GB"``, ``"12.0 MB"``."""
    if count >= 10**9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.1f} MB" if count >= 10**5 else f"{count / 1e3:.1f} kB"


def read_size(size: int | str) -> int:
    """Bytes out of a number, or of a text such as ``"15GB"``, ``"800 MB"``, ``"2GiB"``.

    Raises:
        ConfigError: it is no size.
    """
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    unit = (_UNITS | _BINARY).get(found[2].upper()) if found else None
    if found and unit:
        return round(float(found[1]) * unit)
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    raise ConfigError(
        f"{size!r} is no size",
        allowed="bytes, or a text with a unit: B, kB, MB, GB, TB, KiB, MiB, GiB, TiB",
        do='write "15GB", for example',
    )


# --- processes ---


# Fields of /proc/<pid>/stat as `process_fields` counts them, from the state (field 3 in man 5 proc)
# on.
STATE, PARENT, USER_TIME, SYSTEM_TIME, START_TIME, EXIT_CODE = 0, 1, 11, 12, 19, 49

_TICKS = os.sysconf("SC_CLK_TCK")


def process_fields(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat from the state on; None when it is gone.

    Owners ask many times a second: 10 us without the file objects that take 60.
    """
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):  # the second while it is being reaped
        return None
    try:
        text = os.read(fd, 4096).decode(errors="replace")
    except ProcessLookupError:
        return None
    finally:
        os.close(fd)
    return text.rpartition(")")[2].split()


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    fields = process_fields(pid)
    return fields is not None and fields[STATE] not in "ZX"


def exit_code(pid: int) -> int | None:
    """The exit code of a process that ended and was not reaped (negative: a signal); or None."""
    fields = process_fields(pid)
    if fields is None or fields[STATE] != "Z":
        return None
    return os.waitstatus_to_exitcode(int(fields[EXIT_CODE]))


def children() -> dict[int, list[int]]:
    """Every process's children."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := process_fields(int(name))):
            found.setdefault(int(fields[PARENT]), []).append(int(name))
    return found


def tree_seconds(pid: int, families: dict[int, list[int]]) -> float:
    """CPU seconds of a process and its descendants (who waits for own workers is not idle)."""
    fields = process_fields(pid)
    own = (int(fields[USER_TIME]) + int(fields[SYSTEM_TIME])) / _TICKS if fields else 0.0
    return own + sum(tree_seconds(child, families) for child in families.get(pid, ()))


# A limit in wall time ends healthy processes on a slow machine: the import of torch takes 2 s from
# a warm disk, and minutes from a cold one beside other work.


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
