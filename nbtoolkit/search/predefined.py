"""Folds as the user says: a fold's number for each sample, or pairs of index lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import FoldError
from nbtoolkit.search.columns import as_column
from nbtoolkit.search.folds import others

if TYPE_CHECKING:
    from numpy.typing import NDArray


def predefined_pairs(given: Any, n_samples: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Folds as the user says: a fold's number for each sample, or pairs of index lists."""
    import numpy as np

    given = list(given.tolist() if hasattr(given, "tolist") else given)
    if given and all(isinstance(one, (tuple, list)) and len(one) == 2 for one in given):
        return [_pair(number, pair, n_samples) for number, pair in enumerate(given)]
    number_of = as_column(given, "predefined", n_samples=n_samples)
    if number_of.dtype.kind not in "iu" or not (number_of >= 0).any():
        raise FoldError(
            f"predefined holds {number_of.dtype} values, or no fold at all",
            allowed="whole numbers: the fold that validates on the sample, -1 for none",
            do="make_folds(y, kind='predefined', predefined=[0, 0, 1, 1, -1])",
        )
    numbers = np.unique(number_of[number_of >= 0])
    held_out = [np.flatnonzero(number_of == number) for number in numbers]
    return [
        _pair(i, (others(valid, n_samples), valid), n_samples) for i, valid in enumerate(held_out)
    ]


def _pair(number: int, pair: Any, n_samples: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """One fold's indices, checked."""
    import numpy as np

    train, valid = (np.asarray(part) for part in pair)
    wrong = _wrong_with(train, valid, n_samples)
    if wrong:
        raise FoldError(
            f"the predefined fold {number} {wrong}",
            allowed=f"whole numbers from 0 to {n_samples - 1}, each once, on one side",
            do="pass pairs (train indices, validation indices), as scikit-learn's split() gives",
        )
    return np.sort(train), np.sort(valid)


def _wrong_with(train: NDArray[Any], valid: NDArray[Any], n_samples: int) -> str:
    import numpy as np

    if train.ndim != 1 or valid.ndim != 1:
        return "is no pair of index lists"
    if not train.size or not valid.size:
        return f"has {train.size} samples to train on and {valid.size} to validate on"
    both = np.concatenate([train, valid])
    if both.dtype.kind not in "iu" or both.min() < 0 or both.max() >= n_samples:
        return f"holds what is no index of {n_samples} samples"
    if len(np.unique(train)) < train.size or len(np.unique(valid)) < valid.size:
        return "holds a sample twice"
    shared = np.intersect1d(train, valid).size
    return f"validates on {shared} samples that it trains on" if shared else ""
