"""Define what a sweep searches, as dotted names of settings with the values of each.

space:
  optim.lr: {type: float, low: 1.0e-4, high: 1.0e-1, log: true}
  model.hidden: {type: int, low: 32, high: 512, log: true}
  optim.name: [adamw, sgd]                                # short for choices
  optim.momentum: {type: float, low: 0.5, high: 0.99, when: {optim.name: sgd}}
  train.epochs: 5                                         # a constant
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from nbtoolkit.config.aliases import RENAMED, nearest, new_name
from nbtoolkit.config.validation import fields
from nbtoolkit.config.yaml_source import Keys, Layer, Mistake, refuse
from nbtoolkit.errors import ConfigError, SpaceError
from nbtoolkit.study.parameter import (
    KINDS,
    CategoricalParameter,
    ConstantParameter,
    Parameter,
    Searched,
    stored,
    written_out,
)

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.distributions import BaseDistribution

    from nbtoolkit.config.schema import Config


# --- reading ---
# Reads a space as written, and says what is wrong with it: all at once, with places.


def read_parameters(values: Mapping[str, Any], places: Mapping[Keys, str]) -> dict[str, Parameter]:
    """The parameters of a space, each after those its condition names.

    Args:
        values: dotted name -> parameter, as written or read before.
        places: where each stands, by ``(name,)`` and ``(name, key)``.

    Raises:
        SpaceError: a parameter is wrong, or there is nothing to search.
    """
    reader = _Reader(places)
    read = {name: one for name, value in values.items() if (one := reader.read(name, value))}
    refuse(reader.mistakes, SpaceError)
    reader.check_conditions(read)
    if all(isinstance(one, ConstantParameter) for one in read.values()):
        reader.mistake("", "there is nothing to search", do="give a setting a range or a list")
    refuse(reader.mistakes, SpaceError)
    return _sorted(read)


def place_of(name: str, places: Mapping[Keys, str]) -> str:
    """Where a parameter stands; its name where it did not come out of a file."""
    return places.get((name,), f"space {name!r}" if name else "space")


def _sorted(read: Mapping[str, Parameter]) -> dict[str, Parameter]:
    done: dict[str, Parameter] = {}
    while len(done) < len(read):
        ready = {name: one for name, one in read.items() if set(one.when) <= set(done)}
        done.update({name: one for name, one in ready.items() if name not in done})
    return done


class _Reader:
    """Collects what is wrong while parameters are read."""

    def __init__(self, places: Mapping[Keys, str]) -> None:
        self._places = places
        self.mistakes: list[Mistake] = []

    def mistake(self, name: str, what: str, *, allowed: str = "", do: str = "") -> None:
        """Note a mistake of a parameter."""
        what = f"space.{name}: {what}" if name else what
        place = place_of(name, self._places)
        self.mistakes.append(Mistake(place=place, what=what, allowed=allowed, do=do))

    def read(self, name: str, value: Any) -> Parameter | None:
        """A parameter as written; None where it is wrong."""
        if isinstance(value, Parameter):
            return value  # read before
        spec = dict(written_out(value))
        kind = KINDS.get(str(spec.get("type")))
        if kind is None:
            self._unknown_kind(name, spec)
            return None
        try:
            one = kind.model_validate(spec)
        except ValidationError as error:
            self._misread(name, spec, kind, error)
            return None
        what, do = one.mistake()
        if what:
            self.mistake(name, what, do=do)
        return one

    def check_conditions(self, read: Mapping[str, Parameter]) -> None:
        """Check that every `when` names parameters and values of theirs, without a circle."""
        for name, one in read.items():
            for other, wanted in one.when.items():
                if other not in read:
                    close = nearest(other, read)
                    do = f"did you mean {close!r}?" if close in read else ""
                    what = f"when: {other} is not searched"
                    self.mistake(name, what, allowed=", ".join(read), do=do)
                else:
                    self._check_wanted(name, other, read[other], wanted)
            if not self.mistakes and name in _above(name, read):
                self.mistake(name, "when: depends on itself", do="take one condition out")

    def _check_wanted(self, name: str, other: str, one: Parameter, wanted: Any) -> None:
        if not isinstance(one, (CategoricalParameter, ConstantParameter)):
            what = f"when: {other} is a range"
            self.mistake(name, what, allowed="conditions on a list of choices")
            return
        choices = one.choices if isinstance(one, CategoricalParameter) else (one.value,)
        for value in wanted if isinstance(wanted, tuple) else (wanted,):
            if value not in choices:
                allowed = ", ".join(map(str, choices))
                self.mistake(name, f"when: {other} is never {value!r}", allowed=allowed)

    def _unknown_kind(self, name: str, spec: Mapping[str, Any]) -> None:
        kind = spec.get("type")
        close = nearest(str(kind), KINDS)
        inner = next(iter(spec), "name")
        what = f"type: {kind!r} is not known" if "type" in spec else "has no type"
        nested = isinstance(spec.get(inner), Mapping)
        do = f"did you mean {close!r}?" if close in KINDS else ""
        do = f"write `{name}.{inner}:`, one dotted name for each setting" if nested else do
        self.mistake(name, what, allowed=", ".join(KINDS), do=do)

    def _misread(
        self, name: str, spec: Mapping[str, Any], kind: type[Parameter], error: ValidationError
    ) -> None:
        """Note what pydantic found, once for each key (it goes on into unions and lists)."""
        allowed = fields(kind)
        found = {str(item["loc"][0]): item["type"] for item in reversed(error.errors())}
        for key, problem in found.items():
            place = self._places.get((name, key)) or place_of(name, self._places)
            what, hint, do = f"{key}: {spec.get(key)!r} is not allowed", allowed.get(key, ""), ""
            if problem == "missing":
                what = f"has no {key}"
            elif problem == "extra_forbidden":
                close = nearest(key, allowed)
                what, hint = f"unknown key {key!r}", ", ".join(allowed)
                do = f"did you mean {close!r}?" if close in allowed else ""
            what = f"space.{name}: {what}"
            self.mistakes.append(Mistake(place=place, what=what, allowed=hint, do=do))


def _above(name: str, read: Mapping[str, Parameter]) -> set[str]:
    """All that a parameter's condition names, and theirs."""
    found: set[str] = set()
    todo = list(read[name].when)
    while todo:
        other = todo.pop()
        if other in read and other not in found:
            found.add(other)
            todo += read[other].when
    return found


