"""Own one search in a process of its own, and run its jobs on the slots of this machine.

The scheduler is to a search what the supervisor is to a run. It never imports user code and never
computes. The loop of the search decides which job runs next and what each result means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from nbtoolkit.errors import NbtoolkitError
from nbtoolkit.launcher.supervisor import JobMessage
from nbtoolkit.launcher.supervisor_process import (
    TICK,
    EventLoop,
    KernelGone,
    SupervisorDescriptors,
    supervising,
)
from nbtoolkit.launcher.worker_group import ForkServerGone, Spawner
from nbtoolkit.run.record import RunRecord
from nbtoolkit.search.job_runner import JobRunner
from nbtoolkit.search.pool import (
    JobEnded,
    JobReported,
    JobResult,
    JobStatus,
    MetricsNamed,
    ParametersUnread,
    Pool,
    PoolEvent,
    SearchJob,
    SearchRequest,
    run_search,
)
from nbtoolkit.search.slots import Slot
from nbtoolkit.wire import messages
from nbtoolkit.wire.payload import unpack
from nbtoolkit.wire.serialization import pack_error
from nbtoolkit.wire.transport import notify_files_changed


def schedule_search(descriptors: list[int]) -> None:
    """Run one search to its end; the main function of a scheduler's process.

    Args:
        descriptors: see :class:`SupervisorDescriptors`.
    """
    given = SupervisorDescriptors(*descriptors)
    request = unpack(given.request, SearchRequest)
    with supervising(request.paths, given, request.header) as (loop, spawner):
        record = RunRecord(request.paths, deadline=request.deadline)
        _run(LocalPool(request, record, spawner, loop), record, loop)


def _run(pool: LocalPool, record: RunRecord, loop: EventLoop) -> None:
    """Run a search, and record its failure if it cannot finish."""
    try:
        for level, text in pool.request.notes:
            record.note(text, level)
        record.note(pool.request.slots.explain())
        run_search(pool, record)
        notify_files_changed(loop.kernel)
    except KernelGone:
        pool.abandon()
        record.note("the kernel is gone: the search was ended, unfinished", level="warning")
    except ForkServerGone:
        pool.abandon()
        record.note("the fork server is gone: the search was ended, unfinished", level="warning")
        raise
    except OSError:
        raise
    except Exception as error:  # the loop gives up
        pool.abandon()
        record.fail(pack_error(error), rank=None, notes=[])
        notify_files_changed(loop.kernel)
    finally:
        pool.abandon()


class LocalPool(Pool):
    """Runs jobs on the slots of this machine.

    With ``auto`` placement on several devices, a job that runs out of memory on one device runs
    again on all of them (each holds a part of the batch).

    Args:
        request: the search.
        record: its record.
        spawner: starts the ranks of jobs.
        loop: waits for the kernel and the ranks.
    """

    def __init__(
        self, request: SearchRequest, record: RunRecord, spawner: Spawner, loop: EventLoop
    ) -> None:
        super().__init__(request, record)
        self._spawner = spawner
        self._loop = loop
        self._runners: list[JobRunner] = []
        self._slots = list(request.slots.slots)  # the free ones
        self._together = request.slots.together
        self._too_large: deque[SearchJob] = deque()
        self._not_started: list[JobEnded] = []
        self._warned: set[str] = set()
        self._writers: dict[str, str] = {}  # the first job that wrote a file, by path

    @property
    def free(self) -> int:
        """Number of jobs that can start now; 0 while a job waits for all devices or has them."""
        alone = any(runner.slot is self._together for runner in self._runners)
        if alone or self._too_large:
            return 0
        # A loop that learns late of jobs that did not start would start too many.
        return max(len(self._slots) - len(self._not_started), 0)

    def start(self, job: SearchJob) -> None:
        """Start a job on a free slot."""
        self.running[job.key] = job
        self._start_on(self._slots.pop(0), job)

    def stop(self, key: str, reason: str) -> None:
        """Let a job end as ``"pruned"``, at its last report or at its next one."""
        for runner in self._runners:
            if runner.job.key == key:
                runner.stop(reason, None, "pruned")

    def wait(self) -> list[PoolEvent]:
        """Answer the reports of the last call, wait for a message, and return what has happened."""
        for runner in self._runners:
            runner.answer()
        requests = self._wait_for_messages()
        events = self._follow([*requests, *self._requests_in_folder()])
        for runner in list(self._runners):
            over = runner.poll()
            events += self._news(runner)
            if over:
                events += self._end(runner)
        events += self._start_too_large()
        for ended in self._not_started:
            del self.running[ended.job.key]
        events += self._not_started
        self._not_started = []
        return events

    def abandon(self) -> None:
        """Kill all jobs, and write nothing."""
        for runner in self._runners:
            runner.abandon()
        self._runners = []

    def _stop_all(self, reason: str, grace: float | None) -> None:
        for runner in self._runners:
            runner.stop(reason, grace, self.leaving or "stopped")

    def _wait_for_messages(self) -> list[messages.KernelRequest]:
        connections = [
            connection for runner in self._runners for connection in runner.connections()
        ]
        try:
            return self._loop.wait(connections, 0.0 if self._not_started else TICK)
        except ForkServerGone:
            if not self._runners or not all(runner.exiting for runner in self._runners):
                raise
            return []

    def _start_on(self, slot: Slot, job: SearchJob) -> None:
        try:
            self._runners.append(JobRunner(job, slot, self.request, self._spawner))
        except NbtoolkitError as error:  # the parameters make no valid configuration or plan
            self._release(slot)
            text = f"{type(error).__name__}: {error.what}"
            result = JobResult(status="failed", fault="raised", error=text)
            self._not_started.append(JobEnded(job, result))

    def _release(self, slot: Slot) -> None:
        if slot is not self._together:
            self._slots.append(slot)

    def _end(self, runner: JobRunner) -> list[JobEnded]:
        """Free the slot of a job that is over; a job that was too large for it is not over."""
        job = runner.job
        result = runner.result()
        self._runners.remove(runner)
        self._release(runner.slot)
        on_one = self._together is not None and runner.slot is not self._together
        if result.fault == "oom" and on_one and self.leaving is None:
            text = f"{job.key} ran out of memory: it runs again on all devices"
            self._record.note(text, level="warning")
            self._too_large.append(job)
            return []
        del self.running[job.key]
        return [JobEnded(job, result)]

    def _start_too_large(self) -> list[JobEnded]:
        """Start a job that is too large for one device once all are free."""
        if not self._too_large or self._runners:
            return []
        if self.leaving is None and self._together is not None:
            self._start_on(self._together, self._too_large.popleft())
            return []
        left = [self.running.pop(job.key) for job in self._too_large]
        self._too_large.clear()
        status: JobStatus = "deadline" if self.leaving == "deadline" else "stopped"
        return [JobEnded(job, JobResult(status=status)) for job in left]

    def _news(self, runner: JobRunner) -> list[PoolEvent]:
        """Return what a job has said to the loop, and warn of the rest."""
        said = runner.news
        runner.news = []
        events: list[PoolEvent] = []
        for message in said:
            events += self._from_message(runner.job, message)
        return events

    def _from_message(
        self, job: SearchJob, message: JobReported | JobMessage
    ) -> Sequence[PoolEvent]:
        match message:
            case JobReported():
                return [message]
            case messages.MetricsAnnounced():
                return [MetricsNamed(job, message.names, message.stems, message.first_step)]
            case messages.UsageWarning():
                self._warn_once(message.text)
                return [ParametersUnread(job, message.searched)] if message.searched else []
            case messages.FilesWritten():
                self._note_files(job, message.paths)
        return []

    def _warn_once(self, text: str) -> None:
        """Warn of settings without effect once per search, not once per trial."""
        if text not in self._warned:
            self._warned.add(text)
            self._record.note(text, level="warning")

    def _note_files(self, job: SearchJob, paths: Sequence[str]) -> None:
        """Warn of the first file that two jobs wrote; the result names all of them."""
        for path in paths:
            first = self._writers.setdefault(path, job.key)
            if first == job.key or path in self.shared_files:
                continue
            if not self.shared_files:
                self._record.note(_shared_file(path, first, job.key), level="warning")
            self.shared_files.append(path)


def _shared_file(path: str, first: str, second: str) -> str:
    return (
        f"two jobs wrote the same file, {path} ({first} and {second}): a job that reads it may get "
        "what the other one wrote\n"
        "  Allowed: files in the folder of the job, ctx.paths.folder\n"
        '  Do now:  ctx.save(state, kind="best") and ctx.load("best") for weights; '
        "ctx.paths.folder / name for other files"
    )
