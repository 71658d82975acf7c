"""Define the kinds of parameters that a sweep searches, and the values that each can take.

There are floats, whole numbers, categories and constants. `when` makes one depend on others:

    optim.momentum: {type: float, low: 0.5, high: 0.99, when: {optim.name: sgd}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, PlainSerializer

from nbtoolkit.config.fields import (
    Allowed,
    Count,
    Free,
    FreeSection,
    Number,
    Positive,
    Section,
    Whole,
)

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.distributions import BaseDistribution

Params: TypeAlias = dict[str, Any]
"""Values of settings by dotted name; a value is whatever a YAML file can hold."""


def _choices(value: object) -> object:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError("no list")
    texts = [json.dumps(choice) for choice in value]
    if len(set(texts)) < len(texts):
        raise ValueError("a choice is given twice")
    return FreeSection({"choices": value})["choices"]  # frozen as in a configuration


Choices = Annotated[
    tuple[object, ...],
    BeforeValidator(_choices),
    PlainSerializer(lambda choices: FreeSection({"choices": choices}).to_dict()["choices"]),
    Allowed("a list of different values"),
]


class _Parameter(Section):
    """The part that all kinds share: the condition under which the setting is searched."""

    when: Free = FreeSection()
    """Other parameters and their values (or lists of them) under which this one is searched."""

    def active(self, chosen: Mapping[str, object]) -> bool:
        """Whether it is searched, given the values chosen for the parameters before it."""
        return all(
            name in chosen and chosen[name] in (value if isinstance(value, tuple) else (value,))
            for name, value in self.when.items()
        )

    def conflict(self) -> tuple[str, str] | None:
        """What does not fit together, and what to do about it; None: nothing."""
        return None


class _Range(_Parameter):
    """A number between two, both included, on an even or a logarithmic scale."""

    type: Literal["float", "int"]
    low: Number
    high: Number
    log: bool = False
    step: Positive | None = None

    def conflict(self) -> tuple[str, str] | None:
        """What does not fit together, and what to do about it; None: nothing."""
        low, high, step = self.low, self.high, self.step
        if step == type(self).model_fields["step"].default:
            step = None
        if low > high:
            return f"low: {low:g} is above high: {high:g}", "exchange them"
        if self.log and low <= 0:
            return f"log: true with low: {low:g}", "set low above 0, or log: false"
        if self.log and step is not None:
            return f"log: true with step: {step:g}", "remove one of them"
        if step is not None and abs((high - low) / step - round((high - low) / step)) > 1e-8:
            last = low + math.floor((high - low) / step) * step
            return f"high: {high:g} is not reached in steps of {step:g}", f"set high: {last:g}"
        return None


class FloatParameter(_Range):
    """A number between two, on an even or a logarithmic scale, or in steps from `low` on."""

    type: Literal["float"]

    def distribution(self) -> BaseDistribution:
        """The distribution that Optuna samples from."""
        from optuna.distributions import FloatDistribution

        return FloatDistribution(self.low, self.high, log=self.log, step=self.step)

    def suggest(self, name: str, trial: Trial) -> float:
        """Let Optuna choose a value and store it."""
        return float(trial.suggest_float(name, self.low, self.high, log=self.log, step=self.step))

    def at(self, share: float) -> float:
        """The value at a share of the range, 0 <= share < 1: even shares give even values."""
        if self.step is not None:
            return min(self.high, self.low + int(share * self._count(self.step)) * self.step)
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = low + share * (high - low)
        return min(self.high, max(self.low, math.exp(value) if self.log else value))

    def values(self) -> Sequence[float] | None:
        """All values; None: the range is continuous."""
        if self.step is None:
            return [self.low] if self.low == self.high else None
        return [min(self.high, self.low + i * self.step) for i in range(self._count(self.step))]

    def _count(self, step: float) -> int:
        return round((self.high - self.low) / step) + 1


class IntParameter(_Range):
    """A whole number between two, both included, on an even or a logarithmic scale."""

    type: Literal["int"]
    low: Whole
    high: Whole
    step: Count = 1

    def distribution(self) -> BaseDistribution:
        """The distribution that Optuna samples from."""
        from optuna.distributions import IntDistribution

        return IntDistribution(self.low, self.high, log=self.log, step=self.step)

    def suggest(self, name: str, trial: Trial) -> int:
        """Let Optuna choose a value and store it."""
        return int(trial.suggest_int(name, self.low, self.high, log=self.log, step=self.step))

    def at(self, share: float) -> int:
        """The value at a share of the range, 0 <= share < 1: even shares give even values."""
        if not self.log:
            values = self.values()
            return values[int(share * len(values))]
        low, high = math.log(self.low - 0.5), math.log(self.high + 0.5)  # as wide as the others
        return min(self.high, max(self.low, round(math.exp(low + share * (high - low)))))

    def values(self) -> Sequence[int]:
        """All values."""
        return range(self.low, self.high + 1, self.step)


class CategoricalParameter(_Parameter):
    """One of several values of any kind: texts, numbers, true and false, lists."""

    type: Literal["categorical"]
    choices: Choices

    def distribution(self) -> BaseDistribution:
        """The distribution that Optuna samples from."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution([encode(choice) for choice in self.choices])

    def suggest(self, name: str, trial: Trial) -> object:
        """Let Optuna choose a value and store it."""
        encoded = trial.suggest_categorical(name, [encode(choice) for choice in self.choices])
        return self.decode(encoded)

    def decode(self, encoded: object) -> object:
        """The choice that Optuna's study holds as ``encoded``."""
        texts = [json.dumps(encode(choice)) for choice in self.choices]
        return self.choices[texts.index(json.dumps(encoded))]

    def at(self, share: float) -> object:
        """The value at a share of the list, 0 <= share < 1."""
        return self.choices[int(share * len(self.choices))]

    def values(self) -> Sequence[object]:
        """All values."""
        return self.choices


class ConstantParameter(_Parameter):
    """A setting with the same value in every trial (or in every one in which `when` holds)."""

    type: Literal["constant"]
    value: Annotated[object, Allowed("a value")]

    def values(self) -> Sequence[object]:
        """The one value."""
        return [self.value]


Searched = FloatParameter | IntParameter | CategoricalParameter
Parameter = Searched | ConstantParameter

KINDS: dict[str, type[Parameter]] = {
    "float": FloatParameter,
    "int": IntParameter,
    "categorical": CategoricalParameter,
    "constant": ConstantParameter,
}


def expand(value: object) -> Mapping[str, object]:
    """A parameter written in full: a list is short for choices, another value for a constant.

    A type that is left out follows from the other keys.
    """
    if isinstance(value, (list, tuple)):
        return {"type": "categorical", "choices": list(value)}
    if not isinstance(value, Mapping):
        return {"type": "constant", "value": value}
    kind = None if "type" in value else _obvious_type(value)
    return value if kind is None else {"type": kind, **value}


def _obvious_type(keys: Mapping[str, object]) -> str | None:
    if {"low", "high"} & set(keys):
        numbers = [keys[name] for name in ("low", "high", "step") if keys.get(name) is not None]
        return "int" if all(isinstance(number, int) for number in numbers) else "float"
    if "choices" in keys:
        return "categorical"
    return "constant" if "value" in keys else None


def encode(choice: object) -> bool | int | float | str | None:
    """A choice as Optuna's study holds it: anything but a plain value becomes JSON."""
    if choice is None or isinstance(choice, (bool, int, float, str)):
        return choice
    return json.dumps(choice)
