"""Run one job of a search with its folder, processes and limits."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import cloudpickle

from nbtoolkit.environment.launch_plan import LaunchPlan, same_ranks
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.launcher.event_loop import ForkServerConnection, Spawner
from nbtoolkit.launcher.failures import Failure
from nbtoolkit.launcher.supervisor import JobListener, RunSupervisor
from nbtoolkit.launcher.worker_group import WorkerGroup
from nbtoolkit.run.messages import PhaseReached
from nbtoolkit.run.paths import RunPaths, read_or_empty, write_json, write_whole
from nbtoolkit.run.request import GroupSpec, JobSpec, RunRequest
from nbtoolkit.run.resume import archive_attempt, read_versions
from nbtoolkit.run.serialization import one_line
from nbtoolkit.run.transport import Connection, free_port
from nbtoolkit.search.algorithm import Fault, JobResult, JobStatus, SearchJob, SearchRequest
from nbtoolkit.search.slots import Slot

# --- warm workers ---
# Lone ranks forked ahead of need, so that a job starts the moment a slot is free.
#
# A fork and what a rank does before the user's code take some 40 ms, in which a device would wait;
# a rank in reserve did them while the job before was computing. It has not loaded the function yet,
# and takes one job only: it is as fresh as any other.


LIMIT = 8  # ranks: each holds some 20 MB of its own
CALM = 0.3  # seconds without a new branch: while a job imports, one follows another

FOLDER = "reserve"
"""Where, in a search's folder, ranks in reserve write before they have a job."""


class WarmWorkers:
    """Ranks that wait for a job.

    Args:
        folder: the search's.
        spawner: has their agents forked.
    """

    def __init__(self, folder: Path, spawner: Spawner) -> None:
        self._spawner, self._connection = spawner, spawner.connection
        self._folder = folder / FOLDER
        self._waiting: list[tuple[WorkerGroup, int]] = []  # with the branch they came from
        # Once one has died: where memory or the disk is full another would die too, 20 a second.
        self._given_up = False

    def take(self, plan: LaunchPlan) -> WorkerGroup | None:
        """A rank for a plan, if one is there."""
        self._drop_stale()
        for at, (worker_group, _) in enumerate(self._waiting):
            if _ready(worker_group) and same_ranks(worker_group.plan, plan):
                del self._waiting[at]
                return worker_group
        return None

    def fill(self, plans: Iterable[LaunchPlan]) -> None:
        """Have one rank wait for each plan that is at work; none any more once one has died."""
        self._drop_stale()
        if self._given_up or time.monotonic() - self._connection.branched_at < CALM:
            return
        waiting = [worker_group.plan for worker_group, _ in self._waiting]
        for plan in [plan for plan in plans if plan.processes == 1][:LIMIT]:
            fitting = next((one for one in waiting if same_ranks(one, plan)), None)
            if fitting is not None:
                waiting.remove(fitting)
            else:
                self._fork(plan)

    def close(self) -> None:
        """End all."""
        for worker_group, _ in self._waiting:
            self._connection.dismiss(worker_group)
        self._waiting.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _fork(self, plan: LaunchPlan) -> None:
        spec = GroupSpec(paths=RunPaths(self._folder), plan=plan)
        worker_group = self._spawner.start(spec, free_port())
        self._waiting.append((worker_group, self._connection.branches))

    def _drop_stale(self) -> None:
        """End those that died, and those without what the fork server has imported since."""
        for one in list(self._waiting):
            worker_group, branch = one
            listen(worker_group)
            self._given_up |= worker_group.exited is not None
            if branch != self._connection.branches or worker_group.exited is not None:
                self._connection.dismiss(worker_group)
                self._waiting.remove(one)


def listen(worker_group: WorkerGroup) -> None:
    """Take what a rank says before it has a job."""
    for rank, message in worker_group.hear():
        if isinstance(message, PhaseReached):
            rank.phase, rank.pid = message.phase, message.pid or rank.pid


def _ready(worker_group: WorkerGroup) -> bool:
    return worker_group.all_are("group") and worker_group.alive()


# --- job ---


_KNOWN = ("function", "host", "versions", "run_id", "attempt")  # in a job's versions.json

TIMEOUT_GRACE = 5.0  # seconds a job gets to come to a report once its time is used up

# By the type of a job's error, what went wrong; the rest was raised by the user's code.
_FAULTS: dict[str, Fault] = {
    "nbtoolkit.errors.WorkerDied": "died",
    "nbtoolkit.errors.WorkerHung": "hung",
    "nbtoolkit.errors.GroupStartFailed": "died",
    "nbtoolkit.errors.LossNotFinite": "nan",
    "torch.OutOfMemoryError": "oom",
    "torch.cuda.OutOfMemoryError": "oom",
    "builtins.MemoryError": "oom",
}


