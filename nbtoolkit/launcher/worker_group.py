"""Spawn one agent and its ranks, read their messages, end them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.resources import exit_code, is_running
from nbtoolkit.run import messages
from nbtoolkit.run.transport import Connection, GroupConnections


@dataclass
class RankView:
    """What the supervisor knows of one rank."""

    rank: int
    line: Connection
    quiet: Connection
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
    """How many ``with ctx.pause_hang_detection(...)`` it is inside."""
    collectives: int = 0
    """How many collectives of the default process group it has started."""
    asking: messages.Question | None = None
    """The question it waits for an answer to, which comes when every rank asks."""
    last_word: messages.LastWord | None = None
    """The message it ended with."""
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

    def drain(self) -> list[messages.Message]:
        """What it has sent; the quiet messages were sent before the others, or do not mind."""
        loud = self.line.drain()
        return [*self.quiet.drain(), *loud]

    def end(self, phase: str, word: messages.LastWord | None = None) -> None:
        """It has ended: done, left, failed, or dead without a word."""
        self.reached = self.phase
        self.phase, self.last_word, self.ended_at = phase, word, time.monotonic()
        self.asking = None

    def renew(self) -> None:
        """It is in its group, and takes another job."""
        self.phase, self.reached, self.ended_at = "group", "none", None
        self.heard_at, self.long = time.monotonic(), 0
        self.asking = self.last_word = None

    def hear(self, message: messages.Message) -> bool:
        """Take a message that may be its last word; whether it is."""
        if isinstance(message, messages.LastWord):
            self.end(message.phase, message)
        return self.over


class WorkerGroup:
    """Keeps the ranks' views up to date."""

    def __init__(self, plan: LaunchPlan, port: int, lines: GroupConnections) -> None:
        self.plan, self.port = plan, port
        self.landed: messages.AgentResult | None = None
        """The agent's last word."""
        self.exited: int | None = None
        """The agent's exit code, once it is gone."""
        self.agent_pid: int | None = None
        self.started_at = time.monotonic()
        self.called = False
        """Whether rank 0 was told that the run is to end."""
        pairs = zip(lines.connections, lines.telemetry, strict=True)
        self.ranks = [RankView(rank, line, quiet) for rank, (line, quiet) in enumerate(pairs)]
        self._lines = lines
        self._foreign = False

    @classmethod
    def adopt(
        cls, plan: LaunchPlan, port: int, group: messages.GroupDescriptors, agent_pid: int | None
    ) -> WorkerGroup:
        """Take over an agent that the kernel forked (``start="fork"``), and let it go."""
        lines = GroupConnections.from_descriptors(group)
        worker_group = cls(plan, port, lines)
        worker_group.agent_pid, worker_group._foreign = agent_pid, True
        lines.agent.send(messages.StartRanks(port=port))
        return worker_group

    def board(self, file: Path) -> None:
        """Have ranks that were kept take another job: what is its own is pickled in ``file``."""
        self.started_at, self.called = time.monotonic(), False
        for rank in self.ranks:
            rank.renew()
            rank.line.send(messages.JobAssigned(file=str(file)))

    def alive(self) -> bool:
        """Whether all its ranks run, so that they can take another job."""
        return self.exited is None and all(
            rank.pid is not None and is_running(rank.pid) for rank in self.ranks
        )

    def lines(self) -> list[Connection]:
        """What to select on, besides the fork server's socket."""
        loud = [self._lines.agent, *self._lines.connections]
        return [line for line in loud if not line.closed]

    def hear(self) -> list[tuple[RankView, messages.Message]]:
        """New messages of the ranks; the agent's are kept here."""
        for word in self._lines.agent.drain():
            if isinstance(word, messages.AgentResult):
                self.landed = word
        heard = []
        for rank in self.ranks:
            for message in rank.drain():
                rank.heard_at = time.monotonic()
                heard.append((rank, message))
        return heard

    def all_are(self, phase: str) -> bool:
        """Whether every rank is in this phase."""
        return all(rank.phase == phase for rank in self.ranks)

    def go(self) -> None:
        """Let all ranks go on that wait for the others."""
        for rank in self.ranks:
            rank.line.send(messages.Go())

    def reply(self, answer: messages.Reply) -> None:
        """Answer all ranks that ask."""
        for rank in self.ranks:
            if rank.asking is not None:
                rank.asking, rank.heard_at = None, time.monotonic()  # from now on it may work
                rank.line.send(answer)

    def gone(self) -> list[RankView]:
        """Ranks whose process has ended without a last word; with exit codes where known."""
        agent = self.agent_pid if self._foreign and self.exited is None else None
        if agent is not None and not is_running(agent):
            self.exited = exit_code(agent) or 0
        codes = self.landed.codes if isinstance(self.landed, messages.RanksExited) else {}
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
        if self.agent_pid is not None and self.exited is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.agent_pid, signal.SIGKILL)

    def kill_ranks(self) -> None:
        """SIGKILL the ranks only, so that the agent can still tell their exit codes."""
        for rank in self.ranks:
            if rank.pid is not None and rank.pid != self.agent_pid and is_running(rank.pid):
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
        self._lines.close()
