"""The launchpad's process: a clean interpreter with torch imported, that accepts, forks and reaps.

It forks owners (one a run) for the kernel, pilots (one a group of ranks) for owners, and one
tracking service. It has no threads of its own, never computes, never touches a device and never
imports anything from the working directory. It watches its sockets for their end: kernel gone means
no new run; it goes itself when its last child has gone.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from nbtoolkit.runtime.ahead import Ahead
from nbtoolkit.runtime.forker import Forker, close_all, kill_group
from nbtoolkit.runtime.signals import ignore_warnings
from nbtoolkit.runtime.wire import Message, packet_pair, receive_packet, send_packet

# Imported first: a branch that is wanted at once begins from here, beside the rest.
FIRST = ("torch",)

# Imported once here, for owners, pilots and ranks alike; the last ones are what elastic and a rank
# would otherwise import in each launch, some milliseconds each.
PRELOADED = (
    "accelerate",
    "cloudpickle",
    "tblib",
    "torch.distributed.launcher.api",
    "torch.nn.parallel",
    "torch.utils.data",
    "nbtoolkit.config",
    "nbtoolkit.runtime.owner",
    "nbtoolkit.runtime.pilot",
    "nbtoolkit.runtime.worker",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
    "numpy.random",
    "encodings.idna",
    "shutil",
)


# accelerate 1.6 (Kaggle's) imports torchao where it finds it, which initialises CUDA and so breaks
# every fork (accelerate#3524). In a rank they are importable again.
TOUCH_DEVICES = ("torchao", "bitsandbytes")


@dataclass
class Owner:
    """An owner process: the socket it asks for pilots on, and the pilots it has."""

    socket: socket.socket
    pilots: set[int] = field(default_factory=set)


class Zygote(Forker):
    """Accepts requests from the kernel and from owners, forks, reaps."""

    def __init__(self, kernel: socket.socket) -> None:
        super().__init__()
        self._kernel: socket.socket | None = kernel
        self._owners: dict[int, Owner] = {}
        self._pilots: dict[int, int] = {}  # pilot -> its owner
        # requests that a branch is working on -> their owner, and what it calls them
        self._tokens: dict[int, tuple[int, int]] = {}
        self._own_pilots: set[int] = set()  # those forked here, not in a branch
        # Pilots for the first branch, which is about to be there: its owner, message, descriptors.
        self._patient: list[tuple[int, Message, list[int]]] = []
        self._tracking: socket.socket | None = None
        self._tracking_pid: int | None = None
        self._ahead = Ahead(
            self.fork,
            self._listen,
            self._forget,
            self._pilot_ended,
            self._branch_forked,
            self._branched,
            self._lose_patience,
        )
        self._listen(kernel, self._from_kernel)

    def serve(self) -> None:
        """Accept, fork and reap until the kernel, every owner and the tracking service are gone."""
        while self._kernel is not None or self._owners or self._tracking_pid is not None:
            self.turn()
            if self._kernel is None and not self._owners:
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
        message, fds = packet
        if message["op"] == "run":
            self._fork_owner(run_conductor if message["search"] else run_owner, fds)
        elif message["op"] == "imports":
            self._import_ahead(message, fds)
        elif message["op"] == "preload":
            self._preload(message["names"])
        elif message["op"] == "track":
            self._track(message)
        elif message["op"] == "pids":
            tracking = [self._tracking_pid] if self._tracking_pid is not None else []
            pids = [os.getpid(), *tracking, *self._ahead.pids]
            send_packet(self._kernel, {"op": "pids", "pids": pids})

    def _preload(self, names: list[str]) -> None:
        """Import what conductors need, and call functions ("module:function") that prepare it.

        Each conductor would take a second for it.
        """
        gc.disable()
        for name in names:
            module, _, function = name.partition(":")
            loaded = import_module(module)
            if function:
                getattr(loaded, function)()
        gc.freeze()
        gc.enable()
        assert self._kernel is not None
        send_packet(self._kernel, {"op": "preloaded"})

    def _fork_owner(self, run: Callable[[socket.socket, list[int]], None], fds: list[int]) -> None:
        ours, theirs = packet_pair()

        def child() -> None:
            ours.close()  # else the owner would hold its own line open and not hear of our end
            run(theirs, fds)

        pid = self.fork(child, keep=[theirs.fileno(), *fds])
        theirs.close()
        close_all(fds)
        self._owners[pid] = Owner(ours)
        self._listen(ours, lambda: self._from_owner(pid))
        if self._kernel is not None:
            send_packet(self._kernel, {"op": "forked", "pid": pid})

    def _from_owner(self, owner: int) -> None:
        sock = self._owners[owner].socket
        packet = receive_packet(sock)
        if packet is None:
            self._forget(sock)
            return
        message, fds = packet
        if message["op"] == "pilot":
            self._fork_pilot(owner, message, fds)
        elif message["op"] == "imports":
            self._import_ahead(message, fds)

    def _import_ahead(self, message: Message, fds: list[int]) -> None:
        with os.fdopen(fds[0]) as environ:
            self._ahead.want(message["names"], json.load(environ))

    def _fork_pilot(self, owner: int, message: Message, fds: list[int]) -> None:
        if message["patient"] and self._ahead.begins(message["environment"]):
            self._patient.append((owner, message, fds))
            return
        branch = self._ahead.branch_for(message["environment"])
        token = max(self._tokens, default=0) + 1
        if branch is not None and send_packet(branch, {**message, "token": token}, fds):
            self._tokens[token] = owner, message["ticket"]
        else:
            pid = self.fork(
                lambda: run_pilot(message, fds), keep=fds, parent_death=signal.SIGKILL, leader=True
            )
            self._own_pilots.add(pid)
            self._pilot_forked(owner, message["ticket"], pid)
        close_all(fds)

    def start_tracking(self) -> None:
        """Fork the tracking service."""
        self._tracking, theirs = packet_pair()
        self._tracking_pid = self.fork(lambda: run_tracking(theirs), keep=[theirs.fileno()])
        theirs.close()

    def _track(self, message: Message) -> None:
        if self._tracking is None:
            self.start_tracking()
        assert self._tracking is not None
        if not send_packet(self._tracking, message):  # it died: the next request starts another
            self._end_tracking()

    def _end_tracking(self) -> None:
        if self._tracking is not None:
            self._tracking.close()
            self._tracking = None

    # --- pilots, wherever they were forked ---

    def _branched(self) -> None:
        """Another branch is in use: ranks forked ahead from the one before lack its imports."""
        for owner in self._owners.values():
            send_packet(owner.socket, {"op": "branched"})
        self._lose_patience()

    def _lose_patience(self) -> None:
        """Fork who waited for the first branch: it is there, or it will not come."""
        while self._patient:
            owner, message, fds = self._patient.pop(0)
            self._fork_pilot(owner, {**message, "patient": False}, fds)

    def _branch_forked(self, token: int, pid: int) -> None:
        self._pilot_forked(*self._tokens.pop(token), pid)

    def _pilot_forked(self, owner: int, ticket: int, pid: int) -> None:
        if owner not in self._owners:  # it died meanwhile
            kill_group(pid)
            return
        self._pilots[pid] = owner
        self._owners[owner].pilots.add(pid)
        send_packet(self._owners[owner].socket, {"op": "forked", "ticket": ticket, "pid": pid})

    def _pilot_ended(self, pid: int, code: int) -> None:
        owner = self._owners.get(self._pilots.pop(pid, -1))
        if owner is not None:
            owner.pilots.discard(pid)
            send_packet(owner.socket, {"op": "exited", "pid": pid, "code": code})

    # --- what the loop asks ---

    def is_group(self, pid: int) -> bool:
        """See :class:`Forker`."""
        return pid in self._own_pilots

    def ended(self, pid: int, code: int) -> None:
        """See :class:`Forker`."""
        if pid in self._own_pilots:
            self._own_pilots.discard(pid)
            self._pilot_ended(pid, code)
        elif pid in self._owners:
            owner = self._owners.pop(pid)
            for pilot in owner.pilots:
                kill_group(pilot)
            self._forget(owner.socket)
            owner.socket.close()
        elif pid == self._tracking_pid:
            self._tracking_pid = None
            self._end_tracking()

    def descriptors(self) -> list[int]:
        """See :class:`Forker`."""
        tracking = [self._tracking.fileno()] if self._tracking is not None else []
        waiting = [fd for _, _, fds in self._patient for fd in fds]
        owners = [owner.socket.fileno() for owner in self._owners.values()]
        return [*owners, *tracking, *waiting, *self._ahead.descriptors]

    def _listen(self, sock: socket.socket, hear: Callable[[], None]) -> None:
        self.selector.register(sock, selectors.EVENT_READ, hear)

    def _forget(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(sock)


# --- what the children are ---


def run_owner(launchpad: socket.socket, fds: list[int]) -> None:
    """The main function of an owner's process."""
    from nbtoolkit.runtime.owner import own

    payload, kernel, lock, *forked = fds
    own(payload, socket.socket(fileno=kernel), launchpad, lock, forked)


