"""Start the fork server at the first launch, keep it warm, and submit runs to it.

The process itself is in forkserver.py.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nbtoolkit.environment.resources import STALL_SECONDS, Activity, has_ended, wait_while_active
from nbtoolkit.errors import LaunchError
from nbtoolkit.run import messages
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.transport import (
    Connection,
    packet_pair,
    receive_packet,
    send_enclosed,
    send_packet,
)

if TYPE_CHECKING:
    from nbtoolkit.run.resume import RunLock

T = TypeVar("T")

_LAST_WORDS = 2000  # characters of its stderr that an error shows
END_SECONDS = 20.0  # without progress, at the kernel's end: tracking writes what has ended

# `-c` puts the working directory first on sys.path; it must not be imported from (a user's
# random.py would win).
_BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; sys.path.append({home!r}); "
    "from nbtoolkit.launcher.forkserver import main; main({fd}, {tracking})"
)


class ForkServerClient:
    """One warm process of this kernel.

    Args:
        tracking: start the tracking service first.
        stalled: seconds without any progress after which it is given up; slow as it may be, it is
            waited for as long as it makes some.
    """

    def __init__(self, *, tracking: bool = False, stalled: float = STALL_SECONDS) -> None:
        self.kernel_pid = os.getpid()
        ours, theirs = packet_pair()
        home = str(Path(__file__).resolve().parents[2])
        environ = {
            **os.environ,
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counting GPUs must not create a CUDA context
            "PYTHONUNBUFFERED": "1",
        }
        # Not this process's stderr: who reads a kernel's pipes to their end would wait for detached
        # runs too, and in a notebook nobody would see it.
        self._stderr = os.memfd_create("nbtoolkit-forkserver-stderr", os.MFD_CLOEXEC)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT.format(home=home, fd=theirs.fileno(), tracking=tracking)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            start_new_session=True,  # Jupyter interrupts the kernel's whole process group
            cwd="/",
            env=environ,
        )
        theirs.close()
        self._has_ended = partial(has_ended, self._process)
        self._socket = ours
        self._ready, self._stalled = False, stalled
        self._detached: list[RunPaths] = []
        self._preloaded: set[str] = set()
        self._asking = threading.RLock()  # launches may come from several threads

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it can take a run."""
        return self._process.poll() is None

    def run(
        self,
        main: str,
        payload: int,
        request: int,
        lock: RunLock,
        *,
        detached: bool,
        group: messages.GroupDescriptors | None = None,
    ) -> Connection:
        """Start a supervisor for a run, or a scheduler for a search; returns the line to it.

        Args:
            main: its main function, as ``"module:function"``.
            payload: the packed function.
            request: what it is to do, packed.
            lock: of the folder.
            detached: whether it outlives this process.
            group: the supervisor's ends of the lines to processes that this one has forked.

        Raises:
            LaunchError: the fork server did not start, or died.
        """
        mine, theirs = Connection.pair()
        try:
            descriptors = messages.SupervisorDescriptors(
                payload=payload,
                request=request,
                connection=theirs.fileno(),
                lock=lock.fileno(),
                group=group,
            )
            message = messages.ForkSupervisor(main=main, detached=detached, descriptors=descriptors)
            self._ask(message, messages.SupervisorForked)
        except BaseException:
            mine.close()  # else a traceback kept by the notebook keeps the supervisor waiting
            raise
        finally:
            theirs.close()
        return mine

    def preload(self, names: list[str]) -> None:
        """Have modules imported that schedulers need, and functions called; only once each.

        Raises:
            LaunchError: the fork server did not start, or died.
        """
        if new := [name for name in names if name not in self._preloaded]:
            self._ask(messages.PreloadModules(names=new), messages.ModulesPreloaded)
            self._preloaded.update(new)

    def import_ahead(self, names: list[str], environ: Mapping[str, str]) -> None:
        """Have modules imported for ranks, beside everything else; it is not waited for."""
        with self._asking:
            if self._socket.fileno() < 0:
                raise _at_exit()
            request = messages.ImportModules(names=names, environ=dict(environ))
            send_enclosed(self._socket, request)

    def track(self, folder: Path) -> int:
        """Have a run's events followed into the tracking database, below the process returned."""
        with self._asking:
            self._wait_ready()
            send_packet(self._socket, messages.TrackRun(folder=str(folder)))
        return self.pid

    def let_outlive(self, run: RunPaths) -> None:
        """Note a detached run: while it goes on, this kernel's end does not wait."""
        self._detached.append(run)

    def warm_pids(self) -> set[int]:
        """The processes that stay between launches."""
        return set(self._ask(messages.ListProcesses(), messages.ProcessList).pids)

    def close(self, stalled: float = END_SECONDS) -> None:
        """Let it go, and wait until it has ended; not where a detached run keeps it.

        Args:
            stalled: seconds without any progress after which it is not waited for any more.
        """
        self._hang_up()
        if any(run.owned() for run in self._detached):
            return
        what = f"the fork server (process {self.pid}) to end: tracking writes what has ended"
        if not wait_while_active(self._has_ended, Activity(self.pid), what, stalled=stalled):
            print(
                f"the fork server (process {self.pid}) has not ended: no progress for "
                f"{stalled:g} s; what tracking has not written of a run, "
                "nbtoolkit.tracking.replay(folder) writes",
                file=sys.stderr,
            )

    def kill(self) -> None:
        """End it at once."""
        self._hang_up()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _hang_up(self) -> None:
        if self._socket.fileno() >= 0:
            self._socket.close()
            os.close(self._stderr)

    def _last_words(self) -> str:
        said = os.pread(self._stderr, 1 << 20, 0).decode(errors="replace").rstrip()
        return f"; its last words:\n{said[-_LAST_WORDS:]}" if said else ""

    def _ask(self, request: messages.Message, kind: type[T]) -> T:
        with self._asking:
            if self._socket.fileno() < 0:
                raise _at_exit()
            self._wait_ready()
            send_packet(self._socket, request)
            while not isinstance(answer := self._receive(), kind):
                pass  # the answer to a launch that was interrupted before it was read
            return answer

    def _wait_ready(self) -> None:
        if not self._ready:
            self._receive()
            self._ready = True

    def _receive(self) -> messages.Message:
        news = select.poll()  # select() refuses descriptors above 1023
        news.register(self._socket, select.POLLIN)
        what = f"the fork server (process {self.pid}) to {'answer' if self._ready else 'start'}"
        # Once it has started, its descendants are runs, whose progress is not its own.
        activity = Activity(self.pid, descendants=not self._ready)
        packet = None
        if wait_while_active(
            lambda seconds: news.poll(seconds * 1000), activity, what, stalled=self._stalled
        ):
            packet = receive_packet(self._socket)
            end = "closed its connection"
        else:
            end = f"does not answer: no progress for {self._stalled:g} s"
        if packet is None:
            # its socket closes a moment before it has ended
            if wait_while_active(self._has_ended, Activity(self.pid), what, stalled=1.0):
                end = f"ended with code {self._process.poll()}"
            words = self._last_words()
            self.kill()
            raise LaunchError(
                f"the fork server process {end}{words}",
                allowed="one that starts slowly is waited for as long as it uses CPU or does I/O",
                do="launch again (a new one is started); if it stays so, see nb.doctor()",
            )
        return packet


