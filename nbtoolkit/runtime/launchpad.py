"""The kernel's end of the launchpad: start it at the first launch, keep it warm, hand it runs.

The process itself is in zygote.py.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import nbtoolkit
from nbtoolkit.errors import LaunchError
from nbtoolkit.runtime.activity import STALL_SECONDS, Activity, has_ended, wait_while_active
from nbtoolkit.runtime.paths import RunPaths
from nbtoolkit.runtime.wire import (
    Message,
    memory_file,
    packet_pair,
    receive_packet,
    send_packet,
)

_LAST_WORDS = 2000  # characters of its stderr that an error shows
END_SECONDS = 20.0  # without progress, at the kernel's end: tracking writes what has ended

# `-c` puts the working directory first on sys.path; it must not be imported from (a user's
# random.py would win).
_BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; sys.path.append({home!r}); "
    "from nbtoolkit.runtime.zygote import main; main({fd}, {tracking})"
)


class Launchpad:
    """One warm process of this kernel.

    Args:
        tracking: start the tracking service first.
        stalled: seconds without any progress after which it is given up; slow as it may be, it is
            waited for as long as it makes some.
    """

    def __init__(self, *, tracking: bool = False, stalled: float = STALL_SECONDS) -> None:
        self.kernel_pid = os.getpid()
        ours, theirs = packet_pair()
        home = str(Path(nbtoolkit.__file__).resolve().parent.parent)
        environ = {
            **os.environ,
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counting GPUs must not create a CUDA context
            "PYTHONUNBUFFERED": "1",
        }
        # Not this process's stderr: who reads a kernel's pipes to their end would wait for detached
        # runs too, and in a notebook nobody would see it.
        self._stderr = os.memfd_create("launchpad-stderr", os.MFD_CLOEXEC)
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

    def run(self, fds: list[int], *, search: bool = False) -> int:
        """Start an owner for a packed run, or a conductor for a search.

        Args:
            fds: the payload, the owner's end of the line, the run's lock (see zygote.py).
            search: it is a search.

        Returns:
            The process's pid.

        Raises:
            LaunchError: the launchpad did not start, or died.
        """
        return int(self._ask({"op": "run", "search": search}, "forked", fds)["pid"])

    def preload(self, names: list[str]) -> None:
        """Have modules imported that conductors need, and functions called; only once each.

        Raises:
            LaunchError: the launchpad did not start, or died.
        """
        if new := [name for name in names if name not in self._preloaded]:
            self._ask({"op": "preload", "names": new}, "preloaded")
            self._preloaded.update(new)

    def import_ahead(self, names: list[str], environ: Mapping[str, str]) -> None:
        """Have modules imported for ranks, beside everything else; it is not waited for."""
        with self._asking, memory_file(json.dumps(dict(environ)).encode()) as fd:
            if self._socket.fileno() < 0:
                raise _at_exit()
            send_packet(self._socket, {"op": "imports", "names": names}, [fd])

    def track(self, folder: Path) -> int:
        """Have a run's events followed into the tracking database, below the process returned."""
        with self._asking:
            self._wait_ready()
            send_packet(self._socket, {"op": "track", "folder": str(folder)})
        return self.pid

    def let_outlive(self, run: RunPaths) -> None:
        """Note a detached run: while it goes on, this kernel's end does not wait."""
        self._detached.append(run)

    def warm_pids(self) -> set[int]:
        """The processes that stay between launches."""
        return {int(pid) for pid in self._ask({"op": "pids"}, "pids")["pids"]}

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

    def _ask(self, request: Message, answer: str, fds: list[int] | None = None) -> Message:
        with self._asking:
            if self._socket.fileno() < 0:
                raise _at_exit()
            self._wait_ready()
            send_packet(self._socket, request, fds)
            while (message := self._receive())["op"] != answer:
                pass  # the answer to a launch that was interrupted before it was read
            return message

    def _wait_ready(self) -> None:
        if not self._ready:
            self._receive()
            self._ready = True

    def _receive(self) -> Message:
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
                f"the launchpad process {end}{words}",
                allowed="one that starts slowly is waited for as long as it uses CPU or does I/O",
                do="launch again (a new one is started); if it stays so, see nb.doctor()",
            )
        return packet[0]


_current: Launchpad | None = None
_starting = threading.Lock()
_ending = False


def launchpad(*, tracking: bool = False) -> Launchpad:
    """This kernel's launchpad, started if there is none (a forked child of it gets its own).

    Args:
        tracking: a run is going to be tracked: a new launchpad starts the tracking service first.
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
            _current = Launchpad(tracking=tracking)
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
    """End this kernel's launchpad, if there is one; the next launch starts a new one."""
    global _current
    if _current is not None and _current.kernel_pid == os.getpid():
        _current.close()
        _current = None


def pids() -> set[int]:
    """What this kernel keeps warm: launchpad, branches, tracking; not owners, pilots, ranks."""
    if _current is None or _current.kernel_pid != os.getpid() or not _current.alive():
        return set()
    return _current.warm_pids()
