"""Is a rank hung, or only busy? Decided from what it sent, the CPU time of it and its children, and the others' stacks.

A rank is hung when for ``hang_timeout`` it sent no event and used under 1% CPU while another rank waits in a collective.
That another rank waits is read from its stack: faulthandler writes it even while the rank is blocked in C++.
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
_STACK_SECONDS = 0.3  # what a rank gets to write its stacks

# Innermost Python frames of a rank that waits for others. DDP waits for its buckets inside the backward call.
_WAITING = re.compile(
    r'File ".*/torch/distributed/.*", line \d+ in|File ".*/torch/autograd/graph\.py", line \d+ in _engine_run_backward'
)


class Watch:
    """Keeps, for each rank of a flight, since when it has been silent and idle."""

    def __init__(self, flight: Flight, paths: RunPaths, hang_timeout: float) -> None:
        self._flight, self._paths = flight, paths
        self._timeout = hang_timeout
        # A window long enough that 1% of it is several clock ticks (10 ms each), short against the timeout.
        self._window = min(10.0, max(0.5, hang_timeout / 8))
        self._sampled_at = time.monotonic()
        self._cpu = {rank.rank: 0.0 for rank in flight.ranks}
        self.idle_since = {rank.rank: time.monotonic() for rank in flight.ranks}
        self._warned = False

    def sample(self) -> None:
        """Look at the CPU time; call often, it acts once per window."""
        now = time.monotonic()
        if now - self._sampled_at < self._window:
            return
        families = processes.children()
        for rank in self._flight.ranks:
            used = processes.tree_seconds(rank.pid, families) if rank.pid is not None else 0.0
            # a child that ended takes its time with it: any change is a sign of life
            least = max(BUSY_SHARE * (now - self._sampled_at), 2 / _TICKS)
            busy = abs(used - self._cpu[rank.rank]) >= least
            if busy or rank.long:
                self.idle_since[rank.rank] = now
            self._cpu[rank.rank] = used
        self._sampled_at = now

    def silence(self, rank: RankView) -> float:
        """Seconds since the rank last sent something or computed."""
        return time.monotonic() - max(rank.heard_at, self.idle_since[rank.rank])

    def suspects(self) -> tuple[list[RankView], float]:
        """The ranks silent and idle for at least half the timeout, and the longest silence among them."""
        quiet = [
            rank
            for rank in self._flight.ranks
            if not rank.over and not rank.asking and self.silence(rank) >= self._timeout / 2
        ]
        return quiet, max((self.silence(rank) for rank in quiet), default=0.0)

    def hung(self) -> tuple[list[RankView], str] | None:
        """The hung ranks and every rank's stack, once the timeout is reached; at half of it, see :meth:`warning`."""
        quiet, longest = self.suspects()
        if longest < self._timeout:
            return None
        quiet = [rank for rank in quiet if self.silence(rank) >= self._timeout]
        stacks = self.stacks()
        waiting = {rank.rank for rank in self._flight.ranks if rank.asking or is_waiting(stacks[rank.rank])}
        blocked = [rank for rank in quiet if rank.rank not in waiting]
        if len(self._flight.ranks) == 1 or not waiting:
            return None
        if not blocked and len(quiet) < sum(not rank.over for rank in self._flight.ranks):
            return None  # those that wait are in order; the one they wait for is not silent for long enough
        # where all of them wait, in different collectives, none of them will ever go on
        return (blocked or quiet), format_stacks(stacks)

    def warning(self) -> str | None:
        """At half the timeout, once: the stacks of all ranks."""
        quiet, longest = self.suspects()
        if self._warned or not quiet or len(self._flight.ranks) == 1:
            self._warned = self._warned and bool(quiet)
            return None
        self._warned = True
        names = ", ".join(str(rank.rank) for rank in quiet)
        return (
            f"rank {names} silent and idle for {longest:.0f} s; at {self._timeout:.0f} s it is taken for hung if another "
            f"rank waits for it (runtime.hang_timeout; with ctx.long(...) suspends this)\n" + format_stacks(self.stacks())
        )

    def stacks(self) -> dict[int, str]:
        """Every living rank's stacks, newest only."""
        marks = {rank.rank: _size(self._paths.stacks(rank.rank)) for rank in self._flight.ranks}
        self._flight.signal_ranks(STACKS_SIGNAL)
        limit = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < limit and any(
            _size(self._paths.stacks(rank)) == mark for rank, mark in marks.items()
        ):
            time.sleep(0.01)
        time.sleep(0.02)
        families = processes.children()
        for rank in self._flight.ranks:  # writing stacks costs CPU time that is not the rank's own
            if rank.pid is not None:
                self._cpu[rank.rank] = processes.tree_seconds(rank.pid, families)
        return {rank: _tail(self._paths.stacks(rank), mark) for rank, mark in marks.items()}


def is_waiting(stack: str) -> bool:
    """Whether a faulthandler dump shows its main thread waiting for other ranks."""
    main = stack.rpartition("Current thread")[2] or stack
    frames = [line for line in main.splitlines() if line.lstrip().startswith("File ")]
    inside_torch = itertools.takewhile(lambda frame: "/torch/" in frame, frames)  # innermost first
    return any(_WAITING.search(frame) for frame in inside_torch)


def format_stacks(stacks: dict[int, str]) -> str:
    """All ranks' stacks as one text."""
    return "\n".join(f"--- stack of rank {rank} ---\n{text.strip() or '(none)'}" for rank, text in stacks.items())


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
