"""Run the fork server, a clean interpreter that forks supervisors and agents.

It forks supervisors (one per run) for the kernel, agents (one per worker group) for supervisors,
and one tracking service. It has no threads of its own, never computes, never touches a device and
never imports anything from the working directory. When the kernel's socket closes it accepts no
more runs, and it exits after its last child.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import warnings
from dataclasses import dataclass, field, replace
from importlib import import_module
from pkgutil import resolve_name

from nbtoolkit.launcher.preload import FIRST, Preloader, fork_agent, preload
from nbtoolkit.run import messages
from nbtoolkit.run.signals import ignore_warning_signals
from nbtoolkit.run.transport import packet_pair, receive_packet, send_enclosed, send_packet
from nbtoolkit.worker.forking import Forker, close_all, kill_group

# By name, which imports nothing of the packages above this one.
TRACKING = "nbtoolkit.tracking.service:run_service"
"""The main function of the tracking service."""


@dataclass
class Supervisor:
    """A supervisor process: the socket for its requests, and the pids of its agents."""

    socket: socket.socket
    agents: set[int] = field(default_factory=set)


class ForkServer(Forker):
    """Accepts requests from the kernel and from supervisors, and forks and reaps processes."""

    def __init__(self, kernel: socket.socket) -> None:
        super().__init__()
        self._kernel: socket.socket | None = kernel
        self._supervisors: dict[int, Supervisor] = {}
        self._agents: dict[int, int] = {}  # pid of an agent -> pid of its supervisor
        # Token of a request to a branch -> pid of the supervisor, and the supervisor's ticket.
        self._tokens: dict[int, tuple[int, int]] = {}
        # Requests that wait for the first branch: pid of the supervisor, and its message.
        self._waiting: list[tuple[int, messages.ForkAgent]] = []
        self._tracking: socket.socket | None = None
        self._tracking_pid: int | None = None
        self._preloader = Preloader(self)
        self.listen(kernel, self._from_kernel)

    def serve(self) -> None:
        """Accept, fork and reap until kernel, supervisors and tracking service are gone."""
        while self._kernel is not None or self._supervisors or self._tracking_pid is not None:
            self.turn()
            if self._kernel is None and not self._supervisors:
                # Detached runs have ended too: the service writes what is left, and exits.
                self._end_tracking()

    # --- requests ---

    def _from_kernel(self) -> None:
        assert self._kernel is not None
        packet = receive_packet(self._kernel)
        if packet is None:
            self.forget(self._kernel)
            self._kernel.close()
            self._kernel = None
            return
        match packet:
            case messages.ForkSupervisor():
                self._start_supervisor(packet)
            case messages.ImportModules():
                self._preloader.request(packet.names, packet.environ)
            case messages.PreloadModules():
                self._preload(packet.names)
            case messages.TrackRun():
                self._track(packet)
            case messages.ListProcesses():
                tracking = [self._tracking_pid] if self._tracking_pid is not None else []
                pids = [os.getpid(), *tracking, *self._preloader.pids]
                send_packet(self._kernel, messages.ProcessList(pids=pids))

    def _preload(self, names: list[str]) -> None:
        """Import modules for schedulers, and call functions (``"module:function"``) of theirs.

        Otherwise each scheduler would spend a second on it.
        """
        gc.disable()
        for name in names:
            if ":" in name:
                resolve_name(name)()
            else:
                import_module(name)
        gc.freeze()
        gc.enable()
        assert self._kernel is not None
        send_packet(self._kernel, messages.ModulesPreloaded())

    def _start_supervisor(self, message: messages.ForkSupervisor) -> None:
        ours, theirs = packet_pair()

        def child() -> None:
            # An open copy in the supervisor would hide the end of the fork server from it.
            ours.close()
            resolve_name(message.main)(theirs, message)

        pid = self.fork(child, keep=[theirs.fileno(), *message.descriptors.numbers()])
        theirs.close()
        self._supervisors[pid] = Supervisor(ours)
        self.listen(ours, lambda: self._from_supervisor(pid))
        close_all(message.descriptors.numbers())
        if self._kernel is not None:
            send_packet(self._kernel, messages.SupervisorForked())

    def _from_supervisor(self, supervisor: int) -> None:
        sock = self._supervisors[supervisor].socket
        packet = receive_packet(sock)
        if packet is None:
            self.forget(sock)
            return
        match packet:
            case messages.ForkAgent():
                self._fork_agent(supervisor, packet)
            case messages.ImportModules():
                self._preloader.request(packet.names, packet.environ)

    def _read_last_requests(self, supervisor: int) -> None:
        """Read what a supervisor has sent just before its end.

        On a busy machine both are seen in the same turn, and the end may come first. The ranks
        that the supervisor asked for would never start.
        """
        poller = select.poll()
        poller.register(self._supervisors[supervisor].socket, select.POLLIN)
        while poller.poll(0):
            packet = receive_packet(self._supervisors[supervisor].socket)
            match packet:
                case None:
                    return
                case messages.ForkAgent():
                    close_all(packet.descriptors.numbers())
                case messages.ImportModules():
                    self._preloader.request(packet.names, packet.environ)

    def _fork_agent(self, supervisor: int, message: messages.ForkAgent) -> None:
        if message.patient and self._preloader.first_branch_is_starting(message.environment):
            self._waiting.append((supervisor, message))
            return
        branch = self._preloader.branch_for(message.environment)
        token = max(self._tokens, default=0) + 1
        if branch is not None and send_packet(branch, replace(message, ticket=token)):
            self._tokens[token] = supervisor, message.ticket
            close_all(message.descriptors.numbers())
        else:
            self._agent_forked(supervisor, message.ticket, fork_agent(self, message))

    def start_tracking(self) -> None:
        """Fork the tracking service."""
        self._tracking, theirs = packet_pair()
        self._tracking_pid = self.fork(
            lambda: resolve_name(TRACKING)(theirs), keep=[theirs.fileno()]
        )
        theirs.close()

    def _track(self, message: messages.TrackRun) -> None:
        if self._tracking is None:
            self.start_tracking()
        assert self._tracking is not None
        if not send_enclosed(self._tracking, message):  # it died; the next request starts a new one
            self._end_tracking()

    def _end_tracking(self) -> None:
        if self._tracking is not None:
            self._tracking.close()
            self._tracking = None

    # --- agents, of this process and of branches ---

    def fork_waiting(self) -> None:
        """Fork the agents that waited for the first branch, which is ready or has ended."""
        while self._waiting:
            supervisor, message = self._waiting.pop(0)
            self._fork_agent(supervisor, replace(message, patient=False))

    def branch_forked(self, token: int, pid: int) -> None:
        """Note the agent that a branch has forked."""
        self._agent_forked(*self._tokens.pop(token), pid)

    def _agent_forked(self, supervisor: int, ticket: int, pid: int) -> None:
        if supervisor not in self._supervisors:
            kill_group(pid)
            return
        self._agents[pid] = supervisor
        self._supervisors[supervisor].agents.add(pid)
        send_packet(
            self._supervisors[supervisor].socket, messages.AgentForked(ticket=ticket, pid=pid)
        )

    def agent_ended(self, pid: int, code: int) -> None:
        """Report the exit of an agent to its supervisor."""
        supervisor = self._supervisors.get(self._agents.pop(pid, -1))
        if supervisor is not None:
            supervisor.agents.discard(pid)
            send_packet(supervisor.socket, messages.AgentExited(pid=pid, code=code))

    # --- callbacks of the base class ---

    def ended(self, pid: int, code: int) -> None:
        """Clean up after an agent, a supervisor or the tracking service."""
        if pid in self.leaders:
            self.agent_ended(pid, code)
        elif pid in self._supervisors:
            self._read_last_requests(pid)
            supervisor = self._supervisors.pop(pid)
            for agent in supervisor.agents:
                kill_group(agent)
            self.forget(supervisor.socket)
            supervisor.socket.close()
        elif pid == self._tracking_pid:
            self._tracking_pid = None
            self._end_tracking()

    def descriptors(self) -> list[int]:
        """Return the descriptors that children must not inherit."""
        tracking = [self._tracking.fileno()] if self._tracking is not None else []
        waiting = [fd for _, message in self._waiting for fd in message.descriptors.numbers()]
        supervisors = [supervisor.socket.fileno() for supervisor in self._supervisors.values()]
        return [*supervisors, *tracking, *waiting, *self._preloader.descriptors]


def main(kernel_fd: int, tracking: bool) -> None:
    """Run the fork server; the main function of its process.

    Args:
        kernel_fd: the inherited socket to the kernel.
        tracking: start the tracking service first; it imports MLflow while this process imports
            torch.
    """
    # Python 3.12 warns about a fork in a process with threads. NumPy's idle BLAS threads are
    # harmless (see fork_probe.py).
    warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
    # A cluster's warning is for the kernel and the supervisors, with which this process ends.
    ignore_warning_signals()
    gc.disable()  # during the imports: it would traverse the same objects again and again
    kernel = socket.socket(fileno=kernel_fd)
    forkserver = ForkServer(kernel)
    if tracking:
        forkserver.start_tracking()
    preload(FIRST)
    # A branch imports what is requested already, in parallel with the rest here.
    forkserver.turn(0.0)
    preload()
    send_packet(kernel, messages.ServerReady())
    gc.freeze()  # children share these objects' pages until the collector writes to them
    gc.enable()
    forkserver.serve()
