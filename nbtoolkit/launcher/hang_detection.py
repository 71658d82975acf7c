"""Detect ranks that make no progress, from messages, CPU time, collectives and stacks.

A rank is hung when for ``hang_timeout`` it sent no event and used under 1% CPU while another rank
waits for it. A rank waits when it has started more collectives than another one (channel.py),
which also holds on a GPU, where a waiting rank stands in ``.item()`` and uses a whole core; or when
its stack ends in a collective. faulthandler writes a stack even while the rank is blocked in C++.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import time
from pathlib import Path

from nbtoolkit.environment import resources
from nbtoolkit.environment.installed import installed_roots
from nbtoolkit.launcher.worker_group import RankView, WorkerGroup
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.worker.main import STACKS_SIGNAL

BUSY_SHARE = 0.01  # of one core
_TICKS = os.sysconf("SC_CLK_TCK")
_CALLED_FROM = "/nbtoolkit/worker/main.py"
# What a rank gets to write its stacks: some milliseconds on a quiet machine. One that is late
# counts as one that does not wait for others, and would be blamed.
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
    """Keeps, for each rank of a worker group, since when it has been silent and idle."""

    def __init__(self, worker_group: WorkerGroup, paths: RunPaths, hang_timeout: float) -> None:
        self._worker_group, self._paths = worker_group, paths
        self._timeout = hang_timeout
        # 1% of 2 s are two clock ticks (10 ms each), the least that can be told from none.
        self._window = min(2.0, max(0.5, hang_timeout / 8))
        self._sampled_at = time.monotonic()
        self._cpu = {rank.rank: 0.0 for rank in worker_group.ranks}
        self.idle_since = {rank.rank: time.monotonic() for rank in worker_group.ranks}
        self._looked_at = -math.inf
        self._stacks: dict[int, str] = {}
        self._warned = False

    def sample(self) -> None:
        """Look at the CPU time; call often, it acts once per window."""
        now = time.monotonic()
        gap = now - self._sampled_at
        if gap < self._window:
            return
        least = max(BUSY_SHARE * gap, 2 / _TICKS)
        for rank, used in self._cpu_seconds().items():
            view = self._worker_group.ranks[rank]
            # A child that ended takes its time with it: any change is a sign of life. A rank that
            # waits on a GPU turns in a loop.
            busy = abs(used - self._cpu[rank]) >= least and not self._is_ahead(view)
            # When nobody looked, as this process got no CPU or the machine slept, nobody knows.
            if busy or view.long or gap > _UNSEEN_SECONDS:
                self.idle_since[rank] = now
            self._cpu[rank] = used
        self._sampled_at = now

    def silence(self, rank: RankView) -> float:
        """Seconds since the rank last sent something or computed, or another one ended."""
        ends = [other.ended_at or 0.0 for other in self._worker_group.ranks]
        return time.monotonic() - max(rank.heard_at, self.idle_since[rank.rank], *ends)

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
            f"`with ctx.pause_hang_detection(...)` suspends this)\n{stacks}"
        )

    def waiting(self, ranks: list[RankView]) -> dict[int, str]:
        """Those of ``ranks`` that wait in a collective, with the user's line they stand at."""
        stacks = self.stacks()
        return {
            rank.rank: user_line(stacks[rank.rank])
            for rank in ranks
            if self._is_ahead(rank) or is_waiting(stacks[rank.rank])
        }

    def _is_ahead(self, rank: RankView) -> bool:
        """Whether it has started a collective that another rank has not."""
        return rank.collectives > min(other.collectives for other in self._worker_group.ranks)

    def _stuck(self, seconds: float) -> tuple[list[RankView], str] | None:
        alive = [rank for rank in self._worker_group.ranks if not rank.over]
        quiet = [rank for rank in alive if not rank.asking and self.silence(rank) >= seconds]
        if not quiet or len(self._worker_group.ranks) == 1:
            return None
        stacks, elsewhere = self.stacks(), self.waiting(alive)
        waiting = [rank for rank in alive if rank.asking or rank.rank in elsewhere]
        blocked = [rank for rank in quiet if rank not in waiting]
        # Those that only wait are in order as long as somebody they wait for works. Where all of
        # them wait, in different collectives, none will ever go on.
        if not waiting or (not blocked and len(quiet) < len(alive)):
            return None
        return (blocked or quiet), format_stacks(stacks)

    def stacks(self) -> dict[int, str]:
        """Every living rank's stacks, at most a window old: asking interrupts the ranks."""
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
        time.sleep(0.02)  # for the rest of what is being written
        for rank, used in self._cpu_seconds().items():
            self._cpu[rank] += used - before[rank]  # writing stacks is no sign of life
        return {rank: _tail(self._paths.stacks(rank), mark) for rank, mark in marks.items()}

    def _cpu_seconds(self) -> dict[int, float]:
        """CPU time of each rank and its children so far."""
        families = resources.children()
        return {
            rank.rank: resources.tree_seconds(rank.pid, families) if rank.pid is not None else 0.0
            for rank in self._worker_group.ranks
        }


def is_waiting(stack: str) -> bool:
    """Whether a faulthandler dump shows its main thread waiting for other ranks."""
    frames = _frames(stack)
    inside_torch = itertools.takewhile(lambda frame: "/torch/" in frame, frames)  # innermost first
    return any(_WAITING.search(frame) for frame in inside_torch) or any(
        _DDP.search(frame) for frame in frames[:1]
    )


def user_line(stack: str) -> str:
    """Where in the user's code the main thread stands, as ``file:line``; empty without a stack."""
    places = [found for frame in _frames(stack) if (found := _FRAME.search(frame))]
    foreign = (*_NOT_THE_USERS, *installed_roots())
    users = [place for place in places if not place["file"].startswith(foreign)]
    return next((f"{place['file']}:{place['line']}" for place in users or places), "")


def _frames(stack: str) -> list[str]:
    """The main thread's frames, innermost first, down to the user's function."""
    main = stack.rpartition("Current thread")[2] or stack
    return [line for line in without_launcher(main).splitlines() if "File " in line]


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
