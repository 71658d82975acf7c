"""Disk: how much room a folder has, and sizes as people write them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from nbtoolkit.errors import ConfigError

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
