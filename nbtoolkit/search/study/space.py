"""Define the search space of a sweep, dotted names of settings with the values of each.

space:
  optim.lr: {type: float, low: 1.0e-4, high: 1.0e-1, log: true}
  model.hidden: {type: int, low: 32, high: 512, log: true}
  optim.name: [adamw, sgd]                                # short for choices
  optim.momentum: {type: float, low: 0.5, high: 0.99, when: {optim.name: sgd}}
  train.epochs: 5                                         # a constant

The keys are those of Optuna's distributions, which check them. `when`, lists and constants are
additions. This module imports Optuna: import it late.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from optuna import Trial
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import create_trial

from nbtoolkit.config.loading import Keys, Mistake, refuse
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import ConfigError, SpaceError
from nbtoolkit.search.study.notation import expand

Params: TypeAlias = dict[str, Any]
"""Values of settings by dotted name; a value is whatever a YAML file can hold."""

Distribution: TypeAlias = FloatDistribution | IntDistribution | CategoricalDistribution

_KINDS: dict[str, type[Distribution]] = {
    "float": FloatDistribution,
    "int": IntDistribution,
    "categorical": CategoricalDistribution,
}
_RANGE = "low, high, log, step, when"
_KEYS = {"float": _RANGE, "int": _RANGE, "categorical": "choices, when", "constant": "value, when"}
_MAX_GRID = 100_000


class Space:
    """The parameters of a sweep by dotted name, each after those that its condition names.

    Args:
        written: name -> parameter, as a YAML file holds it.
        places: where each is written, for messages: ``("optim.lr", "low") -> "sweep.yaml:7"``.

    Attributes:
        parameters: name -> parameter, written in full.
        distributions: name -> Optuna's distribution, of the parameters that are not constants.

    Raises:
        SpaceError: a parameter is wrong, or there is nothing to search; lists all mistakes.
    """

    def __init__(
        self, written: Mapping[str, object], places: Mapping[Keys, str] | None = None
    ) -> None:
        self._places = dict(places or {})
        full = {name: expand(value) for name, value in written.items()}
        made: dict[str, Distribution | None] = {}
        mistakes: list[Mistake] = []
        for name, parameter in full.items():
            try:
                made[name] = _distribution(parameter)
            except TypeError as error:
                mistakes.append(self._mistake(name, str(error), _KEYS[parameter["type"]]))
            except (ValueError, OverflowError, UserWarning) as error:
                mistakes.append(self._mistake(name, str(error)))
            wrong = _wrong_conditions(parameter, full)
            mistakes += [self._mistake(name, problem, allowed) for problem, allowed in wrong]
        refuse(mistakes, SpaceError)
        self.parameters = self._sorted(full)
        kinds = ((name, made[name]) for name in self.parameters)
        self.distributions = {name: kind for name, kind in kinds if kind is not None}
        if not self.distributions:
            problem = "space: there is nothing to search"
            raise SpaceError(problem, do="give a setting a range or a list")

    def _sorted(self, parameters: Mapping[str, Params]) -> dict[str, Params]:
        """Return the parameters, each after those that its condition names."""
        done: dict[str, Params] = {}
        while len(done) < len(parameters):
            ready = {
                name: parameter
                for name, parameter in parameters.items()
                if parameter.get("when", {}).keys() <= done.keys()
            }
            if len(ready) == len(done):
                name = next(name for name in parameters if name not in done)
                refuse([self._mistake(name, "when: it depends on itself")], SpaceError)
            done.update(ready)
        return done

    def suggest(self, trial: Trial) -> Params:
        """Let Optuna choose a value for every parameter whose condition holds.

        Returns:
            Dotted name -> value, with the constants: overrides for the configuration.
        """

        def choose(name: str) -> Any:
            kind = self.distributions[name]
            if isinstance(kind, CategoricalDistribution):
                return trial.suggest_categorical(name, kind.choices)
            if isinstance(kind, IntDistribution):
                return trial.suggest_int(name, kind.low, kind.high, step=kind.step, log=kind.log)
            return trial.suggest_float(name, kind.low, kind.high, step=kind.step, log=kind.log)

        return self._choose(choose)

    def decode(self, params: Mapping[str, Any]) -> Params:
        """Return the values of a trial in Optuna's study, with the constants."""
        return self._choose(params.__getitem__)

    def _choose(self, choose: Callable[[str], Any]) -> Params:
        """Return the values of all parameters whose conditions hold.

        Args:
            choose: returns the value of a searched parameter as Optuna's study holds it.
        """
        chosen: Params = {}
        for name, parameter in self.parameters.items():
            if not _active(parameter, chosen):
                continue
            kind = self.distributions.get(name)
            if kind is None:
                chosen[name] = parameter["value"]
            elif isinstance(kind, CategoricalDistribution):
                chosen[name] = parameter["choices"][int(kind.to_internal_repr(choose(name)))]
            else:
                chosen[name] = choose(name)
        return chosen

    def encode(self, values: Mapping[str, object]) -> Params:
        """Return the searched ones of the values, as Optuna's study holds them."""
        return {
            name: _encode(value) for name, value in values.items() if name in self.distributions
        }

    def grid(self) -> list[Params]:
        """Return every combination that the conditions allow; the last parameter changes fastest.

        Optuna's GridSampler would repeat points that differ in a hidden parameter only.

        Raises:
            SpaceError: a range is continuous, or the grid has over 100,000 points.
        """
        points: list[Params] = [{}]
        for name, parameter in self.parameters.items():
            values = self._values(name)
            extended: list[Params] = []
            for point in points:
                if _active(parameter, point):
                    extended += [{**point, name: value} for value in values]
                else:
                    extended.append(point)
                if len(extended) > _MAX_GRID:
                    raise SpaceError(
                        f"the grid has more than {_MAX_GRID:,} points",
                        do="search fewer values, or choose another sampler, such as qmc",
                    )
            points = extended
        return points

    def _values(self, name: str) -> Sequence[object]:
        """Return all values of a parameter."""
        kind = self.distributions.get(name)
        parameter = self.parameters[name]
        if kind is None:
            return [parameter["value"]]
        if isinstance(kind, CategoricalDistribution):
            choices: list[object] = parameter["choices"]
            return choices
        if isinstance(kind, IntDistribution):
            return range(kind.low, kind.high + 1, kind.step)
        if kind.step is None and not kind.single():
            raise SpaceError(
                f"{self._place(name)}: a grid has no end with space.{name}",
                allowed="choices, whole numbers, or a float with a step",
                do=f"give {name} a step or a list, or choose another sampler",
            )
        step = kind.step or 1.0
        count = round((kind.high - kind.low) / step) + 1
        return [min(kind.high, kind.low + i * step) for i in range(count)]

    def to_dict(self) -> dict[str, Params]:
        """Return the space as plain values; :class:`Space` reads it back."""
        return self.parameters

    def check(self, config: Config) -> None:
        """Check that the configuration accepts every parameter's values.

        Raises:
            SpaceError: a name is unknown, or a value is not allowed; lists all mistakes.
        """
        refused = [self._refused(config, name) for name in self.parameters]
        refuse([mistake for mistake in refused if mistake is not None], SpaceError)

    def _refused(self, config: Config, name: str) -> Mistake | None:
        kind = self.distributions.get(name)
        if isinstance(kind, FloatDistribution | IntDistribution):
            values: Sequence[object] = (kind.low, kind.high)
        else:
            values = self._values(name)
        for value in values:
            try:
                config.with_overrides({name: value})
            except ConfigError as error:
                problem = error.what.removeprefix(f"override {name!r}: ")
                place = self._place(name)
                return Mistake(place=place, what=problem, allowed=error.allowed, do=error.do)
        return None

    def outside(self, point: Mapping[str, object]) -> Iterator[str]:
        """Yield a sentence on each value that its parameter never has."""
        for name, value in point.items():
            kind = self.distributions.get(name)
            if kind is None:
                yield f"{name} is not searched"
                continue
            params = {name: _encode(value)}
            try:
                create_trial(value=0.0, params=params, distributions={name: kind})
            except (TypeError, ValueError) as error:
                yield str(error)

    def _place(self, name: str) -> str:
        """Return where a parameter is written; its name if it does not come from a file."""
        return self._places.get((name,), f"space {name!r}")

    def _mistake(self, name: str, problem: str, allowed: str = "") -> Mistake:
        return Mistake(place=self._place(name), what=f"space.{name}: {problem}", allowed=allowed)

    def __repr__(self) -> str:
        return f"Space({', '.join(self.parameters)})"


