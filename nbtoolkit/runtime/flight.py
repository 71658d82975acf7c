"""A flight: one pilot and its ranks, as the owner sees them: started, listened to, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nbtoolkit.runtime.plan import LaunchPlan
from nbtoolkit.runtime.processes import exit_code, is_running
from nbtoolkit.runtime.wire import Line, Message

# How a rank ends, by the type of its last message (a phase message "done" ends it too).
LAST_WORDS = {"error": "failed", "group_failed": "failed", "left": "left"}


@dataclass
class RankView:
    """What the owner knows of one rank."""

    rank: int
    line: Line
    quiet: Line
    """What it sends here wakes nobody: read at each look (waking a process takes 0.2 ms)."""
    pid: int | None = None
    phase: str = "none"
    """none, started, group, ready, user, then done, left, failed or dead."""
    reached: str = "none"
    """The last phase before it ended."""
    ended_at: float | None = None
    heard_at: float = field(default_factory=time.monotonic)
    """When it last sent something."""
    long: int = 0
    """How many ``with ctx.long(...)`` it is inside."""
    collectives: int = 0
    """How many collectives of the default process group it has started."""
    asking: Message | None = None
    """The question it waits for an answer to, which comes when every rank asks."""
    last_word: Message | None = None
    """The message it ended with: done, left, error or group_failed."""
    code: int | None = None
    """Exit code, where known; negative: a signal."""

    @property
    def over(self) -> bool:
        """Whether it will send nothing more."""
        return self.phase in ("done", "left", "failed", "dead")

    @property
    def has_group(self) -> bool:
        """Whether it has joined the others; what comes then, the user's imports, may take long."""
        return self.phase in ("group", "ready", "user")

    def messages(self) -> list[Message]:
        """What it has sent; the quiet messages were sent before the others, or do not mind."""
        loud = self.line.drain()
        return [*self.quiet.drain(), *loud]

    def end(self, phase: str, word: Message | None = None) -> None:
        """It has ended: done, left, failed, or dead without a word."""
        self.reached = self.phase
        self.phase, self.last_word, self.ended_at = phase, word, time.monotonic()
        self.asking = None

    def renew(self) -> None:
        """It is in its group, and takes another job."""
        self.phase, self.reached, self.ended_at = "group", "none", None
        self.heard_at, self.long = time.monotonic(), 0
        self.asking = self.last_word = None

    def hear(self, message: Message) -> bool:
        """Take a message that may be its last word; whether it is."""
        kind = message["type"]
        if kind in LAST_WORDS or message.get("phase") == "done":
            self.end(LAST_WORDS.get(kind, "done"), message)
        return self.over


