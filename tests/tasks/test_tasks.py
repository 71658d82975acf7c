"""The ready-made tasks train on their real data, on one process and on two."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from feeds import contexts
from sklearn.metrics import accuracy_score, mean_absolute_error, r2_score, roc_auc_score

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import ConfigError, MissingExtra
from nbtoolkit.tasks import breast_cancer, datasets, diabetes, digits
from nbtoolkit.tasks.find import find_data

ROOT = Path(__file__).resolve().parents[2]


def config_of(folder: Path, *, file: str = "train", **overrides: Any) -> Config:
    more = {"runtime.output_dir": str(folder), "tracking.mlflow": False, **overrides}
    return nb.load_config(ROOT / f"config/{file}.yaml", env="local", overrides=more)


def test_digits_on_two_processes_with_the_shipped_configuration(tmp_path: Path) -> None:
    result = nb.launch(digits.train, config_of(tmp_path), processes=2, display="off")
    value = result.value
    assert value["val_accuracy"] >= 0.97
    right = np.equal(value["labels"], value["predictions"])
    assert len(right) == 360
    assert right.mean() == pytest.approx(value["val_accuracy"])
    assert result.metrics["val_accuracy"] == value["val_accuracy"]

    images, labels = digits.load()
    model = result.load_into(digits.make_model(config_of(tmp_path)), kind="last")
    with torch.no_grad():
        answers = model(images).argmax(dim=1)
    assert (answers == labels).double().mean() > 0.97


@pytest.mark.long
def test_the_cnn_learns(tmp_path: Path) -> None:
    more = {"model.kind": "cnn", "model.hidden": 32, "model.dropout": 0.1, "train.epochs": 5}
    result = nb.launch(digits.train, config_of(tmp_path, **more), start="inline", display="off")
    assert result.value["val_accuracy"] > 0.9


@pytest.mark.long
def test_breast_cancer_on_two_processes_with_the_shipped_configuration(tmp_path: Path) -> None:
    config = config_of(tmp_path, file="breast_cancer")
    value = nb.launch(breast_cancer.train, config, processes=2, display="off").value
    assert value["val_accuracy"] >= 0.95
    assert value["val_auc"] >= 0.985
    right = accuracy_score(value["labels"], value["predictions"])
    assert right == pytest.approx(value["val_accuracy"])
    assert roc_auc_score(value["labels"], value["probabilities"]) == pytest.approx(value["val_auc"])
    assert len(value["labels"]) == 114


@pytest.mark.long
def test_diabetes_with_the_shipped_configuration_in_the_targets_units(tmp_path: Path) -> None:
    config = config_of(tmp_path, file="diabetes")
    value = nb.launch(diabetes.train, config, start="inline", display="off").value
    assert value["val_r2"] >= 0.45
    pairs = value["targets"], value["predictions"]
    assert mean_absolute_error(*pairs) == pytest.approx(value["val_mae"], rel=1e-5)
    assert r2_score(*pairs) == pytest.approx(value["val_r2"], abs=1e-5)
    assert len(value["targets"]) == 89


def test_inside_a_fold_a_task_predicts_its_samples_in_order(tmp_path: Path) -> None:
    (ctx,) = contexts(tmp_path / "run", train__epochs=1)
    held_out = list(range(100, 40, -1))
    others = [index for index in range(442) if index not in held_out]
    ctx._fold = SimpleNamespace(train_indices=others, valid_indices=held_out)
    value = diabetes.train(ctx.config, ctx)
    assert value["targets"] == datasets.load("diabetes")[1][held_out].tolist()
    assert len(value["predictions"]) == 60


def test_the_scale_is_that_of_the_training_part() -> None:
    values = torch.tensor([[1.0, 10.0], [3.0, 20.0], [1000.0, 0.0]])
    mean, deviation = datasets.scale_of(values, [0, 1])
    assert mean.tolist() == [2.0, 15.0]
    assert deviation.tolist() == pytest.approx([2**0.5, 50**0.5])


def test_without_scikit_learn_its_install_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # as if it were not there
    with pytest.raises(MissingExtra, match=r"diabetes comes with[\s\S]*pip install scikit-learn"):
        datasets.load("diabetes")


@pytest.mark.parametrize("file", sorted((ROOT / "config").glob("*.yaml")), ids=lambda f: f.stem)
def test_every_shipped_configuration_names_a_task_that_is_there(file: Path) -> None:
    module, _, name = nb.load_config(file, env=None).task.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("task", ["digits", "breast_cancer", "diabetes"])
def test_every_task_has_its_data_for_folds(task: str) -> None:
    inputs, targets = find_data(f"nbtoolkit.tasks.{task}:train")
    assert len(inputs) == len(targets)


def test_the_split_is_stratified_and_always_the_same() -> None:
    labels = digits.load()[1]
    fitted, held_out = datasets.split(labels, Config(), SimpleNamespace(fold=None))
    again = datasets.split(labels, Config(), SimpleNamespace(fold=None))[1]
    assert held_out == again
    assert sorted([*fitted, *held_out]) == list(range(1797))
    counts = np.bincount(labels[held_out])
    assert counts.max() - counts.min() <= 2


def test_inside_a_fold_its_samples_are_used() -> None:
    fold = SimpleNamespace(train_indices=[0, 1], valid_indices=[2])
    assert datasets.split(digits.load()[1], Config(), SimpleNamespace(fold=fold)) == ([0, 1], [2])


def test_an_unknown_kind_of_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.kind is 'rnn'\n.*mlp or cnn"):
        digits.make_model(Config().with_overrides({"model.kind": "rnn"}))
