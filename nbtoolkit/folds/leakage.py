"""Find what a fold's validation samples have in common with its training samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from nbtoolkit.errors import FoldError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from nbtoolkit.folds.folds import Fold, Folds, Indices

    Column: TypeAlias = NDArray[Any]
    Mask: TypeAlias = NDArray[np.bool_]

LeakKind = Literal["rows", "groups", "time"]


@dataclass(frozen=True)
class Leak:
    """One kind of leak, counted over all folds.

    Attributes:
        kind: ``"rows"`` (equal inputs on both sides), ``"groups"`` (a group on both sides),
            ``"time"`` (training samples later than validation samples).
        samples: the samples concerned, each counted once: validation samples (``"rows"``,
            ``"groups"``) or training samples (``"time"``).
        folds: the folds in which there are any.
        text: the same as a sentence.
    """

    kind: LeakKind
    samples: int
    folds: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def find_leaks(
    folds: Folds, X: object = None, *, groups: object = None, time: object = None
) -> list[Leak]:
    """Count what validation samples share with training samples; see :meth:`Folds.check`.

    Raises:
        FoldError: an argument has another number of samples than the folds.
    """
    leaks = []
    if X is not None:
        leaks.append(_equal_rows(folds, row_numbers(X, folds.n_samples)))
    if groups is not None:
        leaks.append(_shared_groups(folds, as_column(groups, "groups", n_samples=folds.n_samples)))
    if time is not None:
        leaks.append(_later_samples(folds, as_column(time, "time", n_samples=folds.n_samples)))
    return [leak for leak in leaks if leak.samples]


def _equal_rows(folds: Folds, numbers: Indices) -> Leak:
    shared, where = _collect(folds, lambda fold: _shared(numbers, fold))
    count = int(shared.sum())
    text = (
        f"{count} of {folds.n_samples} samples are validated on although an equal row is trained "
        f"on in the same fold ({_listed(where)}): remove duplicates, or keep them together with "
        "kind='group'"
    )
    return Leak("rows", count, where, text)


def _shared_groups(folds: Folds, groups: Column) -> Leak:
    import numpy as np

    names, numbers = np.unique(groups, return_inverse=True)
    shared, where = _collect(folds, lambda fold: _shared(numbers, fold))
    count, torn = int(shared.sum()), np.unique(numbers[shared])
    text = (
        f"{len(torn)} of {len(names)} groups are on both sides of a fold ({_listed(where)}; such "
        f"as {names[torn[0]] if len(torn) else None}), {count} samples: make the folds with "
        "kind='group' or 'stratified_group'"
    )
    return Leak("groups", count, where, text)


def _later_samples(folds: Folds, time: Column) -> Leak:
    moments = _codes(time)  # numbers, in order: texts have no minimum

    def later(fold: Fold) -> Indices:
        late: Mask = moments[fold.train_indices] > moments[fold.valid_indices].min()
        return fold.train_indices[late]

    trained, where = _collect(folds, later)
    count = int(trained.sum())
    text = (
        f"{count} of {folds.n_samples} samples are trained on although they are later than the "
        f"first sample that their fold validates on ({_listed(where)}): sort the data by time and "
        "make the folds with kind='time'"
    )
    return Leak("time", count, where, text)


def _collect(folds: Folds, leaked: Callable[[Fold], Indices]) -> tuple[Mask, tuple[int, ...]]:
    """The samples leaked in any fold, as a mask over the data set, and the folds with some."""
    import numpy as np

    mask, where = np.zeros(folds.n_samples, dtype=bool), []
    for fold in folds:
        samples = leaked(fold)
        mask[samples] = True
        if len(samples):
            where.append(fold.index)
    return mask, tuple(where)


def _shared(numbers: Indices, fold: Fold) -> Indices:
    """Validation samples whose number a training sample has, too."""
    import numpy as np

    valid = fold.valid_indices
    return valid[np.isin(numbers[valid], numbers[fold.train_indices])]


def _listed(folds: Sequence[int]) -> str:
    listed = ", ".join(map(str, folds[:8])) + (", ..." if len(folds) > 8 else "")
    return f"fold {listed}" if len(folds) == 1 else f"folds {listed}"


# --- arrays of whatever the user passes ---


def as_column(values: Any, name: str, *, n_samples: int | None = None) -> Column:
    """One value per sample, as an array of shape (n,).

    Args:
        values: a list, array, tensor or Series.
        name: of the argument, for messages.
        n_samples: the required length; None: any.

    Raises:
        FoldError: ``values`` has another shape or length.
    """
    import numpy as np

    if hasattr(values, "detach"):  # a tensor, on any device
        values = values.detach().cpu()
    array = np.asarray(values)
    if array.ndim != 1:
        raise FoldError(
            f"{name} has the shape {array.shape}, not one value for each sample",
            allowed="a list, array, tensor or Series of shape (n,)",
            do=f"pass a column: {name}[:, 0], or for one-hot labels {name}.argmax(axis=1)",
        )
    if n_samples is not None and len(array) != n_samples:
        raise FoldError(
            f"{name} has {len(array)} values for {n_samples} samples",
            allowed="one for each sample, in the data set's order",
            do=f"pass the {name} of the same samples",
        )
    return array


def digest_of(targets: Column) -> str:
    """A hash of the targets, 16 hex digits, equal for a list, an array and a tensor of them."""
    kind = {"b": "<i8", "i": "<i8", "u": "<i8", "f": "<f8"}.get(targets.dtype.kind)
    data = targets.astype(kind).tobytes() if kind else "\n".join(map(str, targets)).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def row_numbers(X: Any, n_samples: int) -> Indices:
    """A number for each row, the same for equal rows: int64 of shape (n,).

    Args:
        X: one row per sample: an array or tensor of shape (n, ...), a DataFrame, or a list.
        n_samples: the required number of rows.

    Raises:
        FoldError: ``X`` has another number of rows.
    """
    import numpy as np

    rows = _as_rows(X)
    if len(rows) != n_samples:
        raise FoldError(
            f"X has {len(rows)} rows for {n_samples} samples",
            allowed="one row for each sample, in the data set's order",
            do="pass the inputs of the same samples that the folds were made for",
        )
    keys = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.itemsize * rows.shape[1])))
    return np.unique(keys.ravel(), return_inverse=True)[1].ravel()


def _as_rows(X: Any) -> NDArray[Any]:
    """Rows of plain numbers, shape (n, columns): texts and other objects become numbers."""
    import numpy as np

    if hasattr(X, "detach"):
        X = X.detach().cpu()
    if hasattr(X, "columns"):  # a DataFrame: each column has its own type
        return np.stack([_codes(X[name].to_numpy()) for name in X.columns], axis=1)
    array = np.asarray(X)
    array = array.reshape(len(array), -1)
    if array.dtype.kind in "biuf":
        return array + 0 if array.dtype.kind != "b" else array  # -0.0 becomes 0.0
    return np.stack([_codes(column) for column in array.T], axis=1)


def _codes(column: Column) -> Indices:
    """A number for each value, the same for equal values, in their order."""
    import numpy as np

    values = column if column.dtype.kind in "biufMmU" else column.astype(str)
    numbers: Indices = np.unique(values, return_inverse=True)[1].ravel()
    return numbers
