"""Define the folds of a data set, compare them by hash, save them to files and look for leaks."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

from nbtoolkit.errors import FoldError, FoldWarning
from nbtoolkit.run.paths import write_whole
from nbtoolkit.text_table import html_table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    Column: TypeAlias = NDArray[Any]
    Indices: TypeAlias = NDArray[np.int64]
    Mask: TypeAlias = NDArray[np.bool_]

FoldKind = Literal["stratified", "kfold", "group", "stratified_group", "time", "predefined"]
LeakKind = Literal["rows", "groups", "time"]

_PROPERTIES = ("kind", "n_samples", "k", "repeats", "seed", "target", "hash")


@dataclass(frozen=True, eq=False)
class Fold:
    """One fold: ``ctx.fold`` inside a cross-validation.

    Attributes:
        index: its number, 0 to ``len(folds) - 1``.
        train_indices: samples to train on, int64 of shape (n_train,), ascending.
        valid_indices: samples to validate on, int64 of shape (n_valid,), ascending.
    """

    index: int
    train_indices: Indices
    valid_indices: Indices

    def __repr__(self) -> str:
        sizes = f"train={len(self.train_indices)}, valid={len(self.valid_indices)}"
        return f"Fold({self.index}, {sizes})"

    if not TYPE_CHECKING:  # else type checkers would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Name the attributes of a fold in the error about another one, such as ``train``."""
            raise AttributeError(
                f"a fold has no attribute {name!r}\n"
                "  Allowed: index, train_indices, valid_indices\n"
                "  Do now:  train on x[ctx.fold.train_indices], validate on "
                "x[ctx.fold.valid_indices]"
            )


