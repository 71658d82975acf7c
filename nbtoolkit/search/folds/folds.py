"""Define the folds of a data set, compare them by hash, and save them to files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

from nbtoolkit.cards import properties_html
from nbtoolkit.errors import FoldError
from nbtoolkit.run.paths import write_whole

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    Column: TypeAlias = NDArray[Any]
    Indices: TypeAlias = NDArray[np.int64]

FoldKind = Literal["stratified", "kfold", "group", "stratified_group", "time", "predefined"]

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
        return properties_html(repr(self), sizes, ["samples to train on + to validate on"])


def _read(path: Path) -> Folds:
    saved = json.loads(path.read_text())
    valid = saved["valid"]
    train = saved.get("train")
    if train is None:
        train = [others(part, saved["n_samples"]) for part in valid]
    pairs = list(zip(train, valid, strict=True))
    names = ("kind", "n_samples", "repeats", "seed", "target")
    folds = Folds(pairs=frozen(pairs), **{name: saved[name] for name in names})
    if folds.hash != saved["hash"]:
        raise ValueError(f"its samples have the hash {folds.hash}, not {saved['hash']}")
    return folds


def others(indices: Sequence[int] | Indices, n_samples: int) -> Indices:
    """Return the samples not in ``indices``, ascending."""
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
    """Return a hash of the targets, 16 hex digits: one for a list, an array and a tensor."""
    kind = {"b": "<i8", "i": "<i8", "u": "<i8", "f": "<f8"}.get(targets.dtype.kind)
    data = targets.astype(kind).tobytes() if kind else "\n".join(map(str, targets)).encode()
    return hashlib.sha256(data).hexdigest()[:16]
