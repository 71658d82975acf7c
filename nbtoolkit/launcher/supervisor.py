"""Supervise one run from its plan to its last event."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nbtoolkit.environment.grace import EXIT_GRACE, FAILURE_GRACE
from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.plan import (
    BatchTooLarge,
    Evidence,
    GroupNotFormed,
    PortBusy,
    make_plan,
)
from nbtoolkit.environment.resources import memory_kills
from nbtoolkit.launcher.failures import classify
from nbtoolkit.launcher.hang_reports import refuse_different_calls
from nbtoolkit.launcher.health import HealthMonitor
from nbtoolkit.launcher.out_of_memory import as_out_of_memory
from nbtoolkit.launcher.outcome import Failed, Finished, Outcome, OutOfMemory, record_end
from nbtoolkit.launcher.restarts import Restarts
from nbtoolkit.launcher.worker_group import RankView, Spawner, WorkerGroup
from nbtoolkit.run.checkpoints.checkpoint_store import has_checkpoint
from nbtoolkit.run.events import RETURNED, Event, MetricsReported, PlanChanged, RankPhaseChanged
from nbtoolkit.run.paths import make_folder
from nbtoolkit.run.record import RunRecord
from nbtoolkit.wire import messages
from nbtoolkit.wire.payload import RunRequest
from nbtoolkit.wire.transport import Connection

PORT_TRIES = 4

Report = MetricsReported | messages.ReportRequest
JobMessage = messages.UsageWarning | messages.MetricsAnnounced | messages.FilesWritten


@dataclass(frozen=True)
class Running:
    """Ranks run; ``memory_kills``: the kernel's count of kills for memory before they started."""

    group: WorkerGroup
    health: HealthMonitor
    memory_kills: int | None


@dataclass(frozen=True)
class Exiting:
    """The ranks have ended; their processes may take until ``limit`` to exit."""

    group: WorkerGroup
    outcome: Outcome
    limit: float


@dataclass(frozen=True)
class Pausing:
    """The ranks have failed, and start again at ``until``."""

    failed: Failed
    until: float


@dataclass(frozen=True)
class Ended:
    """The end of the run is written."""

    outcome: Outcome


State = Running | Exiting | Pausing | Ended


