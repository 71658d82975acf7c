"""Device use of a run, every few seconds: GPUs through NVML, ranks through /proc."""

from __future__ import annotations

import os
import time
from typing import Any

from nbtoolkit.runtime.flight import Flight
from nbtoolkit.runtime.processes import SYSTEM_TIME, USER_TIME, process_fields
from nbtoolkit.runtime.record import RunRecord

EVERY = 5.0  # seconds
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Monitor:
    """Writes ``device`` events: each rank's memory (bytes), CPU use (1.0: one core); the GPUs."""

    def __init__(self, flight: Flight, record: RunRecord, *, on: bool = True) -> None:
        self._flight, self._record, self._on = flight, record, on
        self._last = time.monotonic()
        self._cpu: dict[int, float] = {}

    def tick(self) -> None:
        """Write an event when it is time for one."""
        now = time.monotonic()
        if not self._on or now - self._last < EVERY:
            return
        readings = self._ranks(now - self._last) + self._gpus()
        self._last = now
        self._record.write("device", readings=readings)

    def _ranks(self, elapsed: float) -> list[dict[str, Any]]:
        readings = []
        for rank in self._flight.ranks:
            fields = process_fields(rank.pid) if rank.pid is not None else None
            if fields is None:
                continue
            used = (int(fields[USER_TIME]) + int(fields[SYSTEM_TIME])) / _TICKS
            share = (used - self._cpu.get(rank.rank, 0.0)) / elapsed
            self._cpu[rank.rank] = used
            readings.append(
                {"rank": rank.rank, "cpu": round(share, 3), "memory": int(fields[21]) * _PAGE}
            )
        return readings

    def _gpus(self) -> list[dict[str, Any]]:
        if self._flight.plan.device_type != "cuda":
            return []
        from nbtoolkit.runtime.hardware import sample_devices

        return [dict(reading) for reading in sample_devices(self._flight.plan.devices)]