def run_conductor(launchpad: socket.socket, fds: list[int]) -> None:
    """The main function of a search's process."""
    from nbtoolkit.search.conductor import conduct

    payload, kernel, lock, own = fds
    conduct(payload, socket.socket(fileno=kernel), launchpad, lock, own)


def run_pilot(message: dict[str, Any], fds: list[int]) -> None:
    """The main function of a pilot's process."""
    from nbtoolkit.runtime.pilot import fly

    lines = 2 * int(message["plan"]["processes"])  # see flight.rank_lines
    payload, line, *rest = fds
    fly([payload, *rest[lines:]], message, socket.socket(fileno=line), rest[:lines])


def run_tracking(control: socket.socket) -> None:
    """The main function of the tracking service."""
    from nbtoolkit.tracking import run_service

    run_service(control)


def preload(names: Iterable[str] = PRELOADED) -> None:
    """Import what every launch needs, and nothing that touches a device."""
    hidden = {name: None for name in TOUCH_DEVICES if name not in sys.modules}
    sys.modules.update(hidden)  # type: ignore[arg-type]  # None: "not installed", says the import system
    for name in names:
        import_module(name)
    for name in hidden:
        del sys.modules[name]


def main(kernel_fd: int, tracking: bool) -> None:
    """Start the launchpad's process on an inherited socket.

    Args:
        kernel_fd: the socket.
        tracking: start the tracking service first: it imports MLflow while torch is imported here.
    """
    # Python 3.12 warns on fork beside threads; the idle BLAS threads that numpy leaves here are
    # harmless (see probe.py).
    warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
    ignore_warnings()  # of a scheduler: it goes with the kernel and the owners, who heed them
    gc.disable()  # until all is imported: it would look through what stays again and again
    kernel = socket.socket(fileno=kernel_fd)
    zygote = Zygote(kernel)
    if tracking:
        zygote.start_tracking()
    preload(FIRST)
    zygote.turn(0.0)  # what is wanted already is imported by a branch, beside the rest here
    preload()
    send_packet(kernel, {"op": "ready", "pid": os.getpid()})
    gc.freeze()  # children share these objects' pages as long as the collector leaves them alone
    gc.enable()
    zygote.serve()
