"""The panel: time to the first value, cost of a look at many trials, time until a click acts."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbtoolkit as nb
from tests.bench.figures import Figure, in_fresh_process, median

REPORTS, LOOKS = 12, 20
FEW, MANY = 1_000, 10_000

SWEEP_CONFIG = """
study: {name: many, metric: score, direction: maximize, sampler: random, pruner: none}
budget: {n_trials: 20000}
space: {optim.lr: {type: float, low: 0.001, high: 0.1}}
"""


def figures() -> list[Figure]:
    """All figures of the panel."""
    measured = in_fresh_process("tests.bench.panel")
    return [
        Figure("panel up over a sweep, imports included", measured["up"], "s", 1.0, 2.0),
        Figure("panel up again: first value", measured["again"], "s", 0.5, 1.0),
        Figure("look at 1,000 trials: CPU time", measured["few"], "ms", 100.0, 200.0),
        Figure("look at 10,000 trials: CPU time", measured["many"], "ms", 250.0, 500.0),
        Figure("click on Pause answered", measured["click"], "ms", 200.0, 400.0),
    ]


def measure() -> dict[str, float]:
    """Measure in this process, which has imported nothing of the panel yet."""
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        output_dir = Path(home) / "out"
        few = write_sweep(output_dir / "20260101T000000-few-0001", FEW)
        began = time.perf_counter()
        panel = nb.panel(None, {"runtime.output_dir": str(output_dir)})
        assert panel.folder == few
        up = time.perf_counter() - began
        panel.close()
        began = time.perf_counter()
        panel = nb.panel(None, {"runtime.output_dir": str(output_dir)})
        again = time.perf_counter() - began
        of_few = look(panel, few, FEW)
        click = median([answered(panel) for _ in range(LOOKS)])
        many = write_sweep(output_dir / "20260101T000001-many-0002", MANY)
        panel.watch(many)
        of_many = look(panel, many, MANY)
        panel.close()
    return {
        "up": up,
        "again": again,
        "few": of_few * 1000,
        "many": of_many * 1000,
        "click": click * 1000,
    }


def look(panel: nb.Panel, folder: Path, trials: int) -> float:
    """Median CPU seconds of a look, with all cards and the table, after a trial has reported."""
    panel.refresh()
    for thread in threading.enumerate():  # in a thread of its own, seldom
        if thread.name == "nbtoolkit-importance":
            thread.join()
    steps = iter(range(REPORTS, REPORTS + LOOKS))

    def once() -> None:
        step = next(steps)
        report = {"type": "intermediate", "step": step, "number": trials - 1, "value": step / 1e3}
        append(folder, [report])
        panel.refresh()

    return median([taken(once, time.process_time) for _ in range(LOOKS)])


def answered(panel: nb.Panel) -> float:
    """Seconds until a click has its task done, here its refusal: nothing runs in that folder."""
    return taken(lambda: panel._controller.press("pause").exception(), time.perf_counter)


def taken(what: Callable[[], Any], clock: Callable[[], float]) -> float:
    began = clock()
    what()
    return clock() - began


def write_sweep(folder: Path, trials: int) -> Path:
    """The folder of a sweep with many trials, as its scheduler would have written it."""
    folder.mkdir(parents=True)
    (folder / "sweep.yaml").write_text(SWEEP_CONFIG)
    first = time.time() - trials  # two slots: a trial begins each second, and takes two
    events = [{"type": "run", "t": first, "search": "sweep"}]
    for n in range(trials):
        events.append({**trial(n, "running"), "t": first + n})
        for step in range(REPORTS):
            report = {"type": "intermediate", "number": n, "step": step, "value": n * step / 1e5}
            events.append({**report, "t": first + n + 1.9 * step / REPORTS})
        if n < trials - 1:
            events.append({**trial(n, "complete", n / trials), "t": first + n + 1.9})
    append(folder, sorted(events, key=lambda event: event["t"]))
    return folder


def trial(number: int, state: str, value: float | None = None) -> dict[str, Any]:
    event = {"type": "trial", "number": number, "state": state, "value": value, "seconds": 1.0}
    return {**event, "params": {"optim.lr": 0.1 / (number + 1)}, "best": value is not None}


def append(folder: Path, events: list[dict[str, Any]]) -> None:
    with (folder / "events.jsonl").open("a") as log:
        log.writelines(json.dumps({"t": time.time(), **event}) + "\n" for event in events)


if __name__ == "__main__":
    print(json.dumps(measure()))
