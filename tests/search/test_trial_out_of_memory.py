"""A trial that runs out of memory is infeasible, and the sweep goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from fits import configured, model_of, samples
from searches import Fake, algorithm, drive
from torch import nn

import nbtoolkit as nb
from nbtoolkit.run.attempts import newest_plan
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.search.pool import JobResult
from nbtoolkit.search.study.samplers import OUT_OF_MEMORY
from nbtoolkit.search.study.study import FILE, read_study

GRID = {
    "study": {"sampler": "grid", "pruner": "none", "metric": "val_loss", "direction": "minimize"},
    "space": {"model.hidden": [2, 8, 4, 16]},
}


def test_a_trial_that_runs_out_of_memory_is_infeasible_in_the_study(tmp_path: Path) -> None:
    made, diary = algorithm(tmp_path, GRID)
    oom = JobResult(status="failed", fault="oom", error="CUDA out of memory")
    fake = Fake(lambda job, step: {"val_loss": 1.0}, endings={"trials/0001": oom})
    assert len(drive(made, fake)) == 4
    assert made.close("completed")["counts"] == {"complete": 3, "infeasible": 1}
    assert diary.ends()[1].reason == "CUDA out of memory"
    trial = read_study(tmp_path / FILE).trials[1]
    assert trial.state == optuna.trial.TrialState.PRUNED
    assert trial.user_attrs["constraints"] == {OUT_OF_MEMORY: 1.0}


def wide(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    if config.model.hidden > 4:
        raise MemoryError(f"hidden {config.model.hidden}")
    return {"val_loss": 1.0 / config.model.hidden}


def test_a_sweep_goes_on_after_trials_that_ran_out_of_memory(tmp_path: Path) -> None:
    settings = {"runtime.output_dir": str(tmp_path), "tracking.mlflow": False}
    settings["distributed.world_size"] = 1
    config = nb.load_config(env=None, overrides=settings)
    placed = {**GRID, "placement": "all_devices_per_trial"}  # one after the other
    result = nb.sweep(wide, config, placed, display="off")
    states = dict(zip(result.trials["model.hidden"], result.trials["state"], strict=True))
    assert states == {2: "complete", 8: "infeasible", 4: "complete", 16: "infeasible"}
    assert "MemoryError: hidden 8" in set(result.trials["reason"])
    assert result.best_params == {"model.hidden": 4}


def fitted(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    """Has memory for 64 units in a forward pass."""

    def step(model: nn.Module, batch: Any) -> Any:
        if model.training and len(batch[0]) * config.model.hidden > 64:
            raise MemoryError(f"{len(batch[0])} samples")
        return model(batch[0]), batch[1]

    loss = nn.functional.cross_entropy
    return nb.fit(ctx, config, model_of(), samples(64), samples(8), loss=loss, step=step)


@pytest.mark.long
def test_a_trial_takes_as_many_accumulation_steps_as_it_needs(tmp_path: Path) -> None:
    more = {"runtime.output_dir": str(tmp_path), "train.batch_size": 32, "train.epochs": 1}
    space = {"model.hidden": [2, 16, 65]}
    config = configured(overrides={**more, "distributed.world_size": 1})
    result = nb.sweep(fitted, config, {**GRID, "space": space}, display="off")
    assert list(result.trials["state"]) == ["complete", "complete", "infeasible"]
    assert "one sample per forward pass ran out of memory" in result.trials["reason"][2]
    plans = [newest_plan(RunPaths(trial)) for trial in sorted(tmp_path.glob("*/trials/*"))]
    assert [plan["accumulate"] for plan in plans] == [1, 8, 32]
    losses = result.trials["value"]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