_current: ForkServerClient | None = None
_starting = threading.Lock()
_ending = False


def fork_server(*, tracking: bool = False) -> ForkServerClient:
    """This kernel's fork server, started if there is none (a forked child of it gets its own).

    Args:
        tracking: a run is going to be tracked: a new fork server starts the tracking service first.
    """
    global _current
    with _starting:
        if _ending:
            raise _at_exit()
        if _current is None or not _current.alive() or _current.kernel_pid != os.getpid():
            if _current is not None and _current.kernel_pid == os.getpid():
                _current.kill()
            if _current is None:
                atexit.register(_end)
            _current = ForkServerClient(tracking=tracking)
        return _current


def _end() -> None:
    """This process ends: other threads of it, daemons, start nothing more."""
    global _ending
    _ending = True
    shutdown()


def _at_exit() -> LaunchError:
    return LaunchError(
        "this process ends: its fork server is gone",
        allowed="launches before the main thread has ended",
        do="join the thread that launches, or let another process launch",
    )


def shutdown() -> None:
    """End this kernel's fork server, if there is one; the next launch starts a new one."""
    global _current
    if _current is not None and _current.kernel_pid == os.getpid():
        _current.close()
        _current = None


def pids() -> set[int]:
    """The processes that this kernel keeps warm: fork server, its branches, tracking."""
    if _current is None or _current.kernel_pid != os.getpid() or not _current.alive():
        return set()
    return _current.warm_pids()
