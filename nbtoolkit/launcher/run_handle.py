"""Define RunHandle, with which a process follows, stops and waits for a run."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from nbtoolkit.environment.grace import STOP_GRACE
from nbtoolkit.errors import LaunchError, RunFolderError
from nbtoolkit.launcher.fork_servers import import_ahead, take_over
from nbtoolkit.launcher.kept_connections import keep_connected
from nbtoolkit.launcher.run_result import RunResult, no_result, pack_at_deadline, refuse_deleted
from nbtoolkit.run.attempts import completed, last_event
from nbtoolkit.run.events import Event, EventReader
from nbtoolkit.run.failure import raise_failure
from nbtoolkit.run.output import RunDisplay, displays
from nbtoolkit.run.paths import RunPaths, write_json
from nbtoolkit.run.remote_job import remote_job
from nbtoolkit.tracking.catch_up import wait_for_tracking
from nbtoolkit.wire.messages import ModulesImported, StopRequest, SupervisorLost
from nbtoolkit.wire.signals import (
    SignalFlag,
    catch_termination_signals,
    describe_signal,
    without_interrupts,
)
from nbtoolkit.wire.transport import Connection

_POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class StartedRun:
    """A run or search that this process has started.

    Attributes:
        line: the connection to its supervisor.
        tracked: makes the tracking service read its events now, and returns that one's pid; None
            if it is not tracked.
        detached: True if it outlives this process.
    """

    line: Connection
    tracked: Callable[[], int] | None = None
    detached: bool = False


class RunHandle:
    """A handle of a run, from ``nb.launch(wait=False)`` or ``nb.attach``."""

    def __init__(
        self,
        paths: RunPaths,
        started: StartedRun | None = None,
        *,
        cell: RunDisplay | None = None,
        on_event: Callable[[Event], None] | None = None,
        offset: int = 0,
    ) -> None:
        self.paths = paths
        self._started = started
        self._cell = cell
        self._on_event = on_event
        self._line = None if started is None else started.line
        self._reader = EventReader(paths.events, offset)
        self._lost: SupervisorLost | None = None
        self._remote = remote_job(paths) if started is None else None
        self._job_text = ""
        self._was_live = started is not None or paths.owned()
        self._receiving = threading.Lock()
        if started is not None:
            keep_connected(self)

    def done(self) -> bool:
        """Return True if the run has ended, or has lost its supervisor."""
        self._receive()
        over = self._remote is None and last_event(self.paths) is not None  # a job may run again
        return over or not self._supervisor_lives()

    @property
    def status(self) -> str:
        """The present status of the run.

        It is ``"running"`` until the run ends. Then it is the status of the result. A run without a
        result is ``"failed"`` if it ended with an error, or ``"cut off"`` if its processes were
        killed. As long as a job on a cluster waits or runs, the status is the state that the
        cluster reports.
        """
        if self._supervisor_lives():
            return "running" if self._remote is None else self._remote.state().text
        ended = last_event(self.paths)
        return ended.status if ended is not None else "cut off"

    def logs(self, rank: int = 0) -> str:
        """Return the output of a rank so far; empty if there is none."""
        file = self.paths.log(rank)
        return file.read_text(errors="replace") if file.exists() else ""

    def events(self) -> Iterator[Event]:
        """Read the events of the run so far, oldest first; see ``nbtoolkit/run/events.py``."""
        return EventReader(self.paths.events).read()

    def stop(self, reason: str = "a handle asked", grace: float | None = None) -> None:
        """Ask all ranks to leave at their next report, with the status ``"stopped"``.

        A job that still waits in the queue of a cluster is cancelled.

        Args:
            reason: the reason, for the events of the run.
            grace: seconds after which the ranks are killed; None: they are not killed.
        """
        if self._remote is not None and self._remote.state().phase == "waiting":
            self._remote.cancel()
            return
        request = StopRequest(reason=reason, grace=grace)
        if self._line is None or not self._line.send(request):
            write_json(self.paths.stop, {"reason": reason, "grace": grace}, durable=False)

    def cancel(self) -> None:
        """End the run at once, without a last checkpoint; on a cluster, cancel the job."""
        if self._remote is not None:
            self._remote.cancel()
        else:
            self.stop("cancelled", grace=0.0)

    def result(self, timeout: float | None = None) -> RunResult:
        """Wait for the end of the run, show its output meanwhile, and return its result.

        An interrupt asks the ranks to leave. After 5 s, or at a second interrupt, the remaining
        ranks are killed. The call then raises KeyboardInterrupt. In a script, the signals SIGTERM,
        SIGUSR1 and SIGUSR2 also ask the ranks to leave, with the status ``"deadline"``; a second
        SIGTERM kills them. This does not apply to signals for which you have installed a handler.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            TimeoutError: the run has not ended in this time. It continues.
            KeyboardInterrupt: the wait was interrupted, and the run has ended.
            LaunchError: the run ended without a result.
            Exception: the exception of the failed rank, with its own type.
        """
        __tracebackhide__ = True
        limit = None if timeout is None else time.monotonic() + timeout
        try:
            interrupts = self._wait_with_signals(limit)
        except BaseException:
            # on_event raised, or a third interrupt came: nothing waits for the run any more.
            self.disconnect()
            raise
        if interrupts is None:
            raise TimeoutError(
                f"the run {self.paths.run_id} has not ended after {timeout:g} s; it continues"
            )
        self._finish()
        if interrupts:
            raise KeyboardInterrupt
        outcome = self._outcome()
        # Pack once, and not when a run that ended long ago is read.
        if self._was_live:
            self._was_live = False
            pack_at_deadline(outcome.status, self.paths, self._say)
        return outcome

    def _wait_with_signals(self, limit: float | None) -> int | None:
        """Wait; forward termination signals to a run that would end with this process."""
        flag = SignalFlag()
        started = self._started
        ends_with_us = started is not None and not started.detached
        with catch_termination_signals(flag) if ends_with_us else nullcontext():
            return self._wait_for_end(limit, flag)

    def _wait_for_end(self, limit: float | None, flag: SignalFlag) -> int | None:
        """Return how often the wait was interrupted; None if the limit came first."""
        interrupts = handled = 0
        opened = False
        while True:
            try:
                if self._cell is not None and not opened:
                    opened = True
                    # Drawing takes up to a second. A display that is half open cannot be closed.
                    with without_interrupts():
                        self._cell.open(waits=True)
                # Inside the try block, because the next interrupt may come during the request.
                if handled < interrupts:
                    handled = interrupts
                    self._interrupt(interrupts)
                self._forward_signal(flag)
                if self._read_events():
                    return interrupts
                if limit is not None and time.monotonic() >= limit:
                    return None
                self._wait()
            except KeyboardInterrupt:
                interrupts += 1

    def _interrupt(self, count: int) -> None:
        if count == 1:
            self.stop("interrupted", grace=STOP_GRACE)
        elif self._line is not None or self._remote is not None:
            self.cancel()
        else:
            self.stop("interrupted twice", grace=0.0)

    def _forward_signal(self, flag: SignalFlag) -> None:
        """End the run as if its supervisor had received the signal itself."""
        if flag.number and self._line is not None:
            reason = describe_signal(flag.number)
            grace = 0.0 if flag.repeated else None
            self._line.send(StopRequest(reason=reason, grace=grace, status="deadline"))
            flag.number = 0

    def _read_events(self) -> bool:
        """Handle new events and output; return True if no more can follow."""
        # Before the events are read, so that none of the supervisor's last ones is missed.
        complete = not self._supervisor_lives()
        self._say_job()
        for event in self._reader.read():
            if self._on_event is not None:
                self._on_event(event)
            if self._cell is not None:
                self._cell.event(event)
        if self._cell is not None:
            self._cell.pump()
        return complete

    def _say_job(self) -> None:
        """Show the state of a cluster's job when it has changed."""
        if self._remote is not None and (text := self._remote.state().text) != self._job_text:
            self._job_text = text
            self._say(text)

    def _say(self, text: str) -> None:
        if self._cell is not None:
            self._cell.say(text)

    def _supervisor_lives(self) -> bool:
        if self._remote is not None:
            # A run that has ended early may start again.
            over = completed(self.paths) and not self.paths.owned()
            return not over and self._remote.active()
        if self._line is not None:
            return not self._line.closed
        return self.paths.owned()

    def _wait(self) -> None:
        if self._line is None:
            time.sleep(_POLL_SECONDS)
            return
        # select() refuses descriptors above 1023, which a kernel in long use may reach.
        poller = select.poll()
        poller.register(self._line, select.POLLIN)
        poller.poll(_POLL_SECONDS * 1000)
        self._receive()

    def _receive(self) -> None:
        """Receive the supervisor's messages; most only announce new content of the files."""
        if self._line is None:
            return
        with self._receiving:
            for message in self._line.drain():
                if isinstance(message, SupervisorLost):
                    self._lost = message
                elif isinstance(message, ModulesImported):
                    import_ahead(message.names)
        take_over()  # a search that runs goes on with the next fork server

    def disconnect(self) -> None:
        """Close the connection to the supervisor; this ends the run, unless it is detached."""
        if self._line is not None:
            self._line.close()

    def _finish(self) -> None:
        if self._cell is not None:
            self._cell.close()
        if self._started is None:
            return
        self._started.line.close()
        if self._started.tracked is not None and last_event(self.paths) is not None:
            pid = self._started.tracked()  # else the service waits until its next poll
            wait_for_tracking(self.paths, pid, self._say)

    def _outcome(self) -> RunResult:
        """Return the result; raise what kept the run from one."""
        __tracebackhide__ = True
        refuse_deleted(self.paths)  # first: the supervisor of such a run may fail to write there
        if (lost := self._lost) is not None:
            kind = {"RunFolderError": RunFolderError}.get(lost.error, LaunchError)
            raise kind(lost.what, allowed=lost.allowed, do=lost.do)
        ended = last_event(self.paths)
        if ended is None:
            raise no_result(self.paths, self._remote)
        if ended.status == "failed":
            raise_failure(self.paths)
        return self._read_result()

    def _read_result(self) -> RunResult:
        return RunResult(self.paths)

    def __repr__(self) -> str:
        return f"RunHandle({'ended' if self.done() else 'running'}, {self.paths.folder})"

    def _ipython_display_(self) -> None:
        """Show a live view as the cell's value, if widgets are available."""
        displays().show_handle(self.paths, self._cell)

    def _repr_html_(self) -> str:
        return displays().static(self.paths)
