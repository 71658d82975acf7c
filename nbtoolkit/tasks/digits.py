"""Digits: 1,797 handwritten ones of 8 x 8 pixels, from scikit-learn; an MLP or a small CNN.

What the free sections of the config may hold, with the defaults:

    model: {kind: mlp, hidden: 256, dropout: 0.0}    # kind: mlp | cnn
    data: {valid_share: 0.2}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import ConfigError, MissingExtra
from nbtoolkit.training.loop import fit

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from nbtoolkit.config import Config
    from nbtoolkit.runtime.context import RunContext

_SPLIT_SEED = 0  # the split is the same for every run, so that runs can be compared


def train(config: Config, ctx: RunContext) -> dict[str, Any]:
    """Train a classifier of handwritten digits.

    Args:
        config: the module's docstring says what ``model`` and ``data`` may hold.
        ctx: inside a fold, its samples are used instead of the fixed split.

    Returns:
        What :func:`nbtoolkit.fit` returns (``val_accuracy``, ``val_loss``, ...), with ``labels``
        and ``predictions`` of the validation set as lists of digits.
    """
    import torch

    images, labels = load()
    fitted, held_out = split(labels, config, ctx)
    model = make_model(config)
    scores = fit(
        ctx,
        config,
        model,
        (images[fitted], labels[fitted]),
        (images[held_out], labels[held_out]),
        loss=torch.nn.functional.cross_entropy,
        metrics=["accuracy"],
    )
    predictions = predict(model, images[held_out].to(ctx.device))
    return {
        **scores,
        "labels": labels[held_out].tolist(),
        "predictions": predictions.tolist(),
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
    images, labels = load_digits(return_X_y=True)
    return torch.as_tensor(images, dtype=torch.float32) / 16, torch.as_tensor(labels).long()


def split(labels: Tensor, config: Config, ctx: RunContext) -> tuple[Sequence[int], Sequence[int]]:
    """Indices to train and to validate on: the fold's, or a stratified split, always the same."""
    from sklearn.model_selection import train_test_split

    if ctx.fold is not None:
        return ctx.fold.train_indices, ctx.fold.valid_indices
    share = config.data.get("valid_share", 0.2)
    fitted, held_out = train_test_split(
        range(len(labels)), test_size=share, stratify=labels, random_state=_SPLIT_SEED
    )
    return fitted, held_out


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
    model: torch.nn.Module = _MODELS[kind](
        config.model.get("hidden", 256), config.model.get("dropout", 0.0)
    )
    return model


def predict(model: torch.nn.Module, images: Tensor) -> Tensor:
    """The digits that ``model`` sees, shape (n,), on the CPU."""
    import torch

    model.eval()
    with torch.no_grad():
        scores: Tensor = model(images)
        return scores.argmax(dim=1).cpu()


def _mlp(hidden: int, dropout: float) -> torch.nn.Module:
    from torch import nn

    return nn.Sequential(
        nn.Linear(64, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, 10),
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
