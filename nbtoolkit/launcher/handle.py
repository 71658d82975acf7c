"""Define RunResult, the result of a run, and RunHandle, a run in progress."""

from __future__ import annotations

import atexit
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.resources import Activity, wait_while_active
from nbtoolkit.errors import CheckpointError, LaunchError, RunFolderError
from nbtoolkit.launcher.failures import raise_failure
from nbtoolkit.launcher.fork_launch import ForkedAgent
from nbtoolkit.run.events import Event, EventReader, MetricsLogged, RunEnded, RunStarted
from nbtoolkit.run.messages import KillRequest, StopRequest, SupervisorLost
from nbtoolkit.run.output import RunDisplay, charts, displays
from nbtoolkit.run.paths import (
    RunPaths,
    Status,
    read_or_empty,
    read_record,
    read_result,
    reading,
    write_json,
)
from nbtoolkit.run.serialization import unpack_value
from nbtoolkit.run.signals import SignalFlag, catch_termination_signals, describe_signal
from nbtoolkit.run.transport import Connection
from nbtoolkit.text_table import html_table

if TYPE_CHECKING:
    import torch

    from nbtoolkit.views.figure import Chart

# Seconds that the ranks get to reach a report after the first interrupt.
INTERRUPT_GRACE = 5.0
# Seconds that a launch waits for tracking to catch up: a new folder takes 2 s, on a loaded machine
# 20 s. Tracking then continues in the background, and the kernel's exit waits for it.
TRACKING_SECONDS = 60.0
_TRACKING_STALLED = 10.0  # seconds without progress after which that wait ends
_POLL_SECONDS = 0.1


class RunResult:
    """The result of a run, read from its folder.

    Attributes:
        status: ``"completed"``, or why all ranks left early: ``"stopped"``, ``"deadline"``,
            ``"pruned"``.
        metrics: the last reported or returned values; the last logged ones if none was reported.
        plan: the launch plan: processes, devices, precision, batch split, with reasons.
        paths: the run's folder and files.
        seconds: wall time from the supervisor's start to the last rank's end.
        checkpoint: the last saved checkpoint (ctx.save's file, fit's folder), or None.
    """

    def __init__(self, paths: RunPaths) -> None:
        ended = read_result(paths)
        if ended is None:
            raise LaunchError(
                f"the run {paths.folder} has no result", do="attach to it with nb.attach(folder)"
            )
        self.paths = paths
        with reading(paths.result):
            self.status: Status = ended["status"]
            self.metrics: dict[str, float] = ended["metrics"]
            self.seconds: float = ended["seconds"]
            self.checkpoint = _find_checkpoint(paths, ended["checkpoint"])
            self._processes: int = ended["processes"]
        with reading(paths.plan):
            self.plan = LaunchPlan.from_dict(read_record(paths.plan) or {})

    @cached_property
    def value(self) -> Any:
        """The value that rank 0 returned, with tensors on the CPU; None if the run left early."""
        return unpack_value(self.paths.value(0)) if self.status == "completed" else None

    @cached_property
    def values(self) -> list[Any]:
        """The values that the ranks returned, by rank; empty if the run left early."""
        if self.status != "completed":
            return []
        others = range(1, self._processes)
        return [self.value, *(unpack_value(self.paths.value(rank)) for rank in others)]

    @cached_property
    def step_time(self) -> dict[str, float]:
        """Mean shares of the time of the steps of ``nb.fit``; empty if it logged none.

        ``data``: waiting for the next batch; ``communication``: waiting for other ranks (with
        several); ``compute``: the rest.
        """
        shares: dict[str, list[float]] = {}
        for event in EventReader(self.paths.events).read():
            if isinstance(event, MetricsLogged) and "data_share" in event.values:
                for name in ("data", "compute", "communication"):
                    if (share := event.values.get(f"{name}_share")) is not None:
                        shares.setdefault(name, []).append(share)
        return {name: sum(values) / len(values) for name, values in shares.items()}

    @cached_property
    def throughput(self) -> float | None:
        """Samples per second of the training steps, over all ranks; None if ``fit`` logged none.

        The median of the second half of the last attempt's log points; validation, checkpoints and
        start are not part of them.
        """
        logged: list[float] = []
        for event in EventReader(self.paths.events).read():
            if isinstance(event, RunStarted):
                logged = []
            elif isinstance(event, MetricsLogged) and "samples_per_second" in event.values:
                logged.append(event.values["samples_per_second"])
        return median(logged[len(logged) // 2 :]) if logged else None

    @property
    def efficiency(self) -> float | None:
        """:attr:`throughput` over (devices x the measured speed of one device); None without one.

        :func:`nbtoolkit.calibrate` measures that speed, and the launch writes it to the plan. On
        the CPU the machine counts as one device, and the baseline is one process on all CPUs.
        """
        one = self.plan.one_device_speed
        if not one or self.throughput is None:
            return None
        return self.throughput / (max(1, len(self.plan.devices)) * one)

    def load_into(
        self, model: torch.nn.Module, kind: Literal["best", "last"] | None = None
    ) -> torch.nn.Module:
        """Load the run's weights into ``model`` in place, and return it.

        Args:
            model: a model with the same parameters as the trained one.
            kind: which weights; None for the setting ``checkpoint.weights``. If there are no best
                weights, the last saved ones are used.

        Raises:
            CheckpointError: the run saved no weights, they are damaged, or they do not fit the
                model.
        """
        from nbtoolkit.run.weights import find_weights, load_model

        if self.checkpoint is None:
            raise CheckpointError(
                f"the run {self.paths.run_id} has saved no checkpoint",
                allowed="runs whose function calls nb.fit(...) or ctx.save(...)",
                do='call ctx.save({"model": model.state_dict()}) before the function returns',
            )
        # A checkpoint that ctx.save wrote under another name is not found by its kind.
        return load_model(find_weights(self.paths.folder, kind) or self.checkpoint, model)

    def plot(self) -> Chart:
        """Draw the learning curves."""
        return charts().result_chart(self.paths, "curves")

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name}={value:.4g}" for name, value in self.metrics.items())
        parts = [self.status, metrics or "no metrics", f"{self.seconds:.1f} s", self.paths.folder]
        return f"RunResult({', '.join(map(str, parts))})"

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object]] = [("status", self.status)]
        rows += [(name, f"{value:.6g}") for name, value in self.metrics.items()]
        rows += [("seconds", f"{self.seconds:.1f}")]
        if speed := _describe_speed(self):
            rows += [("speed", speed)]
        rows += [("plan", str(self.plan.explain()).splitlines()[0]), ("folder", self.paths.folder)]
        return html_table("run", rows)


