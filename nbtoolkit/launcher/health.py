"""Watch running ranks for hangs, for calls that not every rank makes, and for device use."""

from __future__ import annotations

import itertools
import math
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.environment import resources
from nbtoolkit.environment.installed import installed_roots
from nbtoolkit.environment.plan import GroupFailure
from nbtoolkit.environment.resources import SYSTEM_TIME, USER_TIME, process_fields
from nbtoolkit.launcher import failures
from nbtoolkit.launcher.worker_group import RankView, WorkerGroup
from nbtoolkit.run.events import DevicesSampled, Reading
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.record import RunRecord
from nbtoolkit.worker.main import STACKS_SIGNAL

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config


BUSY_SHARE = 0.01  # of one core

# Seconds that a rank gets to write its stacks, which takes milliseconds on a quiet machine. A late
# rank would count as one that does not wait for others, and be blamed.
_STACK_SECONDS = 2.0
_UNSEEN_SECONDS = 10.0

# Innermost Python frames of a rank that waits for others. DDP waits for its buckets inside the
# backward call. Its own file counts as the innermost frame only: the model's forward is below it.
_WAITING = re.compile(
    r'File ".*/torch/distributed/.*", line \d+ in'
    r'|File ".*/torch/autograd/graph\.py", line \d+ in _engine_run_backward'
)
_DDP = re.compile(r'File ".*/torch/nn/parallel/distributed\.py", line \d+ in')
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in')
_NOT_THE_USERS = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    os.path.dirname(os.__file__) + os.sep,
)


