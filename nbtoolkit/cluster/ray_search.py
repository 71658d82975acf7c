"""Run the jobs of a search as tasks of Ray, one device each, on all machines of the cluster.

The search algorithm lives in the driver, and decides; each task trains one job in its own process,
and asks the driver about its reports.
"""

from __future__ import annotations

import importlib
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
from nbtoolkit.run import messages
from nbtoolkit.run.attempts import last_event
from nbtoolkit.run.events import CommandReceived
from nbtoolkit.run.output import CellOutput
from nbtoolkit.run.paths import RunPaths, write_json
from nbtoolkit.run.payload import unload_function
from nbtoolkit.run.record import RunRecord
from nbtoolkit.run.remote_job import events_size
from nbtoolkit.run.resume import ChosenRun, lock_run, write_first_event
from nbtoolkit.run.serialization import pack_error
from nbtoolkit.search.algorithm import (
    JobResult,
    JobStatus,
    SearchAlgorithm,
    SearchJob,
    SearchRequest,
    is_of_trial,
)
from nbtoolkit.search.job_runner import describe_fault, job_request
from nbtoolkit.search.slots import ALONE, Slot
from nbtoolkit.worker.main import write_output_to

_TICK = 0.2  # seconds between two looks at the folder and at the cluster's size
_FUNCTION_FILE = "remote/function.pkl"


@dataclass
class _Report:
    """A trial's report, and where its thread waits for the answer."""

    key: str
    values: Mapping[str, float]
    step: int | None
    answer: queue.Queue[str | None] = field(default_factory=lambda: queue.Queue(1))


class RaySearch:
    """Runs one search; :meth:`run` in one thread, the other methods in any.

    Args:
        driver: the handle on the actor that runs it, for the tasks.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._inbox: queue.Queue[Any] = queue.Queue()
        self._running: dict[str, tuple[SearchJob, Any, float]] = {}
        self._capacity = self._sized = 0.0

    def text(self) -> str:
        """Say what it does."""
        return f"{len(self._running)} trials run, {self._capacity:.0f} fit"

    def report(self, key: str, values: Mapping[str, float], step: int | None) -> str | None:
        """Hand a trial's report to the algorithm; return the status to leave with, None: go on."""
        report = _Report(key, values, step)
        self._inbox.put(report)
        return report.answer.get()

    def announce(self, key: str, message: messages.MetricsAnnounced) -> None:
        """Hand a trial's names of metrics to the algorithm."""
        self._inbox.put((key, message))

    def run(self, train: Callable[..., Any], request: SearchRequest, run: ChosenRun) -> None:
        """Run a search to its end; called by ``start_search``."""
        import ray

        run.own()
        self._request, self._record = request, RunRecord(request.paths, deadline=request.deadline)
        for level, text in request.notes:
            self._record.note(text, level)
        write_packed(train, request.paths.folder / _FUNCTION_FILE)
        self._shared = ray.put(request)
        module, _, function = request.search.algorithm.partition(":")
        self._record.make_findable()
        try:
            _refuse_several_devices(request)
            algorithm = getattr(importlib.import_module(module), function)(request, self._record)
            self._algorithm: SearchAlgorithm = algorithm
            status = self._run_jobs()
            self._record.complete(status, 1, summary=algorithm.close(status))
        except Exception as error:
            for _, task, _ in self._running.values():
                ray.cancel(task, force=True)
            self._record.fail(pack_error(error), rank=None, notes=[])

    def _run_jobs(self) -> str:
        algorithm, record = self._algorithm, self._record
        while True:
            self._read_requests()
            self._fill()
            if (record.leaving is not None or algorithm.done) and not self._running:
                return record.leaving or ("deadline" if algorithm.cut_short else "completed")
            with suppress(queue.Empty):
                self._handle(self._inbox.get(timeout=_TICK))
                while True:
                    self._handle(self._inbox.get_nowait())

    def _handle(self, message: Any) -> None:
        match message:
            case _Report(key=key):
                job = self._running[key][0] if key in self._running else None
                leave = self._record.leaving
                if job is not None:
                    leave = self._algorithm.on_report(job, message.values, message.step) or leave
                message.answer.put(leave)
            case (str(key), messages.MetricsAnnounced() as told) if key in self._running:
                job = self._running[key][0]
                self._algorithm.on_announcement(job, told.names, told.stems, told.first_step)
            case (str(key), task) if key in self._running and self._running[key][1] is task:
                self._ended(key)

    def _ended(self, key: str) -> None:
        """Give the result of a task to the algorithm; a lost machine is a rank that died."""
        import ray

        job, task, started = self._running.pop(key)
        try:
            result = ray.get(task)
        except ray.exceptions.RayError as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            seconds = time.monotonic() - started
            result = JobResult(status="failed", fault="died", error=text, seconds=seconds)
        self._algorithm.on_end(job, result)

    def _fill(self) -> None:
        """Start jobs on the free devices of the cluster."""
        import ray

        settings, per_device = self._request.config.cluster, self._request.search.per_device
        cpus = settings.cpus_per_device or 1
        if time.monotonic() - self._sized > _TICK:
            self._sized, all_of_them = time.monotonic(), ray.cluster_resources()
            self._capacity = all_of_them.get("CPU", 0) // cpus
            if settings.gpu:
                self._capacity = min(self._capacity, all_of_them.get("GPU", 0) * per_device)
        options = {"num_cpus": cpus, "num_gpus": 1 / per_device if settings.gpu else 0}
        start = ray.remote(run_job).options(max_retries=0, **options)
        while len(self._running) < self._capacity and self._record.leaving is None:
            job = self._algorithm.next(self._record.seconds_left())
            if job is None:
                return
            task = start.remote(self._shared, job, cpus, self._driver)
            self._running[job.key] = (job, task, time.monotonic())
            task.future().add_done_callback(
                partial(lambda key, task, _: self._inbox.put((key, task)), job.key, task)
            )

    def _read_requests(self) -> None:
        """Follow the requests of handles, which they write into the folder, and the deadline."""
        if (request := self._record.stop_requested()) is not None:
            self._record.request_stop("stopped", request.reason, request.grace)
        for command in self._record.commands_requested():
            self._algorithm.on_command(command)
            self._record.write(CommandReceived(op=command.op, n=command.n))
            if command.op == "stop_trial" and command.n is not None:
                self._stop_trial(command.n)
        if self._record.decide() is not None:
            self._algorithm.on_command(messages.SearchCommand(op="stop"))

    def _stop_trial(self, number: int) -> None:
        """Write the request into the folders of the trial's jobs, which may be on any machine."""
        for key in self._running:
            if is_of_trial(key, number):
                reason = "a handle asked for this trial's end"
                stop = RunPaths(self._request.paths.folder / key).stop
                write_json(stop, {"reason": reason, "grace": None}, durable=False)


def _refuse_several_devices(request: SearchRequest) -> None:
    if request.search.placement == "all_devices_per_trial":
        raise PlanError(
            'placement: all_devices_per_trial with where="ray": a trial has one device there',
            allowed='device_per_trial and auto; where="slurm" for trials with several devices',
            do="take placement out of the sweep's file",
        )


# --- in a task ---


class _TrialRecorder(InProcessRecorder):
    """Records a job in its folder, and asks the search's driver about each report."""

    def __init__(self, run: ChosenRun, request: Any, driver: Any, key: str) -> None:
        super().__init__(run, request.job, request.notes, CellOutput(run.paths, "off"), None)
        self._driver, self._key = driver, key

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