def say_speed(result: RunResult, say: Callable[[str], None]) -> None:
    """Show the predicted and the achieved speed, if a calibration was kept before the run."""
    if text := _describe_speed(result):
        say(f"speed: {text}")


def _describe_speed(result: RunResult) -> str:
    predicted = result.plan.predicted_speed
    if predicted is None or result.throughput is None:
        return ""
    share = "" if result.efficiency is None else f", {result.efficiency:.2f} of linear"
    return (
        f"{predicted:,.0f} samples/s predicted by nb.calibrate, {result.throughput:,.0f} achieved"
        f"{share}"
    )


def refuse_deleted(paths: RunPaths) -> None:
    """Raise an error if the run's folder was deleted, possibly by the training function.

    Raises:
        RunFolderError: the folder is missing, or holds only files written after the deletion. Its
            cause is the exception that the function raised.
    """
    if not paths.versions.exists():
        failure: BaseException | None = None
        try:
            if paths.error.exists():
                raise_failure(paths)
        except BaseException as error:
            failure = error
        raise RunFolderError(
            f"the folder {paths.folder} was deleted during the run: its result is lost",
            allowed="a training function that deletes only its own files",
            do="find the code that deletes it (shutil.rmtree, rm -r), and launch again",
        ) from failure


def _find_checkpoint(paths: RunPaths, recorded: str | None) -> Path | None:
    """Return the recorded checkpoint, even if the folder was moved or unpacked since.

    A bundle holds the best checkpoint of a finished run, not its last one.
    """
    if recorded is None:
        return None
    _, separator, name = recorded.rpartition(f"/{paths.checkpoints.name}/")
    if separator and (paths.checkpoints / name).exists():
        return paths.checkpoints / name
    best = sorted(paths.checkpoints.glob("best*"))
    return best[-1] if best else Path(recorded)


@dataclass(frozen=True, kw_only=True)
class StartedRun:
    """A run or search that this process has started.

    Attributes:
        line: the connection to its supervisor.
        tracked: makes the tracking service read its events now, and returns the fork server's pid;
            None if it is not tracked.
        forked: the agent, if this process forked it and has to reap it.
        detached: True if it outlives this process.
    """

    line: Connection
    tracked: Callable[[], int] | None = None
    forked: ForkedAgent | None = None
    detached: bool = False


