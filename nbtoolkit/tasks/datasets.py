"""Load and split the data sets that ship with scikit-learn, and train on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from nbtoolkit.errors import MissingExtra
from nbtoolkit.training.evaluation import predict
from nbtoolkit.training.loop import fit

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from nbtoolkit.config.schema import Config
    from nbtoolkit.training.losses import Loss
    from nbtoolkit.training.metrics import Metrics
    from nbtoolkit.worker.context import RunContext

Name: TypeAlias = Literal["digits", "breast_cancer", "diabetes"]
Indices: TypeAlias = "Sequence[int] | NDArray[np.int64]"
Split: TypeAlias = "tuple[Indices, Indices]"
"""Indices of the samples to train on, and of those to validate on."""

_SPLIT_SEED = 0  # the split is the same for every run, so that runs can be compared


def load(name: Name) -> tuple[Tensor, Tensor]:
    """Load inputs, float32 of shape (n, columns), and targets of shape (n,), int64 or float32.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    import torch

    try:
        from sklearn import datasets
    except ImportError as error:
        raise MissingExtra(
            f"the data set {name} comes with scikit-learn, which is not installed",
            do="pip install scikit-learn",
        ) from error
    inputs, targets = getattr(datasets, f"load_{name}")(return_X_y=True)
    kind = torch.long if targets.dtype.kind == "i" else torch.float32
    return torch.as_tensor(inputs, dtype=torch.float32), torch.as_tensor(targets, dtype=kind)


def split(strata: Tensor, config: Config, ctx: RunContext) -> Split:
    """The fold's samples, or a stratified split that is always the same.

    Args:
        strata: a class for each sample, of shape (n,); each part gets its share of every class.
        config: ``data.valid_share`` is the validation set's share (0.2).
        ctx: ``ctx.fold`` has priority.
    """
    from sklearn.model_selection import train_test_split

    if ctx.fold is not None:
        return ctx.fold.train_indices, ctx.fold.valid_indices
    fitted, held_out = train_test_split(
        range(len(strata)),
        test_size=config.data.get("valid_share", 0.2),
        stratify=strata,
        random_state=_SPLIT_SEED,
    )
    return fitted, held_out


def fit_and_predict(
    ctx: RunContext,
    config: Config,
    model: torch.nn.Module,
    data: tuple[Tensor, Tensor],
    split: Split,
    *,
    loss: Loss,
    metrics: Metrics,
) -> tuple[dict[str, float], Tensor]:
    """Train on one part of the data, and predict the other.

    Args:
        ctx: the run's context.
        config: the run's configuration.
        model: trained in place.
        data: inputs and targets of all samples.
        split: the two parts.
        loss: as :func:`nbtoolkit.fit` takes it.
        metrics: as :func:`nbtoolkit.fit` takes them.

    Returns:
        What :func:`nbtoolkit.fit` returns, and the outputs for the validation part.
    """
    inputs, targets = data
    train, valid = ((inputs[part], targets[part]) for part in split)
    scores = fit(ctx, config, model, train, valid, loss=loss, metrics=metrics)
    return scores, predict(ctx, model, valid[0])


def scale_of(values: Tensor, fitted: Indices) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each column, of shape (columns,), on the training part.

    The validation set is left out: its statistics would make its score too good.
    """
    part = values[fitted]
    return part.mean(dim=0), part.std(dim=0)


def mlp(columns: int, config: Config, *, hidden: int, dropout: float) -> torch.nn.Module:
    """A model with two hidden layers and one output: (n, columns) -> (n,).

    Args:
        columns: of the inputs.
        config: ``model.hidden`` and ``model.dropout``.
        hidden: units of a layer, if ``model.hidden`` is not set.
        dropout: if ``model.dropout`` is not set.
    """
    from torch import nn

    hidden = config.model.get("hidden", hidden)
    dropout = config.model.get("dropout", dropout)
    return nn.Sequential(
        nn.Linear(columns, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, 1),
        nn.Flatten(start_dim=0),
    )
