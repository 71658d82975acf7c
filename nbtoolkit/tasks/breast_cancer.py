"""Classify 569 breast tumours as malignant or benign by 30 measurements each (scikit-learn).

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
    """Train a classifier of tumours on standardised measurements.

    Args:
        config: the module's docstring says what ``model`` and ``data`` may hold.
        ctx: inside a fold, its samples are used instead of the fixed split.

    Returns:
        What :func:`nbtoolkit.fit` returns (``val_accuracy``, ``val_auc``, ...), with ``labels`` and
        ``predictions`` (0: malignant, 1: benign) and ``probabilities`` (of benign) of the
        validation set as lists.
    """
    import torch

    inputs, labels = datasets.load("breast_cancer")
    fitted, held_out = datasets.split(labels, config, ctx)
    mean, deviation = datasets.scale_of(inputs, fitted)
    inputs, targets = (inputs - mean) / deviation, labels.float()
    model = datasets.mlp(inputs.shape[1], config, hidden=32, dropout=0.2)
    scores = fit(
        ctx,
        config,
        model,
        (inputs[fitted], targets[fitted]),
        (inputs[held_out], targets[held_out]),
        loss=torch.nn.functional.binary_cross_entropy_with_logits,
        metrics={"accuracy": "accuracy", "auc": epoch_metric(_auc)},
    )
    logits = predict(ctx, model, inputs[held_out])
    return {
        **scores,
        "labels": labels[held_out].tolist(),
        "predictions": (logits > 0).long().tolist(),
        "probabilities": logits.sigmoid().tolist(),
    }


def _auc(logits: Tensor, targets: Tensor) -> float:
    """Area under the ROC curve."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(targets, logits))
