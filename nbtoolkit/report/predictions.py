"""Predictions: what a run returned of its validation set, beside what is true of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from nbtoolkit.report.plain_pickle import NotPlain, read_plain
from nbtoolkit.runtime.paths import RunPaths

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
