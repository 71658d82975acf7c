"""Run the process of a supervisor, whose main function is :func:`supervise`, and its event loop.

A scheduler's process (search/scheduler.py) has the same loop.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import struct
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from nbtoolkit.environment.resources import START_TIME, STATE, process_fields
from nbtoolkit.errors import LaunchError
from nbtoolkit.launcher.supervisor import RunSupervisor
from nbtoolkit.launcher.worker_group import ForkServerGone, Spawner
from nbtoolkit.run.events import RunStarted
from nbtoolkit.run.paths import RunPaths, folder_error, sign_lock
from nbtoolkit.wire import messages
from nbtoolkit.wire.payload import RunRequest, unpack
from nbtoolkit.wire.signals import ENDING, SignalFlag, describe_signal
from nbtoolkit.wire.transport import Connection

TICK = 0.05
"""Seconds between two polls without a message."""

EXIT_TICK = 0.005
"""Seconds between two polls while the processes exit."""


class KernelGone(Exception):
    """The kernel has ended, and the run is not detached."""


_CHECK_SECONDS = 0.5  # between two checks of a peer


class Peer:
    """The process at the other end of a connection.

    A closed connection alone does not show its death: a process that it forked, such as a
    DataLoader worker of the notebook, holds a copy of the connection open.
    """

    def __init__(self, connection: Connection) -> None:
        credentials = connection.socket.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        self._pid: int = struct.unpack("3i", credentials)[0]
        fields = process_fields(self._pid)
        self._since = fields[START_TIME] if fields else None
        self._checked_at = time.monotonic()

    def gone(self) -> bool:
        """Return True if it has died; checks at most twice a second."""
        now = time.monotonic()
        if now - self._checked_at < _CHECK_SECONDS:
            return False
        self._checked_at = now
        fields = process_fields(self._pid)
        # The start time distinguishes processes of the same pid.
        return fields is None or fields[STATE] in "ZX" or fields[START_TIME] != self._since


class EventLoop:
    """Waits for the kernel, signals, the fork server and the ranks at the same time.

    Args:
        kernel: connection to the process that launched.
        spawner: connection to the fork server.
        detached: the run outlives the kernel.
    """

    def __init__(self, kernel: Connection, spawner: Spawner, *, detached: bool) -> None:
        self.kernel = kernel
        self._spawner = spawner
        self._detached = detached
        self._kernel_process = Peer(kernel)
        self._read_end, self._write_end = os.pipe()
        self._flag = SignalFlag()
        self._catch_signals()

    def wait(
        self, connections: Iterable[Connection], seconds: float
    ) -> list[messages.KernelRequest]:
        """Wait for a message; return the requests of the kernel and of signals.

        Raises:
            ForkServerGone: the fork server died, and the ranks with it.
            KernelGone: the kernel ended, and the run ends with it.
        """
        open_connections = [*connections] if self.kernel.closed else [*connections, self.kernel]
        servers = self._spawner.connections
        sockets = [connection.socket for connection in (*open_connections, *servers)]
        ready = wait([*sockets, self._read_end], seconds)
        requests: list[messages.KernelRequest] = []
        if self._read_end in ready:
            requests += [self._request(number) for number in os.read(self._read_end, 512)]
        if any(server.socket in ready for server in servers):
            self._spawner.receive()
        if self.kernel.socket in ready:
            requests += [
                request
                for request in self.kernel.drain()
                if isinstance(request, messages.KernelRequest)
            ]
        if not self._detached and (self.kernel.closed or self._kernel_process.gone()):
            raise KernelGone
        return requests

    def _catch_signals(self) -> None:
        os.set_blocking(self._write_end, False)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in (*ENDING, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)

    def _request(self, number: int) -> messages.StopRequest:
        """Return the stop request for a signal: an interrupt is a user's, others announce an end.

        A second SIGTERM kills the ranks.
        """
        if number == signal.SIGINT:
            return messages.StopRequest(reason="the supervisor was interrupted")
        self._flag.note(number)
        grace = 0.0 if self._flag.repeated else None
        return messages.StopRequest(reason=describe_signal(number), grace=grace, status="deadline")


# Errors that a folder cannot cause: processes, sockets, memory, too many open files.
_OF_THE_MACHINE = (
    *(errno.ESRCH, errno.ECHILD, errno.EPIPE, errno.ECONNRESET),
    *(errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
)


@dataclass(frozen=True)
class SupervisorDescriptors:
    """What the process is forked with: its connections, packed contents, and the folder's lock."""

    forkserver: int
    payload: int
    request: int
    kernel: int
    lock: int


