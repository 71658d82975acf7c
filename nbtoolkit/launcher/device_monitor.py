"""Sample the memory and the CPU use of running ranks, and the use of their GPUs."""

from __future__ import annotations

import os
import time

from nbtoolkit.environment.resources import SYSTEM_TIME, USER_TIME, process_fields
from nbtoolkit.launcher.worker_group import WorkerGroup
from nbtoolkit.run.events import DevicesSampled, Reading
from nbtoolkit.run.record import RunRecord

SAMPLE_SECONDS = 5.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class DeviceMonitor:
    """Writes ``device`` events: memory (bytes) and CPU use (1.0 is one core) per rank, and GPUs."""

    def __init__(self, worker_group: WorkerGroup, record: RunRecord, *, on: bool = True) -> None:
        self._worker_group = worker_group
        self._record = record
        self._on = on
        self._last = time.monotonic()
        self._cpu: dict[int, float] = {}

    def tick(self) -> None:
        """Write an event if ``SAMPLE_SECONDS`` have passed."""
        now = time.monotonic()
        if not self._on or now - self._last < SAMPLE_SECONDS:
            return
        readings = self._ranks(now - self._last) + self._gpus()
        self._last = now
        self._record.write(DevicesSampled(readings=readings))

    def _ranks(self, elapsed: float) -> list[Reading]:
        readings: list[Reading] = []
        for rank in self._worker_group.ranks:
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

    def _gpus(self) -> list[Reading]:
        if self._worker_group.plan.device_type != "cuda":
            return []
        from nbtoolkit.environment.hardware import sample_devices

        return sample_devices(self._worker_group.plan.devices)
