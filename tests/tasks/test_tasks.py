"""The digits train on one process and on two, and divide their samples for folds."""

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
from whole import needs_extras

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import ConfigError, MissingExtra
from nbtoolkit.tasks import digits
from nbtoolkit.tasks.find import find_data

ROOT = Path(__file__).resolve().parents[2]


def config_of(folder: Path, **overrides: Any) -> Config:
    more = {"runtime.output_dir": str(folder), "tracking.mlflow": False, **overrides}
    return nb.load_config(ROOT / "config/train.yaml", env="local", overrides=more)


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


def test_inside_a_fold_its_samples_are_predicted_in_order(tmp_path: Path) -> None:
    (ctx,) = contexts(tmp_path / "run", train__epochs=1)
    held_out = list(range(100, 40, -1))
    others = [index for index in range(442) if index not in held_out]
    ctx._fold = SimpleNamespace(train_indices=others, valid_indices=held_out)
    value = digits.train(ctx.config, ctx)
    assert value["labels"] == digits.load()[1][held_out].tolist()
    assert len(value["predictions"]) == 60


def test_without_scikit_learn_its_install_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # as if it were not there
    with pytest.raises(MissingExtra, match=r"digits come with[\s\S]*pip install scikit-learn"):
        digits.load()


@needs_extras
@pytest.mark.parametrize("file", sorted((ROOT / "config").glob("*.yaml")), ids=lambda f: f.stem)
def test_every_shipped_configuration_names_a_task_that_is_there(file: Path) -> None:
    module, _, name = nb.load_config(file, env=None).task.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_the_task_has_its_data_for_folds() -> None:
    inputs, targets = find_data("nbtoolkit.tasks.digits:train")
    assert len(inputs) == len(targets) == 1797


def test_the_split_is_stratified_and_always_the_same() -> None:
    labels = digits.load()[1]
    fitted, held_out = digits.split(labels, Config(), SimpleNamespace(fold=None))
    again = digits.split(labels, Config(), SimpleNamespace(fold=None))[1]
    assert held_out == again
    assert sorted([*fitted, *held_out]) == list(range(1797))
    counts = np.bincount(labels[held_out])
    assert counts.max() - counts.min() <= 2


def test_inside_a_fold_its_samples_are_used() -> None:
    fold = SimpleNamespace(train_indices=[0, 1], valid_indices=[2])
    assert digits.split(digits.load()[1], Config(), SimpleNamespace(fold=fold)) == ([0, 1], [2])


def test_an_unknown_kind_of_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.kind is 'rnn'\n.*mlp or cnn"):
        digits.make_model(Config().with_overrides({"model.kind": "rnn"}))
