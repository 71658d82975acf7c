"""Imports ahead of need: a branch of the launchpad imports what the ranks import.

While a rank imports, say, transformers, a branch does the same beside it; the next launch forks its
ranks from the branch, where the import is done. A branch is made, import by import, by forking the
one before; an import that leaves a process which is not fork-safe (see probe.py), or that starts a
thread, is remembered and left to the ranks.

Nothing from the working directory or an editable install is imported here: a changed file must take
effect. A branch holds for one set of environment variables, since many packages read them at
import.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib
import json
import os
import selectors
import signal
import site
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import FrameType
from typing import Any

from nbtoolkit.runtime.forker import Forker, close_all, die_with_parent, kill_group
from nbtoolkit.runtime.probe import probe_fork
from nbtoolkit.runtime.wire import Message, packet_pair, receive_packet, send_packet

# Known not to survive a fork although a probe of torch passes: they keep native threads and
# connections of their own.
_NEVER = frozenset(
    {"tensorflow", "jax", "jaxlib", "ray", "grpc", "pyspark", "torch_xla", "triton", "bitsandbytes"}
)

# What scikit-learn sets when it is imported. A kernel that imports it between two launches is the
# same environment.
_SET_BY_SCIKIT_LEARN = frozenset({("KMP_DUPLICATE_LIB_OK", "True"), ("KMP_INIT_AT_FORK", "FALSE")})

# Variables that say nothing about how a package behaves. pytest sets its own anew for each test.
_IRRELEVANT = frozenset(
    {"PWD", "OLDPWD", "_", "SHLVL", "COLUMNS", "LINES", "JPY_PARENT_PID", "JPY_SESSION_NAME"}
    | {"PYTEST_CURRENT_TEST"}
)


@functools.cache  # 3 ms, which every rank would pay
def installed_roots() -> tuple[str, ...]:
    """The folders that pip installs into."""
    roots = {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        site.getusersitepackages(),
    }
    roots.update(site.getsitepackages())
    return tuple(os.path.join(root, "") for root in sorted(roots))


def environment_key(environ: Mapping[str, str]) -> str:
    """Equal for environments under which imports behave alike."""
    kept = sorted(
        (name, value)
        for name, value in environ.items()
        if name not in _IRRELEVANT and not _is_set_by_library(name, value)
    )
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]


def _is_set_by_library(name: str, value: str) -> bool:
    """Whether a library sets this variable to this value, and not the user."""
    if name == "TORCHINDUCTOR_CACHE_DIR":
        # torch sets it to <tmp>/torchinductor_<user> when the first optimizer is made.
        return os.path.basename(value).startswith("torchinductor_")
    return (name, value) in _SET_BY_SCIKIT_LEARN


class ImportNotes:
    """In a rank: notes which installed packages are imported, the moment their import begins."""

    def __init__(self, tell: Callable[[list[str]], None]) -> None:
        self._tell, self._roots = tell, installed_roots()
        self._told: set[str] = set()
        # Not what was there at the start: to look through sys.modules copies 2,000 pages that the
        # launchpad shares, 6 ms.
        self._asked: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The import system's question; answered as the other finders do."""
        if not _is_import():
            return None
        root, dot, _ = name.partition(".")
        if dot:
            # a late part of what the launchpad has: torch._dynamo takes 1 s at the first optimizer
            if root not in self._asked and _is_outermost():
                self._tell([name])
            return None
        self._asked.add(name)
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                if spec.origin and spec.origin.startswith(self._roots):
                    self._told.add(name)
                    self._tell([name])
                return spec
        return None

    def tell_submodules(self) -> None:
        """The submodules that came later, for packages that load their parts lazily."""
        if not self._told:
            return
        late = [
            name for name in sys.modules if "." in name and name.partition(".")[0] in self._told
        ]
        if late:
            self._tell(sorted(late)[:2000])


def _is_import() -> bool:
    """Whether a module is imported, and not just looked for (importlib.util.find_spec).

    torch._dynamo looks for pandas and scikit-learn, and a branch would take 1.6 s to import them.
    """
    # Frames: this function, ImportNotes.find_spec, the import system's _find_spec, its caller.
    asker = sys._getframe(3)
    return asker.f_code.co_filename.startswith("<frozen importlib._bootstrap>")


def _is_outermost() -> bool:
    """Whether the import that asks is not part of another one (which brings it along)."""
    frame: FrameType | None = sys._getframe(2)
    running = 0
    while frame is not None and running < 2:
        code = frame.f_code
        running += code.co_name == "_find_and_load" and code.co_filename.startswith("<frozen")
        frame = frame.f_back
    return running == 1