class RunHandle:
    """A run in progress, from ``launch(wait=False)`` or ``attach``; it reads the run's folder."""

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
        self._started, self._cell, self._on_event = started, cell, on_event
        self._line = None if started is None else started.line
        self._reader = EventReader(paths.events, offset)
        self._ended: RunEnded | None = None
        self._lost: SupervisorLost | None = None
        self._was_live = started is not None or paths.owned()
        self._receiving = threading.Lock()
        if started is not None:
            _keep_connected(self)

    def done(self) -> bool:
        """Return True if the run has ended or lost its supervisor."""
        self._receive()
        return self.paths.ended() or not self._supervisor_lives()

    def events(self) -> Iterator[Event]:
        """Read the run's events so far, oldest first (see run/events.py for their types)."""
        return EventReader(self.paths.events).read()

    def stop(self, reason: str = "a handle asked", grace: float | None = None) -> None:
        """Ask all ranks to leave at their next report; the run ends with status ``"stopped"``.

        Args:
            reason: recorded in the run's events.
            grace: seconds after which the ranks are killed; None for no limit.
        """
        request = StopRequest(reason=reason, grace=grace)
        if self._line is None or not self._line.send(request):
            write_json(self.paths.stop, {"reason": reason, "grace": grace}, durable=False)

    def result(self, timeout: float | None = None) -> RunResult:
        """Wait for the run's end and return its result; show its output meanwhile.

        An interrupt asks the ranks to leave, kills them after 5 s, and raises KeyboardInterrupt; a
        second one kills them at once. In a script, SIGTERM, SIGUSR1 and SIGUSR2 ask the ranks to
        leave too, with status ``"deadline"``, unless you have handlers for them.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            TimeoutError: the run has not ended yet (it continues).
            KeyboardInterrupt: the wait was interrupted, and the run ended.
            Exception: the failed rank's exception, with its own type.
        """
        __tracebackhide__ = True
        limit = None if timeout is None else time.monotonic() + timeout
        if self._cell is not None:
            self._cell.open(waits=True)
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

    def disconnect(self) -> None:
        """Close the connection to the supervisor, which ends the run unless it is detached."""
        if self._line is not None:
            self._line.close()

    # --- waiting ---

    def _wait_with_signals(self, limit: float | None) -> int | None:
        """Wait; forward termination signals to a run that would end with this process."""
        flag, started = SignalFlag(), self._started
        ends_with_us = started is not None and not started.detached
        with catch_termination_signals(flag) if ends_with_us else nullcontext():
            return self._wait_for_end(limit, flag)

    def _wait_for_end(self, limit: float | None, flag: SignalFlag) -> int | None:
        """Return how often the wait was interrupted; None if the limit came first."""
        interrupts = handled = 0
        while True:
            try:
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

    def _forward_signal(self, flag: SignalFlag) -> None:
        """End the run as if its supervisor had received the signal itself."""
        if flag.number and self._line is not None:
            reason = describe_signal(flag.number)
            self._line.send(StopRequest(reason=reason, status="deadline"))
            flag.number = 0

    def _read_events(self) -> bool:
        """Handle new events and output; return True if no more can follow."""
        # Before the events are read, so that none of the supervisor's last ones is missed.
        complete = not self._supervisor_lives()
        for event in self._reader.read():
            if self._on_event is not None:
                self._on_event(event)
            if self._cell is not None:
                self._cell.event(event)
            if isinstance(event, RunStarted):
                self._ended = None  # a new attempt
            elif isinstance(event, RunEnded):
                self._ended = event
        if self._cell is not None:
            self._cell.pump()
        return complete

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

    def _supervisor_lives(self) -> bool:
        if self._line is not None:
            return not self._line.closed
        return self.paths.owned()

    def _interrupt(self, count: int) -> None:
        if count == 1:
            self.stop("interrupted", grace=INTERRUPT_GRACE)
        elif self._line is not None:
            self._line.send(KillRequest())
        else:
            self.stop("interrupted twice", grace=0.0)

    def _finish(self) -> None:
        if self._cell is not None:
            self._cell.close()
        if self._started is None:
            return
        self._started.line.close()
        if self._started.forked is not None:
            self._started.forked.kill()  # in case its supervisor died before it could end it
        if self._started.tracked is not None and self._ended is not None:
            pid = self._started.tracked()  # else the service waits until its next poll
            wait_for_tracking(self.paths, pid, self._say)

    def _say(self, text: str) -> None:
        if self._cell is not None:
            self._cell.say(text)

    def _outcome(self) -> RunResult:
        __tracebackhide__ = True
        if (lost := self._lost) is not None:
            kind = {"RunFolderError": RunFolderError}.get(lost.error, LaunchError)
            raise kind(lost.what, allowed=lost.allowed, do=lost.do)
        refuse_deleted(self.paths)
        if self.paths.error.exists():
            raise_failure(self.paths)
        if self.paths.result.exists():
            result = RunResult(self.paths)
            if self._was_live:
                say_speed(result, self._say)
            return result
        raise LaunchError(
            f"the supervisor process of the run {self.paths.run_id} died, and the ranks with it "
            "(usual cause: out of memory)",
            allowed="an interrupted run resumes from its last checkpoint",
            do="launch again (resume='auto' finds the run)",
        )

    def __repr__(self) -> str:
        return f"RunHandle({'ended' if self.done() else 'running'}, {self.paths.folder})"

    def _ipython_display_(self) -> None:
        """Show a live view as the cell's value, if widgets are available."""
        displays().show_handle(self.paths, self._cell)

    def _repr_html_(self) -> str:
        return displays().static(self.paths)


