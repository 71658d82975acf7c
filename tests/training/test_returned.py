"""Returned metrics count as a last report; which weights nb.fit leaves in the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.run.events import returned_numbers
from nbtoolkit.worker.context import RunContext

FOLDS = nb.make_folds(range(12), k=2, kind="kfold")
SPACE = {"model.x": {"type": "float", "low": 0.0, "high": 1.0}}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config().with_overrides(
        {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path), "model": {"x": 0.5}}
    )


def reports_and_returns(config: Config, ctx: RunContext) -> dict[str, Any]:
    for epoch in range(3):
        ctx.report({"loss": 1.0 / (epoch + 1)}, step=epoch)
    return {"final_score": config.model.x, "loss": 0.25, "text": "none"}


def returns_one(config: Config, ctx: RunContext) -> float:
    ctx.log({"loss": 1.0})
    return float(config.model.x)


def test_numbers_of_every_kind_are_read() -> None:
    value = {
        "a": 1,
        "b": np.float32(0.5),
        "c": torch.tensor(2.0),
        "d": "x",
        "e": torch.ones(1),
        "f": True,
    }
    assert returned_numbers(value) == {"a": 1.0, "b": 0.5, "c": 2.0}
    assert returned_numbers(np.array(3.0)) == {"value": 3.0}
    assert returned_numbers(0.5) == {"value": 0.5}
    assert returned_numbers(None) == returned_numbers("text") == {}


@pytest.mark.parametrize("start", ["forkserver", "inline"])
def test_what_a_run_returns_is_among_its_metrics(config: Config, start: Any) -> None:
    result = nb.launch(reports_and_returns, config, start=start, display="off")
    assert result.metrics == {"loss": 0.25, "final_score": 0.5}
    result = nb.launch(returns_one, config, start=start, display="off")
    assert result.metrics == {"loss": 1.0, "value": 0.5}


@pytest.mark.parametrize(
    ("train", "study"),
    [
        (reports_and_returns, {"metric": "final_score"}),
        (returns_one, {"metric": "mine", "direction": "maximize"}),
    ],
)
def test_a_sweep_over_what_is_returned(config: Config, train: Any, study: dict[str, Any]) -> None:
    pytest.importorskip("optuna")
    sweep_config = {"study": study, "space": SPACE}
    result = nb.sweep(train, config, sweep_config, n_trials=3, display="off")
    trials = result.study.get_trials()
    assert [trial.value for trial in trials] == [trial.params["model.x"] for trial in trials]
    assert result.best_value == max(trial.value for trial in trials)


@pytest.mark.long
def test_a_cross_validation_has_what_is_returned(config: Config) -> None:
    folds = nb.make_folds(range(8), k=2, kind="kfold")
    result = nb.cross_validate(reports_and_returns, config, folds, display="off")
    assert result.scores["final_score"].tolist() == [0.5, 0.5]


# --- weights ---


def points(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :2].argmax(dim=1)


class Growing(nn.Linear):
    """Its weights count the epochs, so that the validation says which ones it has."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("epoch", torch.zeros(()))


def fits(config: Config, ctx: RunContext) -> dict[str, Any]:
    """The second of three epochs is the best."""
    model = Growing()

    def close(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (model.epoch - 2).abs()

    def step(module: nn.Module, batch: Any) -> Any:
        if module.training:
            model.epoch.fill_(int(model.epoch) + 1 if torch.is_grad_enabled() else model.epoch)
        return module(batch[0]), batch[1]

    data, held_out = points(8, 0), points(6, 1)
    values = nb.fit(
        ctx,
        config,
        model,
        data,
        held_out,
        loss=nn.functional.cross_entropy,
        metrics={"far": close},
        step=step,
    )
    predicted = nb.predict(ctx, model, held_out)
    return {**values, "seen": float(model.epoch), "predictions": predicted}


@pytest.mark.parametrize(
    ("ranks", "weights", "saves", "seen"),
    [
        (1, "best", True, 2.0),
        pytest.param(1, "last", True, 3.0, marks=pytest.mark.long),
        (1, "best", False, 2.0),
        (2, "best", True, 2.0),
        pytest.param(2, "last", True, 3.0, marks=pytest.mark.long),
    ],
)
def test_one_setting_says_which_weights_are_left(
    config: Config, ranks: int, weights: str, saves: bool, seen: float
) -> None:
    mine = config.with_overrides(
        {
            "train": {"epochs": 3, "batch_size": 8},
            "checkpoint": {"weights": weights, "monitor": "val_far", "mode": "min"},
            "checkpoint.enabled": saves,
        }
    )
    result = nb.launch(fits, mine, processes=ranks, display="off")
    assert [value["seen"] for value in result.values] == [seen] * ranks
    assert result.value["best_epoch"] == 2
    if saves:
        x = points(6, 1)[0]
        for model in (result.load_into(Growing()), nb.load_model(result.paths.folder, Growing())):
            assert float(model.epoch) == seen
            assert torch.allclose(model(x), result.value["predictions"], atol=1e-6)


def test_the_models_of_folds_are_those_of_their_predictions(config: Config) -> None:
    mine = config.with_overrides(
        {
            "train": {"epochs": 3, "batch_size": 8},
            "checkpoint": {"monitor": "val_far", "mode": "min"},
        }
    )
    result = nb.cross_validate(fits, mine, FOLDS, display="off")
    for index, model in enumerate(result.models(Growing())):
        predictions = result.values[index]["predictions"]
        assert torch.allclose(model(points(6, 1)[0]), predictions, atol=1e-6)


def test_without_validation_no_epoch_is_best(config: Config) -> None:
    def train(config: Config, ctx: RunContext) -> None:
        model = nn.Linear(4, 2)
        nb.fit(ctx, config, model, points(8, 0), None, loss=nn.functional.cross_entropy)

    result = nb.launch(train, config.with_overrides({"train.epochs": 2}), display="off")
    assert not list(result.paths.checkpoints.glob("best-*"))
