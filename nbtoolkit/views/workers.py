"""Tell what each worker of a run did and does: its jobs side by side, and the use of its devices.

Which jobs ran side by side follows from their times; the use of ranks and GPUs is read from the
ends of event logs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean

from nbtoolkit.run.events import DevicesSampled, Reading, decode

SECONDS = 60.0
"""The length of a device's history."""

_OVERLAP = 0.2  # seconds: a prepared job starts before the scheduler reports the end of the last
_TAIL = 1 << 16  # bytes at the end of an event log in which readings are looked for
_LOGS = 256  # whose readings are kept; one that did not grow is not read again


@dataclass
class JobSpan:
    """The time in which a trial or a fold ran.

    Attributes:
        number: the trial's number; None: a fold of a cross-validation.
        fold: the fold's number; None: a trial without folds.
        begin: unix seconds.
        end: unix seconds; None: it is running.
        state: ``"running"``, or how it ended: the trial's or fold's state; ``"stopped"`` for a
            trial that was stopped by hand, ``"waiting"`` for a job that will run again.
        metrics: a fold's scores, once it is complete.
        seconds: how long a fold took; None: it has not ended.
    """

    number: int | None
    fold: int | None
    begin: float
    end: float | None = None
    state: str = "running"
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None

    @property
    def name(self) -> str:
        """``"trial 3"``, ``"fold 2"``, or ``"trial 3, fold 2"``."""
        parts = {"trial": self.number, "fold": self.fold}
        return ", ".join(f"{label} {n}" for label, n in parts.items() if n is not None)

    def finish(self, at: float, state: str) -> None:
        """Note its end."""
        self.end = max(at, self.begin)
        self.state = state


def rows_of(spans: Sequence[JobSpan], now: float) -> list[list[JobSpan]]:
    """Put spans on the fewest rows on which none overlap: what each slot did.

    Args:
        spans: by begin.
        now: unix seconds, the end of the spans that are open.
    """
    rows: list[list[JobSpan]] = []
    for span in spans:
        row = next((row for row in rows if _follows(row[-1], span)), None)
        if row is None:
            rows.append(row := [])
        elif row[-1].end is not None and row[-1].end > span.begin:
            row[-1] = replace(row[-1], end=span.begin)
        row.append(span)
    for row in rows:
        if row[-1].end is None:
            row[-1] = replace(row[-1], end=max(now, row[-1].begin))
    return rows


def _follows(earlier: JobSpan, later: JobSpan) -> bool:
    """Whether two spans are one after the other; a short overlap is that of a prepared job."""
    end = math.inf if earlier.end is None else earlier.end
    return end - later.begin <= min(_OVERLAP, (end - earlier.begin) / 2)


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
        shares = [(at, share) for at, reading in points if (share := _share(reading)) is not None]
        if since is None:
            uses.append(DeviceUse(name, f"mean {_text(readings)}", shares))
        elif points[-1][0] >= since:
            uses.append(DeviceUse(name, _text(readings[-1:]), shares))
    return uses


def _last_minute(logs: Mapping[Path, str]) -> dict[str, list[tuple[float, Reading]]]:
    """Read the last minute with readings: unix seconds and reading, by name."""
    readings: dict[str, list[tuple[float, Reading]]] = {}
    for log, slot in logs.items():
        for sample in _samples(log, _size(log)):
            for reading in sample.readings:
                if isinstance(reading, dict):  # else the log is damaged
                    readings.setdefault(_name(slot, reading), []).append((sample.t, reading))
    newest = max((at for points in readings.values() for at, _ in points), default=0.0)
    for name, points in readings.items():
        recent = (point for point in points if point[0] >= newest - SECONDS)
        readings[name] = sorted(recent, key=lambda point: point[0])
    return {name: readings[name] for name in sorted(readings) if readings[name]}


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
    """Format the mean use, and the largest memory and temperature, of a device's readings."""
    is_gpu = "index" in readings[0]
    use = _numbers(readings, "utilization" if is_gpu else "cpu")
    memory = _numbers(readings, "memory_used" if is_gpu else "memory")
    parts = []
    if use:
        parts.append(f"{fmean(use):.0f} %" if is_gpu else f"CPU {fmean(use) * 100:.0f} %")
    if memory:
        total = _numbers(readings[:1], "memory_total")
        of = f" of {total[0] / 1e9:.1f}" if total else ""
        parts.append(f"{max(memory) / 1e9:.1f}{of} GB")
    if degrees := _numbers(readings, "temperature"):
        parts.append(f"{max(degrees):.0f} °C")
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