class Flight:
    """Starts a pilot through the launchpad and keeps the ranks' views up to date."""

    def __init__(self, plan: LaunchPlan, port: int, pilot: Line, ends: list[Line]) -> None:
        self.plan, self.port = plan, port
        self.landed: Message | None = None
        """The pilot's last word: ``landed``, ``failures`` or ``not_started``."""
        self.exited: int | None = None
        """The pilot's exit code, once it is gone."""
        self.pilot_pid: int | None = None
        self.started_at = time.monotonic()
        self.called = False
        """Whether rank 0 was told that the run is to end."""
        pairs = zip(ends[: plan.processes], ends[plan.processes :], strict=True)
        self.ranks = [RankView(rank, line, quiet) for rank, (line, quiet) in enumerate(pairs)]
        self._pilot = pilot
        self._foreign = False

    @classmethod
    def start(
        cls,
        plan: LaunchPlan,
        port: int,
        clear: Callable[[Flight, int, list[int]], None],
        payload_fds: list[int],
    ) -> Flight:
        """Have the launchpad fork a pilot.

        Args:
            plan: what is to fly.
            port: where the ranks are to meet.
            clear: asks the launchpad, with the flight, the port and the pilot's descriptors.
            payload_fds: the packed function, and what is this run's own, if that is apart.
        """
        pilot, pilot_end = Line.pair()
        pairs = rank_lines(plan)
        flight = cls(plan, port, pilot, [mine for mine, _ in pairs])
        theirs = [pilot_end, *(end for _, end in pairs)]
        payload, *own = payload_fds
        clear(flight, port, [payload, *(end.fileno() for end in theirs), *own])
        for end in theirs:
            end.close()
        return flight

    @classmethod
    def adopt(cls, plan: LaunchPlan, port: int, fds: list[int], pilot_pid: int) -> Flight:
        """Take over a pilot that the kernel forked (``start="fork"``), and let it go."""
        pilot, *ends = [Line(socket.socket(fileno=fd)) for fd in fds]
        flight = cls(plan, port, pilot, ends)
        flight.pilot_pid, flight._foreign = pilot_pid, True
        pilot.send({"plan": plan.to_dict(), "port": port})
        return flight

    def board(self, file: Path) -> None:
        """Have ranks that were kept take another job: what is its own is pickled in ``file``."""
        self.started_at, self.called = time.monotonic(), False
        for rank in self.ranks:
            rank.renew()
            rank.line.send({"type": "job", "file": str(file)})

    def alive(self) -> bool:
        """Whether all its ranks run, so that they can take another job."""
        return self.exited is None and all(
            rank.pid is not None and is_running(rank.pid) for rank in self.ranks
        )

    def lines(self) -> list[Line]:
        """What to select on, besides the launchpad's socket."""
        return [
            line for line in [self._pilot, *(rank.line for rank in self.ranks)] if not line.closed
        ]

    def hear(self) -> list[tuple[RankView, Message]]:
        """New messages of the ranks; the pilot's are kept here."""
        for message in self._pilot.drain():
            self.landed = message
        heard = []
        for rank in self.ranks:
            for message in rank.messages():
                rank.heard_at = time.monotonic()
                heard.append((rank, message))
        return heard

    def all_are(self, phase: str) -> bool:
        """Whether every rank is in this phase."""
        return all(rank.phase == phase for rank in self.ranks)

    def go(self) -> None:
        """Let all ranks go on that wait for the others."""
        for rank in self.ranks:
            rank.line.send({"type": "go"})

    def reply(self, answer: Message) -> None:
        """Answer all ranks that ask."""
        for rank in self.ranks:
            if rank.asking is not None:
                rank.asking, rank.heard_at = None, time.monotonic()  # from now on it may work
                rank.line.send({"type": "answer", **answer})

    def gone(self) -> list[RankView]:
        """Ranks whose process has ended without a last word; with exit codes where known."""
        pilot = self.pilot_pid if self._foreign and self.exited is None else None
        if pilot is not None and not is_running(pilot):
            self.exited = exit_code(pilot) or 0
        codes = (self.landed or {}).get("codes", {})
        for rank in self.ranks:
            rank.code = codes.get(str(rank.rank), rank.code)
            # elastic hears nothing while DataLoader workers of the dead rank live: look ourselves
            if rank.code is None and rank.pid is not None:
                rank.code = exit_code(rank.pid)
        return [
            rank
            for rank in self.ranks
            if not rank.over
            and (rank.line.closed or (rank.pid is not None and not is_running(rank.pid)))
        ]

    def kill(self) -> None:
        """SIGKILL the group, DataLoader workers too: a rank blocked in C++ hears nothing less."""
        if self.pilot_pid is not None and self.exited is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pilot_pid, signal.SIGKILL)

    def kill_ranks(self) -> None:
        """SIGKILL the ranks only, so that the pilot can still tell their exit codes."""
        for rank in self.ranks:
            if rank.pid is not None and rank.pid != self.pilot_pid and is_running(rank.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)

    def signal_ranks(self, number: int) -> None:
        """Send a signal to every living rank."""
        for rank in self.ranks:
            if rank.pid is not None and not rank.over and is_running(rank.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, number)

    def close(self) -> None:
        """Close all lines; waiting ranks read their end and go."""
        for rank in self.ranks:
            rank.line.close()
            rank.quiet.close()
        self._pilot.close()


def rank_lines(plan: LaunchPlan) -> list[tuple[Line, Line]]:
    """Both ends (the owner's, the rank's) of every rank's line, then of every rank's quiet line."""
    return [Line.pair() for _ in range(2 * plan.processes)]
