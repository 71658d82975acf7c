"""Define the search space of a sweep, dotted names of settings with the values of each.

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
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from pydantic import ValidationError

from nbtoolkit.config.aliases import nearest
from nbtoolkit.config.fields import allowed_values
from nbtoolkit.config.loading import Keys, Layer, Mistake, refuse
from nbtoolkit.errors import ConfigError, SpaceError
from nbtoolkit.study.parameter import (
    KINDS,
    CategoricalParameter,
    ConstantParameter,
    FloatParameter,
    IntParameter,
    Parameter,
    Params,
    Searched,
    encode,
    expand,
)

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.distributions import BaseDistribution

    from nbtoolkit.config.schema import Config

_MAX_GRID = 100_000


class Space:
    """The parameters of a sweep by dotted name, each after those it depends on.

    Args:
        parameters: name -> parameter, as written or checked (:mod:`nbtoolkit.study.parameter`).
        places: where each is written, for messages: ``("optim.lr", "low") -> "sweep.yaml:7"``.

    Raises:
        SpaceError: a parameter is wrong, or there is nothing to search; lists all mistakes.
    """

    def __init__(
        self, parameters: Mapping[str, object], places: Mapping[Keys, str] | None = None
    ) -> None:
        reader = _Reader(places or {})
        self.parameters = reader.read_all(parameters)
        self._place = reader.place
        self._grid: list[Params] | None = None

    @property
    def searched(self) -> dict[str, Searched]:
        """The parameters that are not constants."""
        return {
            name: parameter
            for name, parameter in self.parameters.items()
            if not isinstance(parameter, ConstantParameter)
        }

    def suggest(self, trial: Trial) -> Params:
        """Let Optuna choose a value for every parameter whose condition holds.

        Returns:
            Dotted name -> value, with the constants: overrides for the configuration.
        """
        return self._choose(lambda name, parameter: parameter.suggest(name, trial))

    def at(self, shares: Sequence[float]) -> Params:
        """The point at these shares (0 <= share < 1) of the searched parameters' ranges."""
        share = dict(zip(self.searched, shares, strict=True))
        return self._choose(lambda name, parameter: parameter.at(share[name]))

    def decode(self, params: Mapping[str, object]) -> Params:
        """The values of a trial in Optuna's study, with the constants."""

        def value(name: str, parameter: Searched) -> object:
            if isinstance(parameter, CategoricalParameter):
                return parameter.decode(params[name])
            return params[name]

        return self._choose(value)

    def encode(self, values: Mapping[str, object]) -> Params:
        """The searched ones of the values, as Optuna's study holds them."""
        return {name: encode(value) for name, value in values.items() if name in self.searched}

    def distributions(self) -> dict[str, BaseDistribution]:
        """Optuna's distribution of every searched parameter, whatever its condition."""
        return {name: parameter.distribution() for name, parameter in self.searched.items()}

    def grid(self) -> list[Params]:
        """Every combination that the conditions allow; the last parameter changes fastest.

        Raises:
            SpaceError: a range is continuous, or the grid has over 100,000 points.
        """
        if self._grid is None:
            self._grid = self._make_grid()
        return self._grid

    def _make_grid(self) -> list[Params]:
        for name, parameter in self.parameters.items():
            if parameter.values() is None:
                raise SpaceError(
                    f"{self._place(name)}: a grid has no end with space.{name}",
                    allowed="choices, whole numbers, or a float with a step",
                    do=f"give {name} a step or a list, or choose another sampler",
                )
        points: list[Params] = [{}]
        for name, parameter in self.parameters.items():
            points = list(itertools.islice(_extended(points, name, parameter), _MAX_GRID + 1))
            if len(points) > _MAX_GRID:
                raise SpaceError(
                    f"the grid has more than {_MAX_GRID:,} points",
                    do="search fewer values, or choose another sampler, such as qmc",
                )
        return points

    def to_dict(self) -> dict[str, dict[str, object]]:
        """The space written in full, as plain values; :class:`Space` reads it back."""
        return {name: one.model_dump(exclude_unset=True) for name, one in self.parameters.items()}

    def check(self, config: Config) -> None:
        """Check that the configuration accepts every parameter's values.

        Raises:
            SpaceError: a name is unknown, or a value is not allowed; lists all mistakes.
        """
        mistakes = [self._refused(config, name) for name in self.parameters]
        refuse([mistake for mistake in mistakes if mistake is not None], SpaceError)

    def _refused(self, config: Config, name: str) -> Mistake | None:
        for value in _extremes(self.parameters[name]):
            try:
                config.with_overrides({name: value})
            except ConfigError as error:
                what = error.what.removeprefix(f"override {name!r}: ")
                return Mistake(
                    place=self._place(name), what=what, allowed=error.allowed, do=error.do
                )
        return None

    def _choose(self, choose: Callable[[str, Searched], object]) -> Params:
        """The values of all parameters whose conditions hold."""
        chosen: Params = {}
        for name, parameter in self.parameters.items():
            if parameter.active(chosen):
                chosen[name] = (
                    parameter.value
                    if isinstance(parameter, ConstantParameter)
                    else choose(name, parameter)
                )
        return chosen

    def __repr__(self) -> str:
        return f"Space({', '.join(self.parameters)})"


