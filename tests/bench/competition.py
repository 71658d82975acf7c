"""Time of cv.predict on two slots compared with one slot, in pairs.

The models have many small layers, so that Python's own time counts: the two CPUs of a virtual
machine are often one core, on which large matrix products side by side are no faster. The second
figure has functions that wait, as for a device: it holds on a busy machine, too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import nbtoolkit as nb
from tests.bench.figures import Figure, in_fresh_process, median, quiet_config
from tests.bench.search import shut_afterwards

ROUNDS, ROWS, LAYERS = 3, 100_000, 400


def train(config: Any, ctx: Any) -> dict[str, float]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(LAYERS)])
    data = torch.randn(64, 8), torch.randn(64, 8)
    return nb.fit(ctx, config, model, data, None, loss=torch.nn.functional.mse_loss)


def waits(run: nb.FoldRun, test: Any) -> Any:
    time.sleep(2.0)
    return test


def ratios(which: str) -> list[float]:
    """Times with two slots divided by those with one, in pairs: the kernel's CPUs set the slots."""
    import numpy as np
    import torch

    cpus = sorted(os.sched_getaffinity(0))[:2]
    options: dict[str, Any] = {"predict": waits} if which == "waits" else {}
    test = torch.randn(100 if which == "waits" else ROWS, 8)
    pairs = []
    with quiet_config(**{"train.epochs": 1}) as config, shut_afterwards():
        folds = nb.make_folds(np.arange(64), kind="kfold", k=4 if which == "waits" else 5)
        cv = nb.cross_validate(train, config, folds, display="off")
        cv.predict(test[:100], display="off")  # imports
        for _ in range(ROUNDS):
            times = {}
            for count in (2, 1):
                os.sched_setaffinity(0, set(cpus[:count]))
                begin = time.perf_counter()
                cv.predict(test, display="off", **options)
                times[count] = time.perf_counter() - begin
            pairs.append(times[2] / times[1])
    return pairs


def figures() -> list[Figure]:
    module, name = "tests.bench.competition", "cv.predict on two slots / one after the other"
    fit, wait = (median(in_fresh_process(module, which)) for which in ("fit", "waits"))
    return [
        Figure(f"{name}, 5 models of nb.fit", fit, "x", target=0.6, gate=0.75),
        Figure(f"{name}, 4 functions that wait", wait, "x", target=0.6, gate=0.75),
    ]


if __name__ == "__main__":
    print(json.dumps(ratios(sys.argv[1])))