class RunSupervisor:
    """Supervises one run: listens to the ranks, writes the record, decides when the run is over.

    It lives in a supervisor's process (one run) or in a scheduler's (several at once). It never
    imports user code and never computes.

    Args:
        request: the run.
        spawner: starts worker groups.
        durable: see :class:`RunRecord`.

    Attributes:
        paths: the run's folder.
        plan: the current plan.
        record: the run's record.
    """

    def __init__(self, request: RunRequest, spawner: Spawner, *, durable: bool = True) -> None:
        self._request = request
        self._spawner = spawner
        self.paths = request.job.paths
        self.plan: LaunchPlan = request.job.plan
        self.record = RunRecord(self.paths, deadline=request.job.deadline, durable=durable)
        self._state: State | None = None  # before the start
        self._kill_at = math.inf
        limit = self.plan.too_large
        self._evidence: list[Evidence] = [] if limit is None else [BatchTooLarge(limit)]
        if request.speed is not None:
            self._evidence.append(request.speed)
        self._restarts = Restarts(self.plan.restarts)
        self._had_late_group = False

    def begin(self) -> None:
        """Start the ranks of an attempt whose first event is written."""
        for level, text in self._request.notes:
            self.record.note(text, level)
        self._state = self._start()
        # Here, where nothing waits for it: each rank would flush the folder's name at its end.
        make_folder(self.paths.value(0).parent, durable=False)
        self.record.make_findable()

    def poll(self) -> bool:
        """Check everything once; return True when the run is over and its end is written."""
        match self._state:
            case Running():
                self._state = self._watch(self._state)
            case Exiting():
                self._state = self._wait_for_exit(self._state)
            case Pausing():
                self._state = self._wait_for_restart(self._state)
        return self.outcome is not None

    def stop(self, reason: str, grace: float | None = None, status: str = "stopped") -> None:
        """Stop the ranks at their next report.

        Args:
            reason: noted in the events.
            grace: seconds after which they are killed; None for no limit.
            status: the run's final status.
        """
        self.record.request_stop(status, reason, grace)
        if grace is not None:
            self._kill_at = min(self._kill_at, time.monotonic() + grace)

    def abandon(self) -> None:
        """Kill the processes, if there are any, and write nothing."""
        if isinstance(self._state, (Running, Exiting)):
            self._spawner.dismiss(self._state.group)
            self._state = None

    @property
    def outcome(self) -> Outcome | None:
        """How the run has ended; None before its end is written."""
        return self._state.outcome if isinstance(self._state, Ended) else None

    @property
    def exiting(self) -> bool:
        """True while the processes of ranks that have ended exit."""
        return isinstance(self._state, Exiting)

    def connections(self) -> list[Connection]:
        """Return connections to wait for: the agent's and the ranks'."""
        if isinstance(self._state, (Running, Exiting)):
            return self._state.group.connections()
        return []

    def silence(self) -> float:
        """Return the seconds since any rank sent a message or computed."""
        return self._state.health.silence() if isinstance(self._state, Running) else 0.0

    def _start(self) -> Running:
        """Start ranks with the current plan."""
        kills = memory_kills()
        group = self._spawner.start(replace(self._request.job, plan=self.plan))
        return Running(group, HealthMonitor(group, self.record, self._request.job.config), kills)

    def _watch(self, running: Running) -> Running | Exiting:
        """Listen to the ranks, and follow requests, until the ranks have ended."""
        group = running.group
        self._listen(group)
        self._follow_requests()
        self._announce_stop(group)
        outcome = self._end_of_ranks(running)
        if outcome is None:
            return running
        grace = FAILURE_GRACE
        if isinstance(outcome, Finished):
            grace = EXIT_GRACE
            group.go()  # the processes may exit
        return Exiting(group, outcome, time.monotonic() + grace)

    def _end_of_ranks(self, running: Running) -> Outcome | None:
        """Return how the ranks have ended; None while they run."""
        group = running.group
        if time.monotonic() >= self._kill_at:
            group.kill()
            gone = group.exited is not None or all(rank.over for rank in group.ranks)
            return Finished(self.record.leaving or "stopped") if gone else None
        outcome = classify(group, self.paths)
        if isinstance(outcome, Failed):
            return as_out_of_memory(
                outcome,
                self.plan,
                self._request.job.config,
                in_loop=group.ranks[outcome.rank].accumulates,
                kills=running.memory_kills,
            )
        return outcome or running.health.check()

    def _wait_for_exit(self, exiting: Exiting) -> State:
        """Let the processes exit; then decide what follows."""
        group = exiting.group
        self._listen(group)
        # Ranks that raised wait to be killed; the agent of ranks that have ended has no more to do.
        if isinstance(exiting.outcome, Finished):
            over = group.ranks_ended()
        else:
            over = all(rank.over for rank in group.ranks)
        if not over and group.exited is None and time.monotonic() < exiting.limit:
            return exiting
        self.abandon()
        return self._after(exiting.outcome)

    def _after(self, outcome: Outcome) -> Running | Pausing | Ended:
        """Decide what follows the end of the ranks: other ranks, or the end of the run."""
        match outcome:
            case GroupNotFormed(late=True) if not self._had_late_group:
                # A fork beside elastic's thread can make ranks hang; it rarely does so twice.
                self._had_late_group = True
                self.record.note(f"{outcome.reason}: trying again", level="warning")
                return self._start()
            case GroupNotFormed() if self.plan.processes > 1 and self.plan.fallback:
                return self._start_otherwise(outcome)
            case PortBusy() if self._ports_tried() < PORT_TRIES:
                return self._start_otherwise(outcome)
            case OutOfMemory(can_split=True) if self.record.leaving is None:
                return self._start_otherwise(BatchTooLarge(self.plan.batch_size_per_device))
            case Failed():
                return self._pause(outcome) or self._end(self._restarts.explain_end(outcome))
        return self._end(outcome)

    def _start_otherwise(self, evidence: Evidence) -> Running:
        """Start ranks with a plan that considers what went wrong with this one."""
        request = self._request
        start = self.plan.start
        self._evidence.append(evidence)
        self.plan = make_plan(
            request.job.config, request.host, request.hardware, self._evidence, start=start
        )
        self.record.write(PlanChanged(plan=self.plan.to_dict()))
        self.record.note(
            f"{self.plan.reasons[0]}\nnew plan: {self.plan.explain()}", level="warning"
        )
        return self._start()

    def _ports_tried(self) -> int:
        return sum(isinstance(item, PortBusy) for item in self._evidence)

    def _pause(self, failed: Failed) -> Pausing | None:
        """Return the pause before the ranks start again; None if they do not."""
        saved = has_checkpoint(self.paths.checkpoints)
        allowed = self._restarts.allows(failed, has_checkpoint=saved)
        if self.record.leaving is not None or not allowed:
            return None
        pause = self._restarts.begin()
        self.record.note(self._restarts.plan(failed, pause, has_checkpoint=saved), "warning")
        return Pausing(failed, time.monotonic() + pause)

    def _wait_for_restart(self, pausing: Pausing) -> Running | Pausing | Ended:
        """Start the ranks after the pause, in another attempt, unless the run has to end before."""
        self._follow_requests()
        if (status := self.record.decide()) is not None:
            return self._end(Finished(status))
        if time.monotonic() < pausing.until:
            return pausing
        header = self._request.header
        self.record.begin_attempt(
            replace(
                header,
                attempt=header.attempt + self._restarts.count,
                restarted_after=pausing.failed.brief,
                plan=self.plan.to_dict(),
            )
        )
        return self._start()

    def _end(self, outcome: Outcome) -> Ended:
        record_end(self.record, outcome, self.plan)
        return Ended(outcome)

    def _follow_requests(self) -> None:
        """Follow a request that a handle has written into the run's folder."""
        if (request := self.record.stop_requested()) is not None:
            self.stop(request.reason, request.grace)

    def _announce_stop(self, group: WorkerGroup) -> None:
        """Notify rank 0, in the function, of a pending stop: its next report may be hours away."""
        first = group.ranks[0]
        if self.record.leaving is not None and first.phase == "user" and not group.stop_sent:
            group.stop_sent = True
            first.connection.send(messages.StopPending())

    def _listen(self, group: WorkerGroup) -> None:
        """Handle all new messages."""
        for rank, message in group.receive():
            self._on_message(group, rank, message)
        dead = group.find_dead()
        if dead:
            # A fork server that has died takes the ranks with it; Linux closes its connection
            # before it ends them.
            self._spawner.receive()
        for rank in dead:
            for message in rank.drain():  # its final message may have come with its end
                self._on_message(group, rank, message)
            if not rank.over:
                rank.end("dead")

    def _on_message(self, group: WorkerGroup, rank: RankView, message: messages.Message) -> None:
        group.note(rank, message)
        if rank.rank == 0:
            self._restarts.note(message)
        match message:
            case messages.PhaseReached():
                self._on_phase(group, rank)
            case messages.FunctionReturned():
                self._on_returned(group, rank, message)
            case messages.Question():
                self._answer_if_all_ask(group)
            case messages.ModulesImported():
                self._spawner.import_ahead(message.names)
            case messages.UsageWarning() | messages.MetricsAnnounced() | messages.FilesWritten():
                self._on_job_message(message)
            case Event():
                self.record.take(message)
                if isinstance(message, MetricsReported):
                    self._on_report(message)

    def _on_job_message(self, message: JobMessage) -> None:
        """Handle a message that concerns the search of a run; a run without one notes warnings."""
        self.record.take(message)

    def _on_report(self, report: Report) -> None:
        """Let a search judge a report, and stop the run; a run without one has no judge."""

    def _on_returned(
        self, group: WorkerGroup, rank: RankView, message: messages.FunctionReturned
    ) -> None:
        self.record.write(RankPhaseChanged(rank=rank.rank, phase=rank.phase, pid=rank.pid))
        last_words = [other.last_word for other in group.ranks]
        returned = [word for word in last_words if isinstance(word, messages.FunctionReturned)]
        if len(returned) == len(last_words):
            self.record.compare(
                [word.weights for word in returned], [_named(word.numbers) for word in returned]
            )
        if rank.rank == 0:
            self.record.returned(message.numbers)

    def _on_phase(self, group: WorkerGroup, rank: RankView) -> None:
        self.record.write(RankPhaseChanged(rank=rank.rank, phase=rank.phase, pid=rank.pid))
        if rank.phase == "ready" and group.all_are("ready"):
            group.go()
            for other in group.ranks:
                other.phase = "user"

    def _answer_if_all_ask(self, group: WorkerGroup) -> None:
        questions = [rank.asking for rank in group.ranks if rank.asking is not None]
        if len(questions) == len(group.ranks):
            group.reply(self._answer(questions))

    def _answer(self, questions: Sequence[messages.Question]) -> messages.Reply:
        if len({type(question) for question in questions}) > 1:
            return refuse_different_calls(questions)
        reports = [each for each in questions if isinstance(each, messages.ReportRequest)]
        if reports:
            self.record.compare(
                [report.weights for report in reports], [report.values for report in reports]
            )
            self._on_report(reports[0])
        return self.record.answer(questions[0])


def _named(numbers: dict[str, float]) -> dict[str, float]:
    """Return the numbers that a function returned by name: a single one may be each rank's own."""
    return {name: number for name, number in numbers.items() if name != RETURNED}
