"""Run one job of a search with its folder, processes and limits."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import cast

from nbtoolkit.environment.grace import STOP_GRACE
from nbtoolkit.environment.plan import Evidence, make_plan
from nbtoolkit.launcher.outcome import Finished, OutOfMemory, error_of
from nbtoolkit.launcher.supervisor import JobMessage, Report, RunSupervisor
from nbtoolkit.launcher.worker_group import Spawner, WorkerGroup
from nbtoolkit.run.attempts import readable_first_event
from nbtoolkit.run.events import MetricsReported
from nbtoolkit.run.paths import RunPaths, make_folder, write_whole
from nbtoolkit.search.pool import (
    Fault,
    JobReported,
    JobResult,
    JobStatus,
    SearchJob,
    SearchRequest,
)
from nbtoolkit.search.slots import Slot
from nbtoolkit.wire import messages
from nbtoolkit.wire.payload import JobSpec, RunRequest
from nbtoolkit.wire.serialization import PackedError, one_line

# The fault by the type of a job's error, unless memory ran out. The user's code raised all others.
_FAULTS: dict[str, Fault] = {
    "nbtoolkit.errors.WorkerDied": "died",
    "nbtoolkit.errors.WorkerHung": "hung",
    "nbtoolkit.errors.GroupStartFailed": "died",
    "nbtoolkit.errors.LossNotFinite": "nan",
}


class JobRunner(RunSupervisor):
    """Runs a job on a slot: a supervised run with limits of its own.

    Args:
        job: the job.
        slot: its slot.
        search: the search it belongs to.
        spawner: starts worker groups.

    Attributes:
        news: what the job has reported, and has said about files, metrics and settings; the pool
            takes it.

    Raises:
        NbtoolkitError: the job's configuration or plan is invalid.
    """

    def __init__(self, job: SearchJob, slot: Slot, search: SearchRequest, spawner: Spawner) -> None:
        self.job = job
        self.slot = slot
        self.news: list[JobReported | JobMessage] = []
        self._reporting: WorkerGroup | None = None
        self._job_started = time.monotonic()
        self._fault: tuple[Fault, str] | None = None
        request = job_request(job, slot, search)
        config = request.job.config
        self._hang_timeout = config.runtime.hang_timeout
        # The study has what matters of a trial; a fold is as long as a run.
        durable = job.fold is not None
        super().__init__(request, spawner, durable=durable)
        self.record.write(request.header)
        self.begin()
        write_whole(self.paths.config, config.to_yaml(), durable=False)

    def poll(self) -> bool:
        """Check the job once; return True when it is over."""
        self._check_limits()
        return super().poll()

    def result(self) -> JobResult:
        """Return the result of a job that is over."""
        seconds = self._seconds
        metrics = self.record.metrics
        outcome = self.outcome
        assert outcome is not None
        if self._fault is not None:
            fault, text = self._fault
        elif isinstance(outcome, Finished):
            status = cast(JobStatus, outcome.status)
            return JobResult(status=status, metrics=metrics, seconds=seconds)
        else:
            error = error_of(outcome, self.paths, self.plan)
            fault, text = describe_fault(error, isinstance(outcome, OutOfMemory))
        return JobResult(status="failed", metrics=metrics, seconds=seconds, fault=fault, error=text)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._job_started

    def answer(self) -> None:
        """Let ranks that have reported continue, or leave if the job was stopped since."""
        group = self._reporting
        self._reporting = None
        if group is not None:
            super()._answer_if_all_ask(group)

    def _answer_if_all_ask(self, group: WorkerGroup) -> None:
        """Answer the ranks, but for a report: it waits for :meth:`answer`."""
        reports = [each.asking for each in group.ranks]
        first = reports[0]
        if all(isinstance(report, messages.ReportRequest) for report in reports):
            assert isinstance(first, messages.ReportRequest)
            self._reporting = group
            self.news.append(JobReported(self.job, first.values, first.step))
        else:
            super()._answer_if_all_ask(group)

    def _on_job_message(self, message: JobMessage) -> None:
        self.news.append(message)

    def _on_report(self, report: Report) -> None:
        if isinstance(report, MetricsReported):  # the ranks did not wait for an answer
            self.news.append(JobReported(self.job, report.values, report.step))

    def _check_limits(self) -> None:
        """Stop the job at its time limit, or if it has a single rank and that one does nothing.

        Hang detection proper compares ranks: it needs one that waits.
        """
        if self._fault is not None or self.exiting:
            return
        limit = self.job.timeout
        if limit is not None and self._seconds > limit:
            text = f"its time of {limit:g} s is used up"
            self._fault = "timeout", text
            self.stop(text, STOP_GRACE)
        elif self.plan.processes == 1 and self.silence() > self._hang_timeout:
            text = f"it sent nothing and used under 1% CPU for {self._hang_timeout:g} s"
            self._fault = "hung", text
            self.stop(text, 0.0)


def job_request(job: SearchJob, slot: Slot, request: SearchRequest) -> RunRequest:
    """Decide configuration and plan of a job, and make its folder."""
    paths = RunPaths(request.paths.folder / job.key)
    folds = request.search.folds
    config = request.config.with_overrides({**slot.overrides, **job.overrides})
    if config.runtime.restarts == "auto":  # a search has retries of its own
        config = config.with_overrides({"runtime.restarts": 0})
    evidence: tuple[Evidence, ...] = () if request.speed is None else (request.speed,)
    plan = make_plan(config, request.host, slot.hardware, evidence)
    if job.params:  # the calibration is that of the base configuration, not of this model
        plan = replace(plan, one_device_speed=None)
    make_folder(paths.folder.parent)
    paths.folder.mkdir(exist_ok=True)
    paths.stop.unlink(missing_ok=True)
    before = readable_first_event(paths)
    header = replace(
        request.header,
        run_id=paths.run_id,
        attempt=1 if before is None else before.attempt + 1,
        config=config.to_dict(),
        identity="",
        code={},
        search=None,
        total=None,
        timeout=None,
        params=dict(job.params),
        plan=plan.to_dict(),
    )
    spec = JobSpec(
        paths=paths,
        plan=plan,
        config=config,
        deadline=request.deadline,
        params=dict(job.params),
        fold=None if job.fold is None or folds is None else folds[job.fold],
        synchronous_reports=job.judged,
        in_search=True,
    )
    return RunRequest(
        job=spec, host=request.host, hardware=slot.hardware, header=header, speed=request.speed
    )


def describe_fault(error: PackedError, out_of_memory: bool) -> tuple[Fault, str]:
    """Return the kind of a job's failure, and its error in one line."""
    fault: Fault = "oom" if out_of_memory else _FAULTS.get(error.type, "raised")
    return fault, one_line(error.type, error.text)