@dataclass(frozen=True, eq=False, repr=False)
class Folds:
    """The folds of a data set, from :func:`nbtoolkit.make_folds`: a sequence of :class:`Fold`.

    Two Folds are equal if they split the data set in the same way. They then have the same
    ``hash``.

    Attributes:
        kind: how the folds were made, as in ``make_folds``.
        n_samples: the number of samples in the data set.
        pairs: the train and validation indices of each fold.
        repeats: how often the whole data set is split. The folds of the first split come first.
        seed: the seed of the shuffle; None without a shuffle.
        target: a hash of the targets that the folds were made for, 16 hex digits; None: unknown.
    """

    kind: FoldKind
    n_samples: int
    pairs: tuple[tuple[Indices, Indices], ...]
    repeats: int = 1
    seed: int | None = None
    target: str | None = None

    @property
    def k(self) -> int:
        """The number of folds of one repeat."""
        return len(self.pairs) // self.repeats

    def train_indices(self, index: int) -> Indices:
        """Return a copy of the samples that fold ``index`` trains on, int64 of shape (n_train,)."""
        return self[index].train_indices

    def valid_indices(self, index: int) -> Indices:
        """Return a copy of fold ``index``'s validation samples, int64 of shape (n_valid,)."""
        return self[index].valid_indices

    def check(self, X: Any = None, *, groups: Any = None, time: Any = None) -> list[Leak]:
        """Look for leaks between training and validation samples, and warn of them.

        Args:
            X: the inputs, one row per sample, as an array, tensor, DataFrame or list. A validation
                sample is a leak if its row is equal, bit for bit, to the row of a training sample.
            groups: the group of each sample (patient, author, scene), shape (n,). A validation
                sample is a leak if a training sample has the same group.
            time: the time of each sample, shape (n,), as numbers, dates or strings that sort by
                time. A training sample is a leak if it is later than the fold's first validation
                sample.

        Returns:
            One :class:`~nbtoolkit.folds.folds.Leak` for each kind of leak, or an empty list. Each
            one was also shown as a :class:`~nbtoolkit.errors.FoldWarning`.

        Raises:
            FoldError: ``X``, ``groups`` or ``time`` has another number of samples than the folds.
        """
        leaks = []
        if X is not None:
            leaks.append(_equal_rows(self, row_numbers(X, self.n_samples)))
        if groups is not None:
            groups = as_column(groups, "groups", n_samples=self.n_samples)
            leaks.append(_shared_groups(self, groups))
        if time is not None:
            leaks.append(_later_samples(self, as_column(time, "time", n_samples=self.n_samples)))
        leaks = [leak for leak in leaks if leak.samples]
        for leak in leaks:
            warnings.warn(FoldWarning(leak.text), stacklevel=2)
        return leaks

    @cached_property
    def hash(self) -> str:
        """A hash of the data set's size and every fold's samples, 16 hex digits."""
        digest = hashlib.sha256(str(self.n_samples).encode())
        for train, valid in self.pairs:
            for part in (train, valid):
                digest.update(f"|{len(part)}|".encode() + part.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def differences(self, other: Folds) -> dict[str, tuple[object, object]]:
        """Return the properties that differ, as ``{name: (value here, value in other)}``."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in _PROPERTIES}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the folds as JSON, atomically.

        Args:
            path: the file.

        Returns:
            The same path.

        Raises:
            OSError: the file cannot be written.
        """
        path = Path(path)
        saved = {name: getattr(self, name) for name in _PROPERTIES}
        saved["valid"] = [valid.tolist() for _, valid in self.pairs]
        # Train indices are left out if every fold trains on all that it does not validate on.
        if any(len(train) + len(valid) != self.n_samples for train, valid in self.pairs):
            saved["train"] = [train.tolist() for train, _ in self.pairs]
        write_whole(path, json.dumps(saved) + "\n")
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Folds:
        """Read folds from a file that :meth:`save` wrote.

        Raises:
            FoldError: there is no such file, or it is damaged (its hash does not match).
        """
        try:
            return _read(Path(path))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise FoldError(
                f"the folds cannot be read from {path}: {error}",
                allowed="a file that folds.save(path) wrote",
                do="restore it from a copy, or make the folds again with nb.make_folds",
            ) from error

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Fold:
        number = range(len(self.pairs))[index]  # IndexError after the last; -1 is the last
        # Writable copies: torch warns of read-only arrays, once for the whole process.
        train, valid = (part.copy() for part in self.pairs[number])
        return Fold(number, train, valid)

    def __iter__(self) -> Iterator[Fold]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folds) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    def __repr__(self) -> str:
        times = f" x {self.repeats}" if self.repeats > 1 else ""
        return f"Folds({self.kind}, {self.k}{times}, n_samples={self.n_samples}, {self.hash})"

    def _repr_html_(self) -> str:
        sizes = [
            (f"fold {fold.index}", f"{len(fold.train_indices)} + {len(fold.valid_indices)}")
            for fold in self
        ]
        return html_table(repr(self), sizes, ["samples to train on + to validate on"])


def _read(path: Path) -> Folds:
    saved = json.loads(path.read_text())
    valid, train = saved["valid"], saved.get("train")
    if train is None:
        train = [others(part, saved["n_samples"]) for part in valid]
    pairs = list(zip(train, valid, strict=True))
    names = ("kind", "n_samples", "repeats", "seed", "target")
    folds = Folds(pairs=frozen(pairs), **{name: saved[name] for name in names})
    if folds.hash != saved["hash"]:
        raise ValueError(f"its samples have the hash {folds.hash}, not {saved['hash']}")
    return folds


def others(indices: Sequence[int] | Indices, n_samples: int) -> Indices:
    """The samples not in ``indices``, ascending."""
    import numpy as np

    mask = np.ones(n_samples, dtype=bool)
    mask[np.asarray(indices, dtype=np.int64)] = False
    return np.flatnonzero(mask)


def frozen(pairs: Sequence[tuple[ArrayLike, ArrayLike]]) -> tuple[tuple[Indices, Indices], ...]:
    """Pairs of index lists as read-only int64 arrays."""
    return tuple((_frozen(train), _frozen(valid)) for train, valid in pairs)


def _frozen(indices: ArrayLike) -> Indices:
    import numpy as np

    array = np.array(indices, dtype=np.int64)
    array.setflags(write=False)
    return array


# --- leaks between training and validation samples ---


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
