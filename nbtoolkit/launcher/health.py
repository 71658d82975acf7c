"""Watch running ranks for hangs and for calls that not every rank makes."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.environment import resources
from nbtoolkit.environment.grace import REPORT_SECONDS
from nbtoolkit.environment.plan import GroupNotFormed
from nbtoolkit.launcher import hang_reports
from nbtoolkit.launcher.device_monitor import DeviceMonitor
from nbtoolkit.launcher.outcome import Failed
from nbtoolkit.launcher.worker_group import RankView, WorkerGroup
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.record import RunRecord
from nbtoolkit.worker.main import STACKS_SIGNAL

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config


BUSY_SHARE = 0.01  # of one core
_TICKS = os.sysconf("SC_CLK_TCK")

# Seconds that a rank gets to write its stacks, which takes milliseconds on a quiet machine. A late
# rank would count as one that is stopped, and be blamed.
_STACK_SECONDS = 2.0
_UNSEEN_SECONDS = 10.0


@dataclass
class _Usage:
    """What a rank had used at the last look."""

    cpu: float = 0.0
    """Seconds of CPU."""
    io: str = ""
    """Counters of what it has read and written."""
    idle_since: float = field(default_factory=time.monotonic)


class HangDetector:
    """Detects hung ranks.

    A rank is hung if for ``hang_timeout`` it sent no message and used under 1 % CPU while another
    rank waits for it. A rank waits if it says so (it asks, or its heartbeat names the collective
    that it is in), or if it has started more collectives than another one; this also holds on a
    GPU, where a waiting rank spins in ``.item()`` and uses a whole core. A rank that has returned
    also waits: its run ends when all ranks have returned.
    """

    def __init__(self, worker_group: WorkerGroup, paths: RunPaths, hang_timeout: float) -> None:
        self._worker_group = worker_group
        self._paths = paths
        self._timeout = hang_timeout
        # 1 % of 2 s are two clock ticks (10 ms each), the least that differs from no CPU time.
        self._window = min(2.0, max(0.5, hang_timeout / 8))
        self._sampled_at = time.monotonic()
        self._usages = [_Usage() for _ in worker_group.ranks]
        self._warned = False

    def sample(self) -> None:
        """Sample the CPU time; call it often, it acts once per window."""
        now = time.monotonic()
        gap = now - self._sampled_at
        if gap < self._window:
            return
        least = max(BUSY_SHARE * gap, 2 / _TICKS)
        for rank, cpu in zip(self._worker_group.ranks, self._cpu_seconds(), strict=True):
            usage = self._usages[rank.rank]
            # The time of a child that ended disappears: any change is a sign of life. A rank that
            # waits on a GPU spins.
            busy = abs(cpu - usage.cpu) >= least and not self._is_ahead(rank)
            # After a gap (this process got no CPU, or the machine slept) nothing is known.
            if busy or rank.long or gap > _UNSEEN_SECONDS or self._has_done_io(rank):
                usage.idle_since = now
            usage.cpu = cpu
        self._sampled_at = now

    def silence(self, rank: RankView) -> float:
        """Return the seconds since the rank sent a message or computed, or another rank ended."""
        ends = [other.ended_at or 0.0 for other in self._worker_group.ranks]
        return time.monotonic() - max(rank.heard_at, self._usages[rank.rank].idle_since, *ends)

    def waits(self, rank: RankView) -> bool:
        """Return whether the rank waits for others, as far as it is known."""
        return rank.asking is not None or rank.waits_at != "" or self._is_ahead(rank)

    def hung(self) -> Failed | None:
        """Return the failure for the hung ranks; None if no rank is hung."""
        if (stuck := self._stuck(self._timeout)) is None:
            return None
        stacks = self.stacks()
        stopped = [rank for rank in stuck if not stacks[rank.rank]]  # such as by SIGSTOP
        ranks = self._worker_group.ranks
        return hang_reports.hang_failure(
            stopped or stuck, ranks, stacks, self._timeout, self._paths
        )

    def warning(self) -> str | None:
        """Return a warning, once, at half the timeout; None before."""
        if self._warned or (stuck := self._stuck(self._timeout / 2)) is None:
            return None
        self._warned = True
        return hang_reports.hang_warning(
            stuck, self._worker_group.ranks, self.stacks(), self._timeout
        )

    def _is_ahead(self, rank: RankView) -> bool:
        """Return whether the rank has started a collective that another rank has not."""
        return rank.collectives > min(other.collectives for other in self._worker_group.ranks)

    def _has_done_io(self, rank: RankView) -> bool:
        """Return whether a rank that loads the function has read or written since the last call.

        A slow disk needs little CPU. Later the user's threads may write, whatever the rank does.
        """
        if rank.phase == "user" or rank.pid is None:
            return False
        usage = self._usages[rank.rank]
        before = usage.io
        usage.io = resources.io_counters(rank.pid)
        return usage.io != before

    def _stuck(self, seconds: float) -> list[RankView] | None:
        """Return the ranks that others have waited for; None: there are none."""
        alive = [rank for rank in self._worker_group.ranks if not rank.over]
        quiet = [rank for rank in alive if not rank.asking and self.silence(rank) >= seconds]
        if not quiet or len(self._worker_group.ranks) == 1:
            return None
        blocked = [rank for rank in quiet if not self.waits(rank)]
        if blocked:
            others_wait = any(self.waits(rank) for rank in alive)
            returned = len(alive) < len(self._worker_group.ranks)
            return blocked if others_wait or returned else None
        # Ranks that only wait are healthy while another rank works. If all of them wait, none can
        # continue; those that have started the fewest collectives hold up the others.
        if len(quiet) < len(alive):
            return None
        least = min(rank.collectives for rank in quiet)
        return [rank for rank in quiet if rank.collectives == least]

    def stacks(self) -> dict[int, str]:
        """Let all ranks write their stacks to their files, and return what they wrote."""
        ranks = self._worker_group.ranks
        files = {rank.rank: self._paths.stacks(rank.rank) for rank in ranks}
        sizes = {rank: len(_read(file)) for rank, file in files.items()}
        before = self._cpu_seconds()
        self._worker_group.signal_ranks(STACKS_SIGNAL)
        limit = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < limit and any(
            len(_read(file)) == sizes[rank] for rank, file in files.items()
        ):
            time.sleep(0.01)
        time.sleep(0.02)  # until the writes are complete
        # To write stacks is not a sign of life.
        for usage, earlier, now in zip(self._usages, before, self._cpu_seconds(), strict=True):
            usage.cpu += now - earlier
        for rank in ranks:
            self._has_done_io(rank)
        return {
            rank: _read(file)[sizes[rank] :].decode(errors="replace")
            for rank, file in files.items()
        }

    def _cpu_seconds(self) -> list[float]:
        """Return the CPU seconds of each rank and its children."""
        families = resources.children()
        return [
            0.0 if rank.pid is None else resources.tree_seconds(rank.pid, families)
            for rank in self._worker_group.ranks
        ]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


# Idle seconds after which ranks that form their group are given up. The group takes 0.1 s on a
# quiet machine, and 15 s with NCCL on a cold pair of T4s.
START_SECONDS = 30.0
NCCL_START_SECONDS = 90.0
# With a busy rank, so many times as long: NCCL spins while it waits for a hung rank.
_BUSY_FACTOR = 4
# Seconds that a rank waits in ctx.report before the other ranks are checked.
MISSING_SECONDS = 4.0


class HealthMonitor:
    """Checks the ranks of one worker group.

    Args:
        worker_group: the ranks.
        record: receives warnings and device use.
        config: ``runtime.hang_timeout`` and ``tracking.device_metrics`` are used.
        start_seconds: idle seconds allowed to ranks that form their group; None for 30 s, or 90 s
            with NCCL.
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
        self._worker_group = worker_group
        self._record = record
        self._hang_timeout: float = config.runtime.hang_timeout
        self._hangs = HangDetector(worker_group, record.paths, self._hang_timeout)
        self._monitor = DeviceMonitor(worker_group, record, on=config.tracking.device_metrics)
        self._told_of_start = False

    def check(self) -> Failed | GroupNotFormed | None:
        """Check once; return the failure that ends the worker group, or None."""
        self._monitor.tick()
        self._hangs.sample()
        ranks = self._worker_group.ranks
        if all(rank.phase == "user" or rank.over for rank in ranks):
            return self._check_work()
        return self._check_start()

    def silence(self) -> float:
        """Return the seconds without message or computation of any rank; 0 before user code."""
        ranks = self._worker_group.ranks
        if not all(rank.phase == "user" for rank in ranks):
            return 0.0
        return min(self._hangs.silence(rank) for rank in ranks)

    def _check_start(self) -> Failed | GroupNotFormed | None:
        """Find ranks that block before the training function is called."""
        ranks = self._worker_group.ranks
        if joining := [rank for rank in ranks if not rank.has_group and not rank.over]:
            took = time.monotonic() - self._worker_group.started_at
            idle = min(self._hangs.silence(rank) for rank in joining)
            if idle > self._start_seconds or took > _BUSY_FACTOR * self._start_seconds:
                return GroupNotFormed(
                    f"the ranks did not form a group within {took:.0f} s", late=True
                )
        starting = [rank for rank in ranks if rank.phase in hang_reports.STARTING]
        idle_ranks = self._idle(starting, REPORT_SECONDS)
        if idle_ranks and not self._told_of_start:
            self._told_of_start = True
            self._hangs.stacks()
            idle = max(self._hangs.silence(rank) for rank in idle_ranks)
            warning = hang_reports.start_warning(idle_ranks, idle, self._record.paths)
            self._record.note(warning, level="warning")
        loading = [rank for rank in ranks if rank.phase == "group"]
        if blocked := self._idle(loading, self._hang_timeout):
            stacks = self._hangs.stacks()
            return hang_reports.start_failure(
                blocked, stacks, self._hang_timeout, self._record.paths
            )
        return None

    def _idle(self, ranks: list[RankView], seconds: float) -> list[RankView]:
        return [rank for rank in ranks if self._hangs.silence(rank) >= seconds]

    def _check_work(self) -> Failed | None:
        if (failure := self._check_calls()) is not None:
            return failure
        if (warning := self._hangs.warning()) is not None:
            self._record.note(warning, level="warning")
        return self._hangs.hung()

    def _check_calls(self) -> Failed | None:
        """Find ranks that wait for each other in different calls.

        Ranks that wait in a call that the others cannot reach are refused; the function goes on
        with that error. Ranks that cannot be reached end the worker group.
        """
        group = self._worker_group
        over = [rank for rank in group.ranks if rank.over]
        asking = [rank for rank in group.ranks if rank.asking is not None]
        others = [rank for rank in group.ranks if rank.asking is None and not rank.over]
        failed = any(rank.phase in ("failed", "dead") for rank in over)
        if failed or len(group.ranks) == 1:
            return None
        if asking and over:
            group.reply(hang_reports.refuse_lone_call(asking, over))
            return None
        if not others or not self._wait_for_long(asking, others):
            return None
        waiting = [rank for rank in others if self._hangs.waits(rank)]
        if asking and waiting:
            group.reply(hang_reports.refuse_lone_call(asking, waiting))
        elif waiting == others and (over or _in_different_calls(others)):
            self._hangs.stacks()
            return hang_reports.deadlock_failure(others, over, self._record.paths)
        return None

    def _wait_for_long(self, asking: list[RankView], others: list[RankView]) -> bool:
        """Return whether no rank has got further for some seconds."""
        waited = min(time.monotonic() - rank.heard_at for rank in asking or others)
        idle = min(self._hangs.silence(rank) for rank in others)
        enough = MISSING_SECONDS / 2 if asking else MISSING_SECONDS
        return waited >= MISSING_SECONDS and idle >= enough


def _in_different_calls(ranks: list[RankView]) -> bool:
    """Return whether ranks that wait have come to different collectives or by different lines."""
    return len({(rank.collectives, rank.stack) for rank in ranks}) > 1
