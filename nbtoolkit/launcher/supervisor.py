"""Supervise one run from its plan to its last event."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.plan import GroupFailure, PortBusy, make_plan
from nbtoolkit.errors import GroupStartFailed, LaunchError, NbtoolkitError
from nbtoolkit.launcher import failures
from nbtoolkit.launcher.event_loop import EventLoop, ForkServerGone, KernelGone, Spawner
from nbtoolkit.launcher.health import HealthMonitor, LateGroup
from nbtoolkit.launcher.worker_group import RankView, WorkerGroup
from nbtoolkit.run import messages
from nbtoolkit.run.events import RankPhaseChanged, RunRecord
from nbtoolkit.run.paths import RunPaths, boot_id, folder_error, write_json
from nbtoolkit.run.payload import unpack
from nbtoolkit.run.request import RunRequest
from nbtoolkit.run.serialization import pack_error
from nbtoolkit.run.transport import Connection, free_port
from nbtoolkit.worker.channel import answer_question, record_statement

# --- one run ---
# One run, carried from its plan to its last event, one look at a time.
#
# It lives in a supervisor's process (one run) or a scheduler's (several at once), never imports
# user code and never computes: it listens to the ranks, writes the run's record and decides when it
# is over.


TICK = 0.05  # seconds between looks at the ranks when nothing is said
FAILURE_GRACE = 1.0  # what the other ranks get after the first failure, before SIGKILL
LAND_SECONDS = 10.0  # for the processes to end after their last word
PORT_TRIES = 4


@dataclass(frozen=True, kw_only=True)
class JobListener:
    """The search that a run is a job of.

    Attributes:
        reported: hears what is reported, and may answer with the status to leave with.
        announced: hears which metrics will be reported.
        unread: hears which settings had no effect; in other runs it is a warning of the run.
    """

    reported: Callable[[Mapping[str, float], int | None], str | None]
    announced: Callable[[Sequence[str], Sequence[str], int], None]
    unread: Callable[[str], None]


class RunSupervisor:
    """One run's life.

    Args:
        request: what was decided.
        spawner: has agents forked.
        forked: the lines of an agent and ranks that the kernel forked itself; None: it did not.
        listener: the search it belongs to; None: none.
        durable: see :class:`RunRecord`.

    Attributes:
        paths: the run's folder.
        plan: what flies now.
        record: the run's diary.
        outcome: how it ended, once it has: a status, or a failure.
    """

    def __init__(
        self,
        request: RunRequest,
        spawner: Spawner,
        *,
        forked: messages.GroupDescriptors | None = None,
        listener: JobListener | None = None,
        durable: bool = True,
    ) -> None:
        self._request, self._spawner = request, spawner
        self._forked, self._listener = forked, listener
        self.paths = request.job.paths
        self.plan: LaunchPlan = request.job.plan
        self.record = RunRecord(self.paths, deadline=request.job.deadline, durable=durable)
        self.outcome: str | failures.Failure | GroupFailure | PortBusy | None = None
        self._worker_group: WorkerGroup | None = None
        self._kill_at: float | None = None
        self.killed_on_request = False
        self._ports_tried, self._was_late = 0, False
        self._returned: dict[int, messages.FunctionReturned] = {}  # by rank
        self._exiting: tuple[Any, float] | None = None  # how the worker group ended, and until when

    # --- its course ---

    def begin(self, kept: tuple[WorkerGroup, Path] | None = None) -> None:
        """Write what was decided, and start.

        Args:
            kept: ranks of a run before that take another job, and the file with what is its own;
                None: new ones.
        """
        self.record.write(self._request.header)
        for level, text in self._request.notes:
            self.record.note(text, level)
        if kept is None:
            self._follow(self._start())
        else:
            worker_group, file = kept
            worker_group.board(file)
            self._follow(worker_group)

    def turn(self) -> bool:
        """Look once at everything; returns whether the run is over (its end is written)."""
        worker_group = self._worker_group
        assert worker_group is not None
        self._listen(worker_group)
        if self._exiting is None:
            self._obey(worker_group)
            self._call_ranks(worker_group)
            ended = failures.classify(worker_group, self) or self._care.look()
            if ended is None:
                return False
            grace = LAND_SECONDS if isinstance(ended, str) else FAILURE_GRACE
            self._exiting = ended, time.monotonic() + grace
        return self._exit(worker_group, *self._exiting)

    def lines(self) -> list[Connection]:
        """What to wait for: the agent's line and the ranks'."""
        return [] if self._worker_group is None else self._worker_group.lines()

    def stop(self, reason: str, grace: float | None = None, status: str = "stopped") -> None:
        """Let the ranks leave at the next report.

        Args:
            reason: noted in the events.
            grace: seconds after which they are killed; None: as long as it takes.
            status: they leave with it.
        """
        self.record.request_stop(status, reason, grace)
        if grace is not None:
            limit = time.monotonic() + grace
            self._kill_at = limit if self._kill_at is None else min(limit, self._kill_at)

    def abandon(self) -> None:
        """End the processes; nothing more is written."""
        if self._worker_group is not None:
            self._close(self._worker_group)

    @property
    def exiting(self) -> bool:
        """Whether it is known how the run ended, and its processes are waited for."""
        return self._exiting is not None

    @property
    def status(self) -> str | None:
        """The status it ended with, as soon as that is known; None: it goes on, or failed."""
        known = self.outcome if self._exiting is None else self._exiting[0]
        return known if isinstance(known, str) else None

    def hand_over(self) -> WorkerGroup | None:
        """The ranks that can take another job, once this one is over; None: there are none."""
        worker_group, self._worker_group = self._worker_group, None
        return worker_group

    def silence(self) -> float:
        """Seconds since any rank sent something or computed."""
        return 0.0 if self._worker_group is None else self._care.silence()

    # --- a worker group ---

    def _follow(self, worker_group: WorkerGroup) -> None:
        self._exiting = None
        self._worker_group = worker_group
        self._care = HealthMonitor(worker_group, self.record, self._request.job.config)

    def _start(self) -> WorkerGroup:
        port = self.plan.port or free_port()
        if self._forked is not None:
            worker_group = WorkerGroup.adopt(self.plan, port, self._forked, self._request.agent_pid)
            self._spawner.connection.adopt(worker_group)
            return worker_group
        return self._spawner.start(replace(self._request.job, plan=self.plan), port)

    def _exit(self, worker_group: WorkerGroup, ended: Any, limit: float) -> bool:
        """Wait for the processes to go; then start another group, or settle."""
        failed = not isinstance(ended, str)
        if self._request.job.reuse_workers and not failed and not self.killed_on_request:
            self.outcome = ended
            self._settle(ended)
            return True
        waits = failed and all(
            rank.over for rank in worker_group.ranks
        )  # those that failed: to be ended
        if worker_group.exited is None and not waits and time.monotonic() < limit:
            return False
        self._close(worker_group)
        if self._again(ended):
            self._follow(self._start())
            return False
        self.outcome = ended
        self._settle(ended)
        return True

    def _close(self, worker_group: WorkerGroup) -> None:
        self._spawner.connection.dismiss(worker_group)
        self._worker_group = None
        shutil.rmtree(self.paths.elastic, ignore_errors=True)

    def _again(self, ended: Any) -> bool:
        """Whether the ranks could not start, and another plan may help; it is made then."""
        if self._forked is not None:
            return False
        if isinstance(ended, LateGroup) and not self._was_late:
            self._was_late = True
            self.record.note(f"{ended.reason}: once more", level="warning")
        elif isinstance(ended, PortBusy) and self._ports_tried < PORT_TRIES:
            self._ports_tried += 1
            self._replan(ended)
        elif isinstance(ended, GroupFailure) and self._may_fall_back():
            self._replan(ended)
        else:
            return False
        return True

    def _may_fall_back(self) -> bool:
        return self.plan.processes > 1 and self.plan.fallback

    def _replan(self, evidence: GroupFailure | PortBusy) -> None:
        request, start = self._request, self.plan.start
        self.plan = make_plan(
            request.job.config, request.host, request.hardware, (evidence,), start=start
        )
        write_json(self.paths.plan, self.plan.to_dict())
        self.record.note(
            f"{self.plan.reasons[0]}\nnew plan: {self.plan.explain()}", level="warning"
        )

    # --- listening ---

    def _listen(self, worker_group: WorkerGroup) -> None:
        """Take all that was said."""
        for rank, message in worker_group.hear():
            self._on_message(worker_group, rank, message)
        for rank in worker_group.gone():
            for message in rank.drain():  # its last words may have come with its end
                self._on_message(worker_group, rank, message)
            if not rank.over:
                rank.end("dead")

    def _on_message(
        self, worker_group: WorkerGroup, rank: RankView, message: messages.Message
    ) -> None:
        listener = self._listener
        if isinstance(message, messages.SettingsUnread) and listener is not None:
            listener.unread(message.text)
        elif isinstance(message, messages.Recorded):
            record_statement(self.record, message)
            if isinstance(message, messages.Reported):
                self._hear_judge(message)
        elif isinstance(message, messages.PhaseReached):
            self._on_phase(worker_group, rank, message)
        elif isinstance(message, messages.FunctionReturned):
            self._on_returned(rank, message)
        elif isinstance(message, messages.Question):
            rank.asking = message
            self._answer_if_all_ask(worker_group)
        elif isinstance(message, messages.MetricsAnnounced) and listener is not None:
            listener.announced(message.names, message.stems, message.first_step)
        elif isinstance(message, messages.ModulesImported):
            self._spawner.import_ahead(message.names)
        elif isinstance(message, messages.CollectivesStarted):
            rank.collectives = message.count
        elif isinstance(message, messages.LongOperation):
            rank.long += 1 if message.entered else -1
        rank.hear(message)

    def _on_returned(self, rank: RankView, message: messages.FunctionReturned) -> None:
        rank.phase = "done"
        self.record.write(RankPhaseChanged(rank=rank.rank, phase=rank.phase, pid=rank.pid))
        self._returned[rank.rank] = message
        if len(self._returned) == self.plan.processes:
            self.record.compare([word.weights for _, word in sorted(self._returned.items())])
        if rank.rank == 0:
            self.record.returned(message.numbers)

    def _on_phase(
        self, worker_group: WorkerGroup, rank: RankView, message: messages.PhaseReached
    ) -> None:
        rank.phase, rank.pid = message.phase, message.pid or rank.pid
        self.record.write(RankPhaseChanged(rank=rank.rank, phase=rank.phase, pid=rank.pid))
        if rank.phase == "ready" and worker_group.all_are("ready"):
            worker_group.go()
            for other in worker_group.ranks:
                other.phase = "user"
        elif (
            rank.phase == "started"
            and len(worker_group.ranks) > 1
            and worker_group.all_are("started")
        ):
            # Not before: who joins talks to a thread of the agent's, and a rank forked at that
            # moment inherits whatever lock the thread holds, for ever.
            worker_group.go()

    def _answer_if_all_ask(self, worker_group: WorkerGroup) -> None:
        questions = [rank.asking for rank in worker_group.ranks if rank.asking is not None]
        if len(questions) == len(worker_group.ranks):
            worker_group.reply(self._answer(questions))

    def _answer(self, questions: Sequence[messages.Question]) -> messages.Reply:
        if len({type(question) for question in questions}) > 1:
            return failures.different_calls(questions)
        reports = [one for one in questions if isinstance(one, messages.ReportRequest)]
        if reports:
            self.record.compare([report.weights for report in reports])
            self._hear_judge(reports[0])
        return answer_question(self.record, questions[0])

    def _hear_judge(self, report: messages.Reported | messages.ReportRequest) -> None:
        """Let the ranks leave where the judge says so: at this report, or at the next one."""
        if self._listener is None:
            return
        status = self._listener.reported(report.values, report.step)
        if status is not None:
            self.record.request_stop(status, "judged by what it reported")

    # --- stopping ---

    def _obey(self, worker_group: WorkerGroup) -> None:
        """Requests that come as files, and graces that have run out."""
        if (request := self.record.stop_requested()) is not None:
            self.stop(request.reason, request.grace)
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self.killed_on_request = True
            worker_group.kill()

    def _call_ranks(self, worker_group: WorkerGroup) -> None:
        """Once the run is to end, rank 0 hears of it: its next report may be an hour away."""
        if self.record.leaving is not None and not worker_group.called:
            worker_group.called = True
            worker_group.ranks[0].line.send(messages.StopPending())

    # --- the end ---

    def _settle(self, ended: Any) -> None:
        """Write how the run ended."""
        if isinstance(ended, str):
            self.record.complete(ended, self.plan.processes)
        elif isinstance(ended, failures.Failure):
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
            do=f"read {self.paths.agent_log} and {self.paths.log(0)}",
        )

    def _fail_with(self, error: NbtoolkitError) -> None:
        """End the run with an error of our own."""
        self.record.fail(pack_error(error), rank=None, notes=[])


# --- its process ---


# What no folder causes: processes, sockets, memory, too many open files.
_OF_THE_MACHINE = (
    *(errno.ESRCH, errno.ECHILD, errno.EPIPE, errno.ECONNRESET),
    *(errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
)


def supervise(forkserver: socket.socket, message: messages.ForkSupervisor) -> None:
    """Carry one run from its plan to its last event; the main function of a supervisor process.

    Args:
        forkserver: packets to the fork server: asks for agents, hears of their end.
        message: with what it was forked.
    """
    request = unpack(message.descriptors.request, RunRequest)
    with supervising(request.job.paths, forkserver, message) as (desk, spawner):
        _carry(RunSupervisor(request, spawner, forked=message.descriptors.group), desk)


@contextlib.contextmanager
def supervising(
    paths: RunPaths, forkserver: socket.socket, message: messages.ForkSupervisor
) -> Iterator[tuple[EventLoop, Spawner]]:
    """Be the process that owns a run or a search, and say so where that cannot go on.

    The lock is let go before the line, so that who hears of the end can go on with it at once.
    """
    given = message.descriptors
    line = Connection(socket.socket(fileno=given.connection))
    try:
        _sign(paths, detached=message.detached)
        desk = EventLoop(line, forkserver, detached=message.detached)
        yield desk, Spawner(desk.connection, given.payload)
    except ForkServerGone:
        lost = LaunchError(
            "the fork server process died, and the ranks with it (its usual end: out of memory)",
            do="launch again: a new fork server is started, a run with a checkpoint goes on",
        )
        _tell_lost(line, lost)
    except OSError as error:
        _tell_lost(line, _lost_to(error, paths.folder))
    finally:
        os.close(given.lock)
        line.close()


def _carry(supervisor: RunSupervisor, desk: EventLoop) -> None:
    """Run, and write how it ended when it could not go on to its end."""
    try:
        supervisor.begin()
        while not supervisor.turn():
            for request in _heard(supervisor, desk):
                _obey(supervisor, request)
    except KernelGone:
        supervisor.abandon()
        supervisor.record.note("the kernel is gone: the run was ended, unfinished", level="warning")
    except ForkServerGone:
        supervisor.abandon()
        supervisor.record.note(
            "the fork server is gone: the run was ended, unfinished", level="warning"
        )
        raise
    finally:
        supervisor.abandon()


def _heard(supervisor: RunSupervisor, desk: EventLoop) -> list[messages.KernelRequest]:
    try:
        return desk.wait(supervisor.lines(), TICK)
    except ForkServerGone:
        if not supervisor.exiting:  # else the ranks are gone, and how they ended is known
            raise
        return []


def _obey(supervisor: RunSupervisor, request: messages.KernelRequest) -> None:
    if isinstance(request, messages.StopRequest):
        supervisor.stop(request.reason, request.grace, request.status)
    elif isinstance(request, messages.KillRequest):
        supervisor.stop("killed on request", 0.0)


def _sign(paths: RunPaths, *, detached: bool) -> None:
    """Write down which process owns a run, and whether it outlives the one that launched."""
    about = {"pid": os.getpid(), "boot_id": boot_id(), "since": time.time(), "detached": detached}
    write_json(paths.owner, about, durable=False)


def _lost_to(error: OSError, folder: Path) -> LaunchError:
    """The error of a run whose supervisor met an OSError, of its folder or another."""
    if error.errno not in _OF_THE_MACHINE:
        return folder_error(folder, error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return LaunchError(
        f"the process that owned the run {folder} failed in {place.name}(): {error}",
        do="launch again: a run with a checkpoint goes on; report it if it comes back",
    )


def _tell_lost(line: Connection, error: LaunchError) -> None:
    """The run cannot go on, nor its folder say so: tell whoever still listens."""
    kind = type(error).__name__
    line.send(
        messages.SupervisorLost(error=kind, what=error.what, allowed=error.allowed, do=error.do)
    )
