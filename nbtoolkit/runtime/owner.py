"""The owner of one run: its pilots, events, deadline, failure and stop. A process of its own.

It never imports user code and never computes: it listens to the ranks, writes the run's record and
decides when it is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

from nbtoolkit.errors import GroupStartFailed, LaunchError, NbtoolkitError
from nbtoolkit.runtime import verdict
from nbtoolkit.runtime.ahead import environment_key
from nbtoolkit.runtime.channel import answer, take
from nbtoolkit.runtime.crossing import pack_error
from nbtoolkit.runtime.flight import Flight, RankView
from nbtoolkit.runtime.monitor import Monitor
from nbtoolkit.runtime.paths import RunPaths, boot_id, folder_error, write_json
from nbtoolkit.runtime.payload import unpack
from nbtoolkit.runtime.plan import GroupFailure, LaunchPlan, PortBusy, make_plan
from nbtoolkit.runtime.ports import free_port
from nbtoolkit.runtime.processes import Peer
from nbtoolkit.runtime.record import RunRecord
from nbtoolkit.runtime.signals import ENDING, announcement
from nbtoolkit.runtime.watch import Watch
from nbtoolkit.runtime.wire import Line, Message, memory_file, send_packet, wake

TICK = 0.05  # seconds between looks at the ranks when nothing is said
FAILURE_GRACE = 1.0  # what the other ranks get after the first failure, before SIGKILL
INTERRUPT_GRACE = 5.0
START_SECONDS = 30.0  # for all ranks to form their group: 0.1 s on a quiet machine,
NCCL_START_SECONDS = 90.0  # 15 s with NCCL on a cold T4 pair
LAND_SECONDS = 10.0  # for the processes to end after their last word
MISSING_SECONDS = 4.0  # a rank in ctx.report waits this long before the others are looked at
PORT_TRIES = 4


def own(
    payload_fd: int,
    kernel: socket.socket,
    launchpad: socket.socket,
    lock_fd: int,
    forked: list[int],
) -> None:
    """Carry one run from its plan to its last event; the main function of an owner process.

    Args:
        payload_fd: the packed function and what belongs to it.
        kernel: the line to whoever launched.
        launchpad: packets to the launchpad: asks for pilots, hears of their end.
        lock_fd: holds the run's lock; let go before the line, so that who hears of the run's end
            can go on with it at once.
        forked: the lines of a pilot and ranks that the kernel forks itself; empty otherwise.
    """
    content = unpack(payload_fd)
    line = Line(kernel)
    try:
        Owner(content, payload_fd, line, launchpad, forked).carry()
    except LaunchpadGone:
        lost = LaunchError(
            "the launchpad process died, and the ranks with it (its usual end: out of memory)",
            do="launch again: a new launchpad is started, a run with a checkpoint goes on",
        )
        _tell_lost(line, lost)
    except OSError as error:  # the run's folder cannot be written any more
        _tell_lost(line, folder_error(Path(content["folder"]), error))
    finally:
        os.close(lock_fd)
        line.close()


def _tell_lost(line: Line, error: LaunchError) -> None:
    """The run cannot go on, nor its folder say so: tell whoever still listens."""
    kind = type(error).__name__
    line.send(
        {
            "type": "lost",
            "error": kind,
            "what": error.what,
            "allowed": error.allowed,
            "do": error.do,
        }
    )


class Owner:
    """One run's life."""

    def __init__(
        self,
        content: dict[str, Any],
        payload_fd: int,
        kernel: Line,
        launchpad: socket.socket,
        forked: list[int],
    ) -> None:
        self._content, self._payload_fd, self._forked = content, payload_fd, forked
        self._kernel, self._launchpad = kernel, launchpad
        self._detached: bool = content["detach"]
        self.paths = RunPaths(Path(content["folder"]))
        self.plan: LaunchPlan = content["plan"]
        config = content["config"]
        self._hang_timeout: float = config.runtime.hang_timeout
        self._device_metrics: bool = config.tracking.device_metrics
        about = {"pid": os.getpid(), "boot_id": boot_id(), "since": time.time()}
        write_json(self.paths.owner, about, durable=False)
        self.record = RunRecord(self.paths, deadline=content["deadline"])
        self._flight: Flight | None = None
        self._kill_at: float | None = None
        self._killed_on_request = False
        self._kernel_process = Peer(kernel)
        self._read_end, self._write_end = os.pipe()
        self._catch_signals()

    # --- the story ---

    def carry(self) -> None:
        """Run, and write how it ended when it could not go on to its end."""
        try:
            self.run()
        except KernelGone:
            self.record.note("the kernel is gone: the run was ended, unfinished", level="warning")
        except LaunchpadGone:
            self.record.note(
                "the launchpad is gone: the run was ended, unfinished", level="warning"
            )
            raise

    def run(self) -> None:
        """Fly until the ranks have ended; fly again with another plan when they could not start."""
        self.record.write("run", **self._content["header"], plan=self.plan.to_dict())
        for level, text in self._content["notes"]:
            self.record.note(text, level)
        ports_tried = 0
        late_before = False
        while True:
            outcome = self._fly()
            if isinstance(outcome, Late) and not late_before and not self._forked:
                late_before = True
                self.record.note(f"{outcome.reason}: once more", level="warning")
            elif isinstance(outcome, PortBusy) and ports_tried < PORT_TRIES and not self._forked:
                ports_tried += 1
                self._replan(outcome)
            elif isinstance(outcome, GroupFailure) and self._may_fall_back():
                self._replan(outcome)
            else:
                break
        self._settle(outcome)

    def _may_fall_back(self) -> bool:
        return self.plan.processes > 1 and self.plan.fallback and not self._forked

    def _start(self) -> Flight:
        port = self.plan.port or free_port()
        if self._forked:
            return Flight.adopt(
                self.plan, port, self._launchpad, self._forked, self._content["pilot_pid"]
            )
        environment = environment_key(self._content["around"]["environ"])
        return Flight.start(self.plan, port, self._launchpad, self._payload_fd, environment)

    def _fly(self) -> Any:
        """One flight; returns how it ended: a status, a failure, or evidence for a new plan."""
        self._flight = flight = self._start()
        self._watch = Watch(flight, self.paths, self._hang_timeout)
        self._monitor = Monitor(flight, self.record, on=self._device_metrics)
        try:
            while (outcome := self._step(flight)) is None:
                pass
            self._land(flight, patient=isinstance(outcome, str))
            return outcome
        finally:
            flight.kill()
            flight.close()
            shutil.rmtree(self.paths.elastic, ignore_errors=True)

    def _step(self, flight: Flight) -> Any:
        self._listen(flight)
        self._obey()
        self._call_ranks(flight)
        return verdict.of(flight, self) or self._care(flight)

    # --- listening ---

    def _listen(self, flight: Flight) -> None:
        """Wait a tick, or until somebody says something; then take all that was said."""
        with selectors.DefaultSelector() as selector:
            sources: list[Line | socket.socket | int] = [self._launchpad, self._read_end]
            for source in [*flight.lines(), *sources]:
                selector.register(source, selectors.EVENT_READ)
            if not self._kernel.closed:
                selector.register(self._kernel, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(TICK)}
        if self._read_end in ready:
            self._on_signal(os.read(self._read_end, 512)[0])
        if self._launchpad in ready and not flight.hear_launchpad():
            flight.kill()
            flight.exited = -signal.SIGKILL
            raise LaunchpadGone
        for rank, message in flight.hear():
            self._on_message(flight, rank, message)
        for rank in flight.gone():
            for message in rank.messages():  # its last words may have come with its end
                self._on_message(flight, rank, message)
            if not rank.over:
                rank.end("dead")
        for message in self._kernel.drain() if self._kernel in ready else ():
            if message["type"] == "stop":
                status = message.get("status", "stopped")
                self._stop(message["reason"], message.get("grace"), status)
            elif message["type"] == "kill":
                self._stop("killed on request", 0.0)

    def _on_message(self, flight: Flight, rank: RankView, message: Message) -> None:
        kind = message["type"]
        if kind in ("metrics", "reported", "saved", "note"):
            take(self.record, message)
        elif kind == "phase":
            self._on_phase(flight, rank, message)
        elif kind in ("report", "check", "saving", "checkpoint"):
            rank.asking = message
            self._answer_if_all_ask(flight)
        elif kind == "imports":
            self._import_ahead(message["names"])
        elif kind == "long":
            rank.long += 1 if message["on"] else -1
        rank.hear(message)

    def _import_ahead(self, names: list[str]) -> None:
        """Have the launchpad import for the next launch what a rank imports now."""
        with memory_file(json.dumps(self._content["around"]["environ"]).encode()) as fd:
            send_packet(self._launchpad, {"op": "imports", "names": names}, [fd])

    def _on_phase(self, flight: Flight, rank: RankView, message: Message) -> None:
        rank.phase = message["phase"]
        rank.pid = message.get("pid", rank.pid)
        self.record.write("rank", rank=rank.rank, phase=rank.phase, pid=rank.pid)
        if rank.phase == "ready" and all(other.phase == "ready" for other in flight.ranks):
            for other in flight.ranks:
                other.phase = "user"
                other.line.send({"type": "go"})

    def _answer_if_all_ask(self, flight: Flight) -> None:
        questions = [rank.asking for rank in flight.ranks]
        if None in questions:
            return
        kinds = {question["type"] for question in questions if question}
        if len(kinds) > 1:
            reply: Message = {"error": verdict.different_calls(flight)}
        else:
            reply = answer(self.record, flight.ranks[0].asking or {})
        self._reply(flight, reply)

    def _reply(self, flight: Flight, reply: Message) -> None:
        for rank in flight.ranks:
            if rank.asking is not None:
                rank.asking = None
                rank.line.send({"type": "answer", **reply})

    # --- stopping ---

    def _obey(self) -> None:
        """Requests that come as files, the kernel's end, and graces that have run out."""
        if (request := self.record.stop_requested()) is not None:
            self._stop(request.get("reason", "a handle asked"), request.get("grace"))
        if not self._detached and (self._kernel.closed or self._kernel_process.gone()):
            raise KernelGone
        if (
            self._kill_at is not None
            and time.monotonic() >= self._kill_at
            and self._flight is not None
        ):
            self._killed_on_request = True
            self._flight.kill()

    def _stop(self, reason: str, grace: float | None = None, status: str = "stopped") -> None:
        self.record.ask_to_stop(status, reason, grace)
        if grace is not None:
            limit = time.monotonic() + grace
            self._kill_at = limit if self._kill_at is None else min(limit, self._kill_at)

    def _on_signal(self, number: int) -> None:
        """An interrupt is somebody's wish; other signals announce an end that nobody here chose."""
        if number == signal.SIGINT:
            self._stop("the owner was interrupted")
        else:
            self._stop(announcement(number), status="deadline")

    def _call_ranks(self, flight: Flight) -> None:
        """Once the run is to end, rank 0 hears of it: its next report may be an hour away."""
        if self.record.leaving is not None and not flight.called:
            flight.called = True
            flight.ranks[0].line.send({"type": "come"})

    @property
    def killed_on_request(self) -> bool:
        """Whether the ranks were killed because somebody asked for it."""
        return self._killed_on_request

    def _care(self, flight: Flight) -> Any:
        """Look after ranks that run: hangs, calls that not every rank makes, device use."""
        self._monitor.tick()
        self._watch.sample()
        if all(rank.phase == "user" or rank.over for rank in flight.ranks):
            self._look_for_missing(flight)
            if (warning := self._watch.warning()) is not None:
                self.record.note(warning, level="warning")
                wake(self._kernel)
            if (hung := self._watch.hung()) is not None:
                return verdict.hung(*hung, self._hang_timeout, self.paths)
        elif not all(rank.has_group or rank.over for rank in flight.ranks):
            limit = NCCL_START_SECONDS if flight.plan.backend == "nccl" else START_SECONDS
            if time.monotonic() - flight.started_at > limit:
                return Late(f"the ranks did not form a group within {limit:.0f} s")
        return None

    def _look_for_missing(self, flight: Flight) -> None:
        """Ranks that wait in ctx.report for one that is not coming are told so."""
        asking = [rank for rank in flight.ranks if rank.asking is not None]
        missing = [rank for rank in flight.ranks if rank.asking is None]
        if not asking or not missing:
            return
        over = [rank for rank in missing if rank.over]
        idle = min(self._watch.silence(rank) for rank in missing)
        waited = min(time.monotonic() - rank.heard_at for rank in asking)
        if not over and (waited < MISSING_SECONDS or idle < MISSING_SECONDS / 2):
            return
        if not over:
            over = self._watch.waiting_elsewhere(missing)
        if over:
            self._reply(flight, {"error": verdict.missing_call(asking, over)})

    def _land(self, flight: Flight, *, patient: bool) -> None:
        """Wait for the processes to go; after a failure the ranks that still run have a second."""
        limit = time.monotonic() + (LAND_SECONDS if patient else FAILURE_GRACE)
        while flight.exited is None and time.monotonic() < limit:
            if not patient and all(rank.over for rank in flight.ranks):
                return  # those that failed wait to be ended
            # where the launchpad is gone the ranks are, and how they ended is known
            with contextlib.suppress(LaunchpadGone):
                self._listen(flight)

    # --- the end ---

    def _replan(self, evidence: GroupFailure | PortBusy) -> None:
        content = self._content
        self.plan = make_plan(
            content["config"],
            content["host"],
            content["hardware"],
            (evidence,),
            start=self.plan.start,
        )
        write_json(self.paths.plan, self.plan.to_dict())
        self.record.note(
            f"{self.plan.reasons[0]}\nnew plan: {self.plan.explain()}", level="warning"
        )
        wake(self._kernel)

    def _settle(self, outcome: Any) -> None:
        """Write how the run ended."""
        if isinstance(outcome, str):
            self.record.complete(outcome, self.plan.processes)
        elif isinstance(outcome, verdict.Failure):
            self.record.fail(outcome.error, rank=outcome.rank, notes=outcome.notes)
        else:
            count = self.plan.processes
            what = f"{count} ranks could not form a process group"
            error = GroupStartFailed(
                f"{what if count > 1 else 'the rank could not start'}: "
                f"{getattr(outcome, 'reason', outcome)}",
                allowed="distributed.fallback: true goes on with one process" if count > 1 else "",
                do=f"read {self.paths.pilot_log()} and {self.paths.log(0)}",
            )
            self.fail_with(error)
        wake(self._kernel)

    def fail_with(self, error: NbtoolkitError) -> None:
        """End the run with an error of our own."""
        self.record.fail(pack_error(error), rank=None, notes=[])
        wake(self._kernel)

    def _catch_signals(self) -> None:
        os.set_blocking(self._write_end, False)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in (*ENDING, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)


class Late(GroupFailure):
    """The ranks were too slow: they are forked beside a thread of elastic's, and may hang."""


class LaunchpadGone(Exception):
    """The launchpad's process died; the ranks died with it."""


class KernelGone(Exception):
    """The kernel is gone and the run was not detached."""
