"""Errand: one job on its way: its folder, its processes, its limits, its ending."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import cloudpickle

from nbtoolkit.runtime.carrier import Carrier
from nbtoolkit.runtime.choose import put_aside
from nbtoolkit.runtime.crossing import one_line
from nbtoolkit.runtime.desk import Tower
from nbtoolkit.runtime.flight import Flight
from nbtoolkit.runtime.launch_plan import LaunchPlan, same_ranks
from nbtoolkit.runtime.paths import RunPaths, read_or_empty, write_json, write_whole
from nbtoolkit.runtime.payload import pack_content
from nbtoolkit.runtime.plan import make_plan
from nbtoolkit.runtime.verdict import Failure
from nbtoolkit.runtime.wire import Line
from nbtoolkit.search.program import Ending, Fault, Job, JobStatus, Program
from nbtoolkit.search.reserve import Reserve
from nbtoolkit.search.slots import Slot

if TYPE_CHECKING:
    from nbtoolkit.config import Config

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


class Errand:
    """A job that runs on a slot.

    Args:
        job: what is to be run.
        slot: where.
        base: what all jobs have in common (see conductor.py).
        payload_fd: the packed function.
        tower: the launchpad.
        program: hears what is reported.
        kept: ranks of a job before, which take this one if they fit its plan; else they are ended.
        reserve: has a rank that was forked ahead, perhaps.
        unread: hears which settings had no effect.

    Raises:
        NbtoolkitError: the job's configuration or plan is refused.
    """

    def __init__(
        self,
        job: Job,
        slot: Slot,
        base: Mapping[str, Any],
        payload_fd: int,
        tower: Tower,
        program: Program,
        kept: Flight | None = None,
        reserve: Reserve | None = None,
        unread: Callable[[str], None] | None = None,
    ) -> None:
        self.job, self.slot = job, slot
        self._started = time.monotonic()
        self._fault: tuple[Fault, str] | None = None
        config: Config = base["config"].with_overrides({**slot.overrides, **job.overrides})
        self._config, self._hang_timeout = config, config.runtime.hang_timeout
        self.paths = RunPaths(Path(base["folder"]) / job.key)
        own = self._content(base)
        self._own_fd = pack_content(own)
        self._carrier = Carrier(
            {**base, **own},
            [payload_fd, self._own_fd],
            tower,
            judge=partial(program.reported, job),
            announced=partial(program.announced, job),
            unread=unread,
            durable=False,  # the study knows of it
        )
        self._carrier.begin(self._boarding(own, kept, tower, reserve))
        write_whole(self.paths.config, config.to_yaml(), durable=False)

    def lines(self) -> list[Line]:
        """What to wait for."""
        return self._carrier.lines()

    @property
    def landing(self) -> bool:
        """Whether it is known how it ended."""
        return self._carrier.landing

    @property
    def plan(self) -> LaunchPlan:
        """What flies now."""
        return self._carrier.plan

    @property
    def leaves_room(self) -> bool:
        """Whether another job may start in its slot, though its processes have not ended yet.

        On a GPU their memory must be free first. On the CPU they do nothing any more but end, which
        takes some 20 ms.
        """
        done = self._carrier.status is not None and self._fault is None
        return done and self._carrier.plan.device_type == "cpu"

    def turn(self) -> bool:
        """Look once; whether the job is over, its processes gone."""
        self._keep_limits()
        over = self._carrier.turn()
        if over:
            self._forget()
        return over

    def stop(self, reason: str, grace: float | None, status: str) -> None:
        """Let it leave at its next report (see :meth:`Carrier.stop`)."""
        self._carrier.stop(reason, grace, status)

    def abandon(self) -> None:
        """End its processes; nothing is written."""
        self._carrier.abandon()
        self._forget()

    def hand_over(self) -> Flight | None:
        """Its ranks, once it is over, where they can take another job."""
        return self._carrier.hand_over()

    def ending(self) -> Ending:
        """How it ended."""
        seconds, status = time.monotonic() - self._started, self._carrier.status
        metrics = self._carrier.record.metrics
        if self._fault is not None:
            fault, said = self._fault
        elif status is not None:
            return Ending(status=cast(JobStatus, status), metrics=metrics, seconds=seconds)
        else:
            fault, said = _fault(self._carrier.outcome, self.paths)
        return Ending(status="failed", metrics=metrics, seconds=seconds, fault=fault, error=said)

    def _boarding(
        self, own: dict[str, Any], kept: Flight | None, tower: Tower, reserve: Reserve | None
    ) -> tuple[Flight, Path] | None:
        """Ranks that are there already, and what they need to know, if any can take this job."""
        if kept is not None and not (kept.alive() and same_ranks(kept.plan, own["plan"])):
            tower.dismiss(kept)
            kept = None
        if kept is None and reserve is not None:
            kept = reserve.take(own["plan"])
        if kept is None:
            return None
        file = self.paths.folder / "ranks" / "job.pkl"
        write_whole(file, cloudpickle.dumps(own), durable=False)
        return kept, file

    def _content(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """What is this job's own of all that its processes get; its folder is made."""
        job, paths, slot = self.job, self.paths, self.slot
        plan = make_plan(self._config, base["host"], slot.hardware)
        paths.folder.mkdir(parents=True, exist_ok=True)
        if paths.versions.exists():
            put_aside(paths)
        attempt = 1 + int(read_or_empty(paths.versions).get("attempt", 0))
        header = {**base["job_header"], "run_id": paths.run_id, "attempt": attempt}
        write_json(paths.versions, {**header, "created": time.time()}, durable=False)
        write_json(paths.plan, plan.to_dict(), durable=False)
        return {
            "folder": str(paths.folder),
            "config": self._config,
            "plan": plan,
            "hardware": slot.hardware,
            "header": {**header, "config": self._config.to_dict(), "params": dict(job.params)},
            "notes": [],
            "deadline": base["deadline"],
            "params": dict(job.params),
            "fold": None if job.fold is None else base["folds"][job.fold],
            "judged": job.judged,
            "kept": plan.processes > 1,
        }

    def _keep_limits(self) -> None:
        """Its own time; and a lone rank that does nothing, since no other one waits for it."""
        if self._fault is not None or self.landing:
            return
        limit = self.job.timeout
        if limit is not None and time.monotonic() - self._started > limit:
            said = f"its time of {limit:g} s is used up"
            self._fault = "timeout", said
            self._carrier.stop(said, TIMEOUT_GRACE)
        elif self._carrier.plan.processes == 1 and self._carrier.silence() > self._hang_timeout:
            said = f"it sent nothing and used under 1% CPU for {self._hang_timeout:g} s"
            self._fault = "hung", said
            self._carrier.stop(said, 0.0)

    def _forget(self) -> None:
        if self._own_fd >= 0:
            os.close(self._own_fd)
            self._own_fd = -1


def _fault(outcome: Any, paths: RunPaths) -> tuple[Fault, str]:
    """What went wrong, and in one line."""
    error = outcome.error if isinstance(outcome, Failure) else read_or_empty(paths.error)
    kind, text = str(error.get("type", "")), str(error.get("text", outcome))
    fault = _FAULTS.get(kind, "raised")
    if fault == "raised" and "out of memory" in text:  # torch 2.6's RuntimeErrors of cuBLAS
        fault = "oom"
    return fault, one_line(kind, text)
