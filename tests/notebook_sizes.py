"""The parameters that make each notebook quick; its defaults are the full size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

FEW = {"train.epochs": 2, "model.hidden": 32}

# A notebook without an entry is quick as it is.
QUICK: dict[str, dict[str, Any]] = {
    "01_train": {"overrides": FEW},
    "02_sweep": {"overrides": {"train.epochs": 2}, "n_trials": 4},
    "03_cross_validate": {"overrides": FEW, "n_trials": 1},
    "04_panel": {"overrides": {"train.epochs": 2}, "n_trials": 2},
    "06_benchmark": {"sections": ["communication", "memory"]},
    "07_metric_learning": {
        "overrides": {"model.stage1.train.epochs": 2, "model.stage2.train.epochs": 2}
    },
    # All folds: nbval compares the cell that shows them.
    "08_competition": {"epochs": 2, "rounds": 5},
}
