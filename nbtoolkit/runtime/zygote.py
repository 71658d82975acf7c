"""The launchpad's process: one clean interpreter with torch and accelerate imported, that only accepts, forks and reaps.

It forks owners (one a run) for the kernel, pilots (one a group of ranks) for owners, and one tracking service. It has no
threads of its own, never computes, never touches a device and never imports anything from the working directory. It watches its
sockets for their end: kernel gone means no new run; it goes itself when its last child has gone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nbtoolkit.runtime.wire import Message, packet_pair, receive_packet, send_packet


@dataclass
class Child:
    """A forked process: what it is, and the line on which its requester is told of its end."""

    kind: str
    socket: socket.socket | None = None
    owner: int | None = None
    pilots: set[int] = field(default_factory=set)


class Zygote:
    """Accepts requests from the kernel and from owners, forks, reaps."""

    def __init__(self, kernel: socket.socket) -> None:
        self._kernel: socket.socket | None = kernel
        self._children: dict[int, Child] = {}
        self._tracking: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(kernel, selectors.EVENT_READ, self._from_kernel)
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_write, False)
        os.set_blocking(self._wakeup_read, False)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._wakeup_read, selectors.EVENT_READ, self._reap)

    def serve(self) -> None:
        """Accept, fork and reap until the kernel and every child are gone."""
        while self._kernel is not None or self._children:
            for key, _ in self._selector.select():
                key.data()

    # --- requests -------------------------------------------------------------------------------------------------

    def _from_kernel(self) -> None:
        assert self._kernel is not None
        packet = receive_packet(self._kernel)
        if packet is None:
            self._selector.unregister(self._kernel)
            self._kernel.close()
            self._kernel = None
            self._end_tracking()  # it writes what has ended, then goes
            return
        message, fds = packet
        if message["op"] == "run":
            self._fork_owner(fds)
        elif message["op"] == "track":
            self._track(message)

    def _fork_owner(self, fds: list[int]) -> None:
        ours, theirs = packet_pair()
        pid = self._fork(lambda: _run_owner(theirs, fds), keep=[theirs.fileno(), *fds])
        theirs.close()
        _close(fds)
        self._children[pid] = Child("owner", ours)
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._from_owner(pid, ours))
        if self._kernel is not None:
            send_packet(self._kernel, {"op": "forked", "pid": pid})

    def _from_owner(self, owner: int, sock: socket.socket) -> None:
        packet = receive_packet(sock)
        if packet is None:
            self._selector.unregister(sock)
            return
        message, fds = packet
        pid = self._fork(lambda: _run_pilot(message, fds), keep=fds, parent_death=signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)  # the child does so too; whoever is first
        _close(fds)
        self._children[pid] = Child("pilot", sock, owner)
        self._children[owner].pilots.add(pid)
        send_packet(sock, {"op": "forked", "pid": pid})

    def _track(self, message: Message) -> None:
        if self._tracking is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = self._fork(lambda: _run_tracking(theirs), keep=[theirs.fileno()])
            theirs.close()
            self._children[pid] = Child("tracking")
            self._tracking = ours
        if not send_packet(self._tracking, message):  # it died: the next request starts another
            self._end_tracking()

    def _end_tracking(self) -> None:
        if self._tracking is not None:
            self._tracking.close()
            self._tracking = None

    # --- fork and reap --------------------------------------------------------------------------------------------

    def _fork(self, run: Callable[[], None], *, keep: list[int], parent_death: int = 0) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            self._become_child(keep, parent_death)
            run()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _become_child(self, keep: list[int], parent_death: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if parent_death:
            die_with_parent(parent_death)
        mine = [self._wakeup_read, self._wakeup_write]
        mine += [key.fd for key in self._selector.get_map().values()]
        mine += [child.socket.fileno() for child in self._children.values() if child.socket]
        mine += [self._tracking.fileno()] if self._tracking is not None else []
        self._selector.close()
        _close(sorted(set(mine) - set(keep) - {-1}))

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
            self._bury(info.si_pid)

    def _bury(self, pid: int) -> None:
        """Clean up after a child that has ended; its pid is still reserved, so its group can be killed safely."""
        child = self._children.pop(pid, None)
        if child is not None and child.kind == "pilot":
            _kill_group(pid)  # ranks and DataLoader workers that outlived it
        _, status = os.waitpid(pid, 0)
        if child is None:
            return
        if child.kind == "pilot" and child.owner in self._children:
            assert child.socket is not None
            self._children[child.owner].pilots.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            send_packet(child.socket, {"op": "exited", "pid": pid, "code": code})
        elif child.kind == "owner":
            for pilot in child.pilots:
                _kill_group(pilot)
            assert child.socket is not None
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(child.socket)
            child.socket.close()
        elif child.kind == "tracking":
            self._end_tracking()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _close(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def die_with_parent(number: int) -> None:
    """Ask Linux for signal ``number`` when the thread that forked this process ends (prctl PR_SET_PDEATHSIG)."""
    from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

    _prctl_pr_set_pdeathsig(number)


# --- what the children are ------------------------------------------------------------------------------------------


def _run_owner(launchpad: socket.socket, fds: list[int]) -> None:
    from nbtoolkit.runtime.owner import own

    payload, kernel, _lock, *forked = fds  # the run stays locked as long as this process holds the descriptor
    own(payload, socket.socket(fileno=kernel), launchpad, forked)


def _run_pilot(message: dict[str, Any], fds: list[int]) -> None:
    from nbtoolkit.runtime.pilot import fly

    payload, line, *ranks = fds
    fly(payload, message, socket.socket(fileno=line), ranks)


def _run_tracking(control: socket.socket) -> None:
    from nbtoolkit.tracking import run_service

    run_service(control)


def main(kernel_fd: int) -> None:
    """Start the launchpad's process on an inherited socket."""
    # Python 3.12 warns on fork beside threads; the idle BLAS threads that numpy leaves here are harmless (see probe.py).
    warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
    import accelerate  # noqa: F401  (imported ahead, once for all ranks)
    import cloudpickle  # noqa: F401
    import tblib  # noqa: F401
    import torch.distributed.launcher.api
    import torch.nn.parallel
    import torch.utils.data  # noqa: F401

    import nbtoolkit.config
    import nbtoolkit.runtime.owner
    import nbtoolkit.runtime.pilot
    import nbtoolkit.runtime.worker  # noqa: F401

    kernel = socket.socket(fileno=kernel_fd)
    zygote = Zygote(kernel)
    send_packet(kernel, {"op": "ready", "pid": os.getpid()})
    gc.collect()
    gc.freeze()  # the children share these objects' pages as long as the collector does not write to them
    zygote.serve()
