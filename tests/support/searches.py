"""A pool without processes, for tests of the loops over it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from machines import CPU_BUILD, machine

from nbtoolkit import Folds, load_config, make_folds
from nbtoolkit.host import detect_host
from nbtoolkit.run.events import Event, NoteAdded, RunStarted, TrialChanged
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.record import RunRecord
from nbtoolkit.search.loop import Sweep
from nbtoolkit.search.pool import (
    JobEnded,
    JobReported,
    JobResult,
    MetricsNamed,
    Pool,
    PoolEvent,
    Search,
    SearchEnd,
    SearchJob,
    SearchRequest,
)
from nbtoolkit.search.slots import make_slots
from nbtoolkit.search.study.sweep_config import SweepConfig, load_sweep_config
from nbtoolkit.wire.messages import KernelRequest, SearchCommand, StopRequest

LR = {"type": "float", "low": 1e-4, "high": 1.0, "log": True}
SPACE = {
    "optim.lr": LR,
    "model.kind": ["mlp", "cnn"],
    "model.hidden": {"type": "int", "low": 1, "high": 64},
}


class Memory:
    """An event log in memory; an event that cannot be written as JSON is an error here too."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, event: Event) -> None:
        json.dumps(vars(event), allow_nan=False)
        self.events.append(event)

    def note(self, text: str, level: str = "info") -> None:
        self.write(NoteAdded(text=text, level=level))

    def of(self, type: str) -> list[Any]:
        return [event for event in self.events if event.type == type]

    def notes(self) -> str:
        return "\n".join(event.text for event in self.of("note"))

    def ends(self) -> dict[int, TrialChanged]:
        """Trial -> its last event."""
        return {event.number: event for event in self.of("trial")}


def request(
    folder: Path,
    *,
    folds: Folds | None = None,
    sweep_config: SweepConfig | None = None,
    **known: Any,
) -> SearchRequest:
    """The request for a search in a folder."""
    config, host, hardware = load_config(env=None), detect_host({}), machine(build=CPU_BUILD)
    usual = {
        "paths": RunPaths(folder),
        "config": config,
        "slots": make_slots(config, hardware),
        "host": host,
        "header": RunStarted(run_id=folder.name),
        "notes": (),
        "deadline": None,
        "imposed": False,
        "search": Search(kind="sweep", loop="", folds=folds, sweep_config=sweep_config),
    }
    return SearchRequest(**{**usual, **known})


@dataclass
class Fake:
    """What a job does: its metrics at each step; every job takes a second."""

    metrics: Callable[[SearchJob, int], Mapping[str, Any]]
    steps: int = 3
    endings: dict[str, JobResult] = field(default_factory=dict)
    """Jobs that end otherwise, once."""
    seconds: float = 1.0


class Killed(BaseException):
    """The session dies, with jobs still running."""


class SteppedPool(Pool):
    """A pool whose jobs do what a test says.

    Attributes:
        slots: jobs at once.
        left: seconds to the deadline.
        begun: the jobs that have started, in order.
        stopped: the reasons of the jobs that the loop has stopped, by key.
    """

    def __init__(self, request: SearchRequest) -> None:
        super().__init__(request, RunRecord(request.paths, deadline=request.deadline))
        self.slots, self.left = 0, None if request.deadline is None else 0.0
        self.begun: list[SearchJob] = []
        self.stopped: dict[str, str] = {}
        self.dies_after: int | None = None
        self.fake: Fake | None = None
        self._reported: dict[str, list[Mapping[str, Any]]] = {}

    def seconds_left(self) -> float | None:
        return self.left

    @property
    def free(self) -> int:
        return max(self.slots - len(self.running), 0)

    def start(self, job: SearchJob) -> None:
        assert self.free > 0
        self.running[job.key] = job
        self.begun.append(job)
        if self.dies_after is not None and len(self.begun) >= self.dies_after:
            raise Killed

    def stop(self, key: str, reason: str) -> None:
        assert key in self.running
        self.stopped[key] = reason

    def wait(self) -> list[PoolEvent]:
        """The next report of the oldest job, or its end."""
        job = next(iter(self.running.values()))
        result = self._result(job)
        if result is None:
            metrics = self._metrics(job)
            return [JobReported(job, metrics, len(self._reported[job.key]) - 1)]
        assert self.fake is not None
        del self.running[job.key]
        self.stopped.pop(job.key, None)
        self._reported.pop(job.key, None)
        self.left = None if self.left is None else self.left - self.fake.seconds / self.slots
        return [JobEnded(job, result)]

    def _metrics(self, job: SearchJob) -> Mapping[str, Any]:
        assert self.fake is not None
        reported = self._reported.setdefault(job.key, [])
        reported.append(self.fake.metrics(job, len(reported)))
        return reported[-1]

    def _result(self, job: SearchJob) -> JobResult | None:
        """How a job ends now; None: it goes on."""
        fake, reported = self.fake, self._reported.get(job.key, [])
        assert fake is not None
        if job.key in fake.endings:
            return fake.endings.pop(job.key)
        last = reported[-1] if reported else {}
        if job.key in self.stopped:
            return JobResult(status="pruned", metrics=last, seconds=fake.seconds)
        if len(reported) == fake.steps:
            return JobResult(status="completed", metrics=last, seconds=fake.seconds)
        return None

    def abandon(self) -> None:
        self.running.clear()

    def follow(self, request: KernelRequest) -> None:
        for command in self._follow([request]):
            raise AssertionError(f"a stop is no command: {command}")

    def _stop_all(self, reason: str, grace: float | None) -> None:
        for key in self.running:
            self.stop(key, reason)


