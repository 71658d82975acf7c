"""Define RunResult, how a run ended, and RunHandle, a run that is still going."""

from __future__ import annotations

import atexit
import html
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.resources import Activity, wait_while_active
from nbtoolkit.errors import CheckpointError, LaunchError, RunFolderError
from nbtoolkit.launcher.failures import raise_failure
from nbtoolkit.launcher.fork_launch import ForkedAgent
from nbtoolkit.run.events import Event, EventReader, RunEnded, RunStarted
from nbtoolkit.run.messages import KillRequest, StopRequest, SupervisorLost
from nbtoolkit.run.output import RunDisplay, displays
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

if TYPE_CHECKING:
    import torch

INTERRUPT_GRACE = 5.0  # seconds the ranks get to come to a report after the first interrupt
# So long a launch waits for tracking to catch up: a new folder takes 2 s, on a loaded machine 20 s.
# Tracking goes on behind, and at the kernel's end it is waited for.
TRACKING_SECONDS = 60.0
_TRACKING_STALLED = 10.0  # and so long when it makes no progress
_POLL = 0.1


class RunResult:
    """How a run ended, read from its folder.

    Attributes:
        status: ``"completed"``, or why all ranks left early: ``"stopped"``, ``"deadline"``,
            ``"pruned"``.
        metrics: the values last reported or returned (or logged, where nothing was reported).
        plan: what was run: processes, devices, precision, batch split, with reasons.
        paths: the run's folder and files.
        seconds: wall time from the supervisor's start to the last rank's end.
        checkpoint: the checkpoint (ctx.save's file, fit's folder) last saved; None: nothing was.
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
            self.checkpoint = _here(paths, ended["checkpoint"])
            self._processes: int = ended["processes"]
        with reading(paths.plan):
            self.plan = LaunchPlan.from_dict(read_record(paths.plan) or {})

    @cached_property
    def value(self) -> Any:
        """What rank 0 returned (tensors on the CPU); None when the run left early."""
        return unpack_value(self.paths.value(0)) if self.status == "completed" else None

    @cached_property
    def values(self) -> list[Any]:
        """What each rank returned, by rank; empty when the run left early."""
        if self.status != "completed":
            return []
        others = range(1, self._processes)
        return [self.value, *(unpack_value(self.paths.value(rank)) for rank in others)]

    def load_into(
        self, model: torch.nn.Module, kind: Literal["best", "last"] | None = None
    ) -> torch.nn.Module:
        """Load the run's weights into ``model`` (the notebook's own object) and return it.

        Args:
            model: a model of the same shape as the trained one.
            kind: which weights; None: those that ``checkpoint.weights`` says. Where there are no
                best ones, the last saved are used.

        Raises:
            CheckpointError: the run saved none, they are damaged, or they do not fit the model.
        """
        from nbtoolkit.run.weights import find_weights, load_model

        if self.checkpoint is None:
            raise CheckpointError(
                f"the run {self.paths.run_id} has saved no checkpoint",
                allowed="runs whose function calls nb.fit(...) or ctx.save(...)",
                do='call ctx.save({"model": model.state_dict()}) before it returns',
            )
        # where there is none by these names, the one last saved has a name of its own
        return load_model(find_weights(self.paths.folder, kind) or self.checkpoint, model)

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name}={value:.4g}" for name, value in self.metrics.items())
        metrics = metrics or "no metrics"
        return f"RunResult({self.status}, {metrics}, {self.seconds:.1f} s, {self.paths.folder})"

    def _repr_html_(self) -> str:
        rows = {
            "status": self.status,
            **{name: f"{value:.6g}" for name, value in self.metrics.items()},
            "seconds": f"{self.seconds:.1f}",
            "plan": str(self.plan.explain()).splitlines()[0],
            "folder": str(self.paths.folder),
        }
        cells = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
            for name, text in rows.items()
        )
        return f"<table>{cells}</table>"


def refuse_deleted(paths: RunPaths) -> None:
    """Refuse a run whose folder somebody has deleted, the function itself perhaps.

    Raises:
        RunFolderError: it is gone, or holds only what was written since; its cause is what the
            function raised.
    """
    if not paths.versions.exists():
        failure: BaseException | None = None
        try:
            if paths.error.exists():
                raise_failure(paths)
        except BaseException as error:
            failure = error
        raise RunFolderError(
            f"the folder {paths.folder} was deleted while the run went on: its result is lost",
            allowed="functions that delete only what is theirs",
            do="look for what deletes it (shutil.rmtree, rm -r), and launch again",
        ) from failure


def _here(paths: RunPaths, told: str | None) -> Path | None:
    """The checkpoint that a run's result names, also where the folder was moved or unpacked since.

    A bundle carries the best checkpoint of a finished run, not its last one.
    """
    if told is None:
        return None
    _, found, below = told.rpartition(f"/{paths.checkpoints.name}/")
    if found and (paths.checkpoints / below).exists():
        return paths.checkpoints / below
    best = sorted(paths.checkpoints.glob("best*"))
    return best[-1] if best else Path(told)


@dataclass(frozen=True, kw_only=True)
class StartedRun:
    """A run or search that this process has started.

    Attributes:
        line: to its supervisor.
        tracked: has the tracking service look at it now; None: it is not tracked.
        forked: the agent, to be reaped, where this process has forked it.
        detached: whether it outlives this process.
    """

    line: Connection
    tracked: Callable[[], int] | None = None
    forked: ForkedAgent | None = None
    detached: bool = False


class RunHandle:
    """A run that goes on, from ``launch(wait=False)`` or ``attach``; it reads the run's folder."""

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
        self._hearing = threading.Lock()
        if started is not None:
            _keep(self)

    def done(self) -> bool:
        """Whether the run has ended (or lost its supervisor)."""
        self._hear()
        return self.paths.ended() or not self._supervisor_lives()

    def events(self) -> Iterator[Event]:
        """The run's events so far, oldest first (see run/events.py for their types)."""
        return EventReader(self.paths.events).read()

    def stop(self, reason: str = "a handle asked", grace: float | None = None) -> None:
        """Ask all ranks to leave at their next report; the run ends with status ``"stopped"``.

        Args:
            reason: noted in the run's events.
            grace: seconds after which the ranks are killed; None: as long as it takes.
        """
        request = StopRequest(reason=reason, grace=grace)
        if self._line is None or not self._line.send(request):
            write_json(self.paths.stop, {"reason": reason, "grace": grace}, durable=False)

    def result(self, timeout: float | None = None) -> RunResult:
        """Wait for the run's end and return its result; shows its output meanwhile.

        An interrupt asks the ranks to leave (they get 5 s, then are killed) and raises
        KeyboardInterrupt; a second one kills. In a script, SIGTERM, SIGUSR1 and SIGUSR2 ask the
        ranks to leave too, with status ``"deadline"``, unless you have handlers for them.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            TimeoutError: it has not ended yet (it goes on).
            KeyboardInterrupt: the wait was interrupted, and the run ended.
            Exception: what the failed rank raised, with its own type.
        """
        __tracebackhide__ = True
        limit = None if timeout is None else time.monotonic() + timeout
        if self._cell is not None:
            self._cell.open(waits=True)
        try:
            interrupts = self._wait_heeding(limit)
        except (
            BaseException
        ):  # on_event's own error, or a third interrupt: nobody waits for the run any more
            self.let_go()
            raise
        if interrupts is None:
            raise TimeoutError(
                f"the run {self.paths.run_id} has not ended after {timeout:g} s; it goes on"
            )
        self._finish()
        if interrupts:
            raise KeyboardInterrupt
        outcome = self._outcome()
        if self._was_live:  # once, and not when somebody looks at how a run ended long ago
            self._was_live = False
            pack_at_deadline(outcome.status, self.paths, self._say)
        return outcome

    def let_go(self) -> None:
        """Close the line to the supervisor: a run that is not detached ends (the kernel ends)."""
        if self._line is not None:
            self._line.close()

    # --- waiting ---

    def _wait_heeding(self, limit: float | None) -> int | None:
        """Wait; a signal that announces this process's end is handed on to a run it would end."""
        heard, started = SignalFlag(), self._started
        ends_with_us = started is not None and not started.detached
        with catch_termination_signals(heard) if ends_with_us else nullcontext():
            return self._wait_for_end(limit, heard)

    def _wait_for_end(self, limit: float | None, heard: SignalFlag) -> int | None:
        """How often the wait was interrupted; None when the limit came first."""
        interrupts = handed_on = 0
        while True:
            try:
                if handed_on < interrupts:  # in here, since the next interrupt may come meanwhile
                    handed_on = interrupts
                    self._interrupt(interrupts)
                self._pass_on(heard)
                if self._over():
                    return interrupts
                if limit is not None and time.monotonic() >= limit:
                    return None
                self._wait()
            except KeyboardInterrupt:
                interrupts += 1

    def _pass_on(self, heard: SignalFlag) -> None:
        """Let the run end as if its supervisor had got the signal itself."""
        if heard.number and self._line is not None:
            reason = describe_signal(heard.number)
            self._line.send(StopRequest(reason=reason, status="deadline"))
            heard.number = 0

    def _over(self) -> bool:
        """Take what is new; whether the run has ended and its supervisor is gone."""
        gone = not self._supervisor_lives()
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
        return gone

    def _wait(self) -> None:
        if self._line is None:
            time.sleep(_POLL)
            return
        news = (
            select.poll()
        )  # select() refuses descriptors above 1023, which a lived-in kernel may reach
        news.register(self._line, select.POLLIN)
        news.poll(_POLL * 1000)
        self._hear()

    def _hear(self) -> None:
        """Take what the supervisor said; mostly that there is something new in the files."""
        if self._line is None:
            return
        with self._hearing:
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
            self._started.forked.kill()  # its supervisor is gone, and would have ended it
        if self._started.tracked is not None and self._ended is not None:
            pid = self._started.tracked()  # the service need not wait for its next look
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
            return RunResult(self.paths)
        raise LaunchError(
            f"the supervisor process of the run {self.paths.run_id} died, and the ranks with it",
            allowed="a run that was cut off goes on from its last checkpoint",
            do="launch again (resume='auto' finds it); the usual cause is memory",
        )

    def __repr__(self) -> str:
        return f"RunHandle({'ended' if self.done() else 'running'}, {self.paths.folder})"

    def _ipython_display_(self) -> None:
        """As a cell's value it is a live view, where there are widgets."""
        displays().show_handle(self.paths, self._cell)

    def _repr_html_(self) -> str:
        return displays().static(self.paths)