def _distribution(parameter: Params) -> Distribution | None:
    """Return Optuna's distribution of a parameter; None: it is a constant.

    Raises:
        TypeError: a key is missing or unknown.
        ValueError, OverflowError: a value is wrong.
        UserWarning: no step reaches the upper limit, which Optuna would lower.
    """
    kind = parameter.get("type")
    keys = {key: value for key, value in parameter.items() if key not in ("type", "when")}
    if kind == "constant":
        if keys.keys() != {"value"}:
            raise TypeError(f"a constant has the key value, not {', '.join(keys)}")
        return None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(_unknown_type(kind, keys))
    if "choices" in keys:
        keys["choices"] = _encoded_choices(keys["choices"])
    for key in keys.keys() & {"low", "high", "step"}:
        _check_number(key, keys[key], whole=kind == "int")
    if not isinstance(keys.get("log", False), bool):
        raise ValueError(f"log: {keys['log']!r} is not true or false")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return _KINDS[kind](**keys)


def _unknown_type(kind: object, keys: Params) -> str:
    if kind is not None:
        return f"type: {kind!r} is not known (allowed: {', '.join(_KEYS)})"
    names = ", ".join(keys) or "nothing"
    return f"it has no type, but {names}; write a dotted name for each setting in a section"


def _check_number(key: str, value: object, *, whole: bool) -> None:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or (whole and number != int(number)):
        raise ValueError(f"{key}: {value!r} is not a {'whole ' if whole else ''}number")


