"""Watch running ranks for hangs, for calls that not every rank makes, and for device use."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from nbtoolkit.environment.plan import GroupFailure
from nbtoolkit.environment.resources import SYSTEM_TIME, USER_TIME, process_fields
from nbtoolkit.launcher import failures
from nbtoolkit.launcher.hang_detection import HangDetector
from nbtoolkit.launcher.worker_group import WorkerGroup
from nbtoolkit.run.events import DevicesSampled, Reading
from nbtoolkit.run.recorder import RunRecord

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config


# --- monitor ---
# Device use of a run, every few seconds: GPUs through NVML, ranks through /proc.


EVERY = 5.0  # seconds
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class DeviceMonitor:
    """Writes ``device`` events: each rank's memory (bytes), CPU use (1.0: one core); the GPUs."""

    def __init__(self, worker_group: WorkerGroup, record: RunRecord, *, on: bool = True) -> None:
        self._worker_group, self._record, self._on = worker_group, record, on
        self._last = time.monotonic()
        self._cpu: dict[int, float] = {}

    def tick(self) -> None:
        """Write an event when it is time for one."""
        now = time.monotonic()
        if not self._on or now - self._last < EVERY:
            return
        readings = self._ranks(now - self._last) + self._gpus()
        self._last = now
        self._record.write(DevicesSampled(readings=readings))

    def _ranks(self, elapsed: float) -> list[Reading]:
        readings = []
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


# --- the monitor ---


# Ranks that form their group are given up after so long in which none of them works. They need
# 0.1 s on a quiet machine, and 15 s with NCCL on a cold T4 pair.
START_SECONDS = 30.0
NCCL_START_SECONDS = 90.0
_AT_MOST = 4  # times as long where one works: NCCL turns in a loop while it waits for a hung rank
MISSING_SECONDS = 4.0  # a rank in ctx.report waits this long before the others are looked at


class LateGroup(GroupFailure):
    """The ranks were too slow: they are forked beside a thread of elastic's, and may hang."""


class HealthMonitor:
    """Looks after the ranks of one worker group.

    Args:
        worker_group: the ranks.
        record: warnings and readings go there.
        config: ``runtime.hang_timeout``, ``tracking.device_metrics``.
        start_seconds: how long ranks that form their group may do nothing; None: 30 s, 90 s with
            NCCL.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        record: RunRecord,
        config: Config,
        *,
        start_seconds: float | None = None,
    ) -> None:
        nccl = worker_group.plan.backend == "nccl"
        self._start_seconds = start_seconds or (NCCL_START_SECONDS if nccl else START_SECONDS)
        self._worker_group, self._record = worker_group, record
        self._hang_timeout: float = config.runtime.hang_timeout
        self._watch = HangDetector(worker_group, record.paths, self._hang_timeout)
        self._monitor = DeviceMonitor(worker_group, record, on=config.tracking.device_metrics)

    def look(self) -> failures.Failure | LateGroup | None:
        """Look once; what is wrong, if anything ends the worker group."""
        self._monitor.tick()
        self._watch.sample()
        ranks = self._worker_group.ranks
        if all(rank.phase == "user" or rank.over for rank in ranks):
            return self._look_at_work()
        if joining := [rank for rank in ranks if not rank.has_group and not rank.over]:
            took = time.monotonic() - self._worker_group.started_at
            idle = min(self._watch.silence(rank) for rank in joining)
            if idle > self._start_seconds or took > _AT_MOST * self._start_seconds:
                return LateGroup(f"the ranks did not form a group within {took:.0f} s")
        return None

    def silence(self) -> float:
        """Seconds since any rank sent something or computed; 0 where not all are in user code."""
        ranks = self._worker_group.ranks
        if not all(rank.phase == "user" for rank in ranks):
            return 0.0
        return min(self._watch.silence(rank) for rank in ranks)

    def _look_at_work(self) -> failures.Failure | None:
        if (apart := self._look_for_apart()) is not None:
            return apart
        if (warning := self._watch.warning()) is not None:
            self._record.note(warning, level="warning")
        if (hung := self._watch.hung()) is not None:
            return failures.hung(*hung, self._hang_timeout, self._record.paths)
        return None

    def _look_for_apart(self) -> failures.Failure | None:
        """Ranks that wait for each other in different calls: those that can be are told so."""
        ranks = self._worker_group.ranks
        asking = [rank for rank in ranks if rank.asking is not None]
        over = [rank for rank in ranks if rank.over]
        others = [rank for rank in ranks if rank.asking is None and not rank.over]
        failed = any(rank.phase in ("failed", "dead") for rank in over)
        if failed or len(ranks) == 1 or len(over) == len(ranks):
            return None
        if asking and over:
            self._worker_group.reply(failures.lone_call(asking, over, {}))
            return None
        if not others:
            return None
        waited = min(time.monotonic() - rank.heard_at for rank in asking or others)
        idle = min(self._watch.silence(rank) for rank in others)
        if waited < MISSING_SECONDS or idle < MISSING_SECONDS / (2 if asking else 1):
            return None
        places = self._watch.waiting(others)
        if asking and places:
            there = [rank for rank in others if rank.rank in places]
            self._worker_group.reply(failures.lone_call(asking, there, places))
        elif len(places) == len(others) and (over or len(set(places.values())) > 1):
            return failures.apart(places, over)
        return None