class JobRunner:
    """A job that runs on a slot.

    Args:
        job: what is to be run.
        slot: where.
        search: what it is a job of.
        spawner: has agents forked.
        listener: hears what it says.
        kept: ranks of a job before, which take this one if they fit its plan; else they are ended.
        reserve: has a rank that was forked ahead, perhaps.

    Raises:
        NbtoolkitError: the job's configuration or plan is refused.
    """

    def __init__(
        self,
        job: SearchJob,
        slot: Slot,
        search: SearchRequest,
        spawner: Spawner,
        listener: JobListener,
        kept: WorkerGroup | None,
        reserve: WarmWorkers,
    ) -> None:
        self.job, self.slot = job, slot
        self._started = time.monotonic()
        self._fault: tuple[Fault, str] | None = None
        self.paths = RunPaths(search.paths.folder / job.key)
        request = self._request(search)
        config = request.job.config
        self._hang_timeout = config.runtime.hang_timeout
        # durable=False: the study knows of it
        self._supervisor = RunSupervisor(request, spawner, listener=listener, durable=False)
        self._supervisor.begin(self._ready_ranks(request.job, kept, spawner.connection, reserve))
        write_whole(self.paths.config, config.to_yaml(), durable=False)

    def lines(self) -> list[Connection]:
        """What to wait for."""
        return self._supervisor.lines()

    @property
    def exiting(self) -> bool:
        """Whether it is known how it ended."""
        return self._supervisor.exiting

    @property
    def plan(self) -> LaunchPlan:
        """What flies now."""
        return self._supervisor.plan

    @property
    def leaves_room(self) -> bool:
        """Whether another job may start in its slot, though its processes have not ended yet.

        On a GPU their memory must be free first. On the CPU they do nothing any more but end, which
        takes some 20 ms.
        """
        done = self._supervisor.status is not None and self._fault is None
        return done and self._supervisor.plan.device_type == "cpu"

    def turn(self) -> bool:
        """Look once; whether the job is over, its processes gone."""
        self._keep_limits()
        return self._supervisor.turn()

    def stop(self, reason: str, grace: float | None, status: str) -> None:
        """Let it leave at its next report (see :meth:`RunSupervisor.stop`)."""
        self._supervisor.stop(reason, grace, status)

    def abandon(self) -> None:
        """End its processes; nothing is written."""
        self._supervisor.abandon()

    def hand_over(self) -> WorkerGroup | None:
        """Its ranks, once it is over, where they can take another job."""
        return self._supervisor.hand_over()

    def ending(self) -> JobResult:
        """How it ended."""
        seconds, status = time.monotonic() - self._started, self._supervisor.status
        metrics = self._supervisor.record.metrics
        if self._fault is not None:
            fault, said = self._fault
        elif status is not None:
            return JobResult(status=cast(JobStatus, status), metrics=metrics, seconds=seconds)
        else:
            fault, said = _fault(self._supervisor.outcome, self.paths)
        return JobResult(status="failed", metrics=metrics, seconds=seconds, fault=fault, error=said)

    def _ready_ranks(
        self,
        spec: JobSpec,
        kept: WorkerGroup | None,
        connection: ForkServerConnection,
        reserve: WarmWorkers,
    ) -> tuple[WorkerGroup, Path] | None:
        """Ranks that are there already, and what they need to know, if any can take this job."""
        if kept is not None and not (kept.alive() and same_ranks(kept.plan, spec.plan)):
            connection.dismiss(kept)
            kept = None
        if kept is None:
            kept = reserve.take(spec.plan)
        if kept is None:
            return None
        file = self.paths.folder / "ranks" / "job.pkl"
        write_whole(file, cloudpickle.dumps(spec), durable=False)
        return kept, file

    def _request(self, search: SearchRequest) -> RunRequest:
        """What is decided for this job; its folder is made."""
        job, paths, slot = self.job, self.paths, self.slot
        config = search.config.with_overrides({**slot.overrides, **job.overrides})
        plan = make_plan(config, search.host, slot.hardware)
        paths.folder.mkdir(parents=True, exist_ok=True)
        if paths.versions.exists():
            archive_attempt(paths)
        attempt = 1 + read_versions(paths).get("attempt", 0)
        header = replace(
            search.header,
            run_id=paths.run_id,
            attempt=attempt,
            config=config.to_dict(),
            fingerprint="",
            search=None,
            params=dict(job.params),
            plan=plan.to_dict(),
        )
        about = {name: getattr(header, name) for name in _KNOWN}
        write_json(paths.versions, {**about, "created": time.time()}, durable=False)
        write_json(paths.plan, plan.to_dict(), durable=False)
        spec = JobSpec(
            paths=paths,
            plan=plan,
            config=config,
            deadline=search.deadline,
            params=dict(job.params),
            fold=None if job.fold is None or search.folds is None else search.folds[job.fold],
            synchronous_reports=job.judged,
            reuse_workers=plan.processes > 1,
        )
        return RunRequest(job=spec, host=search.host, hardware=slot.hardware, header=header)

    def _keep_limits(self) -> None:
        """Its own time; and a lone rank that does nothing, since no other one waits for it."""
        if self._fault is not None or self.exiting:
            return
        limit = self.job.timeout
        if limit is not None and time.monotonic() - self._started > limit:
            said = f"its time of {limit:g} s is used up"
            self._fault = "timeout", said
            self._supervisor.stop(said, TIMEOUT_GRACE)
        elif (
            self._supervisor.plan.processes == 1 and self._supervisor.silence() > self._hang_timeout
        ):
            said = f"it sent nothing and used under 1% CPU for {self._hang_timeout:g} s"
            self._fault = "hung", said
            self._supervisor.stop(said, 0.0)


def _fault(outcome: Any, paths: RunPaths) -> tuple[Fault, str]:
    """What went wrong, and in one line."""
    if isinstance(outcome, Failure):
        kind, text = outcome.error.type, outcome.error.text
    else:
        error = read_or_empty(paths.error)
        kind, text = str(error.get("type", "")), str(error.get("text", outcome))
    fault = _FAULTS.get(kind, "raised")
    if fault == "raised" and "out of memory" in text:  # torch 2.6's RuntimeErrors of cuBLAS
        fault = "oom"
    return fault, one_line(kind, text)
