"""Predict the progress of diabetes in 442 patients by 10 measurements each (scikit-learn).

The settings under ``model`` and ``data``, with their defaults:

    model: {hidden: 32, dropout: 0.2}
    data: {valid_share: 0.2}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbtoolkit.tasks import datasets
from nbtoolkit.training.metrics import epoch_metric

if TYPE_CHECKING:
    from torch import Tensor

    from nbtoolkit.config.schema import Config
    from nbtoolkit.worker.context import RunContext


def train(config: Config, ctx: RunContext) -> dict[str, object]:
    """Train a regression on standardised measurements and a standardised target.

    Args:
        config: see the module's docstring for ``model`` and ``data``.
        ctx: the run context; in a cross-validation, the samples of its fold are used.

    Returns:
        What :func:`nbtoolkit.fit` returns (``val_loss``, the mean squared error of the standardised
        target; ``val_mae``, in the target's units, 25 to 346; ``val_r2``; ...), with ``targets``
        and ``predictions`` of the validation set as lists, in the target's units.
    """
    import torch

    inputs, targets = load()
    split = datasets.split(_quarters(targets), config, ctx)
    mean, deviation = datasets.scale_of(inputs, split[0])
    middle, unit = datasets.scale_of(targets, split[0])

    def mae(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().mean() * unit.item()

    scores, outputs = datasets.fit_and_predict(
        ctx,
        config,
        datasets.mlp(inputs.shape[1], config, hidden=32, dropout=0.2),
        ((inputs - mean) / deviation, (targets - middle) / unit),
        split,
        loss=torch.nn.functional.mse_loss,
        metrics={"mae": mae, "r2": epoch_metric(_r2)},
    )
    return {
        **scores,
        "targets": targets[split[1]].tolist(),
        "predictions": (outputs * unit + middle).tolist(),
    }


def load() -> tuple[Tensor, Tensor]:
    """Load the measurements, float32 of shape (442, 10), and the targets, float32 of shape (442,).

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    return datasets.load("diabetes")


def _quarters(targets: Tensor) -> Tensor:
    """Each patient's quarter (0 to 3), from the least ill to the most; int64 of shape (n,)."""
    import torch

    return torch.bucketize(targets, targets.quantile(torch.tensor([0.25, 0.5, 0.75])))


def _r2(outputs: Tensor, targets: Tensor) -> float:
    """Coefficient of determination; the same in any units."""
    from sklearn.metrics import r2_score

    return float(r2_score(targets, outputs))
