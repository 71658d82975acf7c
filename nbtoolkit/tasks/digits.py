"""Classify 1,797 handwritten digits of 8 x 8 pixels (scikit-learn) with an MLP or a small CNN.

The settings under ``model`` and ``data``, with their defaults:

    model: {kind: mlp, hidden: 256, dropout: 0.0}    # kind: mlp | cnn
    data: {valid_share: 0.2}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbtoolkit.errors import ConfigError
from nbtoolkit.tasks import datasets

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nbtoolkit.config.schema import Config
    from nbtoolkit.worker.context import RunContext


def train(config: Config, ctx: RunContext) -> dict[str, object]:
    """Train a classifier of handwritten digits.

    Args:
        config: see the module's docstring for ``model`` and ``data``.
        ctx: the run context; in a cross-validation, the samples of its fold are used.

    Returns:
        What :func:`nbtoolkit.fit` returns (``val_accuracy``, ``val_loss``, ...), with ``labels``
        and ``predictions`` of the validation set as lists of digits.
    """
    import torch

    images, labels = load()
    split = datasets.split(labels, config, ctx)
    scores, outputs = datasets.fit_and_predict(
        ctx,
        config,
        make_model(config),
        (images, labels),
        split,
        loss=torch.nn.functional.cross_entropy,
        metrics=["accuracy"],
    )
    return {
        **scores,
        "labels": labels[split[1]].tolist(),
        "predictions": outputs.argmax(dim=1).tolist(),
    }


def load() -> tuple[Tensor, Tensor]:
    """All images, float32 of shape (1797, 64) in 0..1, and their digits, int64 of shape (1797,).

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    images, labels = datasets.load("digits")
    return images / 16, labels


def make_model(config: Config) -> torch.nn.Module:
    """The classifier that ``config.model`` describes: (n, 64) pixels -> (n, 10) scores.

    Raises:
        ConfigError: ``model.kind`` is unknown.
    """
    kind = config.model.get("kind", "mlp")
    if kind not in _MODELS:
        raise ConfigError(
            f"model.kind is {kind!r}",
            allowed=" or ".join(_MODELS),
            do="set model.kind: mlp",
        )
    return _MODELS[kind](config.model.get("hidden", 256), config.model.get("dropout", 0.0))


def _mlp(hidden: int, dropout: float) -> torch.nn.Module:
    from torch import nn

    return nn.Sequential(
        nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 10)
    )


def _cnn(hidden: int, dropout: float) -> torch.nn.Module:
    from torch import nn

    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, 10),
    )


_MODELS = {"mlp": _mlp, "cnn": _cnn}
