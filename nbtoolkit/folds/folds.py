"""Define the folds of a data set: frozen, hashed, and saved to files."""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from nbtoolkit.errors import FoldError, FoldWarning
from nbtoolkit.run.paths import write_whole
from nbtoolkit.text_table import html_table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from nbtoolkit.folds.leakage import Leak

    Indices: TypeAlias = NDArray[np.int64]

FoldKind = Literal["stratified", "kfold", "group", "stratified_group", "time", "predefined"]

_PROPERTIES = ("kind", "n_samples", "k", "repeats", "seed", "target", "hash")
_INLINE = 20_000  # numbers in folds.json (about 100 kB); more go into folds.npz beside it


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


@dataclass(frozen=True, eq=False, repr=False)
class Folds:
    """The folds of a data set, from :func:`nbtoolkit.make_folds`: a sequence of :class:`Fold`.

    Two are equal if they split alike; then their ``hash`` is equal.

    Attributes:
        kind: how they were made.
        n_samples: samples of the data set.
        pairs: train and validation indices of each fold.
        repeats: how often the whole data set is split; the folds of the first split come first.
        seed: of the shuffle; None without a shuffle.
        target: a hash of the targets they were made for, 16 hex digits; None: not known.
    """

    kind: FoldKind
    n_samples: int
    pairs: tuple[tuple[Indices, Indices], ...]
    repeats: int = 1
    seed: int | None = None
    target: str | None = None

    @property
    def k(self) -> int:
        """Folds of one repeat."""
        return len(self.pairs) // self.repeats

    def train_indices(self, index: int) -> Indices:
        """Samples that fold ``index`` trains on: int64 of shape (n_train,), a copy."""
        return self[index].train_indices

    def valid_indices(self, index: int) -> Indices:
        """Samples that fold ``index`` validates on: int64 of shape (n_valid,), a copy."""
        return self[index].valid_indices

    def check(self, X: Any = None, *, groups: Any = None, time: Any = None) -> list[Leak]:
        """Look for leaks between training and validation samples, and warn of them.

        Args:
            X: the inputs, one row per sample: an array, tensor, DataFrame or list. Counts
                validation samples whose row is equal, bit for bit, to a training sample's.
            groups: a group for each sample (patient, author, scene), shape (n,). Counts validation
                samples whose group has a training sample.
            time: a time for each sample, shape (n,), as numbers, dates or texts that sort. Counts
                training samples that are later than the fold's first validation sample.

        Returns:
            One :class:`~nbtoolkit.folds.leakage.Leak` per kind found, each warned of once as a
            :class:`~nbtoolkit.errors.FoldWarning`; empty: there are none.

        Raises:
            FoldError: ``X``, ``groups`` or ``time`` has another number of samples.
        """
        from nbtoolkit.folds.leakage import find_leaks

        leaks = find_leaks(self, X, groups=groups, time=time)
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
        """The properties that differ: name -> (of these, of ``other``); empty: they are equal."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in _PROPERTIES}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def save(self, path: str | Path) -> Path:
        """Write the folds as JSON, atomically.

        Args:
            path: the file. More than 20,000 indices go into a file beside it, of the same name
                with the suffix ``.npz``.

        Returns:
            The JSON file.

        Raises:
            OSError: it cannot be written.
        """
        path = Path(path)
        saved = {name: getattr(self, name) for name in _PROPERTIES}
        indices = {"valid": [valid for _, valid in self.pairs]}
        # Train indices are left out if every fold trains on all that it does not validate on.
        if any(len(train) + len(valid) != self.n_samples for train, valid in self.pairs):
            indices["train"] = [train for train, _ in self.pairs]
        if sum(len(part) for parts in indices.values() for part in parts) > _INLINE:
            write_whole(path.with_suffix(".npz"), _as_npz(indices))  # first: the JSON refers to it
        else:
            saved |= {name: [part.tolist() for part in parts] for name, parts in indices.items()}
        write_whole(path, json.dumps(saved) + "\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Folds:
        """Read what :meth:`save` wrote.

        Raises:
            FoldError: there is no such file, or it is damaged (its hash does not fit).
        """
        try:
            return _read(Path(path))
        except Exception as error:  # a damaged .npz raises BadZipFile, zlib.error and others
            raise FoldError(
                f"the folds cannot be read from {path}: {error}",
                allowed="a file that folds.save(path) wrote, with its .npz beside it if it has one",
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


def _as_npz(indices: dict[str, list[Indices]]) -> bytes:
    import numpy as np

    arrays: dict[str, Any] = {
        f"{name}_{number}": part
        for name, parts in indices.items()
        for number, part in enumerate(parts)
    }
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def _read(path: Path) -> Folds:
    saved = json.loads(path.read_text())
    count = saved["k"] * saved["repeats"]
    indices = saved if "valid" in saved else _read_npz(path.with_suffix(".npz"), count)
    valid, train = indices["valid"], indices.get("train")
    pairs = [
        (train[number] if train else others(valid[number], saved["n_samples"]), valid[number])
        for number in range(count)
    ]
    names = ("kind", "n_samples", "repeats", "seed", "target")
    folds = Folds(pairs=frozen(pairs), **{name: saved[name] for name in names})
    if folds.hash != saved["hash"]:
        raise ValueError(f"its samples have the hash {folds.hash}, not {saved['hash']}")
    return folds


def _read_npz(path: Path, count: int) -> dict[str, list[Indices]]:
    import numpy as np

    with np.load(path) as arrays:
        names = [name for name in ("valid", "train") if f"{name}_0" in arrays]
        return {name: [arrays[f"{name}_{number}"] for number in range(count)] for name in names}


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
