"""Define how one searched setting is written, and which values it can take.

Floats, whole numbers, categories and constants; `when` makes one depend on others:

    optim.momentum: {type: float, low: 0.5, high: 0.99, when: {optim.name: sgd}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer

from nbtoolkit.config.fields import Allowed, Count, Free, FreeSection, Number, Positive, Whole
from nbtoolkit.config.schema import Section

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.distributions import BaseDistribution


def _choices(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError("no list")
    texts = [json.dumps(one) for one in value]
    if len(set(texts)) < len(texts):
        raise ValueError("a choice is given twice")
    frozen: tuple[Any, ...] = FreeSection({"choices": value})["choices"]  # as in a configuration
    return frozen


Choices = Annotated[
    tuple[Any, ...],
    BeforeValidator(_choices),
    PlainSerializer(lambda choices: FreeSection({"choices": choices}).to_dict()["choices"]),
    Allowed("a list of different values"),
]
Anything = Annotated[Any, Allowed("a value")]


class _Parameter(Section):
    """What all kinds have: the condition under which the setting is searched."""

    when: Free = FreeSection()
    """Other parameters and their values (or lists of them) under which this one is searched."""

    def active(self, chosen: Mapping[str, Any]) -> bool:
        """Whether it is searched, given the values chosen for the parameters before it."""
        return all(
            name in chosen and chosen[name] in (one if isinstance(one, tuple) else (one,))
            for name, one in self.when.items()
        )

    def mistake(self) -> tuple[str, str]:
        """What does not fit together, and what to do; two empty texts: nothing."""
        return "", ""


class FloatParameter(_Parameter):
    """A number between two, even or on a logarithmic scale, or every `step` from `low` on."""

    type: Literal["float"]
    low: Number
    high: Number
    log: bool = False
    step: Positive | None = None

    def distribution(self) -> BaseDistribution:
        """What Optuna samples from."""
        from optuna.distributions import FloatDistribution

        return FloatDistribution(self.low, self.high, log=self.log, step=self.step)

    def suggest(self, name: str, trial: Trial) -> float:
        """Let Optuna choose a value and store it."""
        return float(trial.suggest_float(name, self.low, self.high, log=self.log, step=self.step))

    def at(self, share: float) -> float:
        """The value at a share of the range, 0 <= share < 1: even shares give even values."""
        if self.step is not None:
            return min(self.high, self.low + int(share * self._steps()) * self.step)
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = low + share * (high - low)
        return min(self.high, max(self.low, math.exp(value) if self.log else value))

    def values(self) -> list[float] | None:
        """Every value; None: too many to list."""
        if self.step is None:
            return [self.low] if self.low == self.high else None
        return [min(self.high, self.low + i * self.step) for i in range(self._steps())]

    def _steps(self) -> int:
        return round((self.high - self.low) / (self.step or 1.0)) + 1

    def mistake(self) -> tuple[str, str]:
        """What does not fit together, and what to do; two empty texts: nothing."""
        return _range_mistake(self.low, self.high, self.log, self.step)


class IntParameter(_Parameter):
    """A whole number between two (both may come), even or on a logarithmic scale."""

    type: Literal["int"]
    low: Whole
    high: Whole
    log: bool = False
    step: Count = 1

    def distribution(self) -> BaseDistribution:
        """What Optuna samples from."""
        from optuna.distributions import IntDistribution

        return IntDistribution(self.low, self.high, log=self.log, step=self.step)

    def suggest(self, name: str, trial: Trial) -> int:
        """Let Optuna choose a value and store it."""
        return int(trial.suggest_int(name, self.low, self.high, log=self.log, step=self.step))

    def at(self, share: float) -> int:
        """The value at a share of the range, 0 <= share < 1: even shares give even values."""
        if not self.log:
            return self.low + int(share * self._steps()) * self.step
        low, high = math.log(self.low - 0.5), math.log(self.high + 0.5)  # as wide as the others
        return min(self.high, max(self.low, round(math.exp(low + share * (high - low)))))

    def values(self) -> list[int] | None:
        """Every value; None: too many to list."""
        return list(range(self.low, self.high + 1, self.step))

    def _steps(self) -> int:
        return (self.high - self.low) // self.step + 1

    def mistake(self) -> tuple[str, str]:
        """What does not fit together, and what to do; two empty texts: nothing."""
        return _range_mistake(self.low, self.high, self.log, self.step if self.step > 1 else None)


class CategoricalParameter(_Parameter):
    """One of several values of any kind: texts, numbers, true and false, lists."""

    type: Literal["categorical"]
    choices: Choices

    def distribution(self) -> BaseDistribution:
        """What Optuna samples from."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution([stored(choice) for choice in self.choices])

    def suggest(self, name: str, trial: Trial) -> Any:
        """Let Optuna choose a value and store it."""
        chosen = trial.suggest_categorical(name, [stored(choice) for choice in self.choices])
        return self.meant(chosen)

    def meant(self, value: Any) -> Any:
        """The choice that Optuna's study holds as ``value``."""
        texts = [json.dumps(stored(choice)) for choice in self.choices]
        return self.choices[texts.index(json.dumps(value))]

    def at(self, share: float) -> Any:
        """The value at a share of the list, 0 <= share < 1."""
        return self.choices[int(share * len(self.choices))]

    def values(self) -> list[Any]:
        """Every value."""
        return list(self.choices)


class ConstantParameter(_Parameter):
    """A setting that is the same in every trial (or in every one where `when` holds)."""

    type: Literal["constant"]
    value: Anything


Searched = FloatParameter | IntParameter | CategoricalParameter
Parameter = FloatParameter | IntParameter | CategoricalParameter | ConstantParameter

KINDS: dict[str, type[Parameter]] = {
    "float": FloatParameter,
    "int": IntParameter,
    "categorical": CategoricalParameter,
    "constant": ConstantParameter,
}


def written_out(value: Any) -> Any:
    """A parameter in full: a list stands for its choices, any other plain value for itself."""
    if isinstance(value, (list, tuple)):
        return {"type": "categorical", "choices": list(value)}
    return value if isinstance(value, Mapping) else {"type": "constant", "value": value}


def stored(value: Any) -> Any:
    """What stands for a choice in Optuna's study, which holds plain values only."""
    plain = value is None or isinstance(value, (bool, int, float, str))
    return value if plain else json.dumps(value)


def _range_mistake(low: float, high: float, log: bool, step: float | None) -> tuple[str, str]:
    if low > high:
        return f"low: {low:g} is above high: {high:g}", "exchange them"
    if log and low <= 0:
        return f"log: true with low: {low:g}", "set low above 0, or log: false"
    if log and step is not None:
        return f"log: true with step: {step:g}", "take one of them out"
    if step is not None and abs((high - low) / step - round((high - low) / step)) > 1e-8:
        last = low + math.floor((high - low) / step) * step
        return f"high: {high:g} is not reached in steps of {step:g}", f"set high: {last:g}"
    return "", ""