def _extended(points: list[Params], name: str, parameter: Parameter) -> Iterator[Params]:
    """The points with each value of one more parameter, where its condition holds."""
    values = parameter.values() or ()
    for point in points:
        if parameter.active(point):
            yield from ({**point, name: value} for value in values)
        else:
            yield point


def _extremes(parameter: Parameter) -> Sequence[object]:
    """The values at which a configuration would refuse the parameter, if anywhere."""
    if isinstance(parameter, (FloatParameter, IntParameter)):
        return [parameter.low, parameter.high]
    return parameter.values()


# --- reading ---


class _Reader:
    """Reads parameters as written, and collects all mistakes in them.

    Args:
        places: where each is written, by ``(name,)`` and ``(name, key)``.
    """

    def __init__(self, places: Mapping[Keys, str]) -> None:
        self._places = dict(places)
        self._mistakes: list[Mistake] = []

    def read_all(self, values: Mapping[str, object]) -> dict[str, Parameter]:
        """The parameters of a space, each after those that its condition names.

        Raises:
            SpaceError: a parameter is wrong, or there is nothing to search.
        """
        read = {name: self._read(name, value) for name, value in values.items()}
        refuse(self._mistakes, SpaceError)
        parameters = {name: parameter for name, parameter in read.items() if parameter is not None}
        self._check_conditions(parameters)
        if all(isinstance(parameter, ConstantParameter) for parameter in parameters.values()):
            self._add("", "there is nothing to search", do="give a setting a range or a list")
        refuse(self._mistakes, SpaceError)
        return _sorted(parameters)

    def place(self, name: str, key: str = "") -> str:
        """Where a parameter is written; its name if it does not come from a file."""
        by_name = self._places.get((name,), f"space {name!r}" if name else "space")
        return self._places.get((name, key), by_name)

    def _add(self, name: str, what: str, *, key: str = "", allowed: str = "", do: str = "") -> None:
        what = f"space.{name}: {what}" if name else what
        place = self.place(name, key)
        self._mistakes.append(Mistake(place=place, what=what, allowed=allowed, do=do))

    def _read(self, name: str, value: object) -> Parameter | None:
        """A parameter as written; None if it is wrong."""
        if isinstance(value, Parameter):
            return value  # read before
        spec = expand(value)
        kind = KINDS.get(str(spec.get("type")))
        if kind is None:
            self._add_unknown_kind(name, spec)
            return None
        try:
            parameter = kind.model_validate(dict(spec))
        except ValidationError as error:
            self._add_validation_errors(name, spec, kind, error)
            return None
        if conflict := parameter.conflict():
            what, do = conflict
            self._add(name, what, do=do)
        return parameter

    def _check_conditions(self, parameters: Mapping[str, Parameter]) -> None:
        """Check that every `when` names parameters and values of theirs, without a cycle."""
        for name, parameter in parameters.items():
            for other, wanted in parameter.when.items():
                if other in parameters:
                    self._check_wanted(name, other, parameters[other], wanted)
                    continue
                what = f"when: {other} is not searched"
                do = _did_you_mean(other, parameters)
                self._add(name, what, allowed=", ".join(parameters), do=do)
        if not self._mistakes:
            try:
                TopologicalSorter({name: one.when for name, one in parameters.items()}).prepare()
            except CycleError as error:
                name = next(name for name in parameters if name in error.args[1])
                self._add(name, "when: depends on itself", do="remove one condition")

    def _check_wanted(self, name: str, other: str, parameter: Parameter, wanted: object) -> None:
        if isinstance(parameter, (FloatParameter, IntParameter)):
            what = f"when: {other} is a range"
            self._add(name, what, allowed="conditions on a list of choices")
            return
        choices = parameter.values()
        for value in wanted if isinstance(wanted, tuple) else (wanted,):
            if value not in choices:
                allowed = ", ".join(map(str, choices))
                self._add(name, f"when: {other} is never {value!r}", allowed=allowed)

    def _add_unknown_kind(self, name: str, spec: Mapping[str, object]) -> None:
        kind = spec.get("type")
        inner = next(iter(spec), "name")
        what = f"type: {kind!r} is not known" if "type" in spec else "has no type"
        do = _did_you_mean(str(kind), KINDS)
        if isinstance(spec.get(inner), Mapping):
            do = f"write `{name}.{inner}:`, one dotted name for each setting"
        self._add(name, what, allowed=", ".join(KINDS), do=do)

    def _add_validation_errors(
        self, name: str, spec: Mapping[str, object], kind: type[Parameter], error: ValidationError
    ) -> None:
        """Add pydantic's errors, one for each key (it reports unions and lists in parts)."""
        allowed = allowed_values(kind)
        errors = {str(item["loc"][0]): item["type"] for item in reversed(error.errors())}
        for key, problem in errors.items():
            what, hint, do = f"{key}: {spec.get(key)!r} is not allowed", allowed.get(key, ""), ""
            if problem == "missing":
                what = f"has no {key}"
            elif problem == "extra_forbidden":
                what, hint = f"unknown key {key!r}", ", ".join(allowed)
                do = _did_you_mean(key, allowed)
            self._add(name, what, key=key, allowed=hint, do=do)


