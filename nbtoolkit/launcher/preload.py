"""Import what ranks will import before they need it, in a branch of the fork server.

While a rank imports, say, transformers, a branch does the same beside it; the next launch forks its
ranks from the branch, where the import is done. A branch is made, import by import, by forking the
one before; an import that leaves a process which is not fork-safe (see fork_diagnosis.py), or that
starts a thread, is remembered and left to the ranks.

Nothing from the working directory or an editable install is imported here: a changed file must take
effect. A branch holds for one set of environment variables, since many packages read them at
import.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable

from nbtoolkit.environment.fork_diagnosis import probe_fork
from nbtoolkit.environment.installed import environment_key, installed_roots
from nbtoolkit.run import messages
from nbtoolkit.run.transport import packet_pair, receive_packet, send_packet
from nbtoolkit.worker.forking import Forker, close_all, die_with_parent, kill_group

# Known not to survive a fork although a probe of torch passes: they keep native threads and
# connections of their own.
_NEVER = frozenset(
    {"tensorflow", "jax", "jaxlib", "ray", "grpc", "pyspark", "torch_xla", "triton", "bitsandbytes"}
)

# Imported first: a branch that is wanted at once begins from here, beside the rest.
FIRST = ("torch",)

# Imported once here, for supervisors, agents and ranks alike; the last ones are what elastic and a
# rank would otherwise import in each launch, some milliseconds each.
PRELOADED = (
    "accelerate",
    "cloudpickle",
    "tblib",
    "torch.distributed.launcher.api",
    "torch.nn.parallel",
    "torch.utils.data",
    "nbtoolkit.config.schema",
    "nbtoolkit.launcher.supervisor",
    "nbtoolkit.launcher.agent",
    "nbtoolkit.worker.main",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
    "numpy.random",
    "encodings.idna",
    "psutil",
    "shutil",
)


# accelerate 1.6 (Kaggle's) imports torchao where it finds it, which initialises CUDA and so breaks
# every fork (accelerate#3524). In a rank they are importable again.
TOUCH_DEVICES = ("torchao", "bitsandbytes")


def preload(names: Iterable[str] = PRELOADED) -> None:
    """Import what every launch needs, and nothing that touches a device."""
    hidden = {name: None for name in TOUCH_DEVICES if name not in sys.modules}
    sys.modules.update(hidden)  # type: ignore[arg-type]  # None: "not installed", says the import system
    for name in names:
        importlib.import_module(name)
    for name in hidden:
        del sys.modules[name]


class Preloader:
    """The branch in use, the one that grows, and what is still to be imported."""

    def __init__(
        self,
        fork: Callable[..., int],
        listen: Callable[[socket.socket, Callable[[], None]], None],
        forget: Callable[[socket.socket], None],
        exited: Callable[[int, int], None],
        forked: Callable[[int, int], None],
        settled: Callable[[], None],
    ) -> None:
        self._fork, self._listen, self._forget = fork, listen, forget
        self._exited, self._forked = exited, forked
        self._settled = settled  # the growing branch is ready, or will not come
        self._key: str | None = None
        self._branch: socket.socket | None = None
        self._growing: socket.socket | None = None
        self._wanted: list[list[str]] = []
        self._known: set[str] = set()
        self._installed = _installed_state()
        self._environ: dict[str, str] = {}
        # with their pids, once they have said so
        self._branches: dict[socket.socket, int | None] = {}

    def want(self, names: list[str], environ: dict[str, str]) -> None:
        """Import ``names`` as soon as possible, under ``environ``."""
        key = environment_key(environ)
        if key != self._key or self._installed != _installed_state():
            self.drop()
            self._key, self._environ, self._installed = key, environ, _installed_state()
        new = [
            name
            for name in names
            if name not in self._known and name.partition(".")[0] not in _NEVER
        ]
        self._known.update(new)
        if new:
            self._wanted.append(new)
            self._grow()

    def branch_for(self, key: str) -> socket.socket | None:
        """The branch to fork ranks from in an environment; None: the fork server itself."""
        fits = key == self._key and self._installed == _installed_state()
        return self._branch if fits else None

    def begins(self, key: str) -> bool:
        """Whether the first branch for an environment is being made: there will be one soon."""
        return self._branch is None and self._growing is not None and key == self._key

    def drop(self) -> None:
        """Let all branches go, once their agents have ended."""
        for sock in (self._branch, self._growing):
            if sock is not None:
                send_packet(sock, messages.RetireBranch())
        if self._growing is not None:
            self._settled()
        self._branch = self._growing = None
        self._wanted.clear()
        self._known.clear()

    def close(self) -> None:
        """The fork server ends."""
        for sock in list(self._branches):
            self._gone(sock)

    @property
    def pids(self) -> list[int]:
        """The branches' processes."""
        return [pid for pid in self._branches.values() if pid is not None]

    @property
    def descriptors(self) -> list[int]:
        """Sockets that belong to the fork server alone."""
        return [sock.fileno() for sock in self._branches]

    def _grow(self) -> None:
        """Fork the next branch off the present one (or off the fork server)."""
        if self._growing is not None or not self._wanted:
            return
        names = self._wanted.pop(0)
        ours, theirs = packet_pair()
        self._branches[ours] = None
        self._growing = ours
        self._listen(ours, lambda: self._hear(ours))
        if self._branch is not None:
            end = messages.FileDescriptor(file=theirs.fileno())
            send_packet(self._branch, messages.GrowBranch(names=names, descriptors=end))
        else:
            environ = self._environ
            self._fork(
                lambda: run_branch(theirs, names, environ),
                keep=[theirs.fileno()],
                parent_death=signal.SIGKILL,
            )
        theirs.close()

    def _hear(self, sock: socket.socket) -> None:
        packet = receive_packet(sock)
        if packet is None:
            self._gone(sock)
            return
        match packet:
            case messages.BranchStarted():
                self._branches[sock] = packet.pid
            case messages.AgentForked():
                self._forked(packet.ticket, packet.pid)
            case messages.AgentExited():
                self._exited(packet.pid, packet.code)
            case messages.ServerReady() if sock is self._growing:
                if self._branch is not None:
                    send_packet(self._branch, messages.RetireBranch())
                self._branch, self._growing = sock, None
                self._settled()
                self._grow()

    def _gone(self, sock: socket.socket) -> None:
        """A branch ended: it retired, or an import was not fork-safe (the ranks do it then)."""
        self._forget(sock)
        self._branches.pop(sock, None)
        sock.close()
        if sock is self._branch:
            self._branch = None
        if sock is self._growing:
            self._growing = None
            self._grow()
            self._settled()


