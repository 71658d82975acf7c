"""Measure free disk space, and read other processes' state from /proc."""

from __future__ import annotations

import os
import re
import shutil
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
