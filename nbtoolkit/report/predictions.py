"""Read a run's predictions of its validation set without executing pickled code."""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from nbtoolkit.run.paths import RunPaths

# --- plain pickle ---
# Plain pickle: reads what a run returned as far as it is plain data, and executes nothing.
#
# A pickle may call any function (https://docs.python.org/3/library/pickle.html#restricting-
# globals). A report is also made of folders that came from elsewhere, so that here only the names
# that arrays and tensors need are known.


LARGEST = 200_000_000  # bytes: a report is no place for more

_NUMPY = (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))
_KNOWN = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # bytes, in pickles of old protocols
    # NumPy 2 has renamed its core; each version reads the other's names
    *((f"numpy.{core}.{module}", name) for core in ("core", "_core") for module, name in _NUMPY),
}
_TENSORS = {"_rebuild_tensor_v2", "_rebuild_parameter"}


class NotPlain(Exception):
    """A return value holds something that is no plain data, array or tensor; names it."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return getattr(import_module(module), name)
        if module == "torch._utils" and name in _TENSORS:
            return getattr(import_module(module), name)
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise NotPlain(f"{module}.{name}")


def _storage(data: bytes) -> Any:
    """A tensor's numbers; torch's own function for that would execute what is in them."""
    import torch

    load: Callable[..., Any] = torch.load
    return load(io.BytesIO(data), weights_only=True)


def read_plain(file: Path) -> Any:
    """What a rank returned.

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
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise NotPlain(f"{type(error).__name__}: {error}") from error


# --- predictions ---


TRUE, PREDICTED = ("labels", "targets"), "predictions"
"""The keys of the dict that a training function returns (``nbtoolkit.tasks`` do)."""

Class: TypeAlias = int | str


class NoPredictions(Exception):
    """A run keeps no predictions that could be shown; says why."""


@dataclass(frozen=True)
class Predictions:
    """One prediction for each sample.

    Attributes:
        true: what each sample is.
        predicted: what it was taken for.
    """

    true: tuple[Any, ...]
    predicted: tuple[Any, ...]

    @property
    def are_classes(self) -> bool:
        """Whether they are classes (whole numbers, booleans, texts) rather than quantities."""
        return all(isinstance(value, (int, str)) for value in (*self.true, *self.predicted))

    @property
    def are_numbers(self) -> bool:
        """Whether both can be compared as quantities."""
        return all(isinstance(value, (int, float)) for value in (*self.true, *self.predicted))

    @property
    def classes(self) -> list[Class]:
        """Every class that occurs, in order; texts after numbers."""
        found = {*self.true, *self.predicted}
        return sorted(found, key=lambda one: (isinstance(one, str), one))

    @property
    def counts(self) -> Counter[tuple[Class, Class]]:
        """How often each class (first) was taken for each other (second)."""
        return Counter(zip(self.true, self.predicted, strict=True))

    @property
    def accuracy(self) -> float:
        """The share that is right."""
        right = sum(n for (true, predicted), n in self.counts.items() if true == predicted)
        return right / len(self.true)


def predictions_of(paths: RunPaths) -> Predictions:
    """What rank 0 of a run returned as ``"predictions"``, with its ``"labels"`` or ``"targets"``.

    Raises:
        NoPredictions: it returned none, or something else.
    """
    try:
        value = read_plain(paths.value(0))
    except FileNotFoundError:
        raise NoPredictions("it returned nothing (it did not end well)") from None
    except NotPlain as reason:
        raise NoPredictions(f"what it returned is not read: {reason}") from None
    if not isinstance(value, Mapping):
        raise NoPredictions(f"it returned no dict, but a {type(value).__name__}")
    true = next((value[name] for name in TRUE if name in value), None)
    if true is None or PREDICTED not in value:
        raise NoPredictions('it returned no "predictions" with "labels" or "targets"')
    return _checked(_listed(true), _listed(value[PREDICTED]))


def joined(parts: Iterable[Predictions]) -> Predictions:
    """The predictions of several folds as one."""
    several = list(parts)
    return Predictions(
        tuple(value for part in several for value in part.true),
        tuple(value for part in several for value in part.predicted),
    )


def _checked(true: list[Any], predicted: list[Any]) -> Predictions:
    if len(true) != len(predicted) or not true:
        raise NoPredictions(f"{len(predicted)} predictions for {len(true)} samples")
    found = Predictions(tuple(true), tuple(predicted))
    if not (found.are_classes or found.are_numbers):
        raise NoPredictions("its predictions are not one class or number for each sample")
    return found


def _listed(values: Any) -> list[Any]:
    """The values of a list, array or tensor."""
    if hasattr(values, "detach"):
        values = values.detach()
    return list(values.tolist() if hasattr(values, "tolist") else values)
