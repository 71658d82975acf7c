"""Training functions for tests of cross-validation. Imports little, since every rank imports it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any


def least_squares(config: Any, ctx: Any) -> dict[str, Any]:
    """A linear model of diabetes, solved; the test solves the same in a loop of its own."""
    import numpy as np
    from sklearn.datasets import load_diabetes

    inputs, targets = load_diabetes(return_X_y=True)
    fitted, held_out = ctx.fold.train_indices, ctx.fold.valid_indices
    inputs = np.column_stack([inputs, np.ones(len(inputs))])
    weights = np.linalg.lstsq(inputs[fitted], targets[fitted], rcond=None)[0]
    predictions = inputs[held_out] @ weights
    error = float(np.abs(predictions - targets[held_out]).mean())
    ctx.report({"mae": error})
    return {"mae": error, "predictions": predictions}


def seen(config: Any, ctx: Any) -> dict[str, Any]:
    """What a rank sees of its fold; no tensor is indexed without a warning being an error."""
    import warnings

    import torch

    warnings.simplefilter("error")
    fold = ctx.fold
    return {
        "score": float(fold.index),
        "index": fold.index,
        "train": torch.arange(30)[fold.train_indices].tolist(),
        "valid": fold.valid_indices.tolist(),
        "world_size": ctx.world_size,
        "seed": ctx.seed,
    }


def mends(config: Any, ctx: Any) -> dict[str, float]:
    """Fold 1 raises until there is the file ``mended``."""
    if ctx.fold.index == 1 and not Path(config.data.folder, "mended").exists():
        raise KeyError("fold 1 is ill")
    return {"score": 1.0 + ctx.fold.index}


def dies_once(config: Any, ctx: Any) -> dict[str, float]:
    """Fold 0 goes on from its checkpoint after its process was killed."""
    saved = ctx.load()
    if ctx.fold.index == 0 and saved is None:
        ctx.save({"came": 7.0}, step=1)
        os.kill(os.getpid(), signal.SIGKILL)
    return {"score": saved["came"] if saved else 0.0}


def waits(config: Any, ctx: Any) -> dict[str, float]:
    """Folds from 1 on report until there is the file ``open``."""
    step = 0
    while ctx.fold.index > 0 and not Path(config.data.folder, "open").exists():
        ctx.report({"score": -1.0}, step=step)
        step += 1
        time.sleep(0.01)
    return {"score": float(ctx.fold.index)}


def nothing(config: Any, ctx: Any) -> None:
    """Returns nothing, and reports one number."""
    ctx.report({"score": 1.0})
