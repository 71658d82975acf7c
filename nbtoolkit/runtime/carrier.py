"""Carrier: one run, carried from its plan to its last event, one look at a time.

It lives in an owner's process (one run) or a conductor's (several at once), never imports user code
and never computes: it listens to the ranks, writes the run's record and decides when it is over.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nbtoolkit.errors import GroupStartFailed, NbtoolkitError
from nbtoolkit.runtime import verdict
from nbtoolkit.runtime.ahead import environment_key
from nbtoolkit.runtime.care import Care, Late
from nbtoolkit.runtime.channel import answer, take
from nbtoolkit.runtime.crossing import pack_error
from nbtoolkit.runtime.desk import Tower
from nbtoolkit.runtime.flight import Flight, RankView
from nbtoolkit.runtime.paths import RunPaths, write_json
from nbtoolkit.runtime.plan import GroupFailure, LaunchPlan, PortBusy, make_plan
from nbtoolkit.runtime.ports import free_port
from nbtoolkit.runtime.record import RunRecord
from nbtoolkit.runtime.wire import Line, Message, memory_file, send_packet

TICK = 0.05  # seconds between looks at the ranks when nothing is said
FAILURE_GRACE = 1.0  # what the other ranks get after the first failure, before SIGKILL
LAND_SECONDS = 10.0  # for the processes to end after their last word
PORT_TRIES = 4

Judge = Callable[[Mapping[str, float], int | None], str | None]


class Carrier:
    """One run's life.

    Args:
        content: what was packed for the run (see takeoff.py).
        payload_fds: the packed function, and what is this run's own, if that is apart.
        tower: the launchpad.
        forked: the lines of a pilot and ranks that the kernel forked itself; empty otherwise.
        judge: hears what is reported, and may answer with the status to leave with.
        announced: hears which metrics will be reported.
        unread: hears which settings had no effect; None: it is a warning of the run.
        durable: see :class:`RunRecord`.

    Attributes:
        paths: the run's folder.
        plan: what flies now.
        record: the run's diary.
        outcome: how it ended, once it has: a status, or a failure.
    """

    def __init__(
        self,
        content: dict[str, Any],
        payload_fds: list[int],
        tower: Tower,
        *,
        forked: list[int] | None = None,
        judge: Judge | None = None,
        announced: Callable[[Sequence[str], Sequence[str], int], None] | None = None,
        unread: Callable[[str], None] | None = None,
        durable: bool = True,
    ) -> None:
        self._content, self._payload_fds, self._forked = content, payload_fds, forked or []
        self._tower, self._judge, self._announced = tower, judge, announced
        self._unread = unread
        self.paths = RunPaths(Path(content["folder"]))
        self.plan: LaunchPlan = content["plan"]
        self.record = RunRecord(self.paths, deadline=content["deadline"], durable=durable)
        self.outcome: str | verdict.Failure | GroupFailure | PortBusy | None = None
        self._flight: Flight | None = None
        self._kill_at: float | None = None
        self.killed_on_request = False
        self._ports_tried, self._was_late = 0, False
        self._last_words: dict[int, Message] = {}  # what each rank said when it was done
        self._landing: tuple[Any, float] | None = None  # how the flight ended, and until when

    # --- the story ---

    def begin(self, kept: tuple[Flight, Path] | None = None) -> None:
        """Write what was decided, and start.

        Args:
            kept: ranks of a run before that take another job, and the file with what is its own;
                None: new ones.
        """
        self.record.write("run", **self._content["header"], plan=self.plan.to_dict())
        for level, text in self._content["notes"]:
            self.record.note(text, level)
        if kept is None:
            self._fly(self._start())
        else:
            flight, file = kept
            flight.board(file)
            self._fly(flight)

    def turn(self) -> bool:
        """Look once at everything; returns whether the run is over (its end is written)."""
        flight = self._flight
        assert flight is not None
        self._listen(flight)
        if self._landing is None:
            self._obey(flight)
            self._call_ranks(flight)
            ended = verdict.of(flight, self) or self._care.look()
            if ended is None:
                return False
            grace = LAND_SECONDS if isinstance(ended, str) else FAILURE_GRACE
            self._landing = ended, time.monotonic() + grace
        return self._land(flight, *self._landing)

    def lines(self) -> list[Line]:
        """What to wait for: the pilot's line and the ranks'."""
        return [] if self._flight is None else self._flight.lines()

    def stop(self, reason: str, grace: float | None = None, status: str = "stopped") -> None:
        """Let the ranks leave at the next report.

        Args:
            reason: noted in the events.
            grace: seconds after which they are killed; None: as long as it takes.
            status: they leave with it.
        """
        self.record.ask_to_stop(status, reason, grace)
        if grace is not None:
            limit = time.monotonic() + grace
            self._kill_at = limit if self._kill_at is None else min(limit, self._kill_at)

    def abandon(self) -> None:
        """End the processes; nothing more is written."""
        if self._flight is not None:
            self._close(self._flight)

    @property
    def landing(self) -> bool:
        """Whether it is known how the run ended, and its processes are waited for."""
        return self._landing is not None

    @property
    def status(self) -> str | None:
        """The status it ended with, as soon as that is known; None: it goes on, or failed."""
        known = self.outcome if self._landing is None else self._landing[0]
        return known if isinstance(known, str) else None

    def hand_over(self) -> Flight | None:
        """The ranks that can take another job, once this one is over; None: there are none."""
        flight, self._flight = self._flight, None
        return flight

    def silence(self) -> float:
        """Seconds since any rank sent something or computed."""
        return 0.0 if self._flight is None else self._care.silence()

    # --- a flight ---

    def _fly(self, flight: Flight) -> None:
        self._landing = None
        self._flight = flight
        self._care = Care(flight, self.record, self._content["config"])

    def _start(self) -> Flight:
        port = self.plan.port or free_port()
        if self._forked:
            pid = self._content["pilot_pid"]
            flight = Flight.adopt(self.plan, port, self._forked, pid)
            self._tower.adopt(flight)
            return flight
        environment = environment_key(self._content["around"]["environ"])

        def clear(flight: Flight, port: int, fds: list[int]) -> None:
            self._tower.clear(flight, port, fds, environment)

        return Flight.start(self.plan, port, clear, self._payload_fds)

    def _land(self, flight: Flight, ended: Any, limit: float) -> bool:
        """Wait for the processes to go; then fly again, or settle."""
        failed = not isinstance(ended, str)
        if self._content.get("kept") and not failed and not self.killed_on_request:
            self.outcome = ended
            self._settle(ended)
            return True
        waits = failed and all(rank.over for rank in flight.ranks)  # those that failed: to be ended
        if flight.exited is None and not waits and time.monotonic() < limit:
            return False
        self._close(flight)
        if self._again(ended):
            self._fly(self._start())
            return False
        self.outcome = ended
        self._settle(ended)
        return True

    def _close(self, flight: Flight) -> None:
        self._tower.dismiss(flight)
        self._flight = None
        shutil.rmtree(self.paths.elastic, ignore_errors=True)

    def _again(self, ended: Any) -> bool:
        """Whether the ranks could not start, and another plan may help; it is made then."""
        if isinstance(ended, Late) and not self._was_late and not self._forked:
            self._was_late = True
            self.record.note(f"{ended.reason}: once more", level="warning")
        elif isinstance(ended, PortBusy) and self._ports_tried < PORT_TRIES and not self._forked:
            self._ports_tried += 1
            self._replan(ended)
        elif isinstance(ended, GroupFailure) and self._may_fall_back():
            self._replan(ended)
        else:
            return False
        return True

    def _may_fall_back(self) -> bool:
        return self.plan.processes > 1 and self.plan.fallback and not self._forked

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

    # --- listening ---

    def _listen(self, flight: Flight) -> None:
        """Take all that was said."""
        for rank, message in flight.hear():
            self._on_message(flight, rank, message)
        for rank in flight.gone():
            for message in rank.messages():  # its last words may have come with its end
                self._on_message(flight, rank, message)
            if not rank.over:
                rank.end("dead")

    def _on_message(self, flight: Flight, rank: RankView, message: Message) -> None:
        kind = message["type"]
        if kind == "unread" and self._unread is not None:
            self._unread(message["text"])
        elif kind in ("metrics", "reported", "saved", "note", "unread"):
            take(self.record, message)
            if kind == "reported":
                self._hear_judge(message)
        elif kind == "phase":
            self._on_phase(flight, rank, message)
        elif kind in ("report", "check", "saving", "checkpoint"):
            rank.asking = message
            self._answer_if_all_ask(flight)
        elif kind == "announced" and self._announced is not None:
            self._announced(message["names"], message["stems"], message["first_step"])
        elif kind == "imports":
            self._import_ahead(message["names"])
        elif kind == "collectives":
            rank.collectives = message["started"]
        elif kind == "long":
            rank.long += 1 if message["on"] else -1
        rank.hear(message)

    def _import_ahead(self, names: list[str]) -> None:
        """Have the launchpad import for the next launch what a rank imports now."""
        with memory_file(json.dumps(self._content["around"]["environ"]).encode()) as fd:
            send_packet(self._tower.socket, {"op": "imports", "names": names}, [fd])

    def _on_phase(self, flight: Flight, rank: RankView, message: Message) -> None:
        rank.phase = message["phase"]
        rank.pid = message.get("pid", rank.pid)
        self.record.write("rank", rank=rank.rank, phase=rank.phase, pid=rank.pid)
        if rank.phase == "done":
            self._last_words[rank.rank] = message
            if len(self._last_words) == len(flight.ranks):
                self.record.compare([self._last_words[one.rank] for one in flight.ranks])
            if rank.rank == 0:
                self.record.returned(message["numbers"])
        if rank.phase == "ready" and flight.all_are("ready"):
            flight.go()
            for other in flight.ranks:
                other.phase = "user"
        elif rank.phase == "started" and len(flight.ranks) > 1 and flight.all_are("started"):
            # Not before: who joins talks to a thread of the pilot's, and a rank forked at that
            # moment inherits whatever lock the thread holds, for ever.
            flight.go()

    def _answer_if_all_ask(self, flight: Flight) -> None:
        questions = [rank.asking for rank in flight.ranks]
        if None in questions:
            return
        kinds = {question["type"] for question in questions if question}
        if len(kinds) > 1:
            reply: Message = {"error": verdict.different_calls(flight)}
        else:
            self.record.compare([question or {} for question in questions])
            reply = self._answer(flight.ranks[0].asking or {})
        flight.reply(reply)

    def _answer(self, question: Message) -> Message:
        if question["type"] == "report":
            self._hear_judge(question)
        return answer(self.record, question)

    def _hear_judge(self, report: Message) -> None:
        """Let the ranks leave where the judge says so: at this report, or at the next one."""
        if self._judge is None:
            return
        status = self._judge(report["values"], report["step"])
        if status is not None:
            self.record.ask_to_stop(status, "judged by what it reported")

    # --- stopping ---

    def _obey(self, flight: Flight) -> None:
        """Requests that come as files, and graces that have run out."""
        if (request := self.record.stop_requested()) is not None:
            self.stop(request.get("reason", "a handle asked"), request.get("grace"))
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self.killed_on_request = True
            flight.kill()

    def _call_ranks(self, flight: Flight) -> None:
        """Once the run is to end, rank 0 hears of it: its next report may be an hour away."""
        if self.record.leaving is not None and not flight.called:
            flight.called = True
            flight.ranks[0].line.send({"type": "come"})

    # --- the end ---

    def _settle(self, ended: Any) -> None:
        """Write how the run ended."""
        if isinstance(ended, str):
            self.record.complete(ended, self.plan.processes)
        elif isinstance(ended, verdict.Failure):
            self.record.fail(ended.error, rank=ended.rank, notes=ended.notes)
        else:
            self._fail_with(self._not_started(ended))

    def _not_started(self, ended: Any) -> GroupStartFailed:
        count = self.plan.processes
        what = f"{count} ranks could not form a process group"
        return GroupStartFailed(
            f"{what if count > 1 else 'the rank could not start'}: "
            f"{getattr(ended, 'reason', ended)}",
            allowed="distributed.fallback: true goes on with one process" if count > 1 else "",
            do=f"read {self.paths.pilot_log()} and {self.paths.log(0)}",
        )

    def _fail_with(self, error: NbtoolkitError) -> None:
        """End the run with an error of our own."""
        self.record.fail(pack_error(error), rank=None, notes=[])
