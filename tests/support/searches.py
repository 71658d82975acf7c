"""A scheduler without processes, for tests of search algorithms: a plain loop over jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machines import CPU_BUILD, machine

from nbtoolkit import Folds, load_config, make_folds
from nbtoolkit.host import detect_host
from nbtoolkit.run.events import Event, NoteAdded, RunStarted, TrialChanged
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.search.algorithm import JobResult, Search, SearchJob, SearchRequest
from nbtoolkit.search.slots import make_slots
from nbtoolkit.search.sweep_algorithm import SweepAlgorithm, make_algorithm
from nbtoolkit.study.sweep_config import SweepConfig, load_sweep_config

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
        "search": Search(kind="sweep", algorithm="", folds=folds, sweep_config=sweep_config),
    }
    return SearchRequest(**{**usual, **known})


def algorithm(
    folder: Path, source: Any, *, folds: int | None = None, **known: Any
) -> tuple[SweepAlgorithm, Memory]:
    """A sweep's algorithm in a folder, as the scheduler makes it."""
    sweep_config, diary = load_sweep_config(source, load_config(env=None)), Memory()
    split = make_folds([0, 1] * 10, k=folds) if folds else None
    return make_algorithm(
        request(folder, sweep_config=sweep_config, folds=split, **known), diary
    ), diary


@dataclass
class Fake:
    """What a job does: its metrics at each step; every job takes a second."""

    metrics: Callable[[SearchJob, int], Mapping[str, Any]]
    steps: int = 3
    endings: dict[str, JobResult] = field(default_factory=dict)
    """Jobs that end otherwise, once."""
    seconds: float = 1.0


def drive(
    made: SweepAlgorithm,
    job: Fake,
    *,
    slots: int = 1,
    left: float | None = None,
    jobs: int | None = None,
) -> list[SearchJob]:
    """Run the algorithm's jobs, ``slots`` at once; return them in order of start.

    Args:
        made: the algorithm.
        job: what every job does.
        slots: jobs at once.
        left: seconds to the deadline; every job uses up its own.
        jobs: stop after so many, with jobs still running, as a session that dies does.
    """
    running: list[SearchJob] = []
    begun: list[SearchJob] = []
    while True:
        while len(running) < slots and (new := made.next(left)) is not None:
            running.append(new)
            begun.append(new)
            if jobs is not None and len(begun) >= jobs:
                return begun
        if not running:
            return begun
        one = running.pop(0)
        made.on_end(one, run(made, one, job))
        left = None if left is None else left - job.seconds / slots


def run(made: SweepAlgorithm, one: SearchJob, job: Fake) -> JobResult:
    """One job, from its first report to its end."""
    if one.key in job.endings:
        return job.endings.pop(one.key)
    metrics: Mapping[str, Any] = {}
    for step in range(job.steps):
        metrics = job.metrics(one, step)
        if made.on_report(one, metrics, step) == "pruned" and one.judged:
            return JobResult(status="pruned", metrics=metrics, seconds=job.seconds)
    return JobResult(status="completed", metrics=metrics, seconds=job.seconds)
