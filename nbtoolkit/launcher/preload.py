"""Import modules before ranks need them, in branches of the fork server.

A branch is a copy of the fork server with more modules imported. While a rank imports, for example,
transformers, a branch imports it too, and the next launch forks its ranks from that branch. Each
branch is forked from the previous one. A branch ends if its imports start a thread or leave a
process that is not fork-safe (see fork_probe.py); the ranks then import these modules
themselves.

A branch imports nothing from the working directory or an editable install, because changed files
must take effect. It serves one set of environment variables, since many packages read them at
import.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nbtoolkit.environment.installed import environment_key, installed_roots
from nbtoolkit.launcher.fork_probe import probe_fork
from nbtoolkit.run import messages
from nbtoolkit.run.transport import packet_pair, receive_packet, send_packet
from nbtoolkit.worker.forking import Forker, close_all, die_with_parent, kill_group

if TYPE_CHECKING:
    from nbtoolkit.launcher.forkserver import ForkServer

# Packages that do not survive a fork although a probe of torch passes: they keep native threads and
# connections of their own.
_NOT_FORK_SAFE = frozenset(
    {"tensorflow", "jax", "jaxlib", "ray", "grpc", "pyspark", "torch_xla", "triton", "bitsandbytes"}
    | {"keras", "tf_keras"}  # both import TensorFlow
)

# Imported first: a branch that is requested at once is forked then, and imports in parallel with
# the rest.
FIRST = ("torch",)

# Imported once, for supervisors, agents and ranks. Otherwise elastic and each rank would import the
# last ones in each launch, which takes some milliseconds each.
PRELOADED = (
    "accelerate",
    "cloudpickle",
    "torch.distributed.launcher.api",
    "torch.nn.parallel",
    "torch.utils.data",
    "nbtoolkit.config.schema",
    "nbtoolkit.launcher.supervisor_process",
    "nbtoolkit.launcher.agent",
    "nbtoolkit.worker.main",
    "nbtoolkit.worker.undivided",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
    "numpy.random",
    "encodings.idna",
    "psutil",
    "shutil",
)

# accelerate 1.6 (Kaggle's) imports torchao if it is installed, which initialises CUDA and so breaks
# every fork (accelerate#3524). Ranks can import these.
TOUCH_DEVICES = ("torchao", "bitsandbytes")


def preload(names: Iterable[str] = PRELOADED) -> None:
    """Import the modules that every launch needs, without touching a device."""
    # For the import system, None means that a module is not installed.
    hidden = {name: None for name in TOUCH_DEVICES if name not in sys.modules}
    sys.modules.update(hidden)  # type: ignore[arg-type]
    for name in names:
        importlib.import_module(name)
    for name in hidden:
        del sys.modules[name]


class Preloader:
    """Manages the branches: the one in use, the one that imports, and the pending requests.

    Args:
        server: forks the first branch, and learns about the agents that branches fork.
    """

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._key: str | None = None
        self._branch: socket.socket | None = None
        self._next_branch: socket.socket | None = None
        self._pending: list[list[str]] = []
        self._requested: set[str] = set()
        self._installed = _installed_state()
        self._environ: dict[str, str] = {}
        # All branches that live, with their pids once known.
        self._branches: dict[socket.socket, int | None] = {}

    def request(self, names: list[str], environ: dict[str, str]) -> None:
        """Import ``names`` as soon as possible, with ``environ`` as environment variables."""
        key = environment_key(environ)
        if key != self._key or self._installed != _installed_state():
            self.drop()
            self._key, self._environ, self._installed = key, environ, _installed_state()
        new = [
            name
            for name in names
            if name not in self._requested and name.partition(".")[0] not in _NOT_FORK_SAFE
        ]
        self._requested.update(new)
        if new:
            self._pending.append(new)
            self._fork_branch()

    def branch_for(self, key: str) -> socket.socket | None:
        """Return the branch to fork agents from in an environment; None for the fork server."""
        fits = key == self._key and self._installed == _installed_state()
        return self._branch if fits else None

    def first_branch_is_starting(self, key: str) -> bool:
        """Return True while the first branch for an environment imports."""
        return self._branch is None and self._next_branch is not None and key == self._key

    def drop(self) -> None:
        """Retire all branches; they exit after their last agent."""
        for sock in (self._branch, self._next_branch):
            if sock is not None:
                send_packet(sock, messages.RetireBranch())
        if self._next_branch is not None:
            self._server.fork_waiting()
        self._branch = self._next_branch = None
        self._pending.clear()
        self._requested.clear()

    @property
    def pids(self) -> list[int]:
        """The branches' processes."""
        return [pid for pid in self._branches.values() if pid is not None]

    @property
    def descriptors(self) -> list[int]:
        """Sockets that belong to the fork server alone."""
        return [sock.fileno() for sock in self._branches]

    def _fork_branch(self) -> None:
        """Fork the next branch from the current one, or from the fork server."""
        if self._next_branch is not None or not self._pending:
            return
        names = self._pending.pop(0)
        ours, theirs = packet_pair()
        self._branches[ours] = None
        self._next_branch = ours
        self._server.listen(ours, lambda: self._from_branch(ours))
        if self._branch is not None:
            end = messages.FileDescriptor(file=theirs.fileno())
            send_packet(self._branch, messages.GrowBranch(names=names, descriptors=end))
        else:
            environ = self._environ
            self._server.fork(
                lambda: run_branch(theirs, names, environ),
                keep=[theirs.fileno()],
                parent_death=signal.SIGKILL,
            )
        theirs.close()

    def _from_branch(self, sock: socket.socket) -> None:
        packet = receive_packet(sock)
        if packet is None:
            self._on_branch_end(sock)
            return
        match packet:
            case messages.BranchStarted():
                self._branches[sock] = packet.pid
            case messages.AgentForked():
                self._server.branch_forked(packet.ticket, packet.pid)
            case messages.AgentExited():
                self._server.agent_ended(packet.pid, packet.code)
            case messages.ServerReady() if sock is self._next_branch:
                if self._branch is not None:
                    send_packet(self._branch, messages.RetireBranch())
                self._branch, self._next_branch = sock, None
                self._server.fork_waiting()
                self._fork_branch()

    def _on_branch_end(self, sock: socket.socket) -> None:
        """Handle the end of a branch: it was retired, or its imports were not fork-safe."""
        self._server.forget(sock)
        self._branches.pop(sock, None)
        sock.close()
        if sock is self._branch:
            self._branch = None
        if sock is self._next_branch:
            self._next_branch = None
            self._fork_branch()
            self._server.fork_waiting()


