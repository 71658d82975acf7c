"""The panel: time to open, cost of a refresh with 1,000 trials, time until a click acts."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbtoolkit as nb
from nbtoolkit.panel.board import TABS
from tests.bench.figures import Figure, in_fresh_process, median

TRIALS, REPORTS, LOOKS = 1000, 5, 20

SWEEP_CONFIG = """
study: {name: many, metric: score, direction: maximize, sampler: random, pruner: none}
budget: {n_trials: 2000}
space: {optim.lr: {type: float, low: 0.001, high: 0.1}}
"""


def figures() -> list[Figure]:
    """All figures of the panel."""
    measured = in_fresh_process("tests.bench.panel")
    return [
        Figure("panel up, its imports included", measured["up"], "s", 1.0, 2.0),
        Figure(
            "look at 1,000 trials, slowest page: CPU time", measured["look"], "ms", 100.0, 200.0
        ),
        Figure("click on Pause answered", measured["click"], "ms", 200.0, 400.0),
    ]


def measure() -> dict[str, float]:
    """Measure in this process, which has imported nothing of the panel yet."""
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        began = time.perf_counter()
        panel = nb.panel(None, {"runtime.output_dir": f"{home}/out"})
        up = time.perf_counter() - began
        folder = write_sweep(Path(home))
        panel.watch(folder)
        panel.refresh()
        looks = [look(panel, folder, page) for page in range(len(TABS))]
        click = median([answered(panel) for _ in range(LOOKS)])
        panel.close()
    return {"up": up, "look": max(looks) * 1000, "click": click * 1000}


def look(panel: nb.Panel, folder: Path, page: int) -> float:
    """Median CPU seconds of a look after something new was written, with a page in sight."""
    panel._controller.board.tabs.selected_index = page
    panel.refresh()

    def once() -> None:
        append(folder, [trial(TRIALS - 1, "running")])
        panel.refresh()

    return median([taken(once, time.process_time) for _ in range(LOOKS)])


def answered(panel: nb.Panel) -> float:
    """Seconds until a click has its task done, here its refusal: nothing runs in that folder."""
    return taken(lambda: panel._controller.press("pause").exception(), time.perf_counter)


def taken(what: Callable[[], Any], clock: Callable[[], float]) -> float:
    began = clock()
    what()
    return clock() - began


def write_sweep(home: Path) -> Path:
    """The folder of a sweep with many trials, as its scheduler would have written it."""
    folder = home / "sweep-0001"
    folder.mkdir()
    (folder / "versions.json").write_text('{"kind": "sweep"}')
    (folder / "sweep.yaml").write_text(SWEEP_CONFIG)
    events = [{"type": "run"}, *(trial(n, "running") for n in range(TRIALS))]
    for step in range(REPORTS):
        report = {"type": "intermediate", "step": step}
        events += [{**report, "number": n, "value": n * step / 1e4} for n in range(TRIALS)]
    events += [trial(n, "complete", n / TRIALS) for n in range(TRIALS - 1)]
    append(folder, events)
    return folder


def trial(number: int, state: str, value: float | None = None) -> dict[str, Any]:
    event = {"type": "trial", "number": number, "state": state, "value": value, "seconds": 1.0}
    return {**event, "params": {"optim.lr": 0.1 / (number + 1)}, "best": value is not None}


def append(folder: Path, events: list[dict[str, Any]]) -> None:
    with (folder / "events.jsonl").open("a") as diary:
        diary.writelines(json.dumps({"t": time.time(), **event}) + "\n" for event in events)


if __name__ == "__main__":
    print(json.dumps(measure()))
