"""Read the use of ranks and GPUs from the ends of event logs, as histories and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean

from nbtoolkit.run.events import DevicesSampled, Reading, decode

SECONDS = 60.0
"""The length of a history."""

_TAIL = 1 << 16  # bytes at the end of an event log in which readings are looked for
_LOGS = 256  # whose readings are kept; one that did not grow is not read again


@dataclass(frozen=True)
class DeviceUse:
    """How busy a rank, a slot or a GPU is.

    Attributes:
        name: ``"rank 0"``, ``"slot 1"`` or ``"GPU 0"``.
        text: the use in words.
        history: unix seconds and use from 0 to 1, in the last minute with readings.
    """

    name: str
    text: str
    history: list[tuple[float, float]]


def device_uses(logs: Mapping[Path, str], *, since: float | None) -> list[DeviceUse]:
    """Return the use of each rank, slot and GPU, by the newest readings in event logs.

    Args:
        logs: event logs, and the name of the slot that each belongs to; empty: there are none.
        since: unix seconds from which on a reading is of now; None: it has ended, and the text
            is the mean.
    """
    uses = []
    for name, points in _last_minute(logs).items():
        readings = [reading for _, reading in points]
        shares = [(at, share) for at, one in points if (share := _share(one)) is not None]
        if since is None:
            uses.append(DeviceUse(name, f"mean {_text(readings)}", shares))
        elif points[-1][0] >= since:
            uses.append(DeviceUse(name, _text(readings[-1:]), shares))
    return uses


def _last_minute(logs: Mapping[Path, str]) -> dict[str, list[tuple[float, Reading]]]:
    """Read the last minute with readings: unix seconds and reading, by name."""
    found: dict[str, list[tuple[float, Reading]]] = {}
    for log, slot in logs.items():
        for sample in _samples(log, _size(log)):
            for reading in sample.readings:
                if isinstance(reading, dict):  # else the log is damaged
                    found.setdefault(_name(slot, reading), []).append((sample.t, reading))
    newest = max((at for points in found.values() for at, _ in points), default=0.0)
    for name, points in found.items():
        recent = (point for point in points if point[0] >= newest - SECONDS)
        found[name] = sorted(recent, key=lambda point: point[0])
    return {name: found[name] for name in sorted(found) if found[name]}


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


@lru_cache(_LOGS)
def _samples(log: Path, size: int) -> list[DevicesSampled]:
    """Read the device readings at the end of an event log of this size."""
    # Most lines are of other types and need no decoding.
    lines = (line for line in read_tail(log, _TAIL).splitlines() if '"type": "device"' in line)
    return [event for event in map(decode, lines) if isinstance(event, DevicesSampled)]


def _share(reading: Reading) -> float | None:
    """Return the use from 0 to 1: of a GPU, or of one core by a rank; None: unknown."""
    percent = reading.get("utilization") if "index" in reading else reading.get("cpu", 0.0)
    if not isinstance(percent, (int, float)):
        return None
    return min(max(percent / 100 if "index" in reading else percent, 0.0), 1.0)


def _text(readings: list[Reading]) -> str:
    """Format the mean use and the largest memory of a device's readings."""
    is_gpu = "index" in readings[0]
    use = _numbers(readings, "utilization" if is_gpu else "cpu")
    memory = _numbers(readings, "memory_used" if is_gpu else "memory")
    parts = []
    if use:
        parts.append(f"{fmean(use):.0f} %" if is_gpu else f"CPU {fmean(use) * 100:.0f} %")
    if memory:
        parts.append(f"{max(memory) / 1e9:.1f} GB")
    return ", ".join(parts)


def _numbers(readings: list[Reading], name: str) -> list[float]:
    values = (reading.get(name) for reading in readings)
    return [float(value) for value in values if isinstance(value, (int, float))]


def _name(slot: str, reading: Reading) -> str:
    if "index" in reading:
        return f"GPU {reading['index']}"
    rank = reading.get("rank", 0)
    if not slot:
        return f"rank {rank}"
    return slot if rank == 0 else f"{slot} rank {rank}"


def read_tail(file: Path, size: int) -> str:
    """Read the last ``size`` bytes of a file as text; empty where it cannot be read."""
    try:
        with file.open("rb") as stream:
            end = stream.seek(0, 2)
            stream.seek(max(end - size, 0))
            return stream.read(size).decode(errors="replace")
    except OSError:
        return ""
