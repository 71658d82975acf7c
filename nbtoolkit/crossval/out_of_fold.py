"""Assemble out-of-fold predictions, write them as a table, and average the folds' models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from nbtoolkit.errors import FoldError, MissingExtra
from nbtoolkit.folds.folds import Folds
from nbtoolkit.run.paths import atomic_file

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    from numpy.typing import ArrayLike, NDArray
    from torch import Tensor

    Array: TypeAlias = NDArray[Any]


class Ensemble:
    """The mean of several models' outputs, without gradients.

    Args:
        models: in evaluation mode; called with the same inputs.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self.models = tuple(models)

    def __call__(self, *inputs: object) -> Tensor:
        """The mean of the models' outputs: of logits, if the models return logits.

        Args:
            inputs: the arguments of one model, on the models' device.

        Raises:
            FoldError: the outputs are not tensors of one shape.
        """
        import torch

        with torch.no_grad():
            outputs = [model(*inputs) for model in self.models]
        if len({getattr(output, "shape", None) for output in outputs} | {None}) != 2:
            kinds = sorted({type(output).__name__ for output in outputs})
            raise FoldError(
                f"the outputs of the {len(outputs)} models ({', '.join(kinds)}) have no mean",
                allowed="models whose output is one tensor, of the same shape for all",
                do="call each of ensemble.models, and combine their outputs yourself",
            )
        return torch.stack(outputs).mean(dim=0)

    def __len__(self) -> int:
        return len(self.models)

    def __repr__(self) -> str:
        kinds = ", ".join(sorted({type(model).__name__ for model in self.models}))
        return f"Ensemble({len(self.models)} x {kinds})"


def assemble(folds: Folds, parts: Mapping[int, object]) -> Array:
    """Assemble one prediction for each sample, made by the model that did not see it.

    Args:
        folds: folds of n samples.
        parts: fold -> its predictions for ``valid_indices`` in their order: lists, arrays or
            tensors of shape (n_valid, ...).

    Returns:
        Shape (n, ...). A sample that several folds validate on (``repeats``) has the mean of
        fractions, and the most frequent one of classes (whole numbers, booleans, texts; the least
        of equally frequent ones). A sample that no fold validates on has NaN (None among texts).

    Raises:
        FoldError: a fold does not have one prediction for each of its samples, or the shapes of
            the folds' predictions differ.
    """
    import numpy as np

    arrays = {index: _checked(folds, index, part) for index, part in sorted(parts.items())}
    samples = np.concatenate([folds.valid_indices(index) for index in arrays])
    rows = _concatenate(list(arrays.values()))
    counts = np.bincount(samples, minlength=folds.n_samples)
    combine = _mean if rows.dtype.kind in "fc" else _most_frequent
    predictions = combine(rows, samples, counts)
    return predictions if counts.all() else _with_gaps(predictions, counts == 0)


def write_table(
    path: Path,
    folds: Folds,
    predictions: Array,
    *,
    ids: ArrayLike | None,
    targets: ArrayLike | None,
    metadata: Mapping[str, str],
) -> None:
    """Write out-of-fold predictions as parquet; see ``CVResult.write_out_of_fold``.

    Raises:
        MissingExtra: pyarrow is not installed.
        FoldError: ``ids`` or ``targets`` are not one value for each sample.
    """
    import numpy as np

    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtra(
            "an out-of-fold table is a parquet file, and pyarrow is not installed",
            allowed="cv.oof has the same predictions as an array",
            do="pip install pyarrow",
        ) from error
    number = np.full(folds.n_samples, -1)
    for index in reversed(range(len(folds))):  # of several repeats, the first
        number[folds.valid_indices(index)] = index
    columns = {"index" if ids is None else "id": np.arange(folds.n_samples), "fold": number}
    for name, values in (("id", ids), ("target", targets)):
        if values is not None:
            columns[name] = np.asarray(values)
            if columns[name].shape != (folds.n_samples,):
                raise FoldError(
                    f"{name}s has the shape {columns[name].shape} for {folds.n_samples} samples",
                    allowed="one value for each sample, in the order of the data set",
                    do="pass the column of the data that nb.make_folds was given",
                )
    flat = predictions.reshape(folds.n_samples, -1)
    for at in range(flat.shape[1]):
        columns["prediction" if predictions.ndim == 1 else f"prediction_{at}"] = flat[:, at]
    table = pyarrow.table(columns)
    with atomic_file(path) as file:
        parquet.write_table(table.replace_schema_metadata(dict(metadata)), file)


def _checked(folds: Folds, index: int, part: object) -> Array:
    array, size = as_array(part), len(folds.valid_indices(index))
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
    """The mean of the rows of each sample; ``counts``: rows per sample."""
    import numpy as np

    sums = np.zeros((len(counts), *rows.shape[1:]), dtype=rows.dtype)
    np.add.at(sums, samples, rows)
    divisors = np.maximum(counts, 1).astype(sums.real.dtype)
    mean: Array = sums / divisors.reshape(-1, *[1] * (rows.ndim - 1))
    return mean


def _most_frequent(rows: Array, samples: Array, counts: Array) -> Array:
    """The most frequent value of each sample (and column); ``counts``: rows per sample."""
    import numpy as np

    result = np.zeros((len(counts), *rows.shape[1:]), dtype=rows.dtype)
    if counts.max() <= 1:
        result[samples] = rows
        return result
    classes, codes = np.unique(rows, return_inverse=True)
    width = int(np.prod(rows.shape[1:], dtype=int))
    cells = (samples[:, None] * width + np.arange(width)).ravel()
    # The votes of each pair of cell and class, by cell, then by class.
    pairs, votes = np.unique(np.stack([cells, codes.ravel()]), axis=1, return_counts=True)
    order = np.lexsort((pairs[1], -votes, pairs[0]))
    voted_cells, first = np.unique(pairs[0][order], return_index=True)
    result.reshape(-1)[voted_cells] = classes[pairs[1][order][first]]
    return result


def _with_gaps(predictions: Array, gaps: NDArray[np.bool_]) -> Array:
    """The predictions with NaN (or None) for samples without one."""
    numeric = predictions.dtype.kind in "biufc"
    if predictions.dtype.kind not in "fc":
        predictions = predictions.astype(float if numeric else object)
    predictions[gaps] = float("nan") if numeric else None
    return predictions