class Ahead:
    """In the launchpad: the branch in use, the one that grows, and what is still to be imported."""

    def __init__(
        self,
        fork: Callable[..., int],
        listen: Callable[[socket.socket, Callable[[], None]], None],
        forget: Callable[[socket.socket], None],
        exited: Callable[[int, int], None],
        forked: Callable[[int, int], None],
        branched: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        self._fork, self._listen, self._forget = fork, listen, forget
        self._exited, self._forked = exited, forked
        self._branched, self._failed = branched, failed
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
        """The branch to fork ranks from in an environment; None: the launchpad itself."""
        fits = key == self._key and self._installed == _installed_state()
        return self._branch if fits else None

    def begins(self, key: str) -> bool:
        """Whether the first branch for an environment is being made: there will be one soon."""
        return self._branch is None and self._growing is not None and key == self._key

    def drop(self) -> None:
        """Let all branches go, once their pilots have ended."""
        for sock in (self._branch, self._growing):
            if sock is not None:
                send_packet(sock, {"op": "retire"})
        if self._branch is not None:
            self._branched()
        if self._growing is not None:
            self._failed()
        self._branch = self._growing = None
        self._wanted.clear()
        self._known.clear()

    def close(self) -> None:
        """The launchpad ends."""
        for sock in list(self._branches):
            self._gone(sock)

    @property
    def pids(self) -> list[int]:
        """The branches' processes."""
        return [pid for pid in self._branches.values() if pid is not None]

    @property
    def descriptors(self) -> list[int]:
        """Sockets that belong to the launchpad alone."""
        return [sock.fileno() for sock in self._branches]

    def _grow(self) -> None:
        """Fork the next branch off the present one (or off the launchpad)."""
        if self._growing is not None or not self._wanted:
            return
        names = self._wanted.pop(0)
        ours, theirs = packet_pair()
        self._branches[ours] = None
        self._growing = ours
        self._listen(ours, lambda: self._hear(ours))
        if self._branch is not None:
            message = {"op": "grow", "names": names}
            send_packet(self._branch, message, [theirs.fileno()])
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
        message, _ = packet
        if message["op"] == "hello":
            self._branches[sock] = message["pid"]
        elif message["op"] == "forked":
            self._forked(message["token"], message["pid"])
        elif message["op"] == "exited":
            self._exited(message["pid"], message["code"])
        elif message["op"] == "ready" and sock is self._growing:
            if self._branch is not None:
                send_packet(self._branch, {"op": "retire"})
            self._branch, self._growing = sock, None
            self._branched()
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
            self._failed()


def _installed_state() -> tuple[float, ...]:
    """Changes when something is installed or removed: earlier imports may be stale then."""
    times = []
    for root in installed_roots():
        with contextlib.suppress(OSError):
            times.append(os.stat(root).st_mtime)
    return tuple(times)


# --- the branch's own process ---


class Branch(Forker):
    """A copy of the launchpad with more imported; forks pilots, and the branch after it."""

    def __init__(self, launchpad: socket.socket) -> None:
        super().__init__()
        self._launchpad = launchpad
        self._pilots: set[int] = set()
        self._retired = False
        self.selector.register(launchpad, selectors.EVENT_READ, self._request)

    def serve(self) -> None:
        """Fork until retired or until the launchpad is gone, and the last pilot with it."""
        while not self._retired or self._pilots:
            self.turn()

    def _request(self) -> None:
        packet = receive_packet(self._launchpad)
        if packet is None:  # the launchpad died: nobody is left to hear of the ranks
            for pid in self._pilots:
                kill_group(pid)
            os._exit(1)
        message, fds = packet
        if message["op"] == "pilot":
            self._fork_pilot(message, fds)
        elif message["op"] == "grow":
            sock = socket.socket(fileno=fds[0])
            self.fork(
                lambda: run_branch(sock, message["names"], None),
                keep=fds,
                parent_death=signal.SIGKILL,
            )
            sock.close()
        elif message["op"] == "retire":
            self._retired = True

    def _fork_pilot(self, message: Message, fds: list[int]) -> None:
        from nbtoolkit.runtime.zygote import run_pilot

        pid = self.fork(
            lambda: run_pilot(message, fds), keep=fds, parent_death=signal.SIGKILL, leader=True
        )
        self._pilots.add(pid)
        close_all(fds)
        send_packet(self._launchpad, {"op": "forked", "token": message["token"], "pid": pid})

    def is_group(self, pid: int) -> bool:
        """See :class:`Forker`."""
        return pid in self._pilots

    def ended(self, pid: int, code: int) -> None:
        """See :class:`Forker`."""
        if pid in self._pilots:
            self._pilots.discard(pid)
            send_packet(self._launchpad, {"op": "exited", "pid": pid, "code": code})


def run_branch(launchpad: socket.socket, names: list[str], environ: dict[str, str] | None) -> None:
    """Import, prove to be fork-safe, then serve; ends when an import fails the proof."""
    if environ is not None:
        os.environ.clear()
        os.environ.update(environ)
    send_packet(launchpad, {"op": "hello", "pid": os.getpid()})
    gc.disable()  # imports make much that stays: torch._dynamo takes 1.0 s with it, 0.6 s without
    roots = installed_roots()
    for name in names:
        _import_installed(name, roots)
    _import_the_rest()
    device = _has_gpu()
    if threading.active_count() > 1 or not probe_fork(device=device).ok:
        os._exit(3)
    gc.freeze()
    gc.enable()
    # An import hears of no end: until here its parent's was this one's. From here on the socket's
    # end tells of the launchpad's, and the branch before this one may go.
    die_with_parent(0)
    send_packet(launchpad, {"op": "ready"})
    Branch(launchpad).serve()


def _import_the_rest() -> None:
    """What the launchpad has not imported yet, where the branch left it before it was done."""
    from nbtoolkit.runtime.zygote import preload

    preload()


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
    from nbtoolkit.runtime.hardware import detect_hardware

    return bool(detect_hardware().usable)