def supervise(descriptors: list[int]) -> None:
    """Supervise one run to its end; the main function of a supervisor process.

    Args:
        descriptors: see :class:`SupervisorDescriptors`.
    """
    given = SupervisorDescriptors(*descriptors)
    request = unpack(given.request, RunRequest)
    with supervising(request.job.paths, given, request.header) as (loop, spawner):
        _run(RunSupervisor(request, spawner), loop)


@contextlib.contextmanager
def supervising(
    paths: RunPaths, given: SupervisorDescriptors, header: RunStarted
) -> Iterator[tuple[EventLoop, Spawner]]:
    """Own a run or a search, and report to the kernel if that fails.

    The lock is released before the connection is closed, so that the kernel can resume the run as
    soon as it sees the end.
    """
    kernel = Connection.inherited(given.kernel)
    try:
        sign_lock(given.lock)
        spawner = Spawner(Connection.inherited(given.forkserver), given.payload, kernel)
        yield EventLoop(kernel, spawner, detached=header.detached), spawner
    except ForkServerGone:
        lost = LaunchError(
            "the fork server process died, and the ranks with it (usual cause: out of memory)",
            do="launch again: a new fork server starts, and a run with a checkpoint resumes",
        )
        _report_lost(kernel, lost)
    except OSError as error:
        _report_lost(kernel, _lost_to(error, paths.folder))
    finally:
        os.close(given.lock)
        kernel.close()


def _run(supervisor: RunSupervisor, loop: EventLoop) -> None:
    """Run to the end, and record an end that the run itself cannot record."""
    try:
        supervisor.begin()
        while not supervisor.poll():
            for request in _requests(supervisor, loop):
                match request:
                    case messages.StopRequest():
                        supervisor.stop(request.reason, request.grace, request.status)
    except KernelGone:
        supervisor.abandon()
        supervisor.record.note("the kernel is gone: the run was ended, unfinished", level="warning")
    except ForkServerGone:
        supervisor.abandon()
        supervisor.record.note(
            "the fork server is gone: the run was ended, unfinished", level="warning"
        )
        raise
    finally:
        supervisor.abandon()


def _requests(supervisor: RunSupervisor, loop: EventLoop) -> list[messages.KernelRequest]:
    try:
        return loop.wait(supervisor.connections(), EXIT_TICK if supervisor.exiting else TICK)
    except ForkServerGone:
        if not supervisor.exiting:  # else the ranks are gone, and their outcome is known
            raise
        return []


def _lost_to(error: OSError, folder: Path) -> LaunchError:
    """Return the error of a run whose supervisor got an OSError."""
    if error.errno not in _OF_THE_MACHINE:
        return folder_error(folder, error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return LaunchError(
        f"the process that owned the run {folder} failed in {place.name}(): {error}",
        do="launch again: a run with a checkpoint resumes; report the error if it occurs again",
    )


def _report_lost(connection: Connection, error: LaunchError) -> None:
    """Tell the kernel that the run cannot continue, when the run's folder cannot say so."""
    kind = type(error).__name__
    connection.send(
        messages.SupervisorLost(error=kind, what=error.what, allowed=error.allowed, do=error.do)
    )
