"""Run the jobs of a search as tasks of Ray, one device each, on all machines of the cluster.

The loop of the search lives in the driver, and decides; each task trains one job in its own
process, and asks the driver about its reports.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.errors import NbtoolkitError, PlanError
from nbtoolkit.host import detect_host
from nbtoolkit.launcher.in_process import InProcessRecorder, record_inline
from nbtoolkit.launcher.out_of_memory import is_out_of_memory
from nbtoolkit.launcher.remote import load_packed, write_packed
from nbtoolkit.run.attempts import last_event
from nbtoolkit.run.output import CellOutput
from nbtoolkit.run.paths import RunPaths, write_json
from nbtoolkit.run.record import RunRecord
from nbtoolkit.run.remote_job import events_size
from nbtoolkit.run.resume import ChosenRun, lock_run, write_first_event
from nbtoolkit.search.job_runner import describe_fault, job_request
from nbtoolkit.search.pool import (
    JobEnded,
    JobReported,
    JobResult,
    JobStatus,
    MetricsNamed,
    Pool,
    PoolEvent,
    SearchJob,
    SearchRequest,
    run_search,
)
from nbtoolkit.search.slots import ALONE, Slot
from nbtoolkit.wire import messages
from nbtoolkit.wire.payload import unload_function
from nbtoolkit.wire.serialization import pack_error
from nbtoolkit.worker.main import write_output_to

_TICK = 0.2  # seconds between two looks at the folder and at the cluster's size
_FUNCTION_FILE = "remote/function.pkl"


@dataclass
class _Report:
    """A job's report, and where its thread waits for the answer."""

    key: str
    values: Mapping[str, float]
    step: int | None
    answer: queue.Queue[str | None] = field(default_factory=lambda: queue.Queue(1))


@dataclass
class _Named:
    """The names of the metrics that a job will report."""

    key: str
    message: messages.MetricsAnnounced


@dataclass
class _Ended:
    """The end of a task."""

    key: str
    task: Any


@dataclass
class _Task:
    """A task that runs a job; ``leave``: the status with which the job is to leave."""

    ref: Any
    started: float
    leave: str | None = None


class RaySearch:
    """Runs one search in the driver; :meth:`run` in one thread, the other methods in any.

    Args:
        driver: the handle on the actor that runs it, for the tasks.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._inbox: queue.Queue[_Report | _Named | _Ended] = queue.Queue()
        self._pool: RayPool | None = None

    def text(self) -> str:
        """Say what it does."""
        return "starting" if self._pool is None else self._pool.text()

    def report(self, key: str, values: Mapping[str, float], step: int | None) -> str | None:
        """Hand a job's report to the loop; return the status to leave with, None: go on."""
        report = _Report(key, values, step)
        self._inbox.put(report)
        return report.answer.get()

    def announce(self, key: str, message: messages.MetricsAnnounced) -> None:
        """Hand a job's names of metrics to the loop."""
        self._inbox.put(_Named(key, message))

    def run(self, train: Callable[..., Any], request: SearchRequest, run: ChosenRun) -> None:
        """Run a search to its end; called by ``start_search``."""
        run.own()
        record = RunRecord(request.paths, deadline=request.deadline)
        for level, text in request.notes:
            record.note(text, level)
        write_packed(train, request.paths.folder / _FUNCTION_FILE)
        self._pool = RayPool(request, record, self._driver, self._inbox)
        try:
            _refuse_several_devices(request)
            run_search(self._pool, record)
        except Exception as error:
            self._pool.abandon()
            record.fail(pack_error(error), rank=None, notes=[])