# --- space ---


_LISTED_AT_MOST = 100_000


class Space:
    """The parameters of a sweep by dotted name, each after those it depends on.

    Args:
        parameters: name -> parameter, as written or checked (:mod:`nbtoolkit.study.parameter`).
        places: where each stands, for messages: ``("optim.lr", "low") -> "sweep.yaml:7"``.

    Raises:
        SpaceError: a parameter is wrong, or there is nothing to search; all mistakes at once.
    """

    def __init__(
        self, parameters: Mapping[str, Any], places: Mapping[Keys, str] | None = None
    ) -> None:
        self._places = dict(places or {})
        self.parameters: dict[str, Parameter] = read_parameters(parameters, self._places)
        self._grid: list[dict[str, Any]] | None = None

    @property
    def searched(self) -> dict[str, Searched]:
        """The parameters that are not constants."""
        return {
            name: one
            for name, one in self.parameters.items()
            if not isinstance(one, ConstantParameter)
        }

    def suggest(self, trial: Trial) -> dict[str, Any]:
        """Let Optuna choose a value for every parameter whose condition holds.

        Returns:
            Dotted name -> value, constants too: overrides for the configuration.
        """
        return self._walk(lambda name, one: one.suggest(name, trial))

    def at(self, shares: Sequence[float]) -> dict[str, Any]:
        """The point at these shares (0 <= share < 1) of the searched parameters' ranges."""
        share = dict(zip(self.searched, shares, strict=True))
        return self._walk(lambda name, one: one.at(share[name]))

    def meant(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """The values that a study's trial holds, with the constants."""
        return self._walk(
            lambda name, one: (
                one.meant(stored[name]) if isinstance(one, CategoricalParameter) else stored[name]
            )
        )

    def stored(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Searched values as Optuna's study holds them."""
        return {name: stored(value) for name, value in values.items() if name in self.searched}

    def distributions(self) -> dict[str, BaseDistribution]:
        """Optuna's distribution of every searched parameter, whatever its condition."""
        return {name: one.distribution() for name, one in self.searched.items()}

    def grid(self) -> list[dict[str, Any]]:
        """Every combination, the last parameter changing fastest; conditions are kept.

        Raises:
            SpaceError: a parameter has no list of values, or the grid has over 100,000 points.
        """
        if self._grid is None:
            self._grid = self._points()
        return self._grid

    def _points(self) -> list[dict[str, Any]]:
        endless = [name for name, one in self.searched.items() if one.values() is None]
        if endless:
            raise SpaceError(
                f"{place_of(endless[0], self._places)}: a grid has no end with space.{endless[0]}",
                allowed="choices, whole numbers, or a float with a step",
                do=f"give {endless[0]} a step or a list, or choose another sampler",
            )
        points: list[dict[str, Any]] = [{}]
        for name, one in self.parameters.items():
            longer = (more for point in points for more in _extended(point, name, one))
            points = list(itertools.islice(longer, _LISTED_AT_MOST + 1))
            if len(points) > _LISTED_AT_MOST:
                raise SpaceError(
                    f"the grid has more than {_LISTED_AT_MOST:,} points",
                    do="search fewer values, or choose another sampler, such as qmc",
                )
        return points

    def to_dict(self) -> dict[str, Any]:
        """The space in full, as plain values; :class:`Space` takes it back."""
        return {name: one.model_dump(exclude_unset=True) for name, one in self.parameters.items()}

    def check(self, config: Config) -> None:
        """Check that the configuration takes every parameter's values.

        Raises:
            SpaceError: a name is unknown, or a value is not allowed; all mistakes at once.
        """
        found = [
            mistake
            for name, one in self.parameters.items()
            if (mistake := self._refused(config, name, one)) is not None
        ]
        refuse(found, SpaceError)

    def _refused(self, config: Config, name: str, one: Parameter) -> Mistake | None:
        for value in _extremes(one):
            try:
                config.with_overrides({name: value})
            except ConfigError as error:
                what = error.what.removeprefix(f"override {name!r}: ")
                place = place_of(name, self._places)
                return Mistake(place=place, what=what, allowed=error.allowed, do=error.do)
        return None

    def _walk(self, choose: Callable[[str, Searched], Any]) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        for name, one in self.parameters.items():
            if one.active(chosen):
                chosen[name] = (
                    one.value if isinstance(one, ConstantParameter) else choose(name, one)
                )
        return chosen

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Space) and self.parameters == other.parameters

    def __hash__(self) -> int:
        return hash(tuple(self.parameters))

    def __repr__(self) -> str:
        return f"Space({', '.join(self.parameters)})"


def _extended(point: dict[str, Any], name: str, one: Parameter) -> Iterator[dict[str, Any]]:
    """The point with each value of one more parameter; itself where the condition fails."""
    if not one.active(point):
        yield point
        return
    values = [one.value] if isinstance(one, ConstantParameter) else one.values() or []
    for value in values:
        yield {**point, name: value}


def _extremes(one: Parameter) -> list[Any]:
    """The values at which a configuration would refuse the parameter, if anywhere."""
    if isinstance(one, ConstantParameter):
        return [one.value]
    return list(one.choices) if isinstance(one, CategoricalParameter) else [one.low, one.high]


_Put = Callable[[str, Any], None]

_SAMPLERS = {"bayesian": "tpe", "bayes": "tpe", "sobol": "qmc", "cma-es": "cmaes"}
_PRUNERS = {
    "median_stopping": "median",
    "truncation_selection": "percentile",
    "asha": "successive_halving",
}
_NO_EFFECT = ("use_for_hpo", "save_splits", "shuffle", "use_for_final_training")
"""Of ``k_fold``: what a sweep with folds does anyway, or what is another call's."""


def in_our_names(layer: Layer) -> Layer:
    """The layer of a sweep's file, with ``k_fold, sampling, early_termination, trials_per_gpu``.

    Names of version 0.1 become mistakes that give the new name.
    """
    values, places, found = dict(layer.values), dict(layer.places), list(layer.mistakes)
    for old in RENAMED:
        section, _, key = old.partition(".")
        inner = values.get(section)
        if (
            (key in inner)
            if key and isinstance(inner, Mapping)
            else (not key and section in values)
        ):
            place = places.get((section, key) if key else (section,), old)
            found.append(Mistake(place=place, what=new_name(old), do="rename it"))
            values = _without(values, section, key)
    for name, translate in _TRANSLATED.items():
        if name not in values:
            continue
        given, place = values.pop(name), places.get((name,), name)

        def put(ours: str, value: Any, place: str = place) -> None:
            section, _, key = ours.partition(".")
            keys: Keys = (section, key) if key else (section,)
            if not key:
                values.setdefault(section, value)
            else:
                inner = values.get(section)
                values[section] = {key: value, **(inner if isinstance(inner, Mapping) else {})}
            places.setdefault(keys, place)
            places.setdefault((section,), place)

        unknown = translate(given, put)
        if unknown:
            what = f"'{name}' has no {', '.join(map(repr, unknown))} here"
            found.append(Mistake(place=place, what=what, do=_INSTEAD[name]))
    return Layer(values=values, places=places, mistakes=tuple(found))


def _without(values: dict[str, Any], section: str, key: str) -> dict[str, Any]:
    if not key:
        return {name: value for name, value in values.items() if name != section}
    kept = {name: value for name, value in values[section].items() if name != key}
    return {**values, section: kept}


def _k_fold(given: Any, put: _Put) -> list[str]:
    if not isinstance(given, Mapping):
        put("folds.k", given)
        return []
    settings = dict(given)
    enabled = settings.pop("enabled", True) and settings.get("use_for_hpo", True)
    stratified = settings.pop("stratified", True)
    k, seed = settings.pop("n_splits", 5), settings.pop("random_seed", 0)
    unknown = [name for name in settings if name not in _NO_EFFECT]
    if settings.get("shuffle", True) is not True:
        unknown.append("shuffle: false")
    if enabled:
        put("folds.k", k)
        put("folds.seed", seed)
        put("folds.kind", "stratified" if stratified else "kfold")
    return unknown


def _sampling(given: Any, put: _Put) -> list[str]:
    settings = dict(given) if isinstance(given, Mapping) else {"algorithm": given}
    if "algorithm" in settings:
        algorithm = settings.pop("algorithm")
        put("study.sampler", _SAMPLERS.get(algorithm, algorithm))
    if "max_trials" in settings:
        put("budget.n_trials", settings.pop("max_trials"))
    if "timeout_minutes" in settings:
        put("budget.timeout", f"{settings.pop('timeout_minutes')}m")
    return list(settings)


def _early_termination(given: Any, put: _Put) -> list[str]:
    settings = dict(given) if isinstance(given, Mapping) else {"policy": given}
    policy = settings.pop("policy", None)
    if policy is not None:
        put("study.pruner", _PRUNERS.get(policy, policy))
    return list(settings)


def _trials_per_gpu(given: Any, put: _Put) -> list[str]:
    put("trials_per_device", given)
    return []


_TRANSLATED: dict[str, Callable[[Any, _Put], list[str]]] = {
    "k_fold": _k_fold,
    "sampling": _sampling,
    "early_termination": _early_termination,
    "trials_per_gpu": _trials_per_gpu,
}
_INSTEAD = {
    "k_fold": "see folds: k, kind, repeats, seed, file",
    "sampling": "see study.sampler, study.sampler_options and budget",
    "early_termination": "see study.pruner and study.pruner_options",
    "trials_per_gpu": "",
}
