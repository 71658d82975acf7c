"""Misspelt metrics and parameters are reported as early as they can be known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nbtoolkit as nb
from nbtoolkit.config.aliases import similar_name
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import FitError, SpaceError, SweepError
from nbtoolkit.run.events import EventReader
from nbtoolkit.search.study.sweep_config import load_sweep_config
from nbtoolkit.worker.context import RunContext

SPACE = {"optim.lr": {"type": "float", "low": 0.01, "high": 0.1}}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config().with_overrides(
        {
            "tracking.mlflow": False,
            "runtime.output_dir": str(tmp_path),
            "checkpoint.enabled": False,
            "train": {"epochs": 3, "batch_size": 8},
            "model": {"width": 8, "layers1": 2, "block": {"kernel": 3}},
        }
    )


def points() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    return x, x[:, :2].argmax(dim=1)


def several(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    return {"macro": 0.5, "micro": 0.5}


def fits(config: Config, ctx: RunContext) -> dict[str, float]:
    """Leaves a mark for every call, so that one sees how many trials there were."""
    metrics = {"accuracy": "accuracy", "f1": nb.epoch_metric(several)}
    model, loss = nn.Linear(4, 2), nn.functional.cross_entropy
    values = nb.fit(ctx, config, model, points(), points(), loss=loss, metrics=metrics)
    (Path(config.runtime.output_dir) / "through").touch()
    return values


def reports(config: Config, ctx: RunContext) -> None:
    for epoch in range(3):
        ctx.report({"val_loss": 1.0, "score": config.optim.lr}, step=epoch)
    (Path(config.runtime.output_dir) / "through").touch()


def swept(train: Any, config: Config, metric: str, **study: Any) -> Any:
    sweep_config = {"study": {"metric": metric, "direction": "maximize", **study}, "space": SPACE}
    return nb.sweep(train, config, sweep_config, n_trials=9, display="off")


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("val_acuracy", ["val_loss", "val_accuracy"], "val_accuracy"),
        ("val_acc", ["val_loss", "val_accuracy"], "val_accuracy"),
        ("accuracy", ["val_accuracy"], "val_accuracy"),
        ("valid/Accuracy", ["val_accuracy"], "val_accuracy"),
        ("widht", ["width"], "width"),
        ("val_mae", ["val_mse"], None),
        ("final_score", ["loss"], None),
        ("layers2", ["layers1"], None),
        ("width", ["width", "widths"], None),
        ("top1", ["top5"], None),
    ],
)
def test_a_slip_is_told_from_another_name(name: str, known: list[str], near: str | None) -> None:
    assert similar_name(name, known) == near


@pytest.mark.parametrize(
    ("monitor", "what"),
    [
        (
            "val_acuracy",
            r"no epoch will have\n.*val_loss, val_accuracy[\s\S]*monitor: val_accuracy",
        ),
        ("val_auc", r"no epoch will have\n.*val_f1_<key>[\s\S]*pass a metric of that name"),
    ],
)
def test_a_monitor_that_no_epoch_has_is_refused_before_the_first(
    config: Config, tmp_path: Path, monitor: str, what: str
) -> None:
    mine = config.with_overrides({"checkpoint.monitor": monitor, "checkpoint.mode": "max"})
    with pytest.raises(FitError, match=what):
        nb.launch(fits, mine, start="inline", display="off")


def test_a_monitor_that_only_the_metric_itself_names_is_allowed(config: Config) -> None:
    mine = config.with_overrides({"checkpoint.monitor": "val_f1_macro"})
    assert "best_val_f1_macro" in nb.launch(fits, mine, start="inline", display="off").value


@pytest.mark.parametrize(
    ("train", "metric", "what"),
    [
        (
            fits,
            "val_acuracy",
            r"the metrics: train_loss, val_loss.*\n[\s\S]*study.metric: val_accuracy",
        ),
        (reports, "val_los", r"the metrics: val_loss, score\n[\s\S]*study.metric: val_loss"),
    ],
)
def test_a_misspelt_metric_ends_the_sweep_in_its_first_trial(
    config: Config, tmp_path: Path, train: Any, metric: str, what: str
) -> None:
    pytest.importorskip("optuna")
    with pytest.raises(SweepError, match=what):
        swept(train, config, metric)
    assert not (tmp_path / "through").exists()
    (folder,) = tmp_path.glob("*-sweep-*")
    # Two at a time; on a loaded machine another one starts before the sweep has ended.
    assert len(list((folder / "trials").iterdir())) <= 4


def test_a_metric_that_the_first_trial_has_not_ends_the_sweep(
    config: Config, tmp_path: Path
) -> None:
    pytest.importorskip("optuna")
    with pytest.raises(SweepError, match=r"'final'.*metrics: val_loss, score\n[\s\S]*return final"):
        swept(reports, config, "final")
    (folder,) = tmp_path.glob("*-sweep-*")
    # Two at a time; on a loaded machine another one starts before the sweep has ended.
    assert len(list((folder / "trials").iterdir())) <= 4


def always_fails(config: Config, ctx: RunContext) -> None:
    raise ValueError("mine")


def test_a_sweep_without_a_value_is_not_complete(config: Config, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    with pytest.raises(SweepError, match=r"no trial .* has a value: 9 failed; .*mine"):
        swept(always_fails, config, "score")
    (folder,) = tmp_path.glob("*-sweep-*")
    last = list(EventReader(folder / "events.jsonl").read())[-1]
    assert (last.type, last.status) == ("ended", "failed")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("model.widht", r"space.model.widht: is not in the configuration, and model.width is"),
        ("model.block.kernl", r"and model.block.kernel is"),
    ],
)
def test_a_slip_in_a_section_of_ones_own_is_refused(config: Config, name: str, what: str) -> None:
    space = {name: {"type": "int", "low": 2, "high": 8}}
    sweep_config = {"study": {"metric": "val_loss"}, "space": space}
    with pytest.raises(SpaceError, match=what):
        load_sweep_config(sweep_config, config, n_trials=2)


@pytest.mark.parametrize("name", ["model.layers2", "model.depth", "model.new.kernel", "data.width"])
def test_another_name_in_a_section_of_ones_own_is_searched(config: Config, name: str) -> None:
    space = {name: {"type": "int", "low": 2, "high": 8}}
    load_sweep_config({"study": {"metric": "val_loss"}, "space": space}, config, n_trials=2)
