"""Words: values as a person reads them."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from typing import Any

from nbtoolkit.search.labels import shortened


def number(value: float | None) -> str:
    """Five digits of a number; nothing for None."""
    return "" if value is None else f"{value:.5g}"


def duration(seconds: float) -> str:
    """A time as ``"2.4 s"``, ``"3 min 20 s"`` or ``"2 h 05 min"``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def moment(unix: float | None) -> str:
    """A moment in UTC, to the minute; nothing for None or for what is no moment."""
    if unix is None or not math.isfinite(unix):
        return ""
    try:
        return datetime.fromtimestamp(unix, timezone.utc).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return ""


def setting(value: Any) -> str:
    """A setting as YAML would say it, in short."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else str(value)
    return shortened(text, 48)


def counted(count: int, noun: str) -> str:
    """``"1 run"``, ``"2 runs"``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
