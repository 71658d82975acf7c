"""Classify 569 breast tumours as malignant or benign by 30 measurements each (scikit-learn).

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
    """Train a classifier of tumours on standardised measurements.

    Args:
        config: see the module's docstring for ``model`` and ``data``.
        ctx: the run context; in a cross-validation, the samples of its fold are used.

    Returns:
        What :func:`nbtoolkit.fit` returns (``val_accuracy``, ``val_auc``, ...), with ``labels`` and
        ``predictions`` (0: malignant, 1: benign) and ``probabilities`` (of benign) of the
        validation set as lists.
    """
    import torch

    inputs, labels = load()
    split = datasets.split(labels, config, ctx)
    mean, deviation = datasets.scale_of(inputs, split[0])
    scores, logits = datasets.fit_and_predict(
        ctx,
        config,
        datasets.mlp(inputs.shape[1], config, hidden=32, dropout=0.2),
        ((inputs - mean) / deviation, labels.float()),
        split,
        loss=torch.nn.functional.binary_cross_entropy_with_logits,
        metrics={"accuracy": "accuracy", "auc": epoch_metric(_auc)},
    )
    return {
        **scores,
        "labels": labels[split[1]].tolist(),
        "predictions": (logits > 0).long().tolist(),
        "probabilities": logits.sigmoid().tolist(),
    }


def load() -> tuple[Tensor, Tensor]:
    """Load the measurements, float32 of shape (569, 30), and 0 or 1, int64 of shape (569,).

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    return datasets.load("breast_cancer")


def _auc(logits: Tensor, targets: Tensor) -> float:
    """Area under the ROC curve."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(targets, logits))
