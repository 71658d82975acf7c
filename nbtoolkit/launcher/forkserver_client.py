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

from nbtoolkit.environment.kernel_settings import hash_seed
from nbtoolkit.environment.resources import STALL_SECONDS, Activity, has_ended, wait_while_active
from nbtoolkit.errors import LaunchError
from nbtoolkit.run import messages
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.signals import without_interrupts
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

# Characters of the fork server's stderr that an error shows.
_STDERR_CHARACTERS = 2000
# Seconds without progress after which the kernel's exit waits no longer for tracking.
END_SECONDS = 20.0

# `-c` puts the working directory first on sys.path, where a user's random.py would shadow the
# standard library's.
_BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; sys.path.append({home!r}); "
    "from nbtoolkit.launcher.forkserver import main; main({fd}, {tracking})"
)


class ForkServerClient:
    """The kernel's side of the fork server.

    Args:
        tracking: start the tracking service first.
        stalled: seconds without progress after which a request fails; a slow fork server has all
            the time it needs while it makes progress.
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
        if (seed := hash_seed()) is not None:  # a cell may have changed the variable
            environ["PYTHONHASHSEED"] = seed
        # Not this process's stderr: a program that reads the kernel's pipes to their end would wait
        # for detached runs too, and a notebook would not show it.
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
        """Return True if it can start runs."""
        return self._process.poll() is None

    def run(
        self,
        main: str,
        payload: int,
        request: int,
        lock: RunLock,
        *,
        detached: bool,
    ) -> Connection:
        """Start a supervisor for a run, or a scheduler for a search.

        Args:
            main: its main function, as ``"module:function"``.
            payload: descriptor of the packed training function.
            request: descriptor of the packed request.
            lock: the folder's lock.
            detached: True if it outlives this process.

        Returns:
            The connection to it.

        Raises:
            LaunchError: the fork server did not start, or died.
        """
        ours, theirs = Connection.pair()
        try:
            descriptors = messages.SupervisorDescriptors(
                payload=payload,
                request=request,
                connection=theirs.fileno(),
                lock=lock.fileno(),
            )
            message = messages.ForkSupervisor(main=main, detached=detached, descriptors=descriptors)
            self._ask(message, messages.SupervisorForked)
        except BaseException:
            # A traceback that the notebook keeps would hold it open, and the supervisor would wait.
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def preload(self, names: list[str]) -> None:
        """Import modules for schedulers and call functions (``"module:function"``), once each.

        Raises:
            LaunchError: the fork server did not start, or died.
        """
        if new := [name for name in names if name not in self._preloaded]:
            self._ask(messages.PreloadModules(names=new), messages.ModulesPreloaded)
            self._preloaded.update(new)

    def import_ahead(self, names: list[str], environ: Mapping[str, str]) -> None:
        """Import modules for ranks in the background, without waiting for them."""
        with self._asking:
            if self._socket.fileno() < 0:
                raise _exiting_error()
            request = messages.ImportModules(names=names, environ=dict(environ))
            send_enclosed(self._socket, request)

    def track(self, folder: Path) -> int:
        """Track a run's events; return the pid of the fork server, below which tracking runs."""
        with self._asking:
            self._wait_ready()
            request = messages.TrackRun(folder=str(folder), environ=dict(os.environ))
            send_enclosed(self._socket, request)
        return self.pid

    def let_outlive(self, run: RunPaths) -> None:
        """Register a detached run: while it runs, this kernel's exit does not wait."""
        self._detached.append(run)

    def warm_pids(self) -> set[int]:
        """Return the pids of the processes that live between launches."""
        return set(self._ask(messages.ListProcesses(), messages.ProcessList).pids)

    def close(self, stalled: float = END_SECONDS) -> None:
        """Disconnect, and wait for its end unless a detached run keeps it alive.

        Args:
            stalled: seconds without progress after which the wait ends.
        """
        self._disconnect()
        if any(run.owned() for run in self._detached):
            return
        what = f"the fork server (process {self.pid}) to end: tracking writes what has ended"
        if not wait_while_active(self._has_ended, Activity(self.pid), what, stalled=stalled):
            print(
                f"the fork server (process {self.pid}) has not ended: no progress for "
                f"{stalled:g} s; nbtoolkit.tracking.replay(folder) writes what tracking has not "
                "written of a run",
                file=sys.stderr,
            )

    def kill(self) -> None:
        """End it at once."""
        self._disconnect()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _disconnect(self) -> None:
        if self._socket.fileno() >= 0:
            self._socket.close()
            os.close(self._stderr)

    def _stderr_tail(self) -> str:
        text = os.pread(self._stderr, 1 << 20, 0).decode(errors="replace").rstrip()
        return f"; its last output:\n{text[-_STDERR_CHARACTERS:]}" if text else ""

    def _ask(self, request: messages.Message, kind: type[T]) -> T:
        with self._asking:
            if self._socket.fileno() < 0:
                raise _exiting_error()
            self._wait_ready()
            send_packet(self._socket, request)
            while not isinstance(answer := self._receive(), kind):
                pass  # an interrupt kept an earlier request from reading its answer
            return answer

    def _wait_ready(self) -> None:
        while not self._ready:
            self._receive()

    def _receive(self) -> messages.Message:
        poller = select.poll()  # select() refuses descriptors above 1023
        poller.register(self._socket, select.POLLIN)
        what = f"the fork server (process {self.pid}) to {'answer' if self._ready else 'start'}"
        # Once it has started, its descendants are runs, whose progress is not its own.
        activity = Activity(self.pid, descendants=not self._ready)
        packet = None
        if wait_while_active(
            lambda seconds: poller.poll(seconds * 1000), activity, what, stalled=self._stalled
        ):
            # An interrupt between the two would lose ServerReady, for which the next call waits.
            with without_interrupts():
                packet = receive_packet(self._socket)
                self._ready |= isinstance(packet, messages.ServerReady)
            end = "closed its connection"
        else:
            end = f"does not answer: no progress for {self._stalled:g} s"
        if packet is None:
            # Its socket closes a moment before the process ends.
            if wait_while_active(self._has_ended, Activity(self.pid), what, stalled=1.0):
                end = f"ended with code {self._process.poll()}"
            tail = self._stderr_tail()
            self.kill()
            raise LaunchError(
                f"the fork server process {end}{tail}",
                allowed="a slow start, as long as the process uses CPU or does I/O",
                do="launch again (this starts a new one); if it fails again, see nb.doctor()",
            )
        return packet


