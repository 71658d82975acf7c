"""Read a run's predictions of its validation set without executing pickled code.

A pickle may call any function (https://docs.python.org/3/library/pickle.html#restricting-globals),
and a report is also made of folders from elsewhere. The reader here knows only the names that
arrays and tensors need.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias, cast

from nbtoolkit.run.paths import RunPaths

LARGEST = 200_000_000
"""Bytes of the largest file that is read."""

_NUMPY = (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))
_ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # bytes, in pickles of old protocols
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    # NumPy 2 has renamed its core; each version reads the other's names.
    *((f"numpy.{core}.{module}", name) for core in ("core", "_core") for module, name in _NUMPY),
}

TRUE_KEYS, PREDICTED_KEY = ("labels", "targets"), "predictions"
"""Keys of the dict that a training function returns, as those of ``nbtoolkit.tasks`` do."""

_NOT_ONE_EACH = "its predictions are not one class or number for each sample"

Class: TypeAlias = int | str
Prediction: TypeAlias = int | float | str


class NotPlain(Exception):
    """A return value holds something else than plain data, arrays and tensors; names it."""


class NoPredictions(Exception):
    """A run's predictions cannot be shown; says why."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _ALLOWED:
            return getattr(import_module(module), name)
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _tensor_storage
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise NotPlain(f"{module}.{name}")


def _tensor_storage(data: bytes) -> object:
    """Read a tensor's numbers; torch's own function would execute what is in them."""
    import torch

    load: Callable[..., object] = torch.load
    return load(io.BytesIO(data), weights_only=True)


def read_plain(file: Path) -> object:
    """Read what a rank returned.

    Args:
        file: a pickle, as in ``values/`` of a run's folder.

    Raises:
        NotPlain: it holds other objects, is damaged, or is too large for a report.
        FileNotFoundError: there is none.
    """
    if file.stat().st_size > LARGEST:
        raise NotPlain(f"more than {LARGEST // 10**6} MB")
    try:
        return _Reader(io.BytesIO(file.read_bytes())).load()
    except NotPlain:
        raise
    except Exception as error:  # a damaged pickle may raise any type
        raise NotPlain(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Predictions:
    """One prediction for each sample.

    Attributes:
        true: each sample's class or value.
        predicted: what was predicted for it.
    """

    true: tuple[Prediction, ...]
    predicted: tuple[Prediction, ...]

    @property
    def are_classes(self) -> bool:
        """Whether all are classes (integers, booleans, texts) rather than quantities."""
        return all(isinstance(value, (int, str)) for value in (*self.true, *self.predicted))

    @property
    def are_numbers(self) -> bool:
        """Whether all are numbers."""
        return all(isinstance(value, (int, float)) for value in (*self.true, *self.predicted))

    @property
    def classes(self) -> list[Class]:
        """Every class that occurs, in order; texts after numbers."""
        classes = cast("set[Class]", {*self.true, *self.predicted})
        return sorted(classes, key=lambda value: (isinstance(value, str), value))

    @property
    def counts(self) -> Counter[tuple[Prediction, Prediction]]:
        """The number of samples of each pair of true and predicted class."""
        return Counter(zip(self.true, self.predicted, strict=True))

    @property
    def accuracy(self) -> float:
        """The share of samples that were predicted right."""
        right = sum(n for (true, predicted), n in self.counts.items() if true == predicted)
        return right / len(self.true)


def predictions_of(paths: RunPaths) -> Predictions | None:
    """Read what rank 0 returned as ``"predictions"``, with its ``"labels"`` or ``"targets"``.

    Returns:
        The predictions; None: it returned none.

    Raises:
        NoPredictions: what it returned cannot be read, or is something else.
    """
    try:
        value = read_plain(paths.value(0))
    except FileNotFoundError:
        return None
    except NotPlain as reason:
        raise NoPredictions(f"what it returned is not read: {reason}") from None
    if not isinstance(value, Mapping) or PREDICTED_KEY not in value:
        return None
    true = next((value[key] for key in TRUE_KEYS if key in value), None)
    if true is None:
        return None
    labels, predicted = _listed(true), _listed(value[PREDICTED_KEY])
    if len(labels) != len(predicted) or not labels:
        raise NoPredictions(f"{len(predicted)} predictions for {len(labels)} samples")
    predictions = Predictions(tuple(labels), tuple(predicted))
    if not (predictions.are_classes or predictions.are_numbers):
        raise NoPredictions(_NOT_ONE_EACH)
    return predictions


def joined(parts: Iterable[Predictions]) -> Predictions:
    """Join the predictions of several folds."""
    parts = list(parts)
    return Predictions(
        tuple(value for part in parts for value in part.true),
        tuple(value for part in parts for value in part.predicted),
    )


def _listed(values: Any) -> list[Prediction]:
    """Return the values of a list, array or tensor, of whatever type they are."""
    if hasattr(values, "detach"):
        values = values.detach()
    try:
        return list(values.tolist() if hasattr(values, "tolist") else values)
    except TypeError:  # a single number
        raise NoPredictions(_NOT_ONE_EACH) from None
