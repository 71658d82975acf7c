"""Wait for ranks, the kernel, signals and the fork server in one loop."""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any

from nbtoolkit.environment.installed import environment_key
from nbtoolkit.environment.resources import START_TIME, is_running, process_fields
from nbtoolkit.launcher.worker_group import WorkerGroup
from nbtoolkit.run import messages
from nbtoolkit.run.payload import PackedFunction, pack_content, unpack
from nbtoolkit.run.request import GroupSpec
from nbtoolkit.run.signals import ENDING, describe_signal
from nbtoolkit.run.transport import (
    Connection,
    GroupConnections,
    receive_packet,
    send_enclosed,
    send_packet,
)

# --- the loop ---


class ForkServerGone(Exception):
    """The fork server's process died; the ranks died with it."""


class KernelGone(Exception):
    """The kernel is gone and the run was not detached."""


_LOOK_SECONDS = 0.5  # between two looks at a peer


class Peer:
    """The process that made the other end of a line.

    The end of a line alone does not tell that it died: a process it forked (a DataLoader worker of
    the notebook's own) holds a copy of the line open.
    """

    def __init__(self, line: Connection) -> None:
        credentials = line.socket.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        self.pid: int = struct.unpack("3i", credentials)[0]
        self._since = self._start_time()
        self._looked_at = time.monotonic()

    def gone(self) -> bool:
        """Whether it has died; looks at most twice a second."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return False
        self._looked_at = now
        return not is_running(self.pid) or self._start_time() != self._since

    def _start_time(self) -> str | None:
        """Tells two processes of the same pid apart."""
        fields = process_fields(self.pid)
        return fields[START_TIME] if fields else None


class ForkServerConnection:
    """The fork server as a supervisor sees it: it forks agents, and says when they have ended."""

    def __init__(self, forkserver: socket.socket) -> None:
        self.socket = forkserver
        self.patient = False
        """Whether agents wait for the fork server's first branch, where it is just being made."""
        self.branches = 0
        """How often ranks have come to be forked from a process that has imported more."""
        self.branched_at = -math.inf
        """When they last did (monotonic)."""
        self._worker_groups: dict[int, WorkerGroup] = {}
        self._ticket = 0

    def adopt(self, worker_group: WorkerGroup) -> int:
        """Listen for a worker group's agent and its end; returns the ticket to ask for one with."""
        self._ticket += 1
        self._worker_groups[self._ticket] = worker_group
        return self._ticket

    def hear(self) -> None:
        """Take one message.

        Raises:
            ForkServerGone: it died. The worker groups are ended.
        """
        packet = receive_packet(self.socket)
        if packet is None:
            for worker_group in self._worker_groups.values():
                worker_group.kill()
                worker_group.exited = -signal.SIGKILL
            raise ForkServerGone
        match packet:
            case messages.AgentForked():
                if (asked := self._worker_groups.get(packet.ticket)) is not None:
                    asked.agent_pid = packet.pid
            case messages.BranchReplaced():
                self.branches, self.branched_at = self.branches + 1, time.monotonic()
            case messages.AgentExited():
                self._ended(packet.pid, packet.code)

    def dismiss(self, worker_group: WorkerGroup) -> None:
        """End a worker group's processes."""
        worker_group.kill()
        worker_group.close()
        self.forget(worker_group)

    def forget(self, worker_group: WorkerGroup) -> None:
        """A worker group is over."""
        self._worker_groups = {
            at: one for at, one in self._worker_groups.items() if one is not worker_group
        }

    def _ended(self, pid: int, code: int) -> None:
        for worker_group in self._worker_groups.values():
            if worker_group.agent_pid == pid:
                worker_group.exited = code


class Spawner:
    """Has groups of ranks forked that run one function, where the kernel was.

    Args:
        connection: the fork server.
        payload: the packed function's descriptor.
    """

    def __init__(self, connection: ForkServerConnection, payload: int) -> None:
        self.connection, self._payload = connection, payload
        self._environ = dict(unpack(payload, PackedFunction).environment.environ)
        self._key = environment_key(self._environ)

    def start(self, spec: GroupSpec, port: int) -> WorkerGroup:
        """Have an agent forked whose ranks meet at ``port``."""
        mine, theirs = GroupConnections.pair(spec.plan.processes)
        worker_group, group = WorkerGroup(spec.plan, port, mine), theirs.descriptors
        with pack_content(spec) as packed:
            request = messages.ForkAgent(
                ticket=self.connection.adopt(worker_group),
                port=port,
                environment=self._key,
                patient=self.connection.patient,
                descriptors=messages.AgentDescriptors(
                    payload=self._payload, spec=packed, group=group
                ),
            )
            send_packet(self.connection.socket, request)
        theirs.close()
        return worker_group

    def import_ahead(self, names: list[str]) -> None:
        """Have the fork server import for the next launch what a rank imports now."""
        request = messages.ImportModules(names=names, environ=self._environ)
        send_enclosed(self.connection.socket, request)


class EventLoop:
    """The kernel's line, signals and the fork server, heard together with the ranks.

    Args:
        kernel: the line to whoever launched.
        forkserver: packets to the fork server.
        detached: whether the run outlives the kernel.
    """

    def __init__(self, kernel: Connection, forkserver: socket.socket, *, detached: bool) -> None:
        self.kernel, self.connection = kernel, ForkServerConnection(forkserver)
        self._detached, self._kernel_process = detached, Peer(kernel)
        self._read_end, self._write_end = os.pipe()
        self._catch_signals()

    def wait(self, lines: Iterable[Connection], seconds: float) -> list[messages.KernelRequest]:
        """Wait until one of ``lines`` or somebody else has something to say; returns the requests.

        Raises:
            ForkServerGone: the fork server died, and the ranks with it.
            KernelGone: the kernel ended, and the run is to end with it.
        """
        ready = self._select(lines, seconds)
        requests: list[messages.KernelRequest] = []
        if self._read_end in ready:
            requests.append(_request(os.read(self._read_end, 512)[0]))
        if self.connection.socket in ready:
            self.connection.hear()
        if self.kernel in ready:
            requests += [
                one for one in self.kernel.drain() if isinstance(one, messages.KernelRequest)
            ]
        if not self._detached and (self.kernel.closed or self._kernel_process.gone()):
            raise KernelGone
        return requests

    def _select(self, lines: Iterable[Connection], seconds: float) -> set[Any]:
        with selectors.DefaultSelector() as selector:
            sources: list[Connection | socket.socket | int] = [
                self.connection.socket,
                self._read_end,
            ]
            for source in [*lines, *sources]:
                selector.register(source, selectors.EVENT_READ)
            if not self.kernel.closed:
                selector.register(self.kernel, selectors.EVENT_READ)
            return {key.fileobj for key, _ in selector.select(seconds)}

    def _catch_signals(self) -> None:
        os.set_blocking(self._write_end, False)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in (*ENDING, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)


def _request(number: int) -> messages.StopRequest:
    """An interrupt is somebody's wish; other signals announce an end that nobody here chose."""
    if number == signal.SIGINT:
        return messages.StopRequest(reason="the supervisor was interrupted")
    return messages.StopRequest(reason=describe_signal(number), status="deadline")