_current: ForkServerClient | None = None
_starting = threading.Lock()
_exiting = False


def _own() -> ForkServerClient | None:
    """Return the fork server that this process has started; a forked child of it has none yet."""
    return _current if _current is not None and _current.kernel_pid == os.getpid() else None


def fork_server(*, tracking: bool = False) -> ForkServerClient:
    """Return this kernel's fork server; start one if there is none.

    Args:
        tracking: a new fork server starts the tracking service first.
    """
    global _current
    with _starting:
        if _exiting:
            raise _exiting_error()
        server = _own()
        if server is None or not server.alive():
            if server is not None:
                server.kill()
            if _current is None:
                atexit.register(_shut_down_at_exit)
            server = _current = ForkServerClient(tracking=tracking)
        return server


def _shut_down_at_exit() -> None:
    """Shut down at exit, and keep daemon threads from starting another fork server."""
    global _exiting
    _exiting = True
    shutdown()


def _exiting_error() -> LaunchError:
    return LaunchError(
        "this process is exiting: its fork server has shut down",
        allowed="launches before the main thread has ended",
        do="join the launching thread before the main thread ends, or launch in another process",
    )


def shutdown() -> None:
    """Shut down this kernel's fork server, if there is one; the next launch starts a new one."""
    global _current
    if (server := _own()) is not None:
        server.close()
        _current = None


def pids() -> set[int]:
    """Return the pids of the fork server, its branches and the tracking service."""
    server = _own()
    return server.warm_pids() if server is not None and server.alive() else set()
