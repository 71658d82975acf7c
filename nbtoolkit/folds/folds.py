"""Define which samples each fold trains and validates on; frozen, hashed, saved."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from nbtoolkit.errors import FoldError
from nbtoolkit.run.paths import write_whole
from nbtoolkit.text_table import html_table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from nbtoolkit.folds.leakage import Leak

    Indices: TypeAlias = NDArray[np.int64]

FoldKind = Literal["stratified", "kfold", "group", "stratified_group", "time", "predefined"]

_INLINE = 20_000  # numbers in folds.json (about 100 kB); more lie in folds.npz beside it


@dataclass(frozen=True, eq=False)
class Fold:
    """One fold: what ``ctx.fold`` is inside a cross-validation.

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
    """The folds of a data set, from :func:`nbtoolkit.make_folds`; iterate over them, or index.

    Two are equal when they split alike; ``hash`` says so in a word.

    Attributes:
        kind: how they were made.
        n_samples: samples of the data set.
        pairs: train and validation indices of each fold.
        repeats: how often the whole data set is split; the folds of the first time come first.
        seed: of the shuffle; None where nothing is shuffled.
        target: 16 hex digits over the targets they were made for; None: not known.
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
        """Look for what validation samples have in common with those trained on; warn of it.

        Args:
            X: the inputs, one row a sample: an array, tensor, DataFrame or list. Rows that are
                equal bit for bit and lie on both sides of a split are counted.
            groups: a group for each sample (patient, author, scene): overlaps are counted.
            time: a time for each sample, as numbers, dates or texts that sort: samples trained on
                that are later than the fold's first validation sample are counted.

        Returns:
            One :class:`~nbtoolkit.folds.leakage.Leak` a kind that was found, each warned of once
            as a :class:`~nbtoolkit.errors.FoldWarning`; empty: nothing was found.

        Raises:
            FoldError: ``X``, ``groups`` or ``time`` has another number of samples.
        """
        from nbtoolkit.folds.leakage import find_leaks, warn_of

        return warn_of(find_leaks(self, X, groups=groups, time=time))

    @cached_property
    def hash(self) -> str:
        """16 hex digits over the data set's size and every fold's samples."""
        digest = hashlib.sha256(str(self.n_samples).encode())
        for train, valid in self.pairs:
            for part in (train, valid):
                digest.update(f"|{len(part)}|".encode() + part.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def differences(self, other: Folds) -> dict[str, tuple[Any, Any]]:
        """What of ``other`` is not as here: name -> (here, there); empty: they are the same."""
        names = ("kind", "n_samples", "k", "repeats", "seed", "target", "hash")
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def save(self, path: str | Path) -> Path:
        """Write them as JSON, whole or not at all.

        Args:
            path: the file. Above 20,000 indices these lie beside it, in a file of the same name
                that ends in ``.npz``.

        Returns:
            The JSON file.

        Raises:
            OSError: it cannot be written.
        """
        return _save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Folds:
        """Read what :meth:`save` wrote.

        Raises:
            FoldError: there is no such file, or it is damaged (its hash does not fit).
        """
        return _load(Path(path))

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Fold:
        number = range(len(self.pairs))[index]  # an IndexError beyond the last; -1 is the last
        # Copies, and writable: torch warns of read-only arrays, once and for the whole process.
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


# --- as files ---


def _save(folds: Folds, path: Path) -> Path:
    names = ("kind", "n_samples", "k", "repeats", "seed", "target", "hash")
    about = {name: getattr(folds, name) for name in names}
    parts = {"valid": [valid for _, valid in folds.pairs]}
    if any(not _complementary(pair, folds.n_samples) for pair in folds.pairs):
        parts["train"] = [train for train, _ in folds.pairs]
    if sum(len(indices) for part in parts.values() for indices in part) > _INLINE:
        write_whole(path.with_suffix(".npz"), _as_npz(parts))  # first: the JSON file tells of it
    else:
        about |= {name: [indices.tolist() for indices in part] for name, part in parts.items()}
    write_whole(path, json.dumps(about) + "\n")
    return path


def _complementary(pair: tuple[Indices, Indices], n_samples: int) -> bool:
    """Whether a fold trains on all it does not validate on: its train indices need no place."""
    return len(pair[0]) + len(pair[1]) == n_samples


def _as_npz(parts: dict[str, list[Indices]]) -> bytes:
    import numpy as np

    arrays: dict[str, Any] = {
        f"{name}_{number}": indices
        for name, part in parts.items()
        for number, indices in enumerate(part)
    }
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def _load(path: Path) -> Folds:
    try:
        about = json.loads(path.read_text())
        folds = _rebuilt(about, path)
        if folds.hash != about["hash"]:
            raise ValueError(f"its samples have the hash {folds.hash}, not {about['hash']}")
    except Exception as error:  # a damaged .npz raises BadZipFile, zlib.error and others
        raise FoldError(
            f"the folds cannot be read from {path}: {error}",
            allowed="a file that folds.save(path) wrote, with the .npz beside it if there was one",
            do="put it back from a copy, or make the folds again with nb.make_folds",
        ) from error
    return folds


def _rebuilt(about: dict[str, Any], path: Path) -> Folds:
    count = about["k"] * about["repeats"]
    parts = about if "valid" in about else _from_npz(path.with_suffix(".npz"), count)
    valid, train = parts["valid"], parts.get("train")
    pairs = [
        (train[number] if train else others(valid[number], about["n_samples"]), valid[number])
        for number in range(count)
    ]
    names = ("kind", "n_samples", "repeats", "seed", "target")
    return Folds(pairs=frozen(pairs), **{name: about[name] for name in names})


def _from_npz(path: Path, count: int) -> dict[str, Any]:
    import numpy as np

    with np.load(path) as arrays:
        names = [name for name in ("valid", "train") if f"{name}_0" in arrays]
        return {name: [arrays[f"{name}_{number}"] for number in range(count)] for name in names}


def others(indices: Sequence[int] | Indices, n_samples: int) -> Indices:
    """The samples not in ``indices``, ascending."""
    import numpy as np

    left = np.ones(n_samples, dtype=bool)
    left[np.asarray(indices, dtype=np.int64)] = False
    return np.flatnonzero(left)


def frozen(pairs: Sequence[tuple[Any, Any]]) -> tuple[tuple[Indices, Indices], ...]:
    """Pairs of index arrays as int64 that cannot be written to."""
    return tuple((_frozen(train), _frozen(valid)) for train, valid in pairs)


def _frozen(indices: Any) -> Indices:
    import numpy as np

    array = np.array(indices, dtype=np.int64)
    array.setflags(write=False)
    return array