class RayPool(Pool):
    """Runs jobs as tasks, one device each.

    Args:
        request: the search.
        record: its record.
        driver: the handle on the driver, for the tasks.
        inbox: what the tasks say, and their ends.
    """

    def __init__(
        self,
        request: SearchRequest,
        record: RunRecord,
        driver: Any,
        inbox: queue.Queue[_Report | _Named | _Ended],
    ) -> None:
        import ray

        super().__init__(request, record)
        self._driver = driver
        self._inbox = inbox
        self._shared = ray.put(request)
        self._tasks: dict[str, _Task] = {}
        self._unanswered: list[_Report] = []
        self._capacity = self._sized = 0.0

    def text(self) -> str:
        """Say what it does."""
        return f"{len(self._tasks)} trials run, {self._capacity:.0f} fit"

    @property
    def free(self) -> int:
        """Number of jobs that can start now: the cluster may grow and shrink."""
        import ray

        settings = self.request.config.cluster
        per_device = self.request.search.per_device
        if time.monotonic() - self._sized > _TICK:
            self._sized = time.monotonic()
            resources = ray.cluster_resources()
            self._capacity = resources.get("CPU", 0) // (settings.cpus_per_device or 1)
            if settings.gpu:
                self._capacity = min(self._capacity, resources.get("GPU", 0) * per_device)
        return max(int(self._capacity) - len(self._tasks), 0)

    def start(self, job: SearchJob) -> None:
        """Start a task."""
        import ray

        settings = self.request.config.cluster
        per_device = self.request.search.per_device
        cpus = settings.cpus_per_device or 1
        options = {"num_cpus": cpus, "num_gpus": 1 / per_device if settings.gpu else 0}
        start = ray.remote(run_job).options(max_retries=0, **options)
        task = start.remote(self._shared, job, cpus, self._driver)
        self.running[job.key] = job
        self._tasks[job.key] = _Task(task, time.monotonic())
        task.future().add_done_callback(
            partial(lambda key, task, _: self._inbox.put(_Ended(key, task)), job.key, task)
        )

    def stop(self, key: str, reason: str) -> None:
        """Let a job end as ``"pruned"``, at its last report or at its next one."""
        self._let_leave(key, "pruned", reason, None)

    def wait(self) -> list[PoolEvent]:
        """Answer the reports of the last call, wait for a message, and return what has happened."""
        for report in self._unanswered:
            task = self._tasks.get(report.key)
            report.answer.put(self.leaving if task is None else task.leave or self.leaving)
        self._unanswered = []
        events = self._follow(self._requests_in_folder())
        with suppress(queue.Empty):
            events += self._from_message(self._inbox.get(timeout=_TICK))
            while True:
                events += self._from_message(self._inbox.get_nowait())
        return events

    def abandon(self) -> None:
        """Cancel all tasks."""
        import ray

        for task in self._tasks.values():
            ray.cancel(task.ref, force=True)

    def _stop_all(self, reason: str, grace: float | None) -> None:
        for key in self._tasks:
            self._let_leave(key, self.leaving or "stopped", reason, grace)

    def _let_leave(self, key: str, status: str, reason: str, grace: float | None) -> None:
        """Let a job leave at its last report, if that waits for its answer, or at its next one.

        The request in its folder also reaches a job that checks for a stop without a report. The
        job may run on any machine.
        """
        task = self._tasks.get(key)
        if task is None or task.leave is not None:
            return
        task.leave = status
        stop = RunPaths(self.request.paths.folder / key).stop
        reports = any(report.key == key for report in self._unanswered)
        if not reports and stop.parent.is_dir():
            write_json(stop, {"reason": reason, "grace": grace}, durable=False)

    def _from_message(self, message: _Report | _Named | _Ended) -> list[PoolEvent]:
        job = self.running.get(message.key)
        match message:
            case _Report():
                self._unanswered.append(message)
                return [] if job is None else [JobReported(job, message.values, message.step)]
            case _Named(message=told) if job is not None:
                return [MetricsNamed(job, told.names, told.stems, told.first_step)]
            case _Ended() if job is not None and self._tasks[job.key].ref is message.task:
                return [self._ended(job)]
        return []

    def _ended(self, job: SearchJob) -> JobEnded:
        """Return how a task ended; a lost machine is a rank that died."""
        import ray

        del self.running[job.key]
        task = self._tasks.pop(job.key)
        try:
            return JobEnded(job, ray.get(task.ref))
        except ray.exceptions.RayError as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            seconds = time.monotonic() - task.started
            return JobEnded(
                job, JobResult(status="failed", fault="died", error=text, seconds=seconds)
            )


def _refuse_several_devices(request: SearchRequest) -> None:
    if request.search.placement == "all_devices_per_trial":
        raise PlanError(
            'placement: all_devices_per_trial with where="ray": a trial has one device there',
            allowed='device_per_trial and auto; where="slurm" for trials with several devices',
            do="take placement out of the sweep's file",
        )


class _TrialRecorder(InProcessRecorder):
    """Records a job in its folder, and asks the search's driver about each report."""

    def __init__(self, run: ChosenRun, request: Any, driver: Any, key: str) -> None:
        super().__init__(run, request.job, request.notes, CellOutput(run.paths, "off"), None)
        self._driver = driver
        self._key = key

    def send(self, message: messages.Statement) -> None:
        super().send(message)
        if isinstance(message, messages.MetricsAnnounced):
            self._driver.announce.remote(self._key, message)

    def ask(self, question: messages.Question) -> messages.Reply:
        reply = super().ask(question)
        if isinstance(question, messages.ReportRequest) and self.record.leaving is None:
            import ray

            asked = self._driver.report.remote(self._key, question.values, question.step)
            if (leave := ray.get(asked)) is not None:
                self.record.leaving = leave
                return messages.Answer(leave=leave)
        return reply

    def _track(self, config: Any) -> None:
        """Track nothing: the search is tracked as a whole."""


def run_job(search: SearchRequest, job: SearchJob, cpus: int, driver: Any) -> JobResult:
    """Train one job of a search in this process, a worker of Ray."""
    started = time.monotonic()
    hardware = replace(detect_hardware(), cpu_count=cpus)
    search = replace(search, host=detect_host())
    try:
        request = job_request(job, Slot(name="ray", hardware=hardware, overrides=ALONE), search)
    except NbtoolkitError as error:  # the parameters make no valid configuration or plan
        text = f"{type(error).__name__}: {error.what}"
        return JobResult(status="failed", fault="raised", error=text)
    paths = request.job.paths
    lock = lock_run(paths)
    if lock is None:
        return JobResult(status="failed", fault="died", error=f"{job.key} is still running")
    header = request.header
    size = events_size(paths)
    write_first_event(paths, request.job.config, header)
    write_output_to(paths.log(0))
    run = ChosenRun(paths, lock, header.attempt, size)
    try:
        recorder = _TrialRecorder(run, request, driver, job.key)
        # Anew for each job, so that none sees another's globals.
        record_inline(load_packed(search.paths.folder / _FUNCTION_FILE), request, recorder)
    except Exception as error:
        fault, text = describe_fault(pack_error(error), is_out_of_memory(error))
        seconds = time.monotonic() - started
        return JobResult(status="failed", seconds=seconds, fault=fault, error=text)
    finally:
        lock.release()
        unload_function()
    ended = last_event(paths)
    assert ended is not None
    return JobResult(
        status=cast(JobStatus, ended.status),
        metrics=ended.metrics,
        seconds=time.monotonic() - started,
    )
