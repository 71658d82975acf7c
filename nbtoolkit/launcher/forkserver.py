"""Run the fork server, a clean interpreter that forks all other processes but the ranks.

It knows one request: fork this main function with these descriptors. Its clients are the kernel,
and the supervisors and schedulers that it has forked for the kernel. Agents (one per group of
ranks) are forked for supervisors and schedulers. It has no threads of its own, never computes,
never touches a device and never imports anything from the working directory.

When the kernel's connection closes it goes on for its other clients, and ends after the last one.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import selectors
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pkgutil import resolve_name

from nbtoolkit.launcher.preload import import_installed, import_late, preload
from nbtoolkit.wire import messages
from nbtoolkit.wire.payload import unpack
from nbtoolkit.wire.signals import ignore_warning_signals
from nbtoolkit.wire.transport import Connection
from nbtoolkit.worker.forking import close_all, die_with_parent, kill_group, run_and_exit

QUIET_SECONDS = 0.25
"""Seconds without a request after which it imports what ranks need soon (see preload.py).

A supervisor has asked for its ranks by then: it takes 20 ms."""


@dataclass(eq=False)
class Requester:
    """A client: a process that asks for forks, with the connection to it."""

    connection: Connection


@dataclass(frozen=True)
class Child:
    """A forked process: who has asked for it, and whether it leads a process group."""

    client: Requester
    leads: bool


class ForkServer:
    """Forks and reaps processes for its clients.

    Args:
        kernel: the connection to the first client.
    """

    def __init__(self, kernel: Connection) -> None:
        self._selector = selectors.DefaultSelector()
        self._clients: set[Requester] = set()
        self._children: dict[int, Child] = {}
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_write, False)
        os.set_blocking(self._wakeup_read, False)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._wakeup_read, selectors.EVENT_READ, self._reap)
        self._add(kernel)

    def serve(self, *, imported_late: bool) -> None:
        """Fork and reap until the last client is gone, and the process groups with it.

        Args:
            imported_late: whether it has imported what ranks need soon.
        """
        forked_before = len(self._children)
        while self._clients or self._leaders():
            # Not before the first launch has its ranks: it would wait for the import.
            due = not imported_late and len(self._children) > forked_before
            if not self.turn(QUIET_SECONDS if due else None):
                import_late()
                imported_late = True

    def turn(self, seconds: float | None = None) -> bool:
        """Wait for events, at most ``seconds`` (None: no limit); return whether any came."""
        events = self._selector.select(seconds)
        for key, _ in events:
            # Handling one event may have closed the connection of another.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        return bool(events)

    def _add(self, connection: Connection) -> None:
        client = Requester(connection)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._receive(client))

    def _receive(self, client: Requester) -> None:
        match client.connection.receive():
            case None:
                self._remove(client)
            case messages.Fork() as request:
                self._fork(client, request)
            case messages.ClientAdded() as added:
                self._add(Connection.inherited(added.descriptors[0]))
            case messages.HandOver() as request:
                self._hand_over(client, request)

    def _remove(self, client: Requester) -> None:
        """Forget a client whose end is closed, and kill the process groups that it asked for."""
        self._clients.discard(client)
        self._selector.unregister(client.connection)
        client.connection.close()
        for pid in self._leaders(client):
            kill_group(pid)

    def _hand_over(self, kernel: Requester, request: messages.HandOver) -> None:
        """Connect all clients but the kernel with the next fork server."""
        (fd,) = request.descriptors
        successor = Connection.inherited(fd)
        for client in self._clients - {kernel}:
            here, there = Connection.pair()
            successor.send(messages.ClientAdded(descriptors=[here.fileno()]))
            changed = messages.ServerChanged(
                environment=request.environment, descriptors=[there.fileno()]
            )
            client.connection.send(changed)
            here.close()
            there.close()
        successor.close()

    def _fork(self, client: Requester, request: messages.Fork) -> None:
        given = request.descriptors
        if request.group:
            pid = self._fork_child(request, given)
        else:
            here, there = Connection.pair()
            self._add(here)  # before the fork: the child closes its copy of what is in the selector
            pid = self._fork_child(request, [there.fileno(), *given])
            there.close()
        close_all(given)
        self._children[pid] = Child(client, leads=request.group)
        client.connection.send(messages.Forked(pid=pid))

    def _fork_child(self, request: messages.Fork, fds: list[int]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            run_and_exit(lambda: self._be_child(request, fds))
        if request.group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.setpgid(pid, pid)  # the child does so, too: either may be first
        return pid

    def _be_child(self, request: messages.Fork, fds: list[int]) -> None:
        """Be the new process: leave everything of the fork server, and call the main function."""
        gc.enable()  # disabled while the fork server imports
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if request.group:
            os.setpgid(0, 0)
            die_with_parent(signal.SIGKILL)
        # An open copy of a connection would hide the end of the fork server.
        others = {self._wakeup_read, self._wakeup_write}
        others |= {key.fd for key in self._selector.get_map().values()}
        self._selector.close()
        close_all(sorted(others - set(fds)))
        resolve_name(request.main)(fds)

    def _leaders(self, client: Requester | None = None) -> list[int]:
        """Return the processes that lead a group, of one client or of all."""
        return [
            pid
            for pid, child in self._children.items()
            if child.leads and client in (None, child.client)
        ]

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup_read, 4096)
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None:
                return
            child = self._children.pop(info.si_pid)
            # Before it is reaped, its pid cannot belong to another process: kill its group now, the
            # ranks and DataLoader workers that have outlived their agent.
            if child.leads:
                kill_group(info.si_pid)
            _, status = os.waitpid(info.si_pid, 0)
            if child.client in self._clients:
                code = os.waitstatus_to_exitcode(status)
                child.client.connection.send(messages.ProcessEnded(pid=info.si_pid, code=code))


def main(kernel_fd: int, names_fd: int, late: bool) -> None:
    """Run the fork server; the main function of its process.

    Args:
        kernel_fd: the inherited socket to the kernel.
        names_fd: the packed list of modules of installed packages that it imports besides what
            every launch needs.
        late: import what ranks need soon before the first fork.
    """
    # Python 3.12 warns about a fork in a process with threads. NumPy's idle BLAS threads are
    # harmless (see fork_probe.py).
    warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
    # A cluster's warning is for the kernel and the supervisors, with which this process ends.
    ignore_warning_signals()
    gc.disable()  # during the imports: it would traverse the same objects again and again
    kernel = Connection.inherited(kernel_fd)
    server = ForkServer(kernel)
    server.turn(0.0)  # the tracking service imports MLflow while this process imports torch
    preload()
    modules = unpack(names_fd, list)
    os.close(names_fd)
    spoiled_by = ""
    if modules:
        with _ending_with(kernel):
            spoiled_by = import_installed(modules)
    if late and not spoiled_by:
        import_late()
        gc.disable()
    kernel.send(messages.ServerReady(spoiled_by=spoiled_by))
    if spoiled_by:
        return
    gc.freeze()  # children share these objects' pages until the collector writes to them
    gc.enable()
    server.serve(imported_late=late)


@contextlib.contextmanager
def _ending_with(connection: Connection) -> Iterator[None]:
    """End this process as soon as the other end closes, also in an import that never ends.

    Otherwise it would outlive a kernel that is killed while this process imports.
    """
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    # SIGIO, which ends a process, comes when the other end closes. It sends nothing meanwhile.
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        yield
    finally:
        fcntl.fcntl(connection, fcntl.F_SETFL, flags)
