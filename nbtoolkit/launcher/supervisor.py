"""Supervise one run from its plan to its last event."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.plan import Evidence, GroupFailure, OutOfMemory, PortBusy, make_plan
from nbtoolkit.environment.resources import memory_kills
from nbtoolkit.errors import GroupStartFailed
from nbtoolkit.launcher import failures
from nbtoolkit.launcher.health import HealthMonitor, LateGroup
from nbtoolkit.launcher.restarts import Restarts
from nbtoolkit.launcher.worker_group import RankView, Spawner, WorkerGroup
from nbtoolkit.run import messages
from nbtoolkit.run.checkpoints.checkpoint_store import has_checkpoint
from nbtoolkit.run.events import RETURNED, Event, MetricsReported, PlanChanged, RankPhaseChanged
from nbtoolkit.run.paths import make_folder
from nbtoolkit.run.payload import RunRequest
from nbtoolkit.run.record import RunRecord
from nbtoolkit.run.serialization import pack_error
from nbtoolkit.run.transport import Connection
from nbtoolkit.worker.channel import answer_question, record_statement

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
        unread: receives a warning about how the function uses its settings, folds and loaders,
            and which settings of a search it has not read.
        written: receives the files that the job has written outside its folder.
    """

    reported: Callable[[Mapping[str, float], int | None], str | None]
    announced: Callable[[Sequence[str], Sequence[str], int], None]
    unread: Callable[[str, Sequence[str]], None]
    written: Callable[[Sequence[str]], None]