class HangDetector:
    """Detects hung ranks.

    A rank is hung if for ``hang_timeout`` it sent no message and used under 1 % CPU while another
    rank waits for it. A rank waits if it has started more collectives than another one; this also
    holds on a GPU, where a waiting rank spins in ``.item()`` and uses a whole core. A rank also
    waits if its stack ends in a collective; faulthandler writes the stack even while the rank is
    blocked in C++. A rank that has returned also waits: its run ends when all ranks have returned.
    """

    def __init__(self, worker_group: WorkerGroup, paths: RunPaths, hang_timeout: float) -> None:
        self._worker_group, self._paths = worker_group, paths
        self._timeout = hang_timeout
        # 1 % of 2 s are two clock ticks (10 ms each), the least that differs from no CPU time.
        self._window = min(2.0, max(0.5, hang_timeout / 8))
        self._sampled_at = time.monotonic()
        self._cpu = {rank.rank: 0.0 for rank in worker_group.ranks}
        self.idle_since = {rank.rank: time.monotonic() for rank in worker_group.ranks}
        self._looked_at = -math.inf
        self._stacks: dict[int, str] = {}
        self._warned = False

    def sample(self) -> None:
        """Sample the CPU time; call it often, it acts once per window."""
        now = time.monotonic()
        gap = now - self._sampled_at
        if gap < self._window:
            return
        least = max(BUSY_SHARE * gap, 2 / _TICKS)
        for rank, used in self._cpu_seconds().items():
            view = self._worker_group.ranks[rank]
            # The time of a child that ended disappears: any change is a sign of life. A rank that
            # waits on a GPU spins.
            busy = abs(used - self._cpu[rank]) >= least and not self._is_ahead(view)
            # After a gap (this process got no CPU, or the machine slept) nothing is known.
            if busy or view.long or gap > _UNSEEN_SECONDS:
                self.idle_since[rank] = now
            self._cpu[rank] = used
        self._sampled_at = now

    def silence(self, rank: RankView) -> float:
        """Return the seconds since the rank sent a message or computed, or another rank ended."""
        ends = [other.ended_at or 0.0 for other in self._worker_group.ranks]
        return time.monotonic() - max(rank.heard_at, self.idle_since[rank.rank], *ends)

    def hung(self) -> tuple[list[RankView], str] | None:
        """Return the hung ranks and all stacks; None if no rank is hung."""
        return self._stuck(self._timeout)

    def warning(self) -> str | None:
        """Return a warning, once, at half the timeout; None before."""
        if self._warned or (stuck := self._stuck(self._timeout / 2)) is None:
            return None
        self._warned = True
        ranks, stacks = stuck
        names = " and ".join(str(rank.rank) for rank in ranks)
        return (
            f"rank {names} silent and idle for {self._timeout / 2:g} s while another rank waits "
            f"or has returned; after {self._timeout:g} s it counts as hung (runtime.hang_timeout; "
            f"`with ctx.pause_hang_detection(...)` suspends this)\n{stacks}"
        )

    def waiting(self, ranks: list[RankView]) -> dict[int, str]:
        """Return which of ``ranks`` wait in a collective, with the user's line: rank -> line."""
        stacks = self.stacks()
        return {
            rank.rank: user_line(stacks[rank.rank])
            for rank in ranks
            if self._is_ahead(rank) or is_waiting(stacks[rank.rank])
        }

    def _is_ahead(self, rank: RankView) -> bool:
        """True if the rank has started a collective that another rank has not."""
        return rank.collectives > min(other.collectives for other in self._worker_group.ranks)

    def _stuck(self, seconds: float) -> tuple[list[RankView], str] | None:
        alive = [rank for rank in self._worker_group.ranks if not rank.over]
        quiet = [rank for rank in alive if not rank.asking and self.silence(rank) >= seconds]
        if not quiet or len(self._worker_group.ranks) == 1:
            return None
        stacks, elsewhere = self.stacks(), self.waiting(alive)
        waiting = [rank for rank in alive if rank.asking or rank.rank in elsewhere]
        blocked = [rank for rank in quiet if rank not in waiting]
        returned = len(alive) < len(self._worker_group.ranks)
        # Ranks that only wait are healthy while another rank works. If all of them wait, in
        # different collectives, none can continue.
        if not (waiting or returned) or (not blocked and len(quiet) < len(alive)):
            return None
        return (blocked or quiet), format_stacks(stacks)

    def stacks(self) -> dict[int, str]:
        """Return all ranks' stacks, at most one window old: a request interrupts the ranks."""
        if time.monotonic() - self._looked_at >= self._window:
            self._stacks = self._ask_for_stacks()
            self._looked_at = time.monotonic()
        return self._stacks

    def _ask_for_stacks(self) -> dict[int, str]:
        marks = {
            rank.rank: _size(self._paths.stacks(rank.rank)) for rank in self._worker_group.ranks
        }
        before = self._cpu_seconds()
        self._worker_group.signal_ranks(STACKS_SIGNAL)
        limit = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < limit and any(
            _size(self._paths.stacks(rank)) == mark for rank, mark in marks.items()
        ):
            time.sleep(0.01)
        time.sleep(0.02)  # until the writes are complete
        for rank, used in self._cpu_seconds().items():
            self._cpu[rank] += used - before[rank]  # writing stacks is not a sign of life
        return {rank: _tail(self._paths.stacks(rank), mark) for rank, mark in marks.items()}

    def _cpu_seconds(self) -> dict[int, float]:
        """Return the CPU seconds of each rank and its children."""
        families = resources.children()
        return {
            rank.rank: resources.tree_seconds(rank.pid, families) if rank.pid is not None else 0.0
            for rank in self._worker_group.ranks
        }


def is_waiting(stack: str) -> bool:
    """Return True if a faulthandler dump shows the main thread waiting for other ranks."""
    frames = _frames(stack)
    inside_torch = itertools.takewhile(lambda frame: "/torch/" in frame, frames)  # innermost first
    return any(_WAITING.search(frame) for frame in inside_torch) or any(
        _DDP.search(frame) for frame in frames[:1]
    )


def user_line(stack: str) -> str:
    """Return the main thread's line in the user's code, ``file:line``; empty without a stack."""
    places = [found for frame in _frames(stack) if (found := _FRAME.search(frame))]
    foreign = (*_NOT_THE_USERS, *installed_roots())
    users = [place for place in places if not place["file"].startswith(foreign)]
    return next((f"{place['file']}:{place['line']}" for place in users or places), "")


def _frames(stack: str) -> list[str]:
    """Return the main thread's frames, innermost first, down to the user's function."""
    main = stack.rpartition("Current thread")[2] or stack
    return [line for line in failures.without_launcher(main).splitlines() if "File " in line]