def _encoded_choices(choices: object) -> list[Any]:
    if not isinstance(choices, list):
        raise ValueError(f"choices: {choices!r} is not a list")
    if len({json.dumps(choice) for choice in choices}) < len(choices):
        raise ValueError("choices: one is given twice")
    return [_encode(choice) for choice in choices]


def _encode(choice: Any) -> Any:
    """Return a choice as Optuna's study holds it: a list or a mapping becomes JSON."""
    return json.dumps(choice) if isinstance(choice, list | dict) else choice


def _wanted(parameter: Params) -> Iterator[tuple[str, list[object]]]:
    """Yield the other parameters that the condition names, with the values that they must have."""
    for name, value in parameter.get("when", {}).items():
        yield name, value if isinstance(value, list) else [value]


def _active(parameter: Params, chosen: Params) -> bool:
    """Return whether a parameter is searched, given the values of the parameters before it."""
    return all(name in chosen and chosen[name] in values for name, values in _wanted(parameter))


def _wrong_conditions(
    parameter: Params, parameters: Mapping[str, Params]
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the condition of a parameter, and what is allowed."""
    if not isinstance(parameter.get("when", {}), Mapping):
        yield f"when: {parameter['when']!r} is no condition", "{name: value}, or {name: [values]}"
        return
    for name, values in _wanted(parameter):
        other = parameters.get(name)
        if other is None:
            yield f"when: {name} is not searched", ", ".join(parameters)
            continue
        known = other.get("choices", [other.get("value")])
        if "low" in other or not isinstance(known, list):
            yield f"when: {name} is a range", "conditions on a list of choices"
            continue
        for value in values:
            if value not in known:
                yield f"when: {name} is never {value!r}", ", ".join(map(str, known))
