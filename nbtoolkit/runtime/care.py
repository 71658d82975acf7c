"""Care: a look after ranks that run: hangs, calls that not every rank makes, device use."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nbtoolkit.runtime import verdict
from nbtoolkit.runtime.flight import Flight
from nbtoolkit.runtime.monitor import Monitor
from nbtoolkit.runtime.plan import GroupFailure
from nbtoolkit.runtime.record import RunRecord
from nbtoolkit.runtime.watch import Watch

if TYPE_CHECKING:
    from nbtoolkit.config import Config

# Ranks that form their group are given up after so long in which none of them works. They need
# 0.1 s on a quiet machine, and 15 s with NCCL on a cold T4 pair.
START_SECONDS = 30.0
NCCL_START_SECONDS = 90.0
_AT_MOST = 4  # times as long where one works: NCCL turns in a loop while it waits for a hung rank
MISSING_SECONDS = 4.0  # a rank in ctx.report waits this long before the others are looked at


class Late(GroupFailure):
    """The ranks were too slow: they are forked beside a thread of elastic's, and may hang."""


class Care:
    """Looks after the ranks of one flight.

    Args:
        flight: the ranks.
        record: warnings and readings go there.
        config: ``runtime.hang_timeout``, ``tracking.device_metrics``.
        start_seconds: how long ranks that form their group may do nothing; None: 30 s, 90 s with
            NCCL.
    """

    def __init__(
        self,
        flight: Flight,
        record: RunRecord,
        config: Config,
        *,
        start_seconds: float | None = None,
    ) -> None:
        nccl = flight.plan.backend == "nccl"
        self._start_seconds = start_seconds or (NCCL_START_SECONDS if nccl else START_SECONDS)
        self._flight, self._record = flight, record
        self._hang_timeout: float = config.runtime.hang_timeout
        self._watch = Watch(flight, record.paths, self._hang_timeout)
        self._monitor = Monitor(flight, record, on=config.tracking.device_metrics)

    def look(self) -> verdict.Failure | Late | None:
        """Look once; what is wrong, if anything ends the flight."""
        self._monitor.tick()
        self._watch.sample()
        ranks = self._flight.ranks
        if all(rank.phase == "user" or rank.over for rank in ranks):
            return self._look_at_work()
        if joining := [rank for rank in ranks if not rank.has_group and not rank.over]:
            took = time.monotonic() - self._flight.started_at
            idle = min(self._watch.silence(rank) for rank in joining)
            if idle > self._start_seconds or took > _AT_MOST * self._start_seconds:
                return Late(f"the ranks did not form a group within {took:.0f} s")
        return None

    def silence(self) -> float:
        """Seconds since any rank sent something or computed; 0 where not all are in user code."""
        ranks = self._flight.ranks
        if not all(rank.phase == "user" for rank in ranks):
            return 0.0
        return min(self._watch.silence(rank) for rank in ranks)

    def _look_at_work(self) -> verdict.Failure | None:
        if (apart := self._look_for_apart()) is not None:
            return apart
        if (warning := self._watch.warning()) is not None:
            self._record.note(warning, level="warning")
        if (hung := self._watch.hung()) is not None:
            return verdict.hung(*hung, self._hang_timeout, self._record.paths)
        return None

    def _look_for_apart(self) -> verdict.Failure | None:
        """Ranks that wait for each other in different calls: those that can be are told so."""
        ranks = self._flight.ranks
        asking = [rank for rank in ranks if rank.asking is not None]
        over = [rank for rank in ranks if rank.over]
        others = [rank for rank in ranks if rank.asking is None and not rank.over]
        failed = any(rank.phase in ("failed", "dead") for rank in over)
        if failed or len(ranks) == 1 or len(over) == len(ranks):
            return None
        if asking and over:
            self._flight.reply({"error": verdict.lone_call(asking, over, {})})
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
            self._flight.reply({"error": verdict.lone_call(asking, there, places)})
        elif len(places) == len(others) and (over or len(set(places.values())) > 1):
            return verdict.apart(places, over)
        return None
