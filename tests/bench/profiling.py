"""What a step of ``nb.fit`` pays for ``train.profile: false``, and for the clock of its shares.

    python -m tests.bench.profiling

Three kinds of fit take turns in one rank: as it is, with its clock and its profiler taken out, and
as it is again, which shows the noise. CPU time counts, since nothing of it waits.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import nbtoolkit as nb
from nbtoolkit.training import fit
from nbtoolkit.training.sync import RankTime, StepClock
from tests.bench.figures import Figure, in_fresh_process, quiet_config
from tests.bench.training import SMALL, digits, mlp

T = TypeVar("T")

STEPS, ROUNDS = 500, 40


class NoClock(StepClock):
    """Measures nothing."""

    def begin(self) -> None:
        pass

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        return iter(batches)

    def take(self, steps: int) -> RankTime:
        return RankTime(0.0, 0.0, 0.0)

    def add(self, ranks: Any) -> None:
        pass

    def shares(self) -> dict[str, float]:
        return {}


@contextmanager
def taken_out() -> Iterator[None]:
    """Inside the block ``fit`` has neither a clock nor a profiler."""
    before = fit.StepClock, fit.StepProfiler
    fit.StepClock = NoClock  # type: ignore[misc]
    del fit.StepProfiler
    try:
        yield
    finally:
        fit.StepClock, fit.StepProfiler = before  # type: ignore[misc]


def compare(config: nb.Config, ctx: nb.RunContext) -> dict[str, list[float]]:
    """CPU seconds of a step, of each kind, in turn."""
    import torch

    torch.set_num_threads(1)
    train, _ = digits()

    def seconds() -> float:
        model, begin = mlp(), time.process_time()
        nb.fit(ctx, config, model, train, None, loss=torch.nn.functional.cross_entropy)
        return (time.process_time() - begin) / STEPS

    def without() -> float:
        with taken_out():
            return seconds()

    kinds = {"off": seconds, "absent": without, "again": seconds}
    seen: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(ROUNDS + 1):
        for name in [*kinds] if turn % 2 else reversed([*kinds]):
            seen[name].append(kinds[name]())
    return {name: values[1:] for name, values in seen.items()}


def profiling_off() -> dict[str, float]:
    """The median of the pairs' ratios, off over absent and off over off, and a step's time."""
    settings = {**SMALL, "train.max_steps": STEPS, "checkpoint.enabled": False}
    with quiet_config(**settings) as config:
        found = nb.launch(compare, config, processes=1, resume="never", display="off").value

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(found[one], found[other], strict=True))

    return {
        "ratio": ratio("off", "absent"),
        "noise": ratio("off", "again"),
        "microseconds": statistics.median(found["off"]) * 1e6,
    }


def figures() -> list[Figure]:
    found = in_fresh_process("tests.bench.profiling")
    return [
        Figure("a step with profiling off, over one without its code", found["ratio"], "x", 1.01),
        Figure("the same step over itself (noise)", found["noise"], "x"),
        Figure("the step", found["microseconds"], "us"),
    ]


if __name__ == "__main__":
    print(json.dumps(profiling_off()))