def pack_at_deadline(status: Status, paths: RunPaths, say: Callable[[str], None]) -> None:
    """A run that ended at its deadline is packed, where its session is about to end.

    Args:
        status: how it ended.
        paths: its folder.
        say: shows a sentence to the user.
    """
    if status == "deadline":
        from nbtoolkit.archive.pack import pack_for_next_session

        pack_for_next_session(paths, say)


_kept: list[RunHandle] = []
"""Runs of this kernel: their lines stay open while they go on, whoever holds the handle."""
_keeping = threading.Lock()


def _keep(handle: RunHandle) -> None:
    """Keep a run's line until the run or this process ends: by it the supervisor knows us alive."""
    with _keeping:
        if not _kept:
            atexit.unregister(_let_all_go)
            atexit.register(
                _let_all_go
            )  # after the fork server's, hence called before: it waits for supervisors
        for other in list(_kept):
            if other.done():
                other.let_go()
                _kept.remove(other)
        _kept.append(handle)


def _let_all_go() -> None:
    for handle in _kept:
        handle.let_go()


def wait_for_tracking(
    paths: RunPaths,
    pid: int,
    say: Callable[[str], object],
    *,
    limit: float = TRACKING_SECONDS,
    stalled: float = _TRACKING_STALLED,
) -> bool:
    """Wait until tracking has written a run's events; say so where it has not.

    Args:
        paths: the run.
        pid: the fork server, below which tracking runs.
        say: shows a sentence to the user.
        limit: seconds to wait.
        stalled: seconds to wait without any progress.

    Returns:
        Whether they are written.
    """

    def over(seconds: float) -> bool:
        known = any(_tracking_state(paths))
        if not known:
            time.sleep(min(seconds, 0.01))
        return known

    what = f"tracking to write the run {paths.run_id}"
    over_in_time = wait_while_active(
        over, Activity(pid), what, limit=limit, stalled=stalled, say=say
    )
    replay = f"nbtoolkit.tracking.replay({str(paths.folder)!r})"
    done, error = _tracking_state(paths)
    if error:
        say(f"warning: tracking did not write the whole run: {error}; {replay} tries again")
    elif not over_in_time:
        say(
            "tracking has not written the whole run yet, and goes on in the background: "
            f'{paths.tracking} has "done": true once it is through; after a crash, {replay}'
        )
    return done


def _tracking_state(paths: RunPaths) -> tuple[bool, str]:
    """Whether tracking has written the whole run, and why it gave up."""
    try:
        state: dict[str, Any] = read_or_empty(paths.tracking)
        written = paths.tracking.stat().st_mtime
    except FileNotFoundError:
        return False, ""
    # What an earlier attempt left has read less, and failed before this one began.
    done = state.get("done") and state.get("read", 0) >= paths.events.stat().st_size
    owner: dict[str, Any] = read_or_empty(paths.owner)
    return bool(done), state.get("error", "") if written >= owner.get("since", 0.0) else ""
