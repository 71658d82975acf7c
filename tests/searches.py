"""A conductor without processes, for tests of programs: a plain loop over jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbtoolkit import load_config
from nbtoolkit.search.program import Ending, Job
from nbtoolkit.search.sweep_program import SweepProgram, make_program
from nbtoolkit.search.wishes import load_wishes

LR = {"type": "float", "low": 1e-4, "high": 1.0, "log": True}
SPACE = {
    "optim.lr": LR,
    "model.kind": ["mlp", "cnn"],
    "model.hidden": {"type": "int", "low": 1, "high": 64},
}


class Memory:
    """A diary in memory; what cannot be written as JSON is an error here too."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, type: str, **fields: Any) -> None:
        json.dumps(fields, allow_nan=False)
        self.events.append({"type": type, **fields})

    def note(self, text: str, level: str = "info") -> None:
        self.write("note", text=text, level=level)

    def of(self, type: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == type]

    def notes(self) -> str:
        return "\n".join(event["text"] for event in self.of("note"))

    def ends(self) -> dict[int, dict[str, Any]]:
        """Trial -> its last event."""
        return {event["number"]: event for event in self.of("trial")}


def program(
    folder: Path, source: Any, *, folds: int | None = None, **content: Any
) -> tuple[SweepProgram, Memory]:
    """A sweep's program in a folder, as a conductor makes it."""
    config, diary = load_config(env=None), Memory()
    wishes = load_wishes(source, config)
    about = {
        "wishes": wishes.to_dict(),
        "config": config.to_dict(),
        "folds": {"count": folds, "hash": "abc"} if folds else None,
    }
    made = make_program({**about, **content}, diary, folder)
    _open.append(made)
    return made, diary


_open: list[SweepProgram] = []


def close_all() -> None:
    """Close the files of all programs, and write nothing: their sessions may have died."""
    while _open:
        _open.pop()._books.study.close()


@dataclass
class Fake:
    """What a job does: its metrics at each step; every job takes a second."""

    metrics: Callable[[Job, int], Mapping[str, Any]]
    steps: int = 3
    endings: dict[str, Ending] = field(default_factory=dict)
    """Jobs that end otherwise, once."""
    seconds: float = 1.0


def drive(
    made: SweepProgram,
    job: Fake,
    *,
    slots: int = 1,
    left: float | None = None,
    jobs: int | None = None,
) -> list[Job]:
    """Run what the program wants, ``slots`` at once, oldest first; the jobs in order of start.

    Args:
        made: the program.
        job: what every job does.
        slots: jobs at once.
        left: seconds to the deadline; every job uses up its own.
        jobs: leave off after so many, as a session that dies does: with jobs that run.
    """
    running: list[Job] = []
    begun: list[Job] = []
    while True:
        while len(running) < slots and (new := made.next(left)) is not None:
            running.append(new)
            begun.append(new)
            if jobs is not None and len(begun) >= jobs:
                return begun
        if not running:
            return begun
        one = running.pop(0)
        made.ended(one, run(made, one, job))
        left = None if left is None else left - job.seconds / slots


def run(made: SweepProgram, one: Job, job: Fake) -> Ending:
    """One job, from its first report to its end."""
    if one.key in job.endings:
        return job.endings.pop(one.key)
    metrics: Mapping[str, Any] = {}
    for step in range(job.steps):
        metrics = job.metrics(one, step)
        if made.reported(one, metrics, step) == "pruned" and one.judged:
            return Ending(status="pruned", metrics=metrics, seconds=job.seconds)
    return Ending(status="completed", metrics=metrics, seconds=job.seconds)
