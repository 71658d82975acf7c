"""Fork and reap child processes."""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


class Forker:
    """Base class of a single-threaded loop over sockets and exited children."""

    def __init__(self) -> None:
        self.leaders: set[int] = set()
        """Children that lead process groups, which end with them."""
        self.selector = selectors.DefaultSelector()
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_write, False)
        os.set_blocking(self._wakeup_read, False)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self._wakeup_read, selectors.EVENT_READ, self._reap)

    def turn(self, seconds: float | None = None) -> None:
        """Wait for events, at most ``seconds`` (None: no limit), and handle them."""
        for key, _ in self.selector.select(seconds):
            # Handling one event may have closed the socket of another (a reaped supervisor's).
            if self.selector.get_map().get(key.fd) is key:
                key.data()

    def listen(self, sock: socket.socket, on_readable: Callable[[], None]) -> None:
        """Call ``on_readable`` whenever a socket is readable, or its other end is closed."""
        self.selector.register(sock, selectors.EVENT_READ, on_readable)

    def forget(self, sock: socket.socket) -> None:
        """Undo :meth:`listen`, if the socket is still listened to."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(sock)

    def fork(
        self,
        run: Callable[[], None],
        *,
        keep: list[int],
        parent_death: int = 0,
        leader: bool = False,
    ) -> int:
        """Fork a child that calls ``run`` and exits.

        Args:
            run: the child's main function.
            keep: descriptors that it keeps; it closes all others of this loop.
            parent_death: the signal that it receives when this process dies; 0: none.
            leader: whether it leads its own process group.

        Returns:
            The child's pid.
        """
        pid = self.fork_in_place(keep=keep, parent_death=parent_death, leader=leader)
        if not pid:
            run_and_exit(run)
        return pid

    def fork_in_place(self, *, keep: list[int], parent_death: int = 0, leader: bool = False) -> int:
        """Fork a child that returns from this call with 0, as from ``os.fork``.

        The arguments are those of :meth:`fork`. The child must not use this loop, which is closed.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            if leader:
                self.leaders.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.setpgid(pid, pid)  # the child does so, too: either may be first
            return pid
        try:
            self._become_child(keep, parent_death, leader)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        return 0

    def descriptors(self) -> list[int]:
        """Further descriptors that children close, besides those in the selector."""
        return []

    def ended(self, pid: int, code: int) -> None:
        """Handle a child that has exited and is reaped; ``code`` is negative for a signal.

        It is still in :attr:`leaders` if it was one.
        """
        raise NotImplementedError

    def _become_child(self, keep: list[int], parent_death: int, leader: bool) -> None:
        gc.enable()  # the fork server disables it while it imports
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if leader:
            os.setpgid(0, 0)
        if parent_death:
            die_with_parent(parent_death)
        fds = {self._wakeup_read, self._wakeup_write, *self.descriptors()}
        fds |= {key.fd for key in self.selector.get_map().values()}
        self.selector.close()
        close_all(sorted(fds - set(keep)))

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
            # Before it is reaped, its pid cannot belong to another process: kill its group now, the
            # ranks and DataLoader workers that have outlived their agent.
            if info.si_pid in self.leaders:
                kill_group(info.si_pid)
            _, status = os.waitpid(info.si_pid, 0)
            self.ended(info.si_pid, os.waitstatus_to_exitcode(status))
            self.leaders.discard(info.si_pid)


def run_and_exit(run: Callable[[], None]) -> NoReturn:
    """Run the main function of a forked process, and end it."""
    try:
        run()
    except BaseException as error:
        end_process(error)
    end_process(None)


def end_process(error: BaseException | None) -> NoReturn:
    """End a forked process: with the code of a SystemExit, with 1 after another exception."""
    code = 1
    try:
        if error is None:
            code = 0
        elif isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 1
        else:
            traceback.print_exception(error)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def kill_group(pid: int) -> None:
    """SIGKILL a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def close_all(fds: list[int]) -> None:
    """Close descriptors; ignores those that are already closed."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def die_with_parent(number: int) -> None:
    """Ask Linux for signal ``number`` when the parent thread ends (PR_SET_PDEATHSIG)."""
    from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

    _prctl_pr_set_pdeathsig(number)
