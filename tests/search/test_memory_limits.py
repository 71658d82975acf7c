"""A trial that ran out of memory keeps larger ones from starting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest
from fits import configured, model_of, samples
from searches import Fake, algorithm, drive
from torch import nn

import nbtoolkit as nb
from nbtoolkit.search.algorithm import JobResult, SearchJob
from nbtoolkit.search.memory_limits import MemoryLimits
from nbtoolkit.study.samplers import OUT_OF_MEMORY
from nbtoolkit.study.storage import FILE, read_study

FAILED = {
    "model.hidden": 64,
    "train.batch_size": 32,
    "model.kind": "cnn",
    "model.patch_size": 4,
    "optim.lr": 0.1,
    "optim.name": "adamw",
    "train.epochs": 5,
}


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, True),
        ({"model.hidden": 128}, True),
        ({"model.hidden": 63}, False),
        ({"model.hidden": 128, "train.batch_size": 16}, False),
        ({"model.kind": "mlp"}, False),
        ({"model.patch_size": 8}, False),  # larger patches need less
        ({"optim.lr": 0.0001, "train.epochs": 1}, True),
        ({"optim.name": "sgd"}, False),
        ({"model.more": 1}, False),
    ],
)
def test_what_is_no_smaller_in_any_size_would_run_out_too(changes: Any, refused: bool) -> None:
    limits = MemoryLimits()
    assert limits.why_not(FAILED) is None
    limits.add(3, FAILED)
    reason = limits.why_not({**FAILED, **changes})
    assert (reason is not None) == refused
    expected = "not started: trial 3 ran out of memory with no more (model.hidden 64, train.batch"
    assert reason is None or reason.startswith(expected)


def test_without_a_size_nothing_is_concluded() -> None:
    limits = MemoryLimits()
    limits.add(0, {"optim.lr": 0.1, "model.kind": "cnn"})
    assert limits.why_not({"optim.lr": 0.2, "model.kind": "cnn"}) is None


GRID = {
    "study": {"sampler": "grid", "pruner": "none", "metric": "val_loss", "direction": "minimize"},
    "space": {"model.hidden": [2, 8, 4, 16]},
}


def test_a_trial_that_is_left_out_is_infeasible_in_the_study(tmp_path: Path) -> None:
    made, diary = algorithm(tmp_path, GRID)
    oom = JobResult(status="failed", fault="oom", error="CUDA out of memory")
    fake = Fake(lambda job, step: {"val_loss": 1.0}, endings={"trials/0001": oom})
    jobs = drive(made, fake)
    assert [job.key for job in jobs] == ["trials/0000", "trials/0001", "trials/0002"]
    assert made.close("completed")["counts"] == {"complete": 2, "infeasible": 2}
    reason = "not started: trial 1 ran out of memory with no more (model.hidden 8)"
    assert diary.ends()[3].reason == reason
    assert f"trial 3 is {reason}" in diary.notes()
    (last,) = [one for one in read_study(tmp_path / FILE).trials if one.number == 3]
    assert last.state == optuna.trial.TrialState.PRUNED
    assert last.user_attrs["constraints"] == {OUT_OF_MEMORY: 1.0}


def test_a_search_in_which_all_would_run_out_ends(tmp_path: Path) -> None:
    space = {"model.hidden": {"type": "int", "low": 8, "high": 8}, "optim.lr": [0.1, 0.01]}
    study = {**GRID["study"], "sampler": "random"}
    made, _ = algorithm(tmp_path, {"study": study, "space": space, "budget": {"n_trials": 60}})
    job = made.next(None)
    assert isinstance(job, SearchJob)
    made.on_end(job, JobResult(status="failed", fault="oom", error="CUDA out of memory"))
    assert made.next(None) is None
    while not made.done:
        assert made.next(None) is None
    assert len(read_study(tmp_path / FILE).trials) == 60


def wide(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    (ctx.paths.folder / "began").touch()
    if config.model.hidden > 4:
        raise MemoryError(f"hidden {config.model.hidden}")
    return {"val_loss": 1.0 / config.model.hidden}


def test_a_larger_trial_is_not_started(tmp_path: Path) -> None:
    settings = {"runtime.output_dir": str(tmp_path), "tracking.mlflow": False}
    settings["distributed.world_size"] = 1
    config = nb.load_config(env=None, overrides=settings)
    placed = {**GRID, "placement": "all_devices_per_trial"}  # one after the other
    result = nb.sweep(wide, config, placed, display="off")
    rows = {row["model.hidden"]: row for _, row in result.trials.iterrows()}
    states = {hidden: row["state"] for hidden, row in rows.items()}
    assert states == {2: "complete", 8: "infeasible", 4: "complete", 16: "infeasible"}
    assert rows[8]["reason"] == "MemoryError: hidden 8"
    assert rows[16]["reason"].startswith("not started: trial 1 ran out of memory with no more")
    assert len([*tmp_path.glob("*/trials/*/began")]) == 3
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
    plans = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*/trials/*/plan.json"))]
    assert [plan["accumulate"] for plan in plans] == [1, 8, 32]
    losses = result.trials["value"]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