class RunSupervisor:
    """Supervises one run: listens to the ranks, writes the record, decides when the run is over.

    It lives in a supervisor's process (one run) or in a scheduler's (several at once). It never
    imports user code and never computes.

    Args:
        request: the run.
        spawner: starts worker groups.
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
        listener: JobListener | None = None,
        durable: bool = True,
    ) -> None:
        self._request, self._spawner = request, spawner
        self._listener = listener
        self.paths = request.job.paths
        self.plan: LaunchPlan = request.job.plan
        self.record = RunRecord(self.paths, deadline=request.job.deadline, durable=durable)
        self.outcome: str | failures.Failure | GroupFailure | PortBusy | None = None
        self._worker_group: WorkerGroup | None = None
        self._kill_at: float | None = None
        self.killed_on_request = False
        self._was_late = False
        limit = self.plan.too_large
        self._evidence: list[Evidence] = [] if limit is None else [OutOfMemory(limit)]
        if request.speed is not None:
            self._evidence.append(request.speed)
        # How the worker group ended, and until when its processes may exit.
        self._exiting: tuple[Any, float] | None = None
        self._restarts = Restarts(self.plan.restarts)
        # The failure after which the ranks start again, and when.
        self._restarting: tuple[failures.Failure, float] | None = None

    def begin(self) -> None:
        """Start the ranks of an attempt whose first event is written."""
        for level, text in self._request.notes:
            self.record.note(text, level)
        self._follow(self._start())
        # Here, where nothing waits for it: each rank would flush the folder's name at its end.
        make_folder(self.paths.value(0).parent, durable=False)
        self.record.make_findable()

    def poll(self) -> bool:
        """Check everything once; return True when the run is over and its end is written."""
        if self._restarting is not None:
            return self._wait_for_restart(*self._restarting)
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
            if isinstance(ended, str):
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
        return self._spawner.start(replace(self._request.job, plan=self.plan))

    def _exit(self, worker_group: WorkerGroup, ended: Any, limit: float) -> bool:
        """Wait for the processes to exit; then start another group, or record the end."""
        failed = not isinstance(ended, str)
        # Ranks that raised wait to be killed; the agent of ranks that have ended has no more to do.
        over = worker_group.exited is not None or (
            all(rank.over for rank in worker_group.ranks) if failed else worker_group.ranks_ended()
        )
        if not over and time.monotonic() < limit:
            return False
        self._close(worker_group)
        if isinstance(ended, failures.Failure):
            ended = self._after_failure(worker_group, ended)
        if self._again(ended):
            self._follow(self._start())
            return False
        if isinstance(ended, failures.Failure):
            if self._restart_after(ended):
                return False
            if (why := self._restarts.why_not()) is not None:
                ended = replace(ended, notes=[*ended.notes, why])
        self.outcome = ended
        self._settle(ended)
        return True

    def _close(self, worker_group: WorkerGroup) -> None:
        self._spawner.dismiss(worker_group)
        self._worker_group = None

    def _after_failure(
        self, worker_group: WorkerGroup, failure: failures.Failure
    ) -> failures.Failure | OutOfMemory:
        """Return the evidence if less memory for each forward pass may help, else the failure."""
        known = failure.rank is not None
        if not known or not failures.ran_out_of_memory(failure.error, self._memory_kills):
            return failure
        may_restart = self.record.leaving is None
        in_loop = worker_group.ranks[failure.rank or 0].accumulates
        config = self._request.job.config
        return failures.after_out_of_memory(
            failure, self.plan, config, in_loop=in_loop, may_restart=may_restart
        )

    def _again(self, ended: Any) -> bool:
        """Return True if another attempt may help where the ranks failed; plan it."""
        if isinstance(ended, LateGroup) and not self._was_late:
            self._was_late = True
            self.record.note(f"{ended.reason}: trying again", level="warning")
            return True
        if isinstance(ended, PortBusy):
            helps = [type(one) for one in self._evidence].count(PortBusy) < PORT_TRIES
        elif isinstance(ended, GroupFailure):
            helps = self.plan.processes > 1 and self.plan.fallback
        else:
            helps = isinstance(ended, OutOfMemory)
        if helps:
            self._replan(ended)
        return helps

    def _replan(self, evidence: Evidence) -> None:
        request, start = self._request, self.plan.start
        self._evidence.append(evidence)
        self.plan = make_plan(
            request.job.config, request.host, request.hardware, self._evidence, start=start
        )
        self.record.write(PlanChanged(plan=self.plan.to_dict()))
        self.record.note(
            f"{self.plan.reasons[0]}\nnew plan: {self.plan.explain()}", level="warning"
        )

    # --- restarts ---

    def _restart_after(self, failure: failures.Failure) -> bool:
        """Return True if the ranks will start again; they do so after a pause."""
        saved = has_checkpoint(self.paths.checkpoints)
        if self.record.leaving is not None:
            return False
        if not self._restarts.allows(failure, has_checkpoint=saved):
            return False
        pause = self._restarts.begin()
        self.record.note(self._restarts.plan(failure, pause, has_checkpoint=saved), "warning")
        self._exiting = None
        self._restarting = failure, time.monotonic() + pause
        return True

    def _wait_for_restart(self, failure: failures.Failure, at: float) -> bool:
        """Start the ranks after the pause; return True if the run has to end before."""
        if (request := self.record.stop_requested()) is not None:
            self.stop(request.reason, request.grace)
        if (status := self.record.decide()) is not None:
            self._restarting, self.outcome = None, status
            self._settle(status)
            return True
        if time.monotonic() >= at:
            self._restarting = None
            self._begin_attempt(failure)
        return False

    def _begin_attempt(self, failure: failures.Failure) -> None:
        """Start the ranks again, in an attempt with a first event of its own."""
        header = self._request.header
        self.record.begin_attempt(
            replace(
                header,
                attempt=header.attempt + self._restarts.count,
                restarted_after=failure.brief,
                plan=self.plan.to_dict(),
            )
        )
        self._follow(self._start())

    # --- messages ---

    def _listen(self, worker_group: WorkerGroup) -> None:
        """Handle all new messages."""
        for rank, message in worker_group.receive():
            self._on_message(worker_group, rank, message)
        dead = worker_group.find_dead()
        if dead:
            # A fork server that has died takes the ranks with it; Linux closes its connection
            # before it ends them.
            self._spawner.receive()
        for rank in dead:
            for message in rank.drain():  # its final message may have come with its end
                self._on_message(worker_group, rank, message)
            if not rank.over:
                rank.end("dead")

    def _on_message(
        self, worker_group: WorkerGroup, rank: RankView, message: messages.Message
    ) -> None:
        worker_group.note(rank, message)
        if rank.rank == 0:
            self._restarts.note(message)
        listener = self._listener
        if isinstance(message, messages.UsageWarning) and listener is not None:
            listener.unread(message.text, message.searched)
        elif isinstance(message, (Event, messages.UsageWarning)):
            record_statement(self.record, message)
            if isinstance(message, MetricsReported):
                self._judge(message)
        elif isinstance(message, messages.PhaseReached):
            self._on_phase(worker_group, rank)
        elif isinstance(message, messages.FunctionReturned):
            self._on_returned(worker_group, rank, message)
        elif isinstance(message, messages.Question):
            self._answer_if_all_ask(worker_group)
        elif isinstance(message, messages.MetricsAnnounced) and listener is not None:
            listener.announced(message.names, message.stems, message.first_step)
        elif isinstance(message, messages.FilesWritten) and listener is not None:
            listener.written(message.paths)
        elif isinstance(message, messages.ModulesImported):
            self._spawner.import_ahead(message.names)

    def _on_returned(
        self, worker_group: WorkerGroup, rank: RankView, message: messages.FunctionReturned
    ) -> None:
        self.record.write(RankPhaseChanged(rank=rank.rank, phase=rank.phase, pid=rank.pid))
        last_words = [other.last_word for other in worker_group.ranks]
        returned = [word for word in last_words if isinstance(word, messages.FunctionReturned)]
        if len(returned) == len(last_words):
            self.record.compare(
                [word.weights for word in returned], [_named(word.numbers) for word in returned]
            )
        if rank.rank == 0:
            self.record.returned(message.numbers)

    def _on_phase(self, worker_group: WorkerGroup, rank: RankView) -> None:
        self.record.write(RankPhaseChanged(rank=rank.rank, phase=rank.phase, pid=rank.pid))
        if rank.phase == "ready" and worker_group.all_are("ready"):
            worker_group.go()
            for other in worker_group.ranks:
                other.phase = "user"

    def _answer_if_all_ask(self, worker_group: WorkerGroup) -> None:
        questions = [rank.asking for rank in worker_group.ranks if rank.asking is not None]
        if len(questions) == len(worker_group.ranks):
            worker_group.reply(self._answer(questions))

    def _answer(self, questions: Sequence[messages.Question]) -> messages.Reply:
        if len({type(question) for question in questions}) > 1:
            return failures.refuse_different_calls(questions)
        reports = [one for one in questions if isinstance(one, messages.ReportRequest)]
        if reports:
            self.record.compare(
                [report.weights for report in reports], [report.values for report in reports]
            )
            self._judge(reports[0])
        return answer_question(self.record, questions[0])

    def _judge(self, report: MetricsReported | messages.ReportRequest) -> None:
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
        """Notify rank 0, in the function, of a pending stop: its next report may be hours away."""
        first = worker_group.ranks[0]
        if self.record.leaving is not None and first.phase == "user" and not worker_group.stop_sent:
            worker_group.stop_sent = True
            first.line.send(messages.StopPending())

    # --- the end ---

    def _settle(self, ended: Any) -> None:
        """Record how the run ended."""
        if isinstance(ended, str):
            self.record.complete(ended, self.plan.processes)
        elif isinstance(ended, failures.Failure):
            self.record.fail(ended.error, rank=ended.rank, notes=ended.notes)
        else:
            self.record.fail(pack_error(self._not_started(ended)), rank=None)

    def _not_started(self, ended: Any) -> GroupStartFailed:
        count = self.plan.processes
        what = f"{count} ranks could not form a process group"
        return GroupStartFailed(
            f"{what if count > 1 else 'the rank could not start'}: "
            f"{getattr(ended, 'reason', ended)}",
            allowed="distributed.fallback: true continues with one process" if count > 1 else "",
            do=f"read {self.paths.agent_log} and {self.paths.log(0)}",
        )


def _named(numbers: dict[str, float]) -> dict[str, float]:
    """The numbers that a function returned by name: a single one may be each rank's own."""
    return {name: number for name, number in numbers.items() if name != RETURNED}
