"""Run the fork server, a clean interpreter that forks supervisors and agents.

It forks supervisors (one a run) for the kernel, agents (one a group of ranks) for supervisors, and
one tracking service. It has no threads of its own, never computes, never touches a device and never
imports anything from the working directory. It watches its sockets for their end: kernel gone means
no new run; it goes itself when its last child has gone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module

from nbtoolkit.launcher.preload import FIRST, Preloader, preload
from nbtoolkit.run import messages
from nbtoolkit.run.signals import ignore_warnings
from nbtoolkit.run.transport import packet_pair, receive_packet, send_packet
from nbtoolkit.worker.forking import Forker, close_all, kill_group

TRACKING = "nbtoolkit.tracking.service:run_service"
"""The main function of the tracking service."""


@dataclass
class Supervisor:
    """A supervisor process: the socket it asks for agents on, and the agents it has."""

    socket: socket.socket
    agents: set[int] = field(default_factory=set)


class ForkServer(Forker):
    """Accepts requests from the kernel and from supervisors, forks, reaps."""

    def __init__(self, kernel: socket.socket) -> None:
        super().__init__()
        self._kernel: socket.socket | None = kernel
        self._supervisors: dict[int, Supervisor] = {}
        self._agents: dict[int, int] = {}  # agent -> its supervisor
        # requests that a branch is working on -> their supervisor, and what it calls them
        self._tokens: dict[int, tuple[int, int]] = {}
        self._own_agents: set[int] = set()  # those forked here, not in a branch
        # Agents for the first branch, which is about to be there: its supervisor and message.
        self._patient: list[tuple[int, messages.ForkAgent]] = []
        self._tracking: socket.socket | None = None
        self._tracking_pid: int | None = None
        self._preloader = Preloader(
            self.fork,
            self._listen,
            self._forget,
            self._agent_ended,
            self._branch_forked,
            self._fork_waiting,
        )
        self._listen(kernel, self._from_kernel)

    def serve(self) -> None:
        """Accept, fork and reap until kernel, supervisors and tracking service are gone."""
        while self._kernel is not None or self._supervisors or self._tracking_pid is not None:
            self.turn()
            if self._kernel is None and not self._supervisors:
                self._end_tracking()  # it writes what has ended, then goes; detached runs are over

    # --- requests ---

    def _from_kernel(self) -> None:
        assert self._kernel is not None
        packet = receive_packet(self._kernel)
        if packet is None:
            self._forget(self._kernel)
            self._kernel.close()
            self._kernel = None
            return
        match packet:
            case messages.ForkSupervisor():
                self._fork_supervisor(packet)
            case messages.ImportModules():
                self._preloader.want(packet.names, packet.environ)
            case messages.PreloadModules():
                self._preload(packet.names)
            case messages.TrackRun():
                self._track(packet)
            case messages.ListProcesses():
                tracking = [self._tracking_pid] if self._tracking_pid is not None else []
                pids = [os.getpid(), *tracking, *self._preloader.pids]
                send_packet(self._kernel, messages.ProcessList(pids=pids))

    def _preload(self, names: list[str]) -> None:
        """Import what schedulers need, and call functions ("module:function") that prepare it.

        Each scheduler would take a second for it.
        """
        gc.disable()
        for name in names:
            if ":" in name:
                entry_point(name)()
            else:
                import_module(name)
        gc.freeze()
        gc.enable()
        assert self._kernel is not None
        send_packet(self._kernel, messages.ModulesPreloaded())

    def _fork_supervisor(self, message: messages.ForkSupervisor) -> None:
        ours, theirs = packet_pair()
        fds = message.descriptors.numbers()

        def child() -> None:
            ours.close()  # else the supervisor would hold its own line open and not hear of our end
            entry_point(message.main)(theirs, message)

        pid = self.fork(child, keep=[theirs.fileno(), *fds])
        theirs.close()
        close_all(fds)
        self._supervisors[pid] = Supervisor(ours)
        self._listen(ours, lambda: self._from_supervisor(pid))
        if self._kernel is not None:
            send_packet(self._kernel, messages.SupervisorForked())

    def _from_supervisor(self, supervisor: int) -> None:
        sock = self._supervisors[supervisor].socket
        packet = receive_packet(sock)
        if packet is None:
            self._forget(sock)
            return
        match packet:
            case messages.ForkAgent():
                self._fork_agent(supervisor, packet)
            case messages.ImportModules():
                self._preloader.want(packet.names, packet.environ)

    def _fork_agent(self, supervisor: int, message: messages.ForkAgent) -> None:
        if message.patient and self._preloader.begins(message.environment):
            self._patient.append((supervisor, message))
            return
        branch, fds = self._preloader.branch_for(message.environment), message.descriptors.numbers()
        token = max(self._tokens, default=0) + 1
        if branch is not None and send_packet(branch, replace(message, ticket=token)):
            self._tokens[token] = supervisor, message.ticket
        else:
            from nbtoolkit.launcher.agent import run_agent

            pid = self.fork(
                lambda: run_agent(message), keep=fds, parent_death=signal.SIGKILL, leader=True
            )
            self._own_agents.add(pid)
            self._agent_forked(supervisor, message.ticket, pid)
        close_all(fds)

    def start_tracking(self) -> None:
        """Fork the tracking service."""
        self._tracking, theirs = packet_pair()
        self._tracking_pid = self.fork(
            lambda: entry_point(TRACKING)(theirs), keep=[theirs.fileno()]
        )
        theirs.close()

    def _track(self, message: messages.TrackRun) -> None:
        if self._tracking is None:
            self.start_tracking()
        assert self._tracking is not None
        if not send_packet(self._tracking, message):  # it died: the next request starts another
            self._end_tracking()

    def _end_tracking(self) -> None:
        if self._tracking is not None:
            self._tracking.close()
            self._tracking = None

    # --- agents, wherever they were forked ---

    def _fork_waiting(self) -> None:
        """Fork the agents that waited for the first branch: it is there, or it will not come."""
        while self._patient:
            supervisor, message = self._patient.pop(0)
            self._fork_agent(supervisor, replace(message, patient=False))

    def _branch_forked(self, token: int, pid: int) -> None:
        self._agent_forked(*self._tokens.pop(token), pid)

    def _agent_forked(self, supervisor: int, ticket: int, pid: int) -> None:
        if supervisor not in self._supervisors:  # it died meanwhile
            kill_group(pid)
            return
        self._agents[pid] = supervisor
        self._supervisors[supervisor].agents.add(pid)
        send_packet(
            self._supervisors[supervisor].socket, messages.AgentForked(ticket=ticket, pid=pid)
        )

    def _agent_ended(self, pid: int, code: int) -> None:
        supervisor = self._supervisors.get(self._agents.pop(pid, -1))
        if supervisor is not None:
            supervisor.agents.discard(pid)
            send_packet(supervisor.socket, messages.AgentExited(pid=pid, code=code))

    # --- what the loop asks ---

    def is_group(self, pid: int) -> bool:
        """See :class:`Forker`."""
        return pid in self._own_agents

    def ended(self, pid: int, code: int) -> None:
        """See :class:`Forker`."""
        if pid in self._own_agents:
            self._own_agents.discard(pid)
            self._agent_ended(pid, code)
        elif pid in self._supervisors:
            supervisor = self._supervisors.pop(pid)
            for agent in supervisor.agents:
                kill_group(agent)
            self._forget(supervisor.socket)
            supervisor.socket.close()
        elif pid == self._tracking_pid:
            self._tracking_pid = None
            self._end_tracking()

    def descriptors(self) -> list[int]:
        """See :class:`Forker`."""
        tracking = [self._tracking.fileno()] if self._tracking is not None else []
        waiting = [fd for _, message in self._patient for fd in message.descriptors.numbers()]
        supervisors = [supervisor.socket.fileno() for supervisor in self._supervisors.values()]
        return [*supervisors, *tracking, *waiting, *self._preloader.descriptors]

    def _listen(self, sock: socket.socket, hear: Callable[[], None]) -> None:
        self.selector.register(sock, selectors.EVENT_READ, hear)

    def _forget(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(sock)


# --- what the children are ---


def entry_point(name: str) -> Callable[..., None]:
    """The function that ``"module:function"`` names.

    What lies above this package (searches, tracking) is named, not imported.
    """
    module, _, function = name.partition(":")
    found: Callable[..., None] = getattr(import_module(module), function)
    return found


def main(kernel_fd: int, tracking: bool) -> None:
    """Start the fork server's process on an inherited socket.

    Args:
        kernel_fd: the socket.
        tracking: start the tracking service first: it imports MLflow while torch is imported here.
    """
    # Python 3.12 warns on fork beside threads; the idle BLAS threads that numpy leaves here are
    # harmless (see fork_diagnosis.py).
    warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
    ignore_warnings()  # of a cluster: it ends with the kernel and the supervisors, which heed them
    gc.disable()  # until all is imported: it would look through what stays again and again
    kernel = socket.socket(fileno=kernel_fd)
    forkserver = ForkServer(kernel)
    if tracking:
        forkserver.start_tracking()
    preload(FIRST)
    forkserver.turn(0.0)  # what is wanted already is imported by a branch, beside the rest here
    preload()
    send_packet(kernel, messages.ServerReady())
    gc.freeze()  # children share these objects' pages as long as the collector leaves them alone
    gc.enable()
    forkserver.serve()
