"""Assemble out-of-fold predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from nbtoolkit.errors import FoldError
from nbtoolkit.search.folds.folds import Folds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]


def assemble(folds: Folds, parts: Mapping[int, object]) -> Array:
    """Assemble one prediction for each sample, made by the model that did not see it.

    Args:
        folds: folds of n samples.
        parts: fold -> its predictions for ``valid_indices`` in their order: lists, arrays or
            tensors of shape (n_valid, ...).

    Returns:
        Shape (n, ...). A sample that several folds validate on (``repeats``) has the mean of
        fractions, and of other values (whole numbers, booleans, texts) that of the first fold. A
        sample that no fold validates on has NaN (None among texts).

    Raises:
        FoldError: a fold does not have one prediction for each of its samples, or the shapes of
            the folds' predictions differ.
    """
    import numpy as np

    arrays = {index: _checked(folds, index, part) for index, part in sorted(parts.items())}
    samples = np.concatenate([folds.valid_indices(index) for index in arrays])
    rows = _concatenate(list(arrays.values()))
    counts = np.bincount(samples, minlength=folds.n_samples)
    combine = _mean if rows.dtype.kind in "fc" else _first
    predictions = combine(rows, samples, counts)
    return predictions if counts.all() else _with_gaps(predictions, counts == 0)


def _checked(folds: Folds, index: int, part: object) -> Array:
    array = as_array(part)
    size = len(folds.valid_indices(index))
    if array.ndim == 0 or len(array) != size:
        got = "a single value" if array.ndim == 0 else f"{len(array)} predictions"
        raise FoldError(
            f"fold {index} returned {got} for {size} validation samples",
            allowed="one for each of ctx.fold.valid_indices, in their order",
            do="return all of them from every rank: nb.predict(ctx, model, inputs) gathers them",
        )
    return array


def as_array(part: object) -> Array:
    """Convert predictions, as an array, a tensor or a list of either, to an array."""
    import numpy as np

    if hasattr(part, "detach"):
        part = part.detach().cpu()
    elif isinstance(part, (list, tuple)) and part and hasattr(part[0], "detach"):
        part = [row.detach().cpu().numpy() for row in part]
    return np.asarray(part)


def _concatenate(arrays: list[Array]) -> Array:
    import numpy as np

    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1:
        raise FoldError(
            f"the folds' predictions differ in shape: {', '.join(map(str, sorted(shapes)))}",
            allowed="predictions of one shape",
            do="return scores of all classes, with those that a fold has not seen",
        )
    return np.concatenate(arrays)


def _mean(rows: Array, samples: Array, counts: Array) -> Array:
    """Return the mean of the rows of each sample; ``counts``: rows per sample."""
    import numpy as np

    sums = np.zeros((len(counts), *rows.shape[1:]), dtype=rows.dtype)
    np.add.at(sums, samples, rows)
    divisors = np.maximum(counts, 1).astype(sums.real.dtype)
    mean: Array = sums / divisors.reshape(-1, *[1] * (rows.ndim - 1))
    return mean


def _first(rows: Array, samples: Array, counts: Array) -> Array:
    """Return the first row of each sample; ``counts``: rows per sample."""
    import numpy as np

    result = np.zeros((len(counts), *rows.shape[1:]), dtype=rows.dtype)
    # Of rows with the same index, NumPy keeps the last one.
    result[samples[::-1]] = rows[::-1]
    return result


def _with_gaps(predictions: Array, gaps: NDArray[np.bool_]) -> Array:
    """Return the predictions with NaN (or None) for samples without one."""
    numeric = predictions.dtype.kind in "biufc"
    if predictions.dtype.kind not in "fc":
        predictions = predictions.astype(float if numeric else object)
    predictions[gaps] = float("nan") if numeric else None
    return predictions