def _installed_state() -> tuple[float, ...]:
    """Changes when something is installed or removed: earlier imports may be stale then."""
    times = []
    for root in installed_roots():
        with contextlib.suppress(OSError):
            times.append(os.stat(root).st_mtime)
    return tuple(times)


# --- the branch's own process ---


class PreloadBranch(Forker):
    """A copy of the fork server with more imported; forks agents, and the branch after it."""

    def __init__(self, forkserver: socket.socket) -> None:
        super().__init__()
        self._forkserver = forkserver
        self._agents: set[int] = set()
        self._retired = False
        self.selector.register(forkserver, selectors.EVENT_READ, self._request)

    def serve(self) -> None:
        """Fork until retired or until the fork server is gone, and the last agent with it."""
        while not self._retired or self._agents:
            self.turn()

    def _request(self) -> None:
        packet = receive_packet(self._forkserver)
        if packet is None:  # the fork server died: nobody is left to hear of the ranks
            for pid in self._agents:
                kill_group(pid)
            os._exit(1)
        match packet:
            case messages.ForkAgent():
                self._fork_agent(packet)
            case messages.GrowBranch(names=names):
                sock = socket.socket(fileno=packet.descriptors.file)
                self.fork(
                    lambda: run_branch(sock, names, None),
                    keep=[sock.fileno()],
                    parent_death=signal.SIGKILL,
                )
                sock.close()
            case messages.RetireBranch():
                self._retired = True

    def _fork_agent(self, message: messages.ForkAgent) -> None:
        from nbtoolkit.launcher.agent import run_agent

        fds = message.descriptors.numbers()
        pid = self.fork(
            lambda: run_agent(message), keep=fds, parent_death=signal.SIGKILL, leader=True
        )
        self._agents.add(pid)
        close_all(fds)
        send_packet(self._forkserver, messages.AgentForked(ticket=message.ticket, pid=pid))

    def is_group(self, pid: int) -> bool:
        """See :class:`Forker`."""
        return pid in self._agents

    def ended(self, pid: int, code: int) -> None:
        """See :class:`Forker`."""
        if pid in self._agents:
            self._agents.discard(pid)
            send_packet(self._forkserver, messages.AgentExited(pid=pid, code=code))


def run_branch(forkserver: socket.socket, names: list[str], environ: dict[str, str] | None) -> None:
    """Import, prove to be fork-safe, then serve; ends when an import fails the proof."""
    if environ is not None:
        os.environ.clear()
        os.environ.update(environ)
    send_packet(forkserver, messages.BranchStarted(pid=os.getpid()))
    gc.disable()  # imports make much that stays: torch._dynamo takes 1.0 s with it, 0.6 s without
    roots = installed_roots()
    for name in names:
        _import_installed(name, roots)
    preload()  # what the fork server had not imported yet when this branch left it
    device = _has_gpu()
    if threading.active_count() > 1 or not probe_fork(device=device).ok:
        os._exit(3)
    gc.freeze()
    gc.enable()
    # An import hears of no end: until here its parent's was this one's. From here on the socket's
    # end tells of the fork server's, and the branch before this one may go.
    die_with_parent(0)
    send_packet(forkserver, messages.ServerReady())
    PreloadBranch(forkserver).serve()


def _import_installed(name: str, roots: tuple[str, ...]) -> None:
    """Import an installed module; if that fails it fails in the rank too, where it is shown."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin and spec.origin.startswith(roots):
            importlib.import_module(name)
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, MemoryError)):
            raise


def _has_gpu() -> bool:
    from nbtoolkit.environment.hardware import detect_hardware

    return bool(detect_hardware().usable)
