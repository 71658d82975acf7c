"""Cost of the finders on the digits CNN, and how close the calibrated choice is to the best.

    python -m tests.bench.finders calibrate

The last figure compares the calibrated choice with brute force: runs of each strategy that are
longer than its probes, in turn, so that a machine in use slows both.
"""

from __future__ import annotations

import json
import time

import nbtoolkit as nb
from nbtoolkit.tasks import digits
from tests.bench.figures import Figure, in_fresh_process, median, quiet_config
from tests.bench.search import shut_afterwards

CNN = {"model.kind": "cnn", "train.batch_size": 128}
ROUNDS, EPOCHS = 3, 15


def calibrate() -> dict[str, float]:
    """Seconds of the first and of a kept calibration, and the choice's time over the best one's."""
    with quiet_config(**CNN) as config, shut_afterwards():
        began = time.perf_counter()
        result = nb.calibrate(digits.train, config)
        first = time.perf_counter() - began
        began = time.perf_counter()
        nb.calibrate(digits.train, config)
        kept = time.perf_counter() - began
        strategies = [row.settings["distributed.strategy"] for row in result.rows]
        speeds: dict[str, list[float]] = {name: [] for name in strategies}
        for _ in range(ROUNDS):
            for name in strategies:
                settings = {"distributed.strategy": name, "train.epochs": EPOCHS}
                run = nb.launch(
                    digits.train, config.with_overrides(settings), resume="never", display="off"
                )
                assert run.throughput is not None
                speeds[name].append(run.throughput)
    brute = {name: median(values) for name, values in speeds.items()}
    chosen = result.settings["distributed.strategy"]
    return {"first": first, "kept": kept, "choice": max(brute.values()) / brute[chosen]}


def figures() -> list[Figure]:
    found = in_fresh_process("tests.bench.finders", "calibrate")
    return [
        Figure("nb.calibrate, digits CNN, the first call", found["first"], "s", 60, 90),
        Figure("nb.calibrate, kept", found["kept"], "s", 0.1, 1),
        Figure("speed of the best strategy / of the calibrated choice", found["choice"], "x", 1.05),
    ]


if __name__ == "__main__":
    print(json.dumps(calibrate()))
