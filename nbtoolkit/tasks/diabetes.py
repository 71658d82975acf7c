"""Predict the progress of diabetes in 442 patients by 10 measurements each (scikit-learn).

What the free sections of the config may hold, with the defaults:

    model: {hidden: 32, dropout: 0.2}
    data: {valid_share: 0.2}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbtoolkit.tasks import datasets
from nbtoolkit.training.evaluation import predict
from nbtoolkit.training.loop import fit
from nbtoolkit.training.metrics import epoch_metric

if TYPE_CHECKING:
    from torch import Tensor

    from nbtoolkit.config.schema import Config
    from nbtoolkit.worker.context import RunContext


def train(config: Config, ctx: RunContext) -> dict[str, Any]:
    """Train a regression on standardised measurements and a standardised target.

    Args:
        config: the module's docstring says what ``model`` and ``data`` may hold.
        ctx: inside a fold, its samples are used instead of the fixed split.

    Returns:
        What :func:`nbtoolkit.fit` returns (``val_loss``, the mean squared error of the standardised
        target; ``val_mae``, in the target's units, 25 to 346; ``val_r2``; ...), with ``targets``
        and ``predictions`` of the validation set as lists, in the target's units.
    """
    import torch

    inputs, targets = datasets.load("diabetes")
    fitted, held_out = datasets.split(_quarters(targets), config, ctx)
    mean, deviation = datasets.scale_of(inputs, fitted)
    inputs = (inputs - mean) / deviation
    middle, unit = datasets.scale_of(targets, fitted)
    standardised = (targets - middle) / unit

    def mae(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().mean() * unit.item()

    model = datasets.mlp(inputs.shape[1], config, hidden=32, dropout=0.2)
    scores = fit(
        ctx,
        config,
        model,
        (inputs[fitted], standardised[fitted]),
        (inputs[held_out], standardised[held_out]),
        loss=torch.nn.functional.mse_loss,
        metrics={"mae": mae, "r2": epoch_metric(_r2)},
    )
    outputs = predict(ctx, model, inputs[held_out])
    return {
        **scores,
        "targets": targets[held_out].tolist(),
        "predictions": (outputs * unit + middle).tolist(),
    }


def _quarters(targets: Tensor) -> Tensor:
    """Which quarter of the patients each belongs to, from the least ill to the most."""
    import torch

    return torch.bucketize(targets, targets.quantile(torch.tensor([0.25, 0.5, 0.75])))


def _r2(outputs: Tensor, targets: Tensor) -> float:
    """Share of the targets' variance that is predicted; whatever the units."""
    from sklearn.metrics import r2_score

    return float(r2_score(targets, outputs))
