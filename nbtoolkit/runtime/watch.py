"""Is a rank hung, or only busy? Told from its messages, its CPU time, and the others' stacks.

A rank is hung when for ``hang_timeout`` it sent no event and used under 1% CPU while another rank
waits in a collective. That another rank waits is read from its stack: faulthandler writes it even
while the rank is blocked in C++.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from pathlib import Path

from nbtoolkit.runtime import processes
from nbtoolkit.runtime.flight import Flight, RankView
from nbtoolkit.runtime.paths import RunPaths
from nbtoolkit.runtime.worker import STACKS_SIGNAL

BUSY_SHARE = 0.01  # of one core
_TICKS = os.sysconf("SC_CLK_TCK")
_CALLED_FROM = "/nbtoolkit/runtime/worker.py"
# What a rank gets to write its stacks: some milliseconds on a quiet machine. One that is late
# counts as one that does not wait for others, and would be blamed.
_STACK_SECONDS = 2.0

# Innermost Python frames of a rank that waits for others. DDP waits for its buckets inside the
# backward call.
_WAITING = re.compile(
    r'File ".*/torch/distributed/.*", line \d+ in'
    r'|File ".*/torch/autograd/graph\.py", line \d+ in _engine_run_backward'
)


class Watch:
    """Keeps, for each rank of a flight, since when it has been silent and idle."""

    def __init__(self, flight: Flight, paths: RunPaths, hang_timeout: float) -> None:
        self._flight, self._paths = flight, paths
        self._timeout = hang_timeout
        # 1% of 2 s are two clock ticks (10 ms each), the least that can be told from none.
        self._window = min(2.0, max(0.5, hang_timeout / 8))
        self._sampled_at = time.monotonic()
        self._cpu = {rank.rank: 0.0 for rank in flight.ranks}
        self.idle_since = {rank.rank: time.monotonic() for rank in flight.ranks}
        self._looked_at = 0.0
        self._warned = False

    def sample(self) -> None:
        """Look at the CPU time; call often, it acts once per window."""
        now = time.monotonic()
        if now - self._sampled_at < self._window:
            return
        least = max(BUSY_SHARE * (now - self._sampled_at), 2 / _TICKS)
        for rank, used in self._cpu_seconds().items():
            # a child that ended takes its time with it: any change is a sign of life
            if abs(used - self._cpu[rank]) >= least or self._flight.ranks[rank].long:
                self.idle_since[rank] = now
            self._cpu[rank] = used
        self._sampled_at = now

    def silence(self, rank: RankView) -> float:
        """Seconds since the rank last sent something or computed."""
        return time.monotonic() - max(rank.heard_at, self.idle_since[rank.rank])

    def hung(self) -> tuple[list[RankView], str] | None:
        """The ranks silent and idle for the timeout while another waits, and every rank's stack."""
        return self._stuck(self._timeout)

    def warning(self) -> str | None:
        """At half the timeout, once: who is suspected, and every rank's stack."""
        if self._warned or (stuck := self._stuck(self._timeout / 2)) is None:
            return None
        self._warned = True
        ranks, stacks = stuck
        names = " and ".join(str(rank.rank) for rank in ranks)
        return (
            f"rank {names} silent and idle for {self._timeout / 2:g} s while another rank waits; "
            f"at {self._timeout:g} s it is taken for hung (runtime.hang_timeout; "
            f"`with ctx.long(...)` suspends this)\n{stacks}"
        )

    def waiting_elsewhere(self, ranks: list[RankView]) -> list[RankView]:
        """Those of ``ranks`` that wait in a collective; none where the last look was just now."""
        if not self._may_look():
            return []
        stacks = self.stacks()
        return [rank for rank in ranks if is_waiting(stacks[rank.rank])]

    def _stuck(self, seconds: float) -> tuple[list[RankView], str] | None:
        alive = [rank for rank in self._flight.ranks if not rank.over]
        quiet = [rank for rank in alive if not rank.asking and self.silence(rank) >= seconds]
        if not quiet or len(self._flight.ranks) == 1 or not self._may_look():
            return None
        stacks = self.stacks()
        waiting = [rank for rank in alive if rank.asking or is_waiting(stacks[rank.rank])]
        blocked = [rank for rank in quiet if rank not in waiting]
        # Those that only wait are in order as long as somebody they wait for works. Where all of
        # them wait, in different collectives, none will ever go on.
        if not waiting or (not blocked and len(quiet) < len(alive)):
            return None
        return (blocked or quiet), format_stacks(stacks)

    def _may_look(self) -> bool:
        """Asking for stacks interrupts the ranks: once per window is enough."""
        now = time.monotonic()
        if now - self._looked_at < self._window:
            return False
        self._looked_at = now
        return True

    def stacks(self) -> dict[int, str]:
        """Every living rank's stacks, newest only."""
        marks = {rank.rank: _size(self._paths.stacks(rank.rank)) for rank in self._flight.ranks}
        before = self._cpu_seconds()
        self._flight.signal_ranks(STACKS_SIGNAL)
        limit = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < limit and any(
            _size(self._paths.stacks(rank)) == mark for rank, mark in marks.items()
        ):
            time.sleep(0.01)
        time.sleep(0.02)  # for the rest of what is being written
        for rank, used in self._cpu_seconds().items():
            self._cpu[rank] += used - before[rank]  # writing stacks is no sign of life
        return {rank: _tail(self._paths.stacks(rank), mark) for rank, mark in marks.items()}

    def _cpu_seconds(self) -> dict[int, float]:
        """CPU time of each rank and its children so far."""
        families = processes.children()
        return {
            rank.rank: processes.tree_seconds(rank.pid, families) if rank.pid is not None else 0.0
            for rank in self._flight.ranks
        }


def is_waiting(stack: str) -> bool:
    """Whether a faulthandler dump shows its main thread waiting for other ranks."""
    main = stack.rpartition("Current thread")[2] or stack
    frames = [line for line in main.splitlines() if line.lstrip().startswith("File ")]
    inside_torch = itertools.takewhile(lambda frame: "/torch/" in frame, frames)  # innermost first
    return any(_WAITING.search(frame) for frame in inside_torch)


def format_stacks(stacks: dict[int, str]) -> str:
    """All ranks' stacks as one text."""
    return "\n".join(
        f"--- stack of rank {rank} ---\n{without_launcher(text) or '(none)'}"
        for rank, text in stacks.items()
    )


def without_launcher(stack: str) -> str:
    """A stack, newest call first, down to where the user's function was called."""
    mine = itertools.takewhile(lambda line: _CALLED_FROM not in line, stack.strip().splitlines())
    return "\n".join(mine)


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
