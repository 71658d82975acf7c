"""Classify 1,797 handwritten digits of 8 x 8 pixels (scikit-learn) with an MLP or a small CNN.

The settings under ``model`` and ``data``, with their defaults:

    model: {kind: mlp, hidden: 256, dropout: 0.0}    # kind: mlp | cnn
    data: {valid_share: 0.2}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from nbtoolkit.errors import ConfigError, MissingExtra
from nbtoolkit.training.evaluation import predict
from nbtoolkit.training.fit import fit

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from nbtoolkit.config.schema import Config
    from nbtoolkit.worker.context import RunContext

Indices: TypeAlias = "Sequence[int] | NDArray[np.int64]"

_SPLIT_SEED = 0  # the split is the same for every run, so that runs can be compared


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
    train_part, valid_part = ((images[rows], labels[rows]) for rows in split(labels, config, ctx))
    model = make_model(config)
    loss = torch.nn.functional.cross_entropy
    scores = fit(ctx, config, model, train_part, valid_part, loss=loss, metrics=["accuracy"])
    return {
        **scores,
        "labels": valid_part[1].tolist(),
        "predictions": predict(ctx, model, valid_part[0]).argmax(dim=1).tolist(),
    }


def load() -> tuple[Tensor, Tensor]:
    """All images, float32 of shape (1797, 64) in 0..1, and their digits, int64 of shape (1797,).

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    import torch

    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtra(
            "the digits come with scikit-learn, which is not installed",
            do="pip install scikit-learn",
        ) from error
    pixels, digits = load_digits(return_X_y=True)
    return torch.as_tensor(pixels, dtype=torch.float32) / 16, torch.as_tensor(digits)


def split(labels: Tensor, config: Config, ctx: RunContext) -> tuple[Indices, Indices]:
    """Return the samples to train on, and those to validate on.

    Args:
        labels: the class of each sample, of shape (n,); each part gets its share of every class.
        config: ``data.valid_share`` is the validation set's share (0.2).
        ctx: in a cross-validation, the samples are those of its fold.
    """
    from sklearn.model_selection import train_test_split

    if ctx.fold is not None:
        return ctx.fold.train_indices, ctx.fold.valid_indices
    fitted, held_out = train_test_split(
        range(len(labels)),
        test_size=config.data.get("valid_share", 0.2),
        stratify=labels,
        random_state=_SPLIT_SEED,
    )
    return fitted, held_out


def make_model(config: Config) -> torch.nn.Module:
    """Return the classifier that ``config.model`` describes: (n, 64) pixels -> (n, 10) scores.

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
