"""Schedule the jobs of one search on its slots, in a process of its own.

The scheduler is to a search what the supervisor is to a run. It never imports user code and never
computes. The search algorithm decides which job runs next and what each result means.
"""

from __future__ import annotations

import importlib
import time
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
from nbtoolkit.run import messages
from nbtoolkit.run.events import CommandReceived
from nbtoolkit.run.payload import unpack
from nbtoolkit.run.record import RunRecord
from nbtoolkit.run.serialization import pack_error
from nbtoolkit.run.transport import notify_files_changed
from nbtoolkit.search.algorithm import (
    JobResult,
    SearchAlgorithm,
    SearchJob,
    SearchRequest,
    is_of_trial,
)
from nbtoolkit.search.job_runner import JobRunner
from nbtoolkit.search.slots import Slot, SlotAllocator

PREPARE_AFTER = 0.1
"""Seconds after a job's start in which no further job is prepared."""


def schedule_search(descriptors: list[int]) -> None:
    """Run one search to its end; the main function of a scheduler's process.

    Args:
        descriptors: see :class:`SupervisorDescriptors`.
    """
    given = SupervisorDescriptors(*descriptors)
    request = unpack(given.request, SearchRequest)
    with supervising(request.paths, given, request.header) as (loop, spawner):
        SearchScheduler(request, spawner, loop).run()


