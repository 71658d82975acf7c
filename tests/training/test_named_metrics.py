"""Metrics by name equal scikit-learn's of all samples, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fits import launch
from sklearn import metrics as sk
from torch import nn
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

import nbtoolkit as nb
from nbtoolkit.config.directions import direction_of
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import FitError
from nbtoolkit.training.metrics import named_metrics
from nbtoolkit.training.sklearn_metrics import metric_names, named_metric
from nbtoolkit.worker.context import RunContext

GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.randint(4, (50,), generator=GENERATOR)
SCORES = torch.randn(50, 4, generator=GENERATOR) + nn.functional.one_hot(LABELS, 4)
CHOSEN = SCORES.argmax(1)
PROBABILITIES = SCORES.softmax(1)
ZERO_ONE = (LABELS > 1).long()
LOGITS = torch.randn(50, generator=GENERATOR) + ZERO_ONE
HEIGHTS = torch.rand(50, generator=GENERATOR)
GUESSES = HEIGHTS + 0.1 * torch.randn(50, generator=GENERATOR).abs()


def value(name: str, outputs: torch.Tensor, targets: torch.Tensor, loss: Any = None) -> float:
    metric = named_metric(name)
    assert metric is not None
    return metric(outputs, targets, loss)


OF_CLASSES = {
    "f1_macro": sk.f1_score(LABELS, CHOSEN, average="macro"),
    "f1_micro": sk.f1_score(LABELS, CHOSEN, average="micro"),
    "f1_weighted": sk.f1_score(LABELS, CHOSEN, average="weighted"),
    "balanced_accuracy": sk.balanced_accuracy_score(LABELS, CHOSEN),
    "mcc": sk.matthews_corrcoef(LABELS, CHOSEN),
    "qwk": sk.cohen_kappa_score(LABELS, CHOSEN, weights="quadratic"),
    "roc_auc": sk.roc_auc_score(LABELS, PROBABILITIES, multi_class="ovr", average="macro"),
    "average_precision": sk.average_precision_score(LABELS, PROBABILITIES, average="macro"),
}


@pytest.mark.parametrize("name", OF_CLASSES)
def test_metrics_of_classes_are_scikit_learns_of_logits_and_of_probabilities(name: str) -> None:
    for outputs in (SCORES, PROBABILITIES, PROBABILITIES.log()):
        assert value(name, outputs, LABELS) == pytest.approx(OF_CLASSES[name], abs=1e-9)
    assert value(name, SCORES, LABELS[:, None]) == pytest.approx(OF_CLASSES[name], abs=1e-9)


BINARY = {
    "f1": sk.f1_score(ZERO_ONE, LOGITS > 0),
    "f1_macro": sk.f1_score(ZERO_ONE, LOGITS > 0, average="macro"),
    "mcc": sk.matthews_corrcoef(ZERO_ONE, LOGITS > 0),
    "qwk": sk.cohen_kappa_score(ZERO_ONE, LOGITS > 0, weights="quadratic"),
    "roc_auc": sk.roc_auc_score(ZERO_ONE, LOGITS),
    "average_precision": sk.average_precision_score(ZERO_ONE, LOGITS),
}


@pytest.mark.parametrize("name", BINARY)
def test_binary_metrics_are_scikit_learns_in_every_form_of_the_outputs(name: str) -> None:
    two = torch.stack([torch.zeros(50), LOGITS], dim=1)
    column, floats = LOGITS[:, None], ZERO_ONE.float()
    forms = [(LOGITS, ZERO_ONE), (column, floats), (column, floats[:, None]), (two, ZERO_ONE)]
    for outputs, targets in forms:
        found = value(name, outputs, targets, binary_cross_entropy_with_logits)
        assert found == pytest.approx(BINARY[name], abs=1e-9)
    found = value(name, LOGITS.sigmoid(), floats, binary_cross_entropy)
    assert found == pytest.approx(BINARY[name], abs=1e-9)


def test_metrics_of_numbers_are_scikit_learns() -> None:
    expected = {
        "rmse": sk.root_mean_squared_error(HEIGHTS, GUESSES),
        "mse": sk.mean_squared_error(HEIGHTS, GUESSES),
        "mae": sk.mean_absolute_error(HEIGHTS, GUESSES),
        "r2": sk.r2_score(HEIGHTS, GUESSES),
        "rmsle": sk.root_mean_squared_log_error(HEIGHTS, GUESSES),
    }
    for name, number in expected.items():
        forms = [(GUESSES, HEIGHTS), (GUESSES[:, None], HEIGHTS), (GUESSES, HEIGHTS[:, None])]
        for outputs, targets in forms:  # (50, 1) against (50,) never becomes (50, 50)
            assert value(name, outputs, targets) == pytest.approx(number, abs=1e-6)
    with pytest.raises(FitError, match=r"'rmse' cannot be computed of outputs of shape \(50, 4\)"):
        value("rmse", SCORES, HEIGHTS)


def test_several_labels_of_a_sample_are_averaged() -> None:
    targets = (SCORES + torch.randn(50, 4, generator=GENERATOR) > 0).float()
    expected = sk.f1_score(targets, SCORES > 0, average="macro")
    assert value("f1_macro", SCORES, targets) == pytest.approx(expected)
    expected = sk.roc_auc_score(targets, SCORES, average="macro")
    assert value("roc_auc", SCORES, targets) == pytest.approx(expected)


def test_ignored_labels_do_not_count_and_pixels_do() -> None:
    labels = LABELS.clone()
    labels[:10] = -100
    expected = sk.f1_score(LABELS[10:], CHOSEN[10:], average="macro")
    assert value("f1_macro", SCORES, labels) == pytest.approx(expected)
    pixels, of_pixels = SCORES.view(10, 5, 4).movedim(2, 1), LABELS.view(10, 5)
    assert value("f1_macro", pixels, of_pixels) == pytest.approx(OF_CLASSES["f1_macro"])


def test_map_at_k_is_the_mean_over_the_ranks_of_the_right_classes() -> None:
    scores = torch.tensor([[3.0, 2, 1, 0], [3, 2, 1, 0], [3, 2, 1, 0]])
    assert value("map@3", scores, torch.tensor([0, 2, 3])) == pytest.approx((1 + 1 / 3 + 0) / 3)
    assert value("map@1", scores, torch.tensor([0, 2, 3])) == pytest.approx(1 / 3)
    several = torch.tensor([[1.0, 0, 1, 0]] * 3)
    assert value("map@3", scores, several) == pytest.approx((1 + 2 / 3) / 2)


def test_qwk_rounds_the_numbers_that_a_regression_predicts() -> None:
    grades = LABELS + 0.3
    assert value("qwk", grades + 0.0, LABELS) == 1.0
    assert value("qwk", LABELS + 9.0, LABELS) == value("qwk", torch.full((50,), 3.0), LABELS)


def test_an_unknown_name_lists_them() -> None:
    with pytest.raises(FitError, match=r"'rocauc'[\s\S]*f1_macro.*map@k\n.*mean 'roc_auc'"):
        named_metrics(["rocauc"])
    with pytest.raises(FitError, match=r"no metric of the name 'map@'[\s\S]*rmse, mse, mae, r2"):
        named_metrics({"mine": "map@"})


def test_the_direction_of_every_name_is_known() -> None:
    low = {"rmse", "mse", "mae", "rmsle"}
    for name in metric_names():
        expected = "minimize" if name in low else "maximize"
        assert direction_of(f"val_{name}".replace("@k", "@3")) == expected, name


def test_names_of_classes_are_refused_for_a_regression_before_the_training(tmp_path: Path) -> None:
    config = configured(tmp_path)

    def train(config: Config, ctx: RunContext) -> Any:
        data = HEIGHTS[:, None], HEIGHTS[:, None]
        return nb.fit(ctx, config, nn.Linear(1, 1), data, data, loss=nn.MSELoss(), metrics="f1")

    with pytest.raises(FitError, match=r'"f1" cannot be computed: the targets are not classes'):
        nb.launch(train, config, start="inline", display="off")


# --- two ranks ---


def configured(folder: Path, **more: Any) -> Config:
    settings = {
        "train": {"epochs": 2, "batch_size": 16},
        "tracking.mlflow": False,
        "checkpoint.enabled": False,
        "runtime.output_dir": str(folder),
    }
    return nb.load_config(env=None, overrides={**settings, **more})


NAMES = ["accuracy", "f1_macro", "roc_auc", "average_precision", "qwk", "map@3"]


def on_ranks(config: Config, ctx: RunContext) -> Any:
    torch.manual_seed(0)
    model, loss = nn.Linear(4, 4), nn.functional.cross_entropy
    data, valid = (SCORES, LABELS), (SCORES[:37], LABELS[:37])
    values = nb.fit(ctx, config, model, data, valid, loss=loss, metrics=NAMES)
    return values, nb.predict(ctx, model, SCORES[:37])


def test_the_values_are_those_of_the_whole_set_on_two_ranks(tmp_path: Path) -> None:
    config = configured(tmp_path, **{"checkpoint.monitor": "val_f1_macro"})
    first, second = launch(on_ranks, config, 2).values
    values, outputs = first
    assert values == second[0]
    assert values["best_val_f1_macro"] == values["val_f1_macro"]  # the highest is the best
    labels, probabilities = LABELS[:37], outputs.softmax(1)
    expected = {
        "val_f1_macro": sk.f1_score(labels, outputs.argmax(1), average="macro"),
        "val_roc_auc": sk.roc_auc_score(labels, probabilities, multi_class="ovr"),
        "val_qwk": sk.cohen_kappa_score(labels, outputs.argmax(1), weights="quadratic"),
        "val_map@3": value("map@3", outputs, labels),
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected, abs=1e-6)
