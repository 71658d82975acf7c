"""The ready-made tasks train on their real data, on one process and on two."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nbtoolkit as nb
from nbtoolkit.config import Config
from nbtoolkit.errors import ConfigError
from nbtoolkit.tasks import digits

ROOT = Path(__file__).resolve().parent.parent


def config_of(folder: Path, **overrides: Any) -> Config:
    quiet = {"runtime.output_dir": str(folder), "tracking.mlflow": False}
    return nb.load_config(ROOT / "config/train.yaml", env="local", overrides={**quiet, **overrides})


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
    assert (digits.predict(model, images) == labels).double().mean() > 0.97


def test_the_cnn_learns(tmp_path: Path) -> None:
    more = {"model.kind": "cnn", "model.hidden": 32, "model.dropout": 0.1, "train.epochs": 5}
    result = nb.launch(digits.train, config_of(tmp_path, **more), start="inline", display="off")
    assert result.value["val_accuracy"] > 0.9


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
