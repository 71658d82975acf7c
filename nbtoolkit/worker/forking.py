"""Fork and reap child processes."""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import sys
import traceback
from collections.abc import Callable


class Forker:
    """A single-threaded loop over sockets and ended children; subclasses give both a meaning."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_write, False)
        os.set_blocking(self._wakeup_read, False)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self._wakeup_read, selectors.EVENT_READ, self._reap)

    def turn(self, seconds: float | None = None) -> None:
        """Wait for something to do (None: as long as it takes), and do it."""
        for key, _ in self.selector.select(seconds):
            # what was done for one key of this batch may have closed another (a supervisor that
            # ended and was reaped)
            if self.selector.get_map().get(key.fd) is key:
                key.data()

    def fork(
        self,
        run: Callable[[], None],
        *,
        keep: list[int],
        parent_death: int = 0,
        leader: bool = False,
    ) -> int:
        """Fork a child that calls ``run`` and ends.

        Args:
            run: its main function.
            keep: the descriptors it keeps; all others of this loop are closed in it.
            parent_death: the signal it gets when this process dies; 0: none.
            leader: it leads a process group of its own.

        Returns:
            Its pid.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            if leader:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.setpgid(pid, pid)  # the child does so too; whoever is first
            return pid
        code = 1
        try:
            self._become_child(keep, parent_death, leader)
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

    def descriptors(self) -> list[int]:
        """The descriptors that belong to this process alone (besides those it listens to)."""
        return []

    def is_group(self, pid: int) -> bool:
        """Whether a child leads a process group that ends with it."""
        raise NotImplementedError

    def ended(self, pid: int, code: int) -> None:
        """A child has ended and is reaped; ``code`` is negative for a signal."""
        raise NotImplementedError

    def _become_child(self, keep: list[int], parent_death: int, leader: bool) -> None:
        gc.enable()  # the fork server may be importing
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if leader:
            os.setpgid(0, 0)
        if parent_death:
            die_with_parent(parent_death)
        mine = {self._wakeup_read, self._wakeup_write, *self.descriptors()}
        mine |= {key.fd for key in self.selector.get_map().values()}
        self.selector.close()
        close_all(sorted(mine - set(keep)))

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
            # Not reaped yet, so its pid is still taken, and its group can be killed without hitting
            # a stranger: ranks and DataLoader workers that outlived their agent.
            if self.is_group(info.si_pid):
                kill_group(info.si_pid)
            _, status = os.waitpid(info.si_pid, 0)
            self.ended(info.si_pid, os.waitstatus_to_exitcode(status))


def kill_group(pid: int) -> None:
    """SIGKILL a process group, if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def close_all(fds: list[int]) -> None:
    """Close descriptors; those closed already are skipped."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def die_with_parent(number: int) -> None:
    """Ask Linux for signal ``number`` when the thread that forked us ends (PR_SET_PDEATHSIG)."""
    from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

    _prctl_pr_set_pdeathsig(number)
