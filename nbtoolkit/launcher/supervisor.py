"""Supervise one run from its plan to its last event."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.plan import Evidence, GroupFailure, OutOfMemory, PortBusy, make_plan
from nbtoolkit.environment.resources import memory_kills
from nbtoolkit.errors import GroupStartFailed, LaunchError, NbtoolkitError
from nbtoolkit.launcher import failures
from nbtoolkit.launcher.event_loop import EventLoop, ForkServerGone, KernelGone, Spawner
from nbtoolkit.launcher.health import HealthMonitor, LateGroup
from nbtoolkit.launcher.worker_group import RankView, WorkerGroup
from nbtoolkit.run import messages
from nbtoolkit.run.events import RankPhaseChanged
from nbtoolkit.run.paths import RunPaths, boot_id, folder_error, write_json
from nbtoolkit.run.payload import unpack
from nbtoolkit.run.record import RunRecord
from nbtoolkit.run.request import RunRequest
from nbtoolkit.run.serialization import pack_error
from nbtoolkit.run.transport import Connection, free_port
from nbtoolkit.worker.channel import answer_question, record_statement

TICK = 0.05
"""Seconds between two polls without a message."""

EXIT_TICK = 0.005
"""Seconds between two polls while the processes exit."""

FAILURE_GRACE = 1.0
"""Seconds that the other ranks get after the first failure, before SIGKILL."""

EXIT_SECONDS = 10.0
"""Seconds that the processes get to exit after their final message."""

PORT_TRIES = 4


@dataclass(frozen=True, kw_only=True)
class JobListener:
    """Callbacks of the search that a run belongs to.

    Attributes:
        reported: receives a report; may return the status to leave with.
        announced: receives the names of the metrics that will be reported.
        unread: receives a warning about settings without effect.
    """

    reported: Callable[[Mapping[str, float], int | None], str | None]
    announced: Callable[[Sequence[str], Sequence[str], int], None]
    unread: Callable[[str], None]


class RunSupervisor:
    """Supervises one run: listens to the ranks, writes the record, decides when the run is over.

    It lives in a supervisor's process (one run) or in a scheduler's (several at once). It never
    imports user code and never computes.

    Args:
        request: the run.
        spawner: starts worker groups.
        forked: connections of an agent that the kernel forked itself; None otherwise.
        listener: the search it belongs to; None for none.
        durable: see :class:`RunRecord`.

    Attributes:
        paths: the run's folder.
        plan: the current plan.
        record: the run's record.
        outcome: how it ended: a status, or a failure; None while it runs.
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
        limit = self.plan.too_large
        self._evidence: list[Evidence] = [] if limit is None else [OutOfMemory(limit)]
        if request.speed is not None:
            self._evidence.append(request.speed)
        self._returned: dict[int, messages.FunctionReturned] = {}  # by rank
        # How the worker group ended, and until when its processes may exit.
        self._exiting: tuple[Any, float] | None = None

    def begin(self, kept: WorkerGroup | None = None) -> None:
        """Write the first event, and start the ranks.

        Args:
            kept: idle ranks that have been given this job; None starts new ones.
        """
        self.record.write(self._request.header)
        for level, text in self._request.notes:
            self.record.note(text, level)
        if kept is None:
            self._follow(self._start())
        else:
            self._follow(kept)
            if len(kept.ranks) == 1:  # it waits for no other rank
                kept.released = True
                kept.go()

    def poll(self) -> bool:
        """Check everything once; return True when the run is over and its end is written."""
        worker_group = self._worker_group
        assert worker_group is not None
        self._listen(worker_group)
        if self._exiting is None:
            self._check_stop(worker_group)
            self._announce_stop(worker_group)
            ended = failures.classify(worker_group, self) or self._health.check()
            if ended is None:
                return False
            grace = EXIT_SECONDS if isinstance(ended, str) else FAILURE_GRACE
            self._exiting = ended, time.monotonic() + grace
            if isinstance(ended, str) and not self._request.job.reuse_workers:
                worker_group.go()  # they may exit
        return self._exit(worker_group, *self._exiting)

    def lines(self) -> list[Connection]:
        """Connections to wait for: the agent's and the ranks'."""
        return [] if self._worker_group is None else self._worker_group.lines()

    def stop(self, reason: str, grace: float | None = None, status: str = "stopped") -> None:
        """Stop the ranks at their next report.

        Args:
            reason: noted in the events.
            grace: seconds after which they are killed; None for no limit.
            status: the run's final status.
        """
        self.record.request_stop(status, reason, grace)
        if grace is not None:
            limit = time.monotonic() + grace
            self._kill_at = limit if self._kill_at is None else min(limit, self._kill_at)

    def abandon(self) -> None:
        """Kill the processes without a record."""
        if self._worker_group is not None:
            self._close(self._worker_group)

    @property
    def exiting(self) -> bool:
        """True once the outcome is known, while the processes exit."""
        return self._exiting is not None

    @property
    def status(self) -> str | None:
        """The final status as soon as it is known; None while the run goes on, or if it failed."""
        known = self.outcome if self._exiting is None else self._exiting[0]
        return known if isinstance(known, str) else None

    def hand_over(self) -> WorkerGroup | None:
        """Return the ranks of a run that is over; None if they cannot take another job."""
        worker_group, self._worker_group = self._worker_group, None
        return worker_group

    def silence(self) -> float:
        """Return the seconds since any rank sent a message or computed."""
        return 0.0 if self._worker_group is None else self._health.silence()

    # --- a worker group ---

    def _follow(self, worker_group: WorkerGroup) -> None:
        self._exiting = None
        self._memory_kills = memory_kills()
        self._worker_group = worker_group
        self._health = HealthMonitor(worker_group, self.record, self._request.job.config)

    def _start(self) -> WorkerGroup:
        port = self.plan.port or free_port()
        if self._forked is not None:
            spec = replace(self._request.job, plan=self.plan)
            worker_group = WorkerGroup.adopt(spec, port, self._forked, self._request.agent_pid)
            self._spawner.connection.adopt(worker_group)
            return worker_group
        return self._spawner.start(replace(self._request.job, plan=self.plan), port)

    def _exit(self, worker_group: WorkerGroup, ended: Any, limit: float) -> bool:
        """Wait for the processes to exit; then start another group, or record the end."""
        failed = not isinstance(ended, str)
        if self._request.job.reuse_workers and not failed and not self.killed_on_request:
            self.outcome = ended
            self._settle(ended)
            return True
        # Ranks that raised wait to be killed; the agent of ranks that have ended has no more to do.
        over = worker_group.exited is not None or (
            all(rank.over for rank in worker_group.ranks) if failed else worker_group.ranks_ended()
        )
        if not over and time.monotonic() < limit:
            return False
        self._close(worker_group)
        if isinstance(ended, failures.Failure):
            ended = self._after_failure(worker_group, ended)
        if worker_group.died_waiting() or self._again(ended):
            self._follow(self._start())
            return False
        self.outcome = ended
        self._settle(ended)
        return True

    def _close(self, worker_group: WorkerGroup) -> None:
        self._spawner.connection.dismiss(worker_group)
        self._worker_group = None

    def _after_failure(
        self, worker_group: WorkerGroup, failure: failures.Failure
    ) -> failures.Failure | OutOfMemory:
        """Return the evidence if less memory for each forward pass may help, else the failure."""
        known = failure.rank is not None
        if not known or not failures.ran_out_of_memory(failure.error, self._memory_kills):
            return failure
        may_restart = self._forked is None and self.record.leaving is None
        in_loop = worker_group.ranks[failure.rank or 0].accumulates
        config = self._request.job.config
        return failures.after_out_of_memory(
            failure, self.plan, config, in_loop=in_loop, may_restart=may_restart
        )

    def _again(self, ended: Any) -> bool:
        """Return True if another attempt may help where the ranks failed; plan it."""
        if self._forked is not None:
            return False
        if isinstance(ended, LateGroup) and not self._was_late:
            self._was_late = True
            self.record.note(f"{ended.reason}: trying again", level="warning")
        elif isinstance(ended, PortBusy) and self._ports_tried < PORT_TRIES:
            self._ports_tried += 1
            self._replan(ended)
        elif isinstance(ended, GroupFailure) and self._may_fall_back():
            self._replan(ended)
        elif isinstance(ended, OutOfMemory):
            self._returned.clear()
            self._replan(ended)
        else:
            return False
        return True

    def _may_fall_back(self) -> bool:
        return self.plan.processes > 1 and self.plan.fallback

    def _replan(self, evidence: Evidence) -> None:
        request, start = self._request, self.plan.start
        self._evidence.append(evidence)
        self.plan = make_plan(
            request.job.config, request.host, request.hardware, self._evidence, start=start
        )
        write_json(self.paths.plan, self.plan.to_dict())
        self.record.note(
            f"{self.plan.reasons[0]}\nnew plan: {self.plan.explain()}", level="warning"
        )

    # --- messages ---

    def _listen(self, worker_group: WorkerGroup) -> None:
        """Handle all new messages."""
        for rank, message in worker_group.receive():
            self._on_message(worker_group, rank, message)
        for rank in worker_group.find_dead():
            for message in rank.drain():  # its final message may have come with its end
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
                self._judge(message)
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
        elif isinstance(message, messages.Accumulates):
            rank.accumulates = message.entered
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
            if not worker_group.released:
                worker_group.go()
            for other in worker_group.ranks:
                other.phase = "user"
        elif (
            rank.phase == "started"
            and len(worker_group.ranks) > 1
            and worker_group.all_are("started")
        ):
            # Not before: a rank that joins talks to a thread of the agent, and a rank that is
            # forked at that moment would inherit a lock that the thread holds.
            worker_group.go()

    def _answer_if_all_ask(self, worker_group: WorkerGroup) -> None:
        questions = [rank.asking for rank in worker_group.ranks if rank.asking is not None]
        if len(questions) == len(worker_group.ranks):
            worker_group.reply(self._answer(questions))

    def _answer(self, questions: Sequence[messages.Question]) -> messages.Reply:
        if len({type(question) for question in questions}) > 1:
            return failures.refuse_different_calls(questions)
        reports = [one for one in questions if isinstance(one, messages.ReportRequest)]
        if reports:
            self.record.compare([report.weights for report in reports])
            self._judge(reports[0])
        return answer_question(self.record, questions[0])

    def _judge(self, report: messages.Reported | messages.ReportRequest) -> None:
        """Pass a report to the search, and stop the run if the search says so."""
        if self._listener is None:
            return
        status = self._listener.reported(report.values, report.step)
        if status is not None:
            self.record.request_stop(status, "judged by what it reported")

    # --- stopping ---

    def _check_stop(self, worker_group: WorkerGroup) -> None:
        """Follow requests in the run's folder, and kill ranks whose grace has run out."""
        if (request := self.record.stop_requested()) is not None:
            self.stop(request.reason, request.grace)
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self.killed_on_request = True
            worker_group.kill()

    def _announce_stop(self, worker_group: WorkerGroup) -> None:
        """Notify rank 0 of a pending stop: its next report may be an hour away."""
        if self.record.leaving is not None and not worker_group.stop_sent:
            worker_group.stop_sent = True
            worker_group.ranks[0].line.send(messages.StopPending())

    # --- the end ---

    def _settle(self, ended: Any) -> None:
        """Record how the run ended."""
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
            allowed="distributed.fallback: true continues with one process" if count > 1 else "",
            do=f"read {self.paths.agent_log} and {self.paths.log(0)}",
        )

    def _fail_with(self, error: NbtoolkitError) -> None:
        """End the run with an error of our own."""
        self.record.fail(pack_error(error), rank=None, notes=[])