def _installed_state() -> tuple[float, ...]:
    """Return a value that changes with each install or removal, after which imports are stale."""
    times = []
    for root in installed_roots():
        with contextlib.suppress(OSError):
            times.append(os.stat(root).st_mtime)
    return tuple(times)


# --- the branch's own process ---


class PreloadBranch(Forker):
    """A copy of the fork server with more modules imported; forks agents and the next branch."""

    def __init__(self, forkserver: socket.socket) -> None:
        super().__init__()
        self._forkserver = forkserver
        self._retired = False
        self._growth: messages.GrowBranch | None = None
        self.listen(forkserver, self._request)

    def serve(self) -> tuple[socket.socket, list[str]] | None:
        """Fork on request until retired and the last agent has ended, or the fork server has.

        Returns:
            In the process of a new branch its connection to the fork server and the modules that
            it imports; at the end None.
        """
        while not self._retired or self.leaders:
            self.turn()
            if (growth := self._growth) is not None:
                self._growth = None
                sock = socket.socket(fileno=growth.descriptors.file)
                if not self.fork_in_place(keep=[sock.fileno()], parent_death=signal.SIGKILL):
                    # Its number is closed already, and may belong to another file.
                    self._forkserver.detach()
                    return sock, growth.names
                sock.close()
        return None

    def _request(self) -> None:
        packet = receive_packet(self._forkserver)
        if packet is None:  # the fork server died, and with it the connection to the supervisors
            for pid in self.leaders:
                kill_group(pid)
            os._exit(1)
        match packet:
            case messages.ForkAgent():
                pid = fork_agent(self, packet)
                send_packet(self._forkserver, messages.AgentForked(ticket=packet.ticket, pid=pid))
            case messages.GrowBranch():
                self._growth = packet  # see serve()
            case messages.RetireBranch():
                self._retired = True

    def ended(self, pid: int, code: int) -> None:
        """Report the exit of an agent."""
        if pid in self.leaders:
            send_packet(self._forkserver, messages.AgentExited(pid=pid, code=code))


def fork_agent(forker: Forker, message: messages.ForkAgent) -> int:
    """Fork an agent from the fork server or a branch; return its pid."""
    from nbtoolkit.launcher.agent import run_agent

    fds = message.descriptors.numbers()
    pid = forker.fork(
        lambda: run_agent(message), keep=fds, parent_death=signal.SIGKILL, leader=True
    )
    close_all(fds)
    return pid


def run_branch(forkserver: socket.socket, names: list[str], environ: dict[str, str]) -> None:
    """Be a branch: import modules and serve; then, in the process of the next branch, be that one.

    This is a loop, because a branch within the call of the previous branch, and so each rank, would
    have seven more frames on its stack: after 140 branches Python's limit is reached.

    Args:
        forkserver: the connection to the fork server.
        names: the modules.
        environ: replaces the environment variables.
    """
    os.environ.clear()
    os.environ.update(environ)
    branch: tuple[socket.socket, list[str]] | None = forkserver, names
    while branch is not None:
        forkserver, names = branch
        _become_branch(forkserver, names)
        branch = PreloadBranch(forkserver).serve()


def _become_branch(forkserver: socket.socket, names: list[str]) -> None:
    """Import modules; exit with code 3 if the process is not fork-safe afterwards."""
    send_packet(forkserver, messages.BranchStarted(pid=os.getpid()))
    # Imports create many objects that stay: torch._dynamo takes 1.0 s with the collector, 0.6 s
    # without.
    gc.disable()
    roots = installed_roots()
    for name in names:
        _import_installed(name, roots)
    preload()  # in case the fork server was still importing when this branch was forked
    from nbtoolkit.environment.hardware import detect_hardware

    device = bool(detect_hardware().usable)
    if threading.active_count() > 1 or not probe_fork(device=device):
        os._exit(3)
    gc.freeze()
    gc.enable()
    # During the imports nothing reads the socket, so this process dies with its parent. From here
    # on the end of the socket shows the end of the fork server, and the previous branch may exit.
    die_with_parent(0)
    send_packet(forkserver, messages.ServerReady())


def _import_installed(name: str, roots: tuple[str, ...]) -> None:
    """Import an installed module; ignore errors, which the rank's own import will raise."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin and spec.origin.startswith(roots):
            importlib.import_module(name)
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, MemoryError)):
            raise
