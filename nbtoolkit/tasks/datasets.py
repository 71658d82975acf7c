"""Data sets that come with scikit-learn: loaded, split, standardised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from nbtoolkit.errors import MissingExtra

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from nbtoolkit.config.schema import Config
    from nbtoolkit.worker.context import RunContext

Indices: TypeAlias = "Sequence[int] | NDArray[np.int64]"
Name: TypeAlias = Literal["digits", "breast_cancer", "diabetes"]

_SPLIT_SEED = 0  # the split is the same for every run, so that runs can be compared


def load(name: Name) -> tuple[Tensor, Tensor]:
    """Inputs, float32 of shape (n, columns), and targets of shape (n,), int64 or float32.

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


def split(strata: Tensor, config: Config, ctx: RunContext) -> tuple[Indices, Indices]:
    """Indices to train and to validate on: the fold's, or a stratified split, always the same.

    Args:
        strata: a class for each sample; each part gets its share of every class.
        config: ``data.valid_share`` is the validation set's share (0.2).
        ctx: ``ctx.fold`` decides where there is one.
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


def scale_of(values: Tensor, fitted: Indices) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each column, of the training part alone.

    The validation set must not be seen: what is known of it would make its score too good.
    """
    part = values[fitted]
    return part.mean(dim=0), part.std(dim=0)


def mlp(columns: int, config: Config, *, hidden: int, dropout: float) -> torch.nn.Module:
    """Two hidden layers, one output: (n, columns) -> (n,).

    Args:
        columns: of the inputs.
        config: ``model.hidden`` and ``model.dropout``.
        hidden: units of a layer, where ``model.hidden`` is not set.
        dropout: where ``model.dropout`` is not set.
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