def pack_at_deadline(status: Status, paths: RunPaths, say: Callable[[str], None]) -> None:
    """Pack a run that ended at its deadline, if its session is about to end.

    Args:
        status: the run's final status.
        paths: the run.
        say: shows a message to the user.
    """
    if status == "deadline":
        from nbtoolkit.archive.pack import pack_for_next_session

        pack_for_next_session(paths, say)


_connected: list[RunHandle] = []
"""Running runs of this kernel; their connections stay open even if the user drops the handles."""
_connected_lock = threading.Lock()


def _keep_connected(handle: RunHandle) -> None:
    """Keep a run's connection open until the run or this process ends.

    The open connection tells the supervisor that this process lives.
    """
    with _connected_lock:
        if not _connected:
            # Registered after the fork server's exit function, and so called before it: that one
            # waits for the supervisors.
            atexit.unregister(_disconnect_all)
            atexit.register(_disconnect_all)
        for other in list(_connected):
            if other.done():
                other.disconnect()
                _connected.remove(other)
        _connected.append(handle)


def _disconnect_all() -> None:
    for handle in _connected:
        handle.disconnect()


def wait_for_tracking(
    paths: RunPaths,
    pid: int,
    say: Callable[[str], object],
    *,
    limit: float = TRACKING_SECONDS,
    stalled: float = _TRACKING_STALLED,
) -> bool:
    """Wait until tracking has written a run's events; show a message if it has not.

    Args:
        paths: the run.
        pid: the fork server's process; tracking runs below it.
        say: shows a message to the user.
        limit: seconds to wait.
        stalled: seconds without progress after which the wait ends.

    Returns:
        True if all events are written.
    """

    def has_ended(seconds: float) -> bool:
        ended = any(_tracking_state(paths))
        if not ended:
            time.sleep(min(seconds, 0.01))
        return ended

    what = f"tracking to write the run {paths.run_id}"
    in_time = wait_while_active(
        has_ended, Activity(pid), what, limit=limit, stalled=stalled, say=say
    )
    replay = f"nbtoolkit.tracking.replay({str(paths.folder)!r})"
    done, error = _tracking_state(paths)
    if error:
        say(f"warning: tracking did not write the whole run: {error}; {replay} retries")
    elif not in_time:
        say(
            "tracking has not written the whole run yet, and continues in the background: "
            f'{paths.tracking} has "done": true at its end; after a crash, call {replay}'
        )
    return done


def _tracking_state(paths: RunPaths) -> tuple[bool, str]:
    """Return whether tracking has written the whole run, and the error that ended it, or ""."""
    try:
        state: dict[str, Any] = read_or_empty(paths.tracking)
        written = paths.tracking.stat().st_mtime
    except FileNotFoundError:
        return False, ""
    # The file of an earlier attempt has read fewer events, or is older than this attempt.
    done = state.get("done") and state.get("read", 0) >= paths.events.stat().st_size
    owner: dict[str, Any] = read_or_empty(paths.owner)
    return bool(done), state.get("error", "") if written >= owner.get("since", 0.0) else ""