# --- the supervisor's process ---


# Errors that a folder cannot cause: processes, sockets, memory, too many open files.
_OF_THE_MACHINE = (
    *(errno.ESRCH, errno.ECHILD, errno.EPIPE, errno.ECONNRESET),
    *(errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
)


def supervise(
    forkserver: socket.socket, message: messages.ForkSupervisor, standby: WorkerGroup | None = None
) -> None:
    """Supervise one run to its end; the main function of a supervisor process.

    Args:
        forkserver: connection to the fork server.
        message: the request that this process was forked with.
        standby: ranks that wait for the run; None starts new ones.
    """
    given = message.descriptors
    request = unpack(given.request, RunRequest)
    job, shape = request.job, message.shape
    with supervising(job.paths, forkserver, message) as (loop, spawner):
        supervisor = RunSupervisor(request, spawner, forked=given.group)
        if standby is not None:
            loop.connection.adopt(standby)
            standby.assign_run(given.payload, job)
        _run(supervisor, loop, standby)
    if shape and supervisor.status == "completed" and supervisor.plan == job.plan:
        spawner.prepare_standby(job, shape)


@contextlib.contextmanager
def supervising(
    paths: RunPaths, forkserver: socket.socket, message: messages.ForkSupervisor
) -> Iterator[tuple[EventLoop, Spawner]]:
    """Own a run or a search, and report to the kernel if that fails.

    The lock is released before the connection is closed, so that the kernel can resume the run as
    soon as it sees the end.
    """
    given = message.descriptors
    line = Connection(socket.socket(fileno=given.connection))
    try:
        _write_owner(paths, detached=message.detached)
        loop = EventLoop(line, forkserver, detached=message.detached)
        yield loop, Spawner(loop.connection, given.payload)
    except ForkServerGone:
        lost = LaunchError(
            "the fork server process died, and the ranks with it (usual cause: out of memory)",
            do="launch again: a new fork server starts, and a run with a checkpoint resumes",
        )
        _report_lost(line, lost)
    except OSError as error:
        _report_lost(line, _lost_to(error, paths.folder))
    finally:
        os.close(given.lock)
        line.close()


def _run(supervisor: RunSupervisor, loop: EventLoop, kept: WorkerGroup | None) -> None:
    """Run to the end, and record an end that the run itself cannot record."""
    try:
        supervisor.begin(kept)
        while not supervisor.poll():
            for request in _requests(supervisor, loop):
                _follow_request(supervisor, request)
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


def _requests(supervisor: RunSupervisor, loop: EventLoop) -> list[messages.KernelRequest]:
    try:
        return loop.wait(supervisor.lines(), EXIT_TICK if supervisor.exiting else TICK)
    except ForkServerGone:
        if not supervisor.exiting:  # else the ranks are gone, and their outcome is known
            raise
        return []


def _follow_request(supervisor: RunSupervisor, request: messages.KernelRequest) -> None:
    if isinstance(request, messages.StopRequest):
        supervisor.stop(request.reason, request.grace, request.status)
    elif isinstance(request, messages.KillRequest):
        supervisor.stop("killed on request", 0.0)


def _write_owner(paths: RunPaths, *, detached: bool) -> None:
    """Record which process owns a run, and whether it outlives the kernel."""
    about = {"pid": os.getpid(), "boot_id": boot_id(), "since": time.time(), "detached": detached}
    write_json(paths.owner, about, durable=False)


def _lost_to(error: OSError, folder: Path) -> LaunchError:
    """Return the error of a run whose supervisor got an OSError."""
    if error.errno not in _OF_THE_MACHINE:
        return folder_error(folder, error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return LaunchError(
        f"the process that owned the run {folder} failed in {place.name}(): {error}",
        do="launch again: a run with a checkpoint resumes; report the error if it occurs again",
    )


def _report_lost(line: Connection, error: LaunchError) -> None:
    """Tell the kernel that the run cannot continue, when the run's folder cannot say so."""
    kind = type(error).__name__
    line.send(
        messages.SupervisorLost(error=kind, what=error.what, allowed=error.allowed, do=error.do)
    )
