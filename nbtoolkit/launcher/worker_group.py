"""Start an agent and its ranks, and keep track of their messages, phases and exit codes."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

from nbtoolkit.environment.installed import environment_key
from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.resources import exit_code, is_running
from nbtoolkit.wire import messages
from nbtoolkit.wire.payload import JobSpec, PackedFunction, pack_content, unpack
from nbtoolkit.wire.transport import Connection, GroupConnections, free_port
from nbtoolkit.worker.forking import kill_group


@dataclass
class RankView:
    """The supervisor's view of one rank."""

    rank: int
    connection: Connection
    quiet: Connection
    """Telemetry connection: read at each poll, but not waited for (a wake-up takes 0.2 ms)."""
    pid: int | None = None
    phase: str = "none"
    """none, started, group, ready, user, then done, left, failed or dead."""
    reached: str = "none"
    """Last phase before its end."""
    ended_at: float | None = None
    heard_at: float = field(default_factory=time.monotonic)
    """Time of its last message (monotonic)."""
    long: int = 0
    """Depth of nested ``with ctx.pause_hang_detection(...)`` blocks."""
    accumulates: bool = False
    """True in a loop in which more accumulation steps need less memory."""
    collectives: int = 0
    """Number of collectives of the default process group that it has started."""
    waits_at: str = ""
    """The user's line, if the rank says that it waits in a collective; else empty."""
    stack: tuple[str, ...] = ()
    """The frames of that call, from the training function on."""
    asking: messages.Question | None = None
    """The question it waits with; the answer comes when every rank asks."""
    last_word: messages.LastWord | None = None
    """Its final message."""
    code: int | None = None
    """Exit code, if known; negative for a signal."""

    @property
    def over(self) -> bool:
        """True if it will send nothing more."""
        return self.phase in ("done", "left", "failed", "dead")

    @property
    def has_group(self) -> bool:
        """True if it has joined the group; the user's imports, which follow, may take long."""
        return self.phase in ("group", "ready", "user")

    def drain(self) -> list[messages.Message]:
        """Return its new messages, telemetry first."""
        loud = self.connection.drain()
        return [*self.quiet.drain(), *loud]

    def note(self, message: messages.Message) -> None:
        """Keep what a message says about the rank's state."""
        match message:
            case messages.PhaseReached():
                self.phase, self.pid = message.phase, message.pid or self.pid
            case messages.Question():
                self.asking = message
            case messages.CollectivesStarted():
                self.collectives = message.count
                self.waits_at = message.where
                self.stack = tuple(message.stack)
            case messages.Accumulates():
                self.accumulates = message.entered
            case messages.LongOperation():
                self.long += 1 if message.entered else -1
            case messages.LastWord():
                self.end(message.phase, message)

    def end(self, phase: str, word: messages.LastWord | None = None) -> None:
        """Note its end: done, left, failed, or dead without a message."""
        self.reached = self.phase
        self.phase = phase
        self.last_word = word
        self.ended_at = time.monotonic()
        self.asking = None


class WorkerGroup:
    """One agent and its ranks, as their supervisor sees them."""

    def __init__(self, plan: LaunchPlan, group: GroupConnections, temporary: Path) -> None:
        self.plan = plan
        self.port = plan.port or free_port()
        """Where the ranks meet."""
        self.temporary = temporary
        """The agent's temporary folder, removed with the group."""
        self.agent_result: messages.AgentResult | None = None
        """The agent's final message."""
        self.exited: int | None = None
        """The agent's exit code, once it has exited."""
        self.agent_pid: int | None = None
        self.started_at = time.monotonic()
        self.stop_sent = False
        """True once rank 0 was notified of a pending stop."""
        pairs = zip(group.connections, group.telemetry, strict=True)
        self.ranks = [
            RankView(rank, connection, quiet) for rank, (connection, quiet) in enumerate(pairs)
        ]
        self._group = group

    def ranks_ended(self) -> bool:
        """Return whether no rank runs any more, with what it does at its exit."""
        return all(
            rank.connection.closed or (rank.pid is not None and not is_running(rank.pid))
            for rank in self.ranks
        )

    def connections(self) -> list[Connection]:
        """Return connections to wait for, besides the fork server's."""
        loud = [self._group.agent, *self._group.connections]
        return [connection for connection in loud if not connection.closed]

    def receive(self) -> list[tuple[RankView, messages.Message]]:
        """Return the ranks' new messages; keep the agent's."""
        for message in self._group.agent.drain():
            if isinstance(message, messages.AgentResult):
                self.agent_result = message
        received = []
        for rank in self.ranks:
            for message in rank.drain():
                rank.heard_at = time.monotonic()
                received.append((rank, message))
        return received

    def note(self, rank: RankView, message: messages.Message) -> None:
        """Keep what a message says about its rank; let the ranks join once all have started.

        Not before: a rank that joins talks to a thread of the agent, and a rank that is forked at
        that moment would inherit a lock that the thread holds.
        """
        rank.note(message)
        starts = isinstance(message, messages.PhaseReached) and message.phase == "started"
        if starts and self.all_are("started"):
            self.go()

    def all_are(self, phase: str) -> bool:
        """Return whether every rank is in this phase."""
        return all(rank.phase == phase for rank in self.ranks)

    def go(self) -> None:
        """Release ranks that wait for each other; a single rank does not wait."""
        if len(self.ranks) > 1:
            for rank in self.ranks:
                rank.connection.send(messages.Go())

    def reply(self, answer: messages.Reply) -> None:
        """Answer all ranks that ask."""
        for rank in self.ranks:
            if rank.asking is not None:
                rank.asking = None
                rank.heard_at = time.monotonic()
                rank.connection.send(answer)

    def find_dead(self) -> list[RankView]:
        """Return ranks whose process ended without a final message; set known exit codes."""
        codes = (
            self.agent_result.codes if isinstance(self.agent_result, messages.RanksExited) else {}
        )
        for rank in self.ranks:
            rank.code = codes.get(str(rank.rank), rank.code)
            # elastic notices nothing while DataLoader workers of the dead rank live: check here.
            if rank.code is None and rank.pid is not None:
                rank.code = exit_code(rank.pid)
        return [
            rank
            for rank in self.ranks
            if not rank.over
            and (rank.connection.closed or (rank.pid is not None and not is_running(rank.pid)))
        ]

    def kill(self) -> None:
        """SIGKILL the process group, DataLoader workers included.

        A rank that is blocked in C++ ignores other signals.
        """
        if self.agent_pid is not None and self.exited is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.agent_pid, signal.SIGKILL)

    def kill_ranks(self) -> None:
        """SIGKILL the ranks only, so that the agent can report their exit codes."""
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
        """Close all connections (waiting ranks then exit), and remove the temporary folder."""
        self._group.close()
        shutil.rmtree(self.temporary, ignore_errors=True)


