"""One machine of a shared sweep: its own folder, and the study in $STUDY_URL.

python shared_sweep.py FOLDER TRIALS [SECONDS]
"""

from __future__ import annotations

import sys
import time
from typing import Any

import nbtoolkit as nb


def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    for step in range(4):
        time.sleep(config.model["seconds"] / 4)
        ctx.report({"score": config.model["x"]}, step=step)
    return {"score": config.model["x"]}


def source(trials: int, **study: Any) -> dict[str, Any]:
    shared = {"name": "shared", "storage": "$STUDY_URL", "heartbeat": 1}
    fixed = {"metric": "score", "direction": "maximize", "sampler": "random", "pruner": "none"}
    return {
        "study": {**fixed, **shared, **study},
        "budget": {"n_trials": trials},
        "space": {"model.x": {"type": "float", "low": 0.0, "high": 1.0}},
    }


def config(folder: str, seconds: float = 0.0) -> dict[str, Any]:
    return {
        "runtime.output_dir": folder,
        "tracking.mlflow": False,
        "model.seconds": seconds,
        "model.x": 0.0,
    }


if __name__ == "__main__":
    folder, trials, *rest = sys.argv[1:]
    settings = config(folder, float(rest[0]) if rest else 0.0)
    result = nb.sweep(train, settings, source(int(trials)), display="off")
    print(result.status, len(result.trials), result.best_value, flush=True)
