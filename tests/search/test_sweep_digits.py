"""A sweep of the digits' CNN over five folds, as in `config/hpo/digits.yaml`."""

from __future__ import annotations

from pathlib import Path

import pytest

import nbtoolkit as nb
from nbtoolkit.tasks import digits


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_sweep_of_the_cnn_reaches_98_percent_over_five_folds(tmp_path: Path) -> None:
    config = nb.load_config(
        env=None,
        overrides={
            "runtime.output_dir": str(tmp_path),
            "tracking.mlflow": False,
            "model.kind": "cnn",
            "model.hidden": 64,
            "train.epochs": 12,
        },
    )
    space = {"optim.lr": {"type": "float", "low": 1e-3, "high": 1e-2, "log": True}}
    sweep_config = {"study": {"metric": "val_accuracy", "direction": "maximize"}, "space": space}
    folds = nb.make_folds(digits.load()[1], k=5)
    result = nb.sweep(digits.train, config, sweep_config, n_trials=4, folds=folds, display="text")
    assert result.best_value is not None
    assert result.best_value >= 0.98
    winner = nb.launch(digits.train, result.best_config, display="off")
    assert winner.metrics["val_accuracy"] >= 0.95  # of one split, not the mean of five
