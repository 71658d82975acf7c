"""Wait for ranks, the kernel, signals and the fork server in one loop."""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from nbtoolkit.environment.installed import environment_key
from nbtoolkit.environment.resources import START_TIME, is_running, process_fields
from nbtoolkit.launcher.worker_group import WorkerGroup
from nbtoolkit.run import messages
from nbtoolkit.run.payload import PackedFunction, pack_content, unpack
from nbtoolkit.run.request import JobSpec
from nbtoolkit.run.signals import ENDING, describe_signal
from nbtoolkit.run.transport import (
    Connection,
    GroupConnections,
    receive_packet,
    send_enclosed,
    send_packet,
)


class ForkServerGone(Exception):
    """The fork server's process died, and the ranks with it."""


class KernelGone(Exception):
    """The kernel has ended, and the run is not detached."""


_CHECK_SECONDS = 0.5  # between two checks of a peer


class Peer:
    """The process at the other end of a connection.

    A closed connection alone does not show its death: a process that it forked, such as a
    DataLoader worker of the notebook, holds a copy of the connection open.
    """

    def __init__(self, line: Connection) -> None:
        credentials = line.socket.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        self.pid: int = struct.unpack("3i", credentials)[0]
        self._since = self._start_time()
        self._checked_at = time.monotonic()

    def gone(self) -> bool:
        """Return True if it has died; checks at most twice a second."""
        now = time.monotonic()
        if now - self._checked_at < _CHECK_SECONDS:
            return False
        self._checked_at = now
        return not is_running(self.pid) or self._start_time() != self._since

    def _start_time(self) -> str | None:
        """Return its start time, which distinguishes processes of the same pid."""
        fields = process_fields(self.pid)
        return fields[START_TIME] if fields else None


class ForkServerConnection:
    """A supervisor's connection to the fork server, which forks agents and reports their end."""

    def __init__(self, forkserver: socket.socket) -> None:
        self.socket = forkserver
        self.patient = False
        """Let agents wait for the first preload branch while it is being made."""
        self._worker_groups: dict[int, WorkerGroup] = {}
        self._ticket = 0

    def adopt(self, worker_group: WorkerGroup) -> int:
        """Follow a worker group's agent; return the ticket for requests about it."""
        self._ticket += 1
        self._worker_groups[self._ticket] = worker_group
        return self._ticket

    def receive(self) -> messages.Message | None:
        """Handle one message about an agent; return any other.

        Raises:
            ForkServerGone: the fork server died; the worker groups are killed.
        """
        packet = receive_packet(self.socket)
        if packet is None:
            for worker_group in self._worker_groups.values():
                worker_group.kill()
                worker_group.exited = -signal.SIGKILL
            raise ForkServerGone
        match packet:
            case messages.AgentForked():
                if (group := self._worker_groups.get(packet.ticket)) is not None:
                    group.agent_pid = packet.pid
            case messages.AgentExited():
                self._ended(packet.pid, packet.code)
            case _:
                return packet
        return None

    def dismiss(self, worker_group: WorkerGroup) -> None:
        """Kill a worker group's processes and forget it."""
        worker_group.kill()
        worker_group.close()
        self.forget(worker_group)

    def forget(self, worker_group: WorkerGroup) -> None:
        """Forget a worker group that is over."""
        self._worker_groups = {
            at: one for at, one in self._worker_groups.items() if one is not worker_group
        }

    def _ended(self, pid: int, code: int) -> None:
        for worker_group in self._worker_groups.values():
            if worker_group.agent_pid == pid:
                worker_group.exited = code


class Spawner:
    """Starts worker groups that run one function in the kernel's environment.

    Args:
        connection: the fork server.
        payload: file descriptor of the packed function.
    """

    def __init__(self, connection: ForkServerConnection, payload: int) -> None:
        self.connection, self._payload = connection, payload
        self._environment = unpack(payload, PackedFunction).environment
        self._environ = dict(self._environment.environ)
        self._key = environment_key(self._environ)

    def start(self, spec: JobSpec, port: int) -> WorkerGroup:
        """Start a worker group whose ranks meet at ``port``."""
        mine, theirs = GroupConnections.pair(spec.plan.processes)
        worker_group = WorkerGroup(spec.plan, port, mine, spec.paths.elastic)
        group = theirs.descriptors
        # Plain values; in a fresh process cloudpickle takes 5 ms longer.
        with pack_content(pickle.dumps(spec)) as packed:
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

    def prepare_standby(self, job: JobSpec, shape: str) -> None:
        """Let the fork server start ranks that wait for a run like ``job``, with its environment.

        The function of ``job``, and the arrays in it, are not kept.
        """
        packed = PackedFunction(function=b"", sources={}, environment=self._environment)
        spec = pickle.dumps(replace(job, standby=True))
        with pack_content(pickle.dumps(packed)) as payload, pack_content(spec) as content:
            request = messages.StartStandby(
                shape=shape,
                environment=self._key,
                seconds=job.config.runtime.standby_seconds,
                descriptors=messages.StandbyDescriptors(payload=payload, spec=content),
            )
            send_packet(self.connection.socket, request)

    def import_ahead(self, names: list[str]) -> None:
        """Let the fork server import modules for the next launch."""
        request = messages.ImportModules(names=names, environ=self._environ)
        send_enclosed(self.connection.socket, request)


class EventLoop:
    """Waits for the kernel, signals, the fork server and the ranks at the same time.

    Args:
        kernel: connection to the process that launched.
        forkserver: connection to the fork server.
        detached: the run outlives the kernel.
    """

    def __init__(self, kernel: Connection, forkserver: socket.socket, *, detached: bool) -> None:
        self.kernel, self.connection = kernel, ForkServerConnection(forkserver)
        self._detached, self._kernel_process = detached, Peer(kernel)
        self._read_end, self._write_end = os.pipe()
        self._catch_signals()

    def wait(self, lines: Iterable[Connection], seconds: float) -> list[messages.KernelRequest]:
        """Wait for a message; return the requests of the kernel and of signals.

        Raises:
            ForkServerGone: the fork server died, and the ranks with it.
            KernelGone: the kernel ended, and the run ends with it.
        """
        ready = self._select(lines, seconds)
        requests: list[messages.KernelRequest] = []
        if self._read_end in ready:
            requests.append(_request(os.read(self._read_end, 512)[0]))
        if self.connection.socket in ready:
            self.connection.receive()
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
    """Return the stop request for a signal: an interrupt is a user's, others announce an end."""
    if number == signal.SIGINT:
        return messages.StopRequest(reason="the supervisor was interrupted")
    return messages.StopRequest(reason=describe_signal(number), status="deadline")
