"""Devices: what each rank and each GPU was last seen to use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nbtoolkit.runtime.table import gib
from nbtoolkit.views.markup import bar, boxed, said
from nbtoolkit.views.state import State


def devices(state: State | None) -> str:
    """Use and memory of each as HTML; it is read every 5 s while something runs."""
    if state is None:
        return ""
    lines = list(_lines(state))
    if not lines:
        return boxed(said("No device was looked at yet (every 5 s, tracking.device_metrics)."))
    return boxed(*(bar(share, text) for share, text in lines))


def devices_text(state: State | None) -> str:
    """The same as lines of text."""
    return "\n".join(text for _, text in _lines(state)) if state is not None else ""


def _lines(state: State) -> Iterator[tuple[float | None, str]]:
    for name, readings in state.readings().items():
        for reading in readings:
            share, text = _reading(reading)
            yield share, f"{name}: {text}" if name else text


def _reading(reading: dict[str, Any]) -> tuple[float | None, str]:
    """How much of it is used, and the same in words."""
    if "index" in reading:
        used, use = reading.get("memory_used"), reading.get("utilization")
        words = [f"GPU {reading['index']}"]
        words += [f"{use:.0f} % used"] if isinstance(use, (int, float)) else []
        words += [f"{gib(int(used))} in use"] if isinstance(used, (int, float)) else []
        return (use / 100 if isinstance(use, (int, float)) else None), ", ".join(words)
    cores = float(reading.get("cpu", 0.0))
    memory = gib(int(reading.get("memory", 0)))
    return cores, f"rank {reading.get('rank')}: {cores:.2f} cores of CPU, {memory} of memory"
