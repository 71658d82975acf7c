"""Overhead of a trial through ``where="ray"``, beside Ray Tune's own: 100 trials of no training.

Run it where Ray is installed: ``build/cluster/venv/bin/python -m tests.bench ray_trials``.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import nbtoolkit as nb
from tests.bench.figures import Figure

TRIALS = 100
"""Of each. Without reuse_actors, a trial of Tune may wait 30 s for the end of the actor before."""


def train(config: Any, ctx: Any) -> dict[str, float]:
    return {"score": ctx.params["model.x"]}


def ours(folder: str) -> float:
    space = {
        "space": {"model.x": {"type": "float", "low": 0.0, "high": 1.0}},
        "study": {"metric": "score", "direction": "maximize"},
        "budget": {"n_trials": TRIALS},
    }
    config = {
        "runtime.output_dir": folder,
        "tracking.mlflow": False,
        "cluster.gpu": False,
        "cluster.devices": 1,
    }
    started = time.perf_counter()
    result = nb.sweep(train, config, space, where="ray", resume="never", display="off")
    seconds = time.perf_counter() - started
    assert list(result.trials["state"]) == ["complete"] * TRIALS
    return seconds / TRIALS


def tunes(folder: str) -> float:
    from ray import tune

    def trainable(config: dict[str, float]) -> None:
        tune.report({"score": config["x"]})

    tuner = tune.Tuner(
        tune.with_resources(trainable, {"cpu": 1}),
        param_space={"x": tune.uniform(0.0, 1.0)},
        tune_config=tune.TuneConfig(
            num_samples=TRIALS, metric="score", mode="max", reuse_actors=True
        ),
        run_config=tune.RunConfig(storage_path=folder, verbose=0),
    )
    started = time.perf_counter()
    results = tuner.fit()
    seconds = time.perf_counter() - started
    assert len(results) == TRIALS
    assert not results.num_errors
    return seconds / TRIALS


def figures() -> list[Figure]:
    import ray

    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=2, log_to_driver=False, object_store_memory=80 * 1024 * 1024)
        try:
            # The first round starts Ray's worker processes and imports.
            rounds = [(ours(f"{folder}/{turn}"), tunes(f"{folder}/tune{turn}")) for turn in (1, 2)]
        finally:
            ray.shutdown()
    return [
        figure
        for turn, (own, tune) in zip(("first", "second"), rounds, strict=True)
        for figure in (
            Figure(f'{TRIALS} trials, where="ray", {turn}: a trial', own * 1000, "ms", tune * 1000),
            Figure(f"{TRIALS} trials, Ray Tune, {turn}: a trial", tune * 1000, "ms"),
            Figure(f"{TRIALS} trials, {turn}: overhead over Ray Tune's", own / tune, "x", 1.0),
        )
    ]