def format_stacks(stacks: dict[int, str]) -> str:
    """Return all ranks' stacks as one text."""
    return "\n".join(
        f"--- stack of rank {rank} ---\n{failures.without_launcher(text) or '(none)'}"
        for rank, text in stacks.items()
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _tail(path: Path, offset: int) -> str:
    try:
        return path.read_bytes()[offset:].decode(errors="replace")
    except FileNotFoundError:
        return ""


# --- device use ---


SAMPLE_SECONDS = 5.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class DeviceMonitor:
    """Writes ``device`` events: memory (bytes) and CPU use (1.0 is one core) per rank, and GPUs."""

    def __init__(self, worker_group: WorkerGroup, record: RunRecord, *, on: bool = True) -> None:
        self._worker_group, self._record, self._on = worker_group, record, on
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


# --- all checks of a worker group ---


# Idle seconds after which ranks that form their group are given up. The group takes 0.1 s on a
# quiet machine, and 15 s with NCCL on a cold pair of T4s.
START_SECONDS = 30.0
NCCL_START_SECONDS = 90.0
# With a busy rank, so many times as long: NCCL spins while it waits for a hung rank.
_BUSY_FACTOR = 4
# Seconds that a rank waits in ctx.report before the other ranks are checked.
MISSING_SECONDS = 4.0


class LateGroup(GroupFailure):
    """The ranks formed no group in time; a fork beside elastic's thread can make them hang."""


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
        self._worker_group, self._record = worker_group, record
        self._hang_timeout: float = config.runtime.hang_timeout
        self._hangs = HangDetector(worker_group, record.paths, self._hang_timeout)
        self._monitor = DeviceMonitor(worker_group, record, on=config.tracking.device_metrics)

    def check(self) -> failures.Failure | LateGroup | None:
        """Check once; return the failure that ends the worker group, or None."""
        self._monitor.tick()
        self._hangs.sample()
        ranks = self._worker_group.ranks
        if all(rank.phase == "user" or rank.over for rank in ranks):
            return self._check_work()
        if joining := [rank for rank in ranks if not rank.has_group and not rank.over]:
            took = time.monotonic() - self._worker_group.started_at
            idle = min(self._hangs.silence(rank) for rank in joining)
            if idle > self._start_seconds or took > _BUSY_FACTOR * self._start_seconds:
                return LateGroup(f"the ranks did not form a group within {took:.0f} s")
        return None

    def silence(self) -> float:
        """Return the seconds without message or computation of any rank; 0 before user code."""
        ranks = self._worker_group.ranks
        if not all(rank.phase == "user" for rank in ranks):
            return 0.0
        return min(self._hangs.silence(rank) for rank in ranks)

    def _check_work(self) -> failures.Failure | None:
        if (failure := self._check_calls()) is not None:
            return failure
        if (warning := self._hangs.warning()) is not None:
            self._record.note(warning, level="warning")
        if (hung := self._hangs.hung()) is not None:
            return failures.hang_failure(*hung, self._hang_timeout, self._record.paths)
        return None

    def _check_calls(self) -> failures.Failure | None:
        """Find ranks that wait for each other in different calls."""
        ranks = self._worker_group.ranks
        asking = [rank for rank in ranks if rank.asking is not None]
        over = [rank for rank in ranks if rank.over]
        others = [rank for rank in ranks if rank.asking is None and not rank.over]
        failed = any(rank.phase in ("failed", "dead") for rank in over)
        if failed or len(ranks) == 1 or len(over) == len(ranks):
            return None
        if asking and over:
            self._worker_group.reply(failures.refuse_lone_call(asking, over, {}))
            return None
        if not others:
            return None
        waited = min(time.monotonic() - rank.heard_at for rank in asking or others)
        idle = min(self._hangs.silence(rank) for rank in others)
        if waited < MISSING_SECONDS or idle < MISSING_SECONDS / (2 if asking else 1):
            return None
        places = self._hangs.waiting(others)
        if asking and places:
            there = [rank for rank in others if rank.rank in places]
            self._worker_group.reply(failures.refuse_lone_call(asking, there, places))
        elif len(places) == len(others) and (over or len(set(places.values())) > 1):
            return failures.deadlock_failure(places, over)
        return None
