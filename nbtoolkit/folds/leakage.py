"""Find what a fold's validation samples have in common with its training samples."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from nbtoolkit.errors import FoldError, FoldWarning

if TYPE_CHECKING:
    from numpy.typing import NDArray


# --- columns ---
# One value a sample, in whatever the user keeps it.


def as_column(values: Any, name: str, *, n_samples: int | None = None) -> NDArray[Any]:
    """One value a sample, as an array of shape (n,).

    Args:
        values: a list, array, tensor or Series.
        name: what it is, for the message.
        n_samples: how many there must be; None: any number.

    Raises:
        FoldError: it has another shape or length.
    """
    import numpy as np

    if hasattr(values, "detach"):  # a tensor, on whatever device
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


def digest_of(targets: NDArray[Any]) -> str:
    """16 hex digits over the targets, the same for a list, an array and a tensor of them."""
    kind = {"b": "<i8", "i": "<i8", "u": "<i8", "f": "<f8"}.get(targets.dtype.kind)
    data = targets.astype(kind).tobytes() if kind else "\n".join(map(str, targets)).encode()
    return hashlib.sha256(data).hexdigest()[:16]


# --- leaks ---


if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from nbtoolkit.folds.folds import Fold, Folds

    Mask: TypeAlias = NDArray[np.bool_]

LeakKind = Literal["rows", "groups", "time"]


@dataclass(frozen=True)
class Leak:
    """One kind of leak, counted over all folds.

    Attributes:
        kind: ``"rows"`` (equal inputs on both sides), ``"groups"`` (a group on both sides),
            ``"time"`` (trained on what is later than what is validated on).
        samples: samples concerned, each counted once: those validated on (``"rows"``,
            ``"groups"``), or trained on (``"time"``).
        folds: the folds in which there are any.
        text: the same as a sentence.
    """

    kind: LeakKind
    samples: int
    folds: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def find_leaks(folds: Folds, X: Any = None, *, groups: Any = None, time: Any = None) -> list[Leak]:
    """Count what validation samples share with those trained on; see :meth:`Folds.check`.

    Raises:
        FoldError: an argument has another number of samples than the folds.
    """
    found = []
    if X is not None:
        found.append(_rows(folds, row_numbers(X, folds.n_samples)))
    if groups is not None:
        found.append(_groups(folds, as_column(groups, "groups", n_samples=folds.n_samples)))
    if time is not None:
        found.append(_time(folds, as_column(time, "time", n_samples=folds.n_samples)))
    return [leak for leak in found if leak.samples]


def warn_of(leaks: list[Leak]) -> list[Leak]:
    """Warn of each leak at the line that called :meth:`Folds.check`; returns them."""
    for leak in leaks:
        warnings.warn(FoldWarning(leak.text), stacklevel=3)
    return leaks


# --- the three kinds ---


def _rows(folds: Folds, numbers: NDArray[Any]) -> Leak:
    shared, where = _seen(folds, lambda fold: _common(numbers, fold))
    count = int(shared.sum())
    text = (
        f"{count} of {folds.n_samples} samples are validated on although an equal row is trained "
        f"on in the same fold ({_named(where)}): remove duplicates, or keep them together with "
        "kind='group'"
    )
    return Leak("rows", count, where, text)


def _groups(folds: Folds, groups: NDArray[Any]) -> Leak:
    import numpy as np

    names, numbers = np.unique(groups, return_inverse=True)
    shared, where = _seen(folds, lambda fold: _common(numbers, fold))
    count, torn = int(shared.sum()), np.unique(numbers[shared])
    text = (
        f"{len(torn)} of {len(names)} groups are on both sides of a fold ({_named(where)}; such "
        f"as {names[torn[0]] if len(torn) else None}), {count} samples: make the folds with "
        "kind='group' or 'stratified_group'"
    )
    return Leak("groups", count, where, text)


def _time(folds: Folds, time: NDArray[Any]) -> Leak:
    moments = _codes(time)  # numbers, in order: texts have no minimum

    def later(fold: Fold) -> NDArray[Any]:
        late: Mask = moments[fold.train_indices] > moments[fold.valid_indices].min()
        return fold.train_indices[late]

    trained, where = _seen(folds, later)
    count = int(trained.sum())
    text = (
        f"{count} of {folds.n_samples} samples are trained on although they are later than the "
        f"first sample that their fold validates on ({_named(where)}): sort the data by time and "
        "make the folds with kind='time'"
    )
    return Leak("time", count, where, text)


def _seen(folds: Folds, of_fold: Callable[[Fold], NDArray[Any]]) -> tuple[Mask, tuple[int, ...]]:
    """The samples found in any fold, as a mask over the data set, and the folds with some."""
    import numpy as np

    mask, where = np.zeros(folds.n_samples, dtype=bool), []
    for fold in folds:
        found = of_fold(fold)
        mask[found] = True
        if len(found):
            where.append(fold.index)
    return mask, tuple(where)


def _common(numbers: NDArray[Any], fold: Fold) -> NDArray[Any]:
    """Validation samples whose number is that of a sample trained on."""
    import numpy as np

    valid = fold.valid_indices
    return valid[np.isin(numbers[valid], numbers[fold.train_indices])]


def _named(folds: Sequence[int]) -> str:
    listed = ", ".join(map(str, folds[:8])) + (", ..." if len(folds) > 8 else "")
    return f"fold {listed}" if len(folds) == 1 else f"folds {listed}"


# --- which rows are equal ---


def row_numbers(X: Any, n_samples: int) -> NDArray[Any]:
    """A number for each row, the same for equal ones: int64 of shape (n,).

    Args:
        X: one row a sample: an array or tensor of shape (n, ...), a DataFrame, or a list.
        n_samples: how many rows there must be.

    Raises:
        FoldError: there are more, or fewer.
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
    if hasattr(X, "columns"):  # a DataFrame: each column has a type of its own
        return np.stack([_codes(X[name].to_numpy()) for name in X.columns], axis=1)
    array = np.asarray(X)
    array = array.reshape(len(array), -1)
    if array.dtype.kind in "biuf":
        return array + 0 if array.dtype.kind != "b" else array  # -0.0 becomes 0.0
    return np.stack([_codes(column) for column in array.T], axis=1)


def _codes(column: NDArray[Any]) -> NDArray[np.int64]:
    """A number for each value, the same for equal ones, in their order."""
    import numpy as np

    values = column if column.dtype.kind in "biufMmU" else column.astype(str)
    return np.unique(values, return_inverse=True)[1].ravel()