class ForkServerGone(Exception):
    """The fork server's process died, and the ranks with it."""


AGENT = "nbtoolkit.launcher.agent:run_agent"
"""The main function of an agent."""


class Spawner:
    """A supervisor's connections to the fork servers: starts worker groups, follows their agents.

    Args:
        forkserver: the fork server that has forked this process. When the kernel has started the
            next one, that one forks the further agents.
        payload: descriptor of the packed function that the groups run, and of the kernel's
            environment in which they run it.
        kernel: receives the modules that ranks have imported.
    """

    def __init__(self, forkserver: Connection, payload: int, kernel: Connection) -> None:
        self._payload = payload
        self._kernel = kernel
        self._environment = environment_key(unpack(payload, PackedFunction).environment.environ)
        self._servers = [_Server(forkserver)]

    @property
    def connections(self) -> list[Connection]:
        """Connections to wait for."""
        return [server.connection for server in self._servers]

    def start(self, spec: JobSpec) -> WorkerGroup:
        """Start a worker group for a job."""
        server = self._servers[-1]
        mine, other_ends = GroupConnections.pair(spec.plan.processes)
        worker_group = WorkerGroup(spec.plan, mine, spec.paths.elastic)
        # Plain values; in a fresh process cloudpickle takes 5 ms longer.
        job = pickle.dumps(replace(spec, port=worker_group.port))
        with pack_content(job) as packed:
            descriptors = [self._payload, packed, *other_ends.descriptors.numbers()]
            server.connection.send(messages.Fork(main=AGENT, group=True, descriptors=descriptors))
        other_ends.close()
        server.starting.append(worker_group)
        return worker_group

    def import_ahead(self, names: list[str]) -> None:
        """Let the kernel have modules imported for later ranks; forgotten if it does not read."""
        self._kernel.send_nowait(messages.ModulesImported(names=names))

    def receive(self) -> None:
        """Handle what the fork servers have sent.

        Raises:
            ForkServerGone: a fork server died, and the ranks that it had started.
        """
        for server in list(self._servers):
            for message in server.connection.drain():
                if isinstance(message, messages.ServerChanged):
                    self._change_server(message)
                else:
                    server.note(message)
            if server.connection.closed:
                self._lose(server)

    def dismiss(self, worker_group: WorkerGroup) -> None:
        """Kill a worker group's processes and forget it."""
        worker_group.kill()
        worker_group.close()
        for server in self._servers:
            server.dismiss(worker_group)

    def _change_server(self, message: messages.ServerChanged) -> None:
        successor = Connection.inherited(message.descriptors[0])
        if message.environment == self._environment:
            self._servers.append(_Server(successor))
        else:
            successor.close()

    def _lose(self, server: _Server) -> None:
        for worker_group in (*server.starting, *server.running.values()):
            if worker_group is not None:
                worker_group.kill()
                worker_group.exited = -signal.SIGKILL
        self._servers.remove(server)
        raise ForkServerGone


class _Server:
    """One fork server, with the worker groups whose agents it has forked."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.starting: deque[WorkerGroup | None] = deque()
        """Groups that wait for the answer, which comes in this order; None: dismissed."""
        self.running: dict[int, WorkerGroup] = {}
        """By the pid of the agent."""

    def note(self, message: messages.Message) -> None:
        """Note that an agent was forked, or has ended."""
        match message:
            case messages.Forked():
                worker_group = self.starting.popleft()
                if worker_group is None:
                    kill_group(message.pid)
                else:
                    worker_group.agent_pid = message.pid
                    self.running[message.pid] = worker_group
            case messages.ProcessEnded() if message.pid in self.running:
                self.running.pop(message.pid).exited = message.code

    def dismiss(self, worker_group: WorkerGroup) -> None:
        """Forget a worker group."""
        self.starting = deque(None if group is worker_group else group for group in self.starting)
        self.running = {
            pid: group for pid, group in self.running.items() if group is not worker_group
        }
