"""Start a fork server, and let it fork processes: the kernel's side of forkserver.py."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nbtoolkit.environment.grace import STALL_SECONDS
from nbtoolkit.environment.installed import environment_key
from nbtoolkit.environment.kernel_settings import hash_seed
from nbtoolkit.environment.resources import (
    Activity,
    has_ended,
    is_running,
    wait_while_active,
)
from nbtoolkit.errors import LaunchError
from nbtoolkit.launcher.preload import import_conditions
from nbtoolkit.wire import messages
from nbtoolkit.wire.payload import pack_content
from nbtoolkit.wire.signals import without_interrupts
from nbtoolkit.wire.transport import Connection

if TYPE_CHECKING:
    from nbtoolkit.run.resume import RunLock

# Characters of the fork server's stderr that an error shows.
_STDERR_CHARACTERS = 2000

# `-c` puts the working directory first on sys.path, where a user's random.py would shadow the
# standard library's.
_BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; sys.path.append({home!r}); "
    "from nbtoolkit.launcher.forkserver import main; main({fd}, {names}, {late})"
)


class ForkServerClient:
    """The kernel's side of a fork server.

    Args:
        names: modules of installed packages that it imports besides what every launch needs.
        late: it imports what ranks need soon before it is ready, else when it is idle.
        stalled: seconds without progress after which a request fails; a slow fork server has all
            the time it needs while it makes progress.
    """

    def __init__(
        self, names: Sequence[str] = (), *, late: bool = False, stalled: float = STALL_SECONDS
    ) -> None:
        self.names = tuple(names)
        self.environment = environment_key(os.environ)
        self._conditions = import_conditions(os.environ, self.names)
        self.connection, other_end = Connection.pair()
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
        # Not as an argument, which has at most 128 KiB.
        with pack_content(pickle.dumps(list(self.names))) as packed:
            fd = other_end.fileno()
            boot = _BOOT.format(home=home, fd=fd, names=packed, late=late)
            self._process = subprocess.Popen(
                [sys.executable, "-c", boot],
                pass_fds=[fd, packed],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                start_new_session=True,  # Jupyter interrupts the kernel's whole process group
                cwd="/",
                env=environ,
            )
        other_end.close()
        self._has_ended = partial(has_ended, self._process)
        self._ready = False
        self._stalled = stalled
        self._requests = 0
        self._forked = list[int]()
        self._asking = threading.RLock()  # launches may come from several threads
        self.spoiled_by = ""
        """The package after whose import it could not fork any more, if it ended for that."""

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Return True if it can start runs."""
        # Linux lets a killed process be waited for when its last thread has ended (NumPy leaves
        # some), but its state shows the end at once.
        return self._process.poll() is None and is_running(self.pid)

    def reaped(self) -> bool:
        """Return True if it has ended; then it is a zombie no more."""
        return self._process.poll() is not None

    def fits(self) -> bool:
        """Return True if its imports are those that a new one would make now."""
        return self._conditions == import_conditions(os.environ, self.names)

    def is_ready(self) -> bool:
        """Return True if it has started; does not wait."""
        with self._asking:
            if not self._ready:
                for message in self.connection.drain():
                    self._note(message)
            return self._ready

    def fork(self, main: str, descriptors: list[int]) -> int:
        """Fork a process, and wait until it exists.

        Args:
            main: its main function, as ``"module:function"``; receives a list of descriptors: of
                its connection to the fork server, and copies of ``descriptors``.
            descriptors: they stay open here.

        Returns:
            Its pid.

        Raises:
            LaunchError: the fork server did not start, or died.
        """
        with self._asking:
            self.wait_until_ready()
            request = self.fork_soon(main, descriptors)
            return self.pid_of(request)

    def fork_soon(self, main: str, descriptors: list[int]) -> int:
        """Let a fork server that is starting fork a process; return a number for :meth:`pid_of`."""
        with self._asking:
            if self.connection.closed:
                raise exiting_error()
            self.connection.send(messages.Fork(main=main, group=False, descriptors=descriptors))
            self._requests += 1
            return self._requests

    def pid_of(self, request: int) -> int:
        """Return the pid of the process of a request; wait until it is forked.

        Raises:
            LaunchError: the fork server did not start, or died.
        """
        with self._asking:
            # The answers come in the order of the requests. An interrupt may have kept an earlier
            # request from reading its answer.
            self._wait_until(lambda: len(self._forked) >= request)
            return self._forked[request - 1]

    def hand_over(self, successor: ForkServerClient) -> None:
        """Let its clients ask the next fork server from now on."""
        with self._asking:
            self.connection.send(
                messages.HandOver(
                    environment=successor.environment, descriptors=[successor.connection.fileno()]
                )
            )

    def disconnect(self) -> None:
        """Ask nothing any more; it ends after its last run."""
        if not self.connection.closed:
            self.connection.close()
            os.close(self._stderr)

    def wait_for_end(self, stalled: float) -> None:
        """Wait for its end.

        Args:
            stalled: seconds without progress after which the wait ends.
        """
        awaited = f"the fork server (process {self.pid}) to end"
        if not wait_while_active(self._has_ended, Activity(self.pid), awaited, stalled=stalled):
            print(
                f"the fork server (process {self.pid}) has not ended: no progress for "
                f"{stalled:g} s",
                file=sys.stderr,
            )

    def kill(self) -> None:
        """End it at once."""
        self.disconnect()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def wait_until_ready(self) -> None:
        """Wait until it can fork.

        Raises:
            LaunchError: it did not start.
        """
        with self._asking:
            self._wait_until(lambda: self._ready)

    def start(self, main: str, payload: int, request: int, lock: RunLock) -> Connection:
        """Start a supervisor for a run, or a scheduler for a search.

        Args:
            main: its main function, as ``"module:function"``.
            payload: descriptor of the packed training function.
            request: descriptor of the packed request.
            lock: the folder's lock.

        Returns:
            The connection to it.

        Raises:
            LaunchError: the fork server did not start, or died.
        """
        ours, other_end = Connection.pair()
        try:
            self.fork(main, [payload, request, other_end.fileno(), lock.fileno()])
        except BaseException:
            # A traceback that the notebook keeps would hold it open, and the supervisor would wait.
            ours.close()
            raise
        finally:
            other_end.close()
        return ours

    def _stderr_tail(self) -> str:
        text = os.pread(self._stderr, 1 << 20, 0).decode(errors="replace").rstrip()
        return f"; its last output:\n{text[-_STDERR_CHARACTERS:]}" if text else ""

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Receive messages until one of them has what the caller waits for."""
        while not done():
            self._receive()

    def _receive(self) -> None:
        awaited = f"the fork server (process {self.pid}) to {'answer' if self._ready else 'start'}"
        # Once it has started, its descendants are runs, whose progress is not its own.
        activity = Activity(self.pid, descendants=not self._ready)
        in_time = wait_while_active(self._message_waits, activity, awaited, stalled=self._stalled)
        received = False
        if in_time:
            # An interrupt between the two would lose ServerReady, for which the next call waits.
            with without_interrupts():
                message = self.connection.receive()
                self._note(message)
            received = message is not None
        if not received:
            self._refuse(awaited, in_time)

    def _message_waits(self, seconds: float) -> bool:
        poller = select.poll()  # select() refuses descriptors above 1023
        poller.register(self.connection, select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    def _note(self, message: messages.Message | None) -> None:
        match message:
            case messages.ServerReady():
                self.spoiled_by = message.spoiled_by
                self._ready = not message.spoiled_by
            case messages.Forked():
                self._forked.append(message.pid)

    def _refuse(self, awaited: str, in_time: bool) -> NoReturn:
        end = "closed its connection"
        if not in_time:
            end = f"does not answer: no progress for {self._stalled:g} s"
        # Its socket closes a moment before the process ends.
        if wait_while_active(self._has_ended, Activity(self.pid), awaited, stalled=1.0):
            end = f"ended with code {self._process.poll()}"
        tail = self._stderr_tail()
        self.kill()
        raise LaunchError(
            f"the fork server process {end}{tail}",
            allowed="a slow start, as long as the process uses CPU or does I/O",
            do="launch again (this starts a new one); if it fails again, see nb.doctor()",
        )


def exiting_error() -> LaunchError:
    """Return the error of a launch that comes too late."""
    return LaunchError(
        "this process is exiting: its fork server has shut down",
        allowed="launches before the main thread has ended",
        do="join the launching thread before the main thread ends, or launch in another process",
    )