class Loop(Protocol):
    """What a sweep's loop and a cross-validation's have in common."""

    @property
    def over(self) -> bool: ...

    def run(self) -> SearchEnd: ...

    def start_jobs(self) -> None: ...

    def handle(self, event: PoolEvent) -> None: ...

    def finish(self) -> SearchEnd: ...


class Session:
    """One session of a search, which a test runs as a whole or step by step."""

    def __init__(self, pool: SteppedPool, loop: Loop) -> None:
        self.pool, self.loop = pool, loop
        self._end: SearchEnd | None = None

    @property
    def done(self) -> bool:
        return self.loop.over

    def next(self, left: float | None = None) -> SearchJob | None:
        """The job that the loop starts on one more slot; None if it starts none."""
        before = len(self.pool.begun)
        self.pool.slots, self.pool.left = len(self.pool.running) + 1, left
        self.loop.start_jobs()
        self.pool.slots = len(self.pool.running)
        return self.pool.begun[before] if len(self.pool.begun) > before else None

    def on_report(self, job: SearchJob, metrics: Mapping[str, Any], step: int | None) -> str | None:
        """Report; the status with which the job leaves, None: it goes on."""
        self.loop.handle(JobReported(job, metrics, step))
        return "pruned" if job.key in self.pool.stopped else None

    def on_names(self, job: SearchJob, *, first_step: int) -> None:
        self.loop.handle(MetricsNamed(job, ["val_loss"], [], first_step))

    def on_end(self, job: SearchJob | None, result: JobResult) -> None:
        assert job is not None
        del self.pool.running[job.key]
        self.pool.stopped.pop(job.key, None)
        self.loop.handle(JobEnded(job, result))

    def on_command(self, command: SearchCommand) -> None:
        self.loop.handle(command)

    def stop(self) -> None:
        """A handle asks for the end of the search."""
        request = StopRequest(reason="a test asks")
        self.pool.follow(request)

    def end(self) -> SearchEnd:
        """How the session ends: nothing runs, and nothing starts."""
        if self._end is None:
            self._end = self.loop.finish()
        return self._end

    def close(self, status: str) -> Mapping[str, Any]:
        """The summary of a session that ends with a status."""
        end = self.end()
        assert end.status == status
        return end.summary

    def run(self) -> None:
        self._end = self.loop.run()


class SweepSession(Session):
    """One session of a sweep."""

    def __init__(self, pool: SteppedPool, sweep: Sweep) -> None:
        super().__init__(pool, sweep)
        self._sweep = sweep

    def prepare(self) -> None:
        """Let some time pass while all slots are busy."""
        self.pool.slots = len(self.pool.running)
        time.sleep(0.11)
        self._sweep.ask_ahead()


def algorithm(
    folder: Path, source: Any, *, folds: int | None = None, **known: Any
) -> tuple[SweepSession, Memory]:
    """A session of a sweep in a folder."""
    sweep_config, diary = load_sweep_config(source, load_config(env=None)), Memory()
    split = make_folds([0, 1] * 10, k=folds) if folds else None
    pool = SteppedPool(request(folder, sweep_config=sweep_config, folds=split, **known))
    return SweepSession(pool, Sweep(pool, diary)), diary


def drive(
    made: Session,
    job: Fake,
    *,
    slots: int = 1,
    left: float | None = None,
    jobs: int | None = None,
) -> list[SearchJob]:
    """Run the jobs of a session to its end, ``slots`` at once; return them in order of start.

    Args:
        made: the session.
        job: what every job does.
        slots: jobs at once.
        left: seconds to the deadline; every job uses up its own.
        jobs: die after so many have started, with jobs still running.
    """
    pool = made.pool
    pool.slots, pool.left, pool.dies_after, pool.fake = slots, left, jobs, job
    before = len(pool.begun)
    with suppress(Killed):
        made.run()
    return pool.begun[before:]
