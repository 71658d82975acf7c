"""Time of cv.predict on two slots compared with one slot, in pairs.

The models have many small layers, so that Python's own time counts: the two CPUs of a virtual
machine are often one core, on which large matrix products side by side are no faster.
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

ROUNDS, ROWS, LAYERS = 5, 100_000, 400


def train(config: Any, ctx: Any) -> dict[str, float]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(LAYERS)])
    data = torch.randn(64, 8), torch.randn(64, 8)
    return nb.fit(ctx, config, model, data, None, loss=torch.nn.functional.mse_loss)


def ratio() -> dict[str, Any]:
    """Times with both CPUs, and with one of them for everything that starts."""
    import numpy as np
    import torch

    cpus = sorted(os.sched_getaffinity(0))[:2]
    test, pairs = torch.randn(ROWS, 8), []
    with quiet_config(**{"train.epochs": 1}) as config, shut_afterwards():
        folds = nb.make_folds(np.arange(64), kind="kfold", k=5)
        cv = nb.cross_validate(train, config, folds, display="off")
        cv.predict(test[:100], display="off")  # imports
        for _ in range(ROUNDS):
            times = {}
            for count in (2, 1):
                os.sched_setaffinity(0, set(cpus[:count]))
                begin = time.perf_counter()
                cv.predict(test, display="off")
                times[count] = time.perf_counter() - begin
            pairs.append(times)
    return {"ratios": [pair[2] / pair[1] for pair in pairs], "one": [pair[1] for pair in pairs]}


def figures() -> list[Figure]:
    found = in_fresh_process("tests.bench.competition", "ratio")
    name = "cv.predict, 5 folds: two slots / one after the other (median of pairs)"
    return [
        Figure(name, median(found["ratios"]), "x", target=0.6, gate=0.75),
        Figure("cv.predict, 5 folds, one after the other", median(found["one"]), "s"),
    ]


if __name__ == "__main__":
    assert sys.argv[1:] == ["ratio"]
    print(json.dumps(ratio()))
