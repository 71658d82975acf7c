"""Facts about other processes, read from /proc: whether one runs, its exit code, CPU time."""

from __future__ import annotations

import os
import socket
import struct
import time

from nbtoolkit.runtime.wire import Line

# Fields of /proc/<pid>/stat as `process_fields` counts them, from the state (field 3 in man 5 proc)
# on.
STATE, PARENT, USER_TIME, SYSTEM_TIME, START_TIME, EXIT_CODE = 0, 1, 11, 12, 19, 49

_TICKS = os.sysconf("SC_CLK_TCK")
_LOOK_SECONDS = 0.5  # between two looks at a peer


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


class Peer:
    """The process that made the other end of a line.

    The end of a line alone does not tell that it died: a process it forked (a DataLoader worker of
    the notebook's own) holds a copy of the line open.
    """

    def __init__(self, line: Line) -> None:
        credentials = line.socket.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        self.pid: int = struct.unpack("3i", credentials)[0]
        self._since = self._start_time()
        self._looked_at = time.monotonic()

    def gone(self) -> bool:
        """Whether it has died; looks at most twice a second."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return False
        self._looked_at = now
        return not is_running(self.pid) or self._start_time() != self._since

    def _start_time(self) -> str | None:
        """Tells two processes of the same pid apart."""
        fields = process_fields(self.pid)
        return fields[START_TIME] if fields else None