def _did_you_mean(name: str, known: Mapping[str, object]) -> str:
    close = nearest(name, known)
    return f"did you mean {close!r}?" if close in known else ""


def _sorted(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """The parameters, each after those that its condition names."""
    done: dict[str, Parameter] = {}
    while len(done) < len(parameters):
        done.update({n: one for n, one in parameters.items() if one.when.keys() <= done.keys()})
    return done


# --- names of other tools ---

_SAMPLERS = {"bayesian": "tpe", "bayes": "tpe", "sobol": "qmc", "cma-es": "cmaes"}
_PRUNERS = {
    "median_stopping": "median",
    "truncation_selection": "percentile",
    "asha": "successive_halving",
}
_NO_EFFECT = ("use_for_hpo", "save_splits", "shuffle", "use_for_final_training")
"""Keys of ``k_fold`` that a sweep with folds implies, or that belong to another call."""


def translate_names(layer: Layer) -> Layer:
    """Translate ``k_fold, sampling, early_termination, trials_per_gpu`` of a sweep's file.

    A setting of ours in the same file takes precedence.
    """
    values, places, mistakes = dict(layer.values), dict(layer.places), list(layer.mistakes)
    for name, (translate, hint) in _TRANSLATORS.items():
        if name not in values:
            continue
        place = places.get((name,), name)
        settings, unknown = translate(values.pop(name))
        for dotted, value in settings.items():
            section, _, key = dotted.partition(".")
            inner = values.get(section)
            if not key:
                values.setdefault(section, value)
            else:
                values[section] = {key: value, **(inner if isinstance(inner, Mapping) else {})}
                places.setdefault((section, key), place)
            places.setdefault((section,), place)
        if unknown:
            what = f"'{name}' has no {', '.join(map(repr, unknown))} here"
            mistakes.append(Mistake(place=place, what=what, do=hint))
    return Layer(values=values, places=places, mistakes=tuple(mistakes))


_Translated = tuple[dict[str, object], list[str]]
"""Settings of ours by dotted name, and the keys that are unknown."""


def _k_fold(given: object) -> _Translated:
    if not isinstance(given, Mapping):
        return {"folds.k": given}, []
    options = dict(given)
    enabled = options.pop("enabled", True) and options.get("use_for_hpo", True)
    settings = {
        "folds.k": options.pop("n_splits", 5),
        "folds.seed": options.pop("random_seed", 0),
        "folds.kind": "stratified" if options.pop("stratified", True) else "kfold",
    }
    unknown = [name for name in options if name not in _NO_EFFECT]
    if options.get("shuffle", True) is not True:
        unknown.append("shuffle: false")
    return settings if enabled else {}, unknown


def _sampling(given: object) -> _Translated:
    options = dict(given) if isinstance(given, Mapping) else {"algorithm": given}
    settings: dict[str, object] = {}
    if "algorithm" in options:
        settings["study.sampler"] = _our_name(_SAMPLERS, options.pop("algorithm"))
    if "max_trials" in options:
        settings["budget.n_trials"] = options.pop("max_trials")
    if "timeout_minutes" in options:
        settings["budget.timeout"] = f"{options.pop('timeout_minutes')}m"
    return settings, list(options)


def _early_termination(given: object) -> _Translated:
    options = dict(given) if isinstance(given, Mapping) else {"policy": given}
    policy = options.pop("policy", None)
    settings = {} if policy is None else {"study.pruner": _our_name(_PRUNERS, policy)}
    return settings, list(options)


def _our_name(names: Mapping[str, str], given: object) -> object:
    return names.get(given, given) if isinstance(given, str) else given


def _trials_per_gpu(given: object) -> _Translated:
    return {"trials_per_device": given}, []


_TRANSLATORS: dict[str, tuple[Callable[[object], _Translated], str]] = {
    "k_fold": (_k_fold, "see folds: k, kind, repeats, seed, file"),
    "sampling": (_sampling, "see study.sampler, study.sampler_options and budget"),
    "early_termination": (_early_termination, "see study.pruner and study.pruner_options"),
    "trials_per_gpu": (_trials_per_gpu, ""),
}
