from __future__ import annotations

from pathlib import Path

import pytest

import nbtoolkit as nb
from nbtoolkit.config.directions import direction_of, resolve
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import FitError, SpaceError
from nbtoolkit.search.study.sweep_config import load_sweep_config

LOW = """
val_loss val_mae val_mse val_rmse valRMSE perplexity val_ppl log_loss nll error_rate
cross_entropy CrossEntropyLoss dice_loss brier_score negative_log_likelihood MeanSquaredError
FIDScore latency_ms val_mae_per_class accuracy_error WER
"""
HIGH = """
val_accuracy acc@5 top5 mAP mAP50 val/mAP_50_95 roc_auc ROC-AUC rocAUC f1 val_f1_macro
final_score r2 R2Score explained_variance dice IoU mIoU neg_mean_squared_error neg_log_loss
log_likelihood samples_per_second MultiClassAccuracy
"""
NEITHER = ["x", "value", "width", "objective", "", "glossy", "capacity"]

SPACE = {"optim.lr": {"type": "float", "low": 1e-4, "high": 1e-1}}


@pytest.fixture(scope="module")
def config() -> Config:
    return nb.load_config(env=None)


@pytest.mark.parametrize(
    ("metric", "direction"),
    [
        *((name, "minimize") for name in LOW.split()),
        *((name, "maximize") for name in HIGH.split()),
        *((name, None) for name in NEITHER),
    ],
)
def test_a_name_says_which_values_are_best_or_it_does_not(
    metric: str, direction: str | None
) -> None:
    assert direction_of(metric) == direction


def test_the_mode_of_the_checkpoints_says_it_for_their_metric(config: Config) -> None:
    mine = config.with_overrides({"checkpoint.monitor": "width", "checkpoint.mode": "min"})
    assert resolve("width", mine) == "minimize"
    assert resolve("height", mine) is None
    assert resolve("val_loss", config) == "minimize"
    turned = config.with_overrides({"checkpoint.monitor": "my_loss", "checkpoint.mode": "max"})
    assert resolve("my_loss", turned) == "maximize"


@pytest.mark.parametrize("metric", ["val_mae", "val_mse", "val_rmse", "perplexity"])
def test_a_sweep_makes_an_error_small(metric: str, config: Config) -> None:
    sweep_config = load_sweep_config(
        {"study": {"metric": metric}, "space": SPACE}, config, n_trials=2
    )
    assert sweep_config.directions == ("minimize",)


def test_a_sweep_goes_by_the_mode_of_the_checkpoints(config: Config) -> None:
    mine = config.with_overrides({"checkpoint.monitor": "val_gap", "checkpoint.mode": "min"})
    assert load_sweep_config(SPACE, mine, n_trials=2).directions == ("minimize",)


def test_a_sweep_over_a_name_that_says_nothing_is_refused_with_the_lines_to_choose_from(
    config: Config,
) -> None:
    source = {"study": {"metric": "width"}, "space": SPACE}
    what = r"highest or the lowest 'width' is best cannot be told(.|\n)*`direction: maximize` or"
    with pytest.raises(SpaceError, match=what):
        load_sweep_config(source, config, n_trials=2)
    source["study"] = {"metric": "width", "direction": "minimize"}
    assert load_sweep_config(source, config, n_trials=2).directions == ("minimize",)


def test_of_several_metrics_each_has_a_direction_or_is_named(config: Config) -> None:
    source = {"study": {"metric": ["val_rmse", "width"]}, "space": SPACE}
    with pytest.raises(SpaceError, match=r"'width' is best(.|\n)*one for each metric"):
        load_sweep_config(source, config, n_trials=2)
    source["study"] = {"metric": ["val_rmse", "val_f1"]}
    assert load_sweep_config(source, config, n_trials=2).directions == ("minimize", "maximize")


def test_a_fit_that_goes_by_a_name_that_says_nothing_is_refused_before_its_first_step(
    config: Config, tmp_path: Path
) -> None:
    def train(config: Config, ctx: nb.RunContext) -> None:
        import torch
        from torch import nn

        data = torch.ones(8, 2), torch.zeros(8, 1)
        loss = nn.functional.mse_loss
        nb.fit(ctx, config, nn.Linear(2, 1), data, data, loss=loss, metrics={"width": loss})

    mine = config.with_overrides(
        {
            "checkpoint.monitor": "val_width",
            "runtime.output_dir": str(tmp_path),
            "tracking.mlflow": False,
        }
    )
    what = r"'val_width' \(checkpoint\.monitor\) does not say(.|\n)*`mode: max` or `mode: min`"
    with pytest.raises(FitError, match=what):
        nb.launch(train, mine, start="inline", display="off")