class SearchScheduler:
    """Runs one search."""

    def __init__(self, request: SearchRequest, spawner: Spawner, loop: EventLoop) -> None:
        self._request, self._spawner, self._loop = request, spawner, loop
        self._record = RunRecord(request.paths, deadline=request.deadline)
        self._slots = SlotAllocator(request.slots, self._record)
        self._running: list[JobRunner] = []
        self._unread: set[str] = set()  # warnings that were given
        self._writers: dict[str, str] = {}  # the first job that wrote a file, by path
        self._shared_files: list[str] = []
        self._started_at = 0.0  # start of the last job (monotonic)

    def run(self) -> None:
        """Run the search, and record its failure if it cannot finish."""
        try:
            self._begin()
            self._complete(self._run_jobs())
        except KernelGone:
            self._abandon("the kernel is gone: the search was ended, unfinished")
        except ForkServerGone:
            self._abandon("the fork server is gone: the search was ended, unfinished")
            raise
        except NbtoolkitError as error:  # the algorithm gives up
            self._fail(error)
        except OSError:
            raise
        except Exception as error:
            self._fail(error)
        finally:
            self._end_workers()

    def _begin(self) -> None:
        request = self._request
        for level, text in request.notes:
            self._record.note(text, level)
        self._record.note(request.slots.explain())
        module, _, function = request.search.algorithm.partition(":")
        make = getattr(importlib.import_module(module), function)
        self._algorithm: SearchAlgorithm = make(request, self._record)
        self._record.make_findable()

    def _run_jobs(self) -> str:
        """Run jobs until none is left; return the final status."""
        algorithm = self._algorithm
        while True:
            self._check_jobs()
            self._check_deadline()
            self._fill_slots()
            self._prepare_next()
            over = self._record.leaving is not None or algorithm.done
            if over and not self._running:
                early = "deadline" if algorithm.cut_short else "completed"
                return self._record.leaving or early
            self._wait()

    # --- jobs ---

    def _check_jobs(self) -> None:
        """Check every job once, and report those that have ended to the algorithm.

        A prepared job starts before the report, because the report takes some 10 ms.
        """
        ended: list[tuple[SearchJob, JobResult]] = []
        for runner in list(self._running):
            if not runner.poll():
                continue
            self._running.remove(runner)
            self._slots.release(runner.slot)
            result = runner.result()
            if not self._slots.should_retry(runner.job, runner.slot, result):
                ended.append((runner.job, result))
        if ended and all(result.status == "completed" for _, result in ended):
            self._fill_slots(prepared_only=True)
        for job, result in ended:
            self._algorithm.on_end(job, result)

    def _fill_slots(self, *, prepared_only: bool = False) -> None:
        """Start jobs on the free slots."""
        if self._record.leaving is not None:
            return
        jobs: list[SearchJob] = []
        while len(jobs) < self._slots.free and (self._algorithm.ready or not prepared_only):
            job = self._algorithm.next(self._record.seconds_left())
            if job is None:
                break
            jobs.append(job)
        for job, slot in self._slots.assign(jobs):
            self._started_at = time.monotonic()
            try:
                self._running.append(self._start(job, slot))
            except NbtoolkitError as error:  # the parameters make no valid configuration or plan
                self._slots.release(slot)
                text = f"{type(error).__name__}: {error.what}"
                self._algorithm.on_end(job, JobResult(status="failed", fault="raised", error=text))

    def _prepare_next(self) -> None:
        """Prepare the next job while all slots are busy, but not while jobs start or end."""
        calm = time.monotonic() - self._started_at > PREPARE_AFTER
        if calm and self._record.leaving is None and self._running and not self._slots.free:
            self._algorithm.prepare(len(self._running))

    def _start(self, job: SearchJob, slot: Slot) -> JobRunner:
        return JobRunner(job, slot, self._request, self._spawner, self._algorithm, self._on_message)

    def _on_message(self, job: SearchJob, message: JobMessage) -> None:
        match message:
            case messages.MetricsAnnounced():
                self._algorithm.on_announcement(
                    job, message.names, message.stems, message.first_step
                )
            case messages.UsageWarning():
                self._warn_once(job, message.text, message.searched)
            case messages.FilesWritten():
                self._note_files(job, message.paths)

    def _warn_once(self, job: SearchJob, text: str, searched: Sequence[str]) -> None:
        """Warn of settings without effect once per search, not once per trial."""
        if text not in self._unread:
            self._unread.add(text)
            self._record.note(text, level="warning")
        if searched:
            self._algorithm.on_unread(job, searched)

    def _note_files(self, job: SearchJob, paths: Sequence[str]) -> None:
        """Warn of the first file that two jobs wrote; the result names all of them."""
        for path in paths:
            first = self._writers.setdefault(path, job.key)
            if first == job.key or path in self._shared_files:
                continue
            if not self._shared_files:
                self._record.note(_shared_file(path, first, job.key), level="warning")
            self._shared_files.append(path)

    # --- requests ---

    def _wait(self) -> None:
        """Wait for a message, and follow requests."""
        try:
            requests = self._loop.wait(
                [line for runner in self._running for line in runner.lines()], TICK
            )
        except ForkServerGone:
            if not self._running or not all(runner.exiting for runner in self._running):
                raise
            requests = []
        for request in [*requests, *self._requests_in_folder()]:
            self._follow(request)

    def _requests_in_folder(self) -> list[messages.KernelRequest]:
        """Read the commands of handles that have no connection to this process."""
        stop = self._record.stop_requested()
        return [*([] if stop is None else [stop]), *self._record.commands_requested()]

    def _follow(self, request: messages.KernelRequest) -> None:
        match request:
            case messages.StopRequest():
                self._stop(request.reason, request.grace, request.status)
            case messages.SearchCommand():
                self._algorithm.on_command(request)
                self._record.write(CommandReceived(op=request.op, n=request.n))
                if request.op == "stop_trial" and request.n is not None:
                    self._stop_trial(request.n)

    def _stop(self, reason: str, grace: float | None, status: str) -> None:
        self._record.request_stop(status, reason, grace)
        self._algorithm.on_command(messages.SearchCommand(op="stop"))
        for runner in self._running:
            runner.stop(reason, grace, self._record.leaving or status)

    def _stop_trial(self, number: int) -> None:
        for runner in self._running:
            if is_of_trial(runner.job.key, number):
                runner.stop("a handle asked for this trial's end", None, "stopped")

    def _check_deadline(self) -> None:
        """At the deadline, let all jobs save and leave; kill those that do not report soon."""
        if self._record.leaving is None and self._record.decide() is not None:
            self._stop("the search's time is used up", self._request.grace, "deadline")

    # --- the end ---

    def _complete(self, status: str) -> None:
        summary = {**self._algorithm.close(status), "shared_files": self._shared_files}
        self._record.complete(status, 1, summary=summary)
        notify_files_changed(self._loop.kernel)

    def _fail(self, error: BaseException) -> None:
        self._end_workers()
        self._record.fail(pack_error(error), rank=None, notes=[])
        notify_files_changed(self._loop.kernel)

    def _abandon(self, reason: str) -> None:
        self._end_workers()
        self._record.note(reason, level="warning")

    def _end_workers(self) -> None:
        for runner in self._running:
            runner.abandon()
        self._running = []


def _shared_file(path: str, first: str, second: str) -> str:
    return (
        f"two jobs wrote the same file, {path} ({first} and {second}): a job that reads it may get "
        "what the other one wrote\n"
        "  Allowed: files in the folder of the job, ctx.paths.folder\n"
        '  Do now:  ctx.save(state, kind="best") and ctx.load("best") for weights; '
        "ctx.paths.folder / name for other files"
    )
