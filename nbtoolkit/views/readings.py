"""Readings: what a run last said of its devices, found at the end of its diary."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

_TAIL = 1 << 16  # bytes from a diary's end in which it is looked for


def last_readings(diary: Path) -> list[dict[str, Any]]:
    """The newest reading of the devices in a diary; empty where there is none.

    Args:
        diary: a run's ``events.jsonl``.
    """
    lines = _tail(diary, _TAIL).splitlines()
    for line in reversed(lines):
        if '"type": "device"' in line:
            with contextlib.suppress(ValueError):
                readings: list[dict[str, Any]] = json.loads(line)["readings"]
                return readings
    return []


def _tail(file: Path, size: int) -> str:
    """The last bytes of a file as text; empty where there is none."""
    try:
        with file.open("rb") as raw:
            end = raw.seek(0, 2)
            raw.seek(max(end - size, 0))
            return raw.read(size).decode(errors="replace")
    except OSError:
        return ""
