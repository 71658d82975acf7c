"""Assemble out-of-fold predictions, and average the folds' models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import FoldError
from nbtoolkit.folds.folds import Folds

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor


# --- ensemble ---
# The folds' models as one, which answers with the mean of what they answer.


class Ensemble:
    """The mean of several models' outputs, without gradients.

    Args:
        models: in evaluation mode; called with the same inputs.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self.models = tuple(models)

    def __call__(self, *inputs: Any) -> Tensor:
        """The models' mean output: of logits, where they give logits.

        Args:
            inputs: what one model takes, on the models' device.

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
                do="call ensemble.models one by one, and put their outputs together yourself",
            )
        return torch.stack(outputs).mean(dim=0)

    def __len__(self) -> int:
        return len(self.models)

    def __repr__(self) -> str:
        kinds = ", ".join(sorted({type(model).__name__ for model in self.models}))
        return f"Ensemble({len(self.models)} x {kinds})"


# --- out of fold ---


def assemble(folds: Folds, parts: Mapping[int, Any]) -> NDArray[Any]:
    """One prediction for each sample, made by the model that did not see it.

    Args:
        folds: n samples.
        parts: by fold, its predictions for ``valid_indices`` in their order: lists, arrays or
            tensors of shape (n_valid, ...).

    Returns:
        Shape (n, ...). A sample that several folds validate on (``repeats``) has the mean of
        fractions, and the most frequent one of classes (whole numbers, booleans, texts; of equally
        frequent ones the least). One that none validates on has NaN (None among texts).

    Raises:
        FoldError: a fold's predictions are not one for each of its samples, or the folds' differ
            in shape.
    """
    import numpy as np

    arrays = {index: _checked(folds, index, part) for index, part in sorted(parts.items())}
    samples = np.concatenate([folds.valid_indices(index) for index in arrays])
    rows = _joined(list(arrays.values()))
    seen = np.bincount(samples, minlength=folds.n_samples)
    whole = _mean(rows, samples, seen) if rows.dtype.kind in "fc" else _vote(rows, samples, seen)
    return whole if seen.all() else _with_gaps(whole, seen == 0)


def _checked(folds: Folds, index: int, part: Any) -> NDArray[Any]:
    array, size = _as_array(part), len(folds.valid_indices(index))
    if array.ndim == 0 or len(array) != size:
        got = "a single value" if array.ndim == 0 else f"{len(array)} predictions"
        raise FoldError(
            f"fold {index} returned {got} for {size} validation samples",
            allowed="one for each of ctx.fold.valid_indices, in their order",
            do="return all of them from every rank: nb.predict(ctx, model, inputs) gathers them",
        )
    return array


def _as_array(part: Any) -> NDArray[Any]:
    import numpy as np

    if hasattr(part, "detach"):
        part = part.detach().cpu()
    elif isinstance(part, (list, tuple)) and part and hasattr(part[0], "detach"):
        part = [one.detach().cpu().numpy() for one in part]
    return np.asarray(part)


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    import numpy as np

    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1:
        raise FoldError(
            f"the folds' predictions differ in shape: {', '.join(map(str, sorted(shapes)))}",
            allowed="predictions of one shape",
            do="return scores of all classes, also of those that a fold has not seen",
        )
    return np.concatenate(arrays)


def _mean(rows: NDArray[Any], samples: NDArray[Any], seen: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    whole = np.zeros((len(seen), *rows.shape[1:]), dtype=rows.dtype)
    np.add.at(whole, samples, rows)
    counts = np.maximum(seen, 1).astype(whole.real.dtype)
    mean: NDArray[Any] = whole / counts.reshape(-1, *[1] * (rows.ndim - 1))
    return mean


def _vote(rows: NDArray[Any], samples: NDArray[Any], seen: NDArray[Any]) -> NDArray[Any]:
    """The most frequent value of each sample (and column)."""
    import numpy as np

    whole = np.zeros((len(seen), *rows.shape[1:]), dtype=rows.dtype)
    if seen.max() <= 1:
        whole[samples] = rows
        return whole
    names, codes = np.unique(rows, return_inverse=True)
    width = int(np.prod(rows.shape[1:], dtype=int))
    cells = (samples[:, None] * width + np.arange(width)).ravel()
    ballots, votes = np.unique(
        np.stack([cells, codes.ravel()]), axis=1, return_counts=True
    )  # by cell, then by value
    order = np.lexsort((ballots[1], -votes, ballots[0]))
    voted, first = np.unique(ballots[0][order], return_index=True)
    whole.reshape(-1)[voted] = names[ballots[1][order][first]]
    return whole


def _with_gaps(whole: NDArray[Any], gaps: NDArray[np.bool_]) -> NDArray[Any]:
    """The array with NaN (or None) where there is no prediction."""
    numeric = whole.dtype.kind in "biufc"
    if whole.dtype.kind not in "fc":
        whole = whole.astype(float if numeric else object)
    whole[gaps] = float("nan") if numeric else None
    return whole
