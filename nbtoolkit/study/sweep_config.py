"""Define and check the configuration of a sweep, a YAML file, a dict, or a bare space.

study: {name: digits, metric: val_accuracy, direction: maximize, sampler: tpe, pruner: median}
budget: {n_trials: 40, timeout: 2h}
space:
  optim.lr: {type: float, low: 1.0e-4, high: 1.0e-1, log: true}
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer, ValidationError

from nbtoolkit.config.aliases import similar_name
from nbtoolkit.config.fields import (
    Allowed,
    Count,
    CountFrom0,
    Free,
    FreeSection,
    NotNegative,
    Seconds,
    Seed,
    Text,
)
from nbtoolkit.config.layers import file_layer, merge
from nbtoolkit.config.schema import Auto, Config, Section
from nbtoolkit.config.validation import Direction, direction_of, fields, mistakes, resolve
from nbtoolkit.config.yaml_source import Keys, Layer, Mistake, dump, refuse
from nbtoolkit.errors import SpaceError
from nbtoolkit.folds.folds import FoldKind
from nbtoolkit.study.parameter import CategoricalParameter, FloatParameter, IntParameter
from nbtoolkit.study.space import Space, in_our_names

# --- checks ---
# Settings that are right one by one and wrong together, or with the space.


def clashes(
    sweep_config: SweepConfig, space: Space, config: Config, places: Mapping[Keys, str]
) -> list[Mistake]:
    """Everything that does not fit together.

    Args:
        sweep_config: each checked by itself.
        space: what is searched.
        config: what every trial's parameters are laid over.
        places: where the settings stand.
    """
    found = [
        *_about_metrics(sweep_config),
        *_about_pruning(sweep_config),
        *_about_ends(sweep_config),
        *_about_sampling(sweep_config, space),
        *_about_constraints(sweep_config),
        *_about_first_trials(sweep_config, space),
        *_about_free_names(space, config),
    ]
    return [
        Mistake(place=_place(name, places), what=f"{name}: {what}", allowed=allowed, do=do)
        for name, what, allowed, do in found
    ]


_Clash = tuple[str, str, str, str]
"""The setting, what is wrong with it, what is allowed, what to do."""


def _about_metrics(sweep_config: SweepConfig) -> Iterator[_Clash]:
    several, direction = len(sweep_config.metrics), sweep_config.study.direction
    if isinstance(direction, tuple) and len(direction) != several:
        what = f"{len(direction)} directions for {several} metrics"
        yield "study.direction", what, "one for all, or one for each", ""
    if several > 1 and sweep_config.study.trial_value == "best":
        what = "best is not defined with several metrics"
        yield "study.trial_value", what, "last", "let train() report what counts last"
    if several > 1 and sweep_config.reevaluate_top.k:
        what = "there is no order of leaders with several metrics"
        yield "reevaluate_top.k", what, "0", "take reevaluate_top out"


def _about_pruning(sweep_config: SweepConfig) -> Iterator[_Clash]:
    pruner = sweep_config.pruner
    if len(sweep_config.metrics) > 1 and pruner != "none":
        what = f"{pruner} compares one metric, here are {len(sweep_config.metrics)}"
        yield "study.pruner", what, "none", "take the pruner out, or all metrics but one"
    if pruner == "wilcoxon" and sweep_config.folds.k is None and sweep_config.folds.file is None:
        what = "wilcoxon compares trials fold by fold, and there are no folds"
        yield "study.pruner", what, "median, percentile, ...", "set folds, or pruner: median"
    if pruner == "percentile" and "percentile" not in sweep_config.study.pruner_options:
        what = "percentile needs to know which"
        yield "study.pruner_options", what, "{percentile: 25.0}", "set the percentile"
    if pruner == "none" and sweep_config.study.pruner_options:
        yield "study.pruner_options", "there is no pruner", "", "take them out"


def _about_ends(sweep_config: SweepConfig) -> Iterator[_Clash]:
    budget = sweep_config.budget
    if budget.n_trials is None and budget.timeout is None and sweep_config.study.sampler != "grid":
        do = 'pass n_trials=20 or timeout="2h", or set them under budget'
        yield "budget", "has no end", "n_trials or timeout (or both)", do


def _about_sampling(sweep_config: SweepConfig, space: Space) -> Iterator[_Clash]:
    sampler = sweep_config.study.sampler
    if len(sweep_config.metrics) > 1 and sampler == "cmaes":
        what = "cmaes improves one metric, here are several"
        yield "study.sampler", what, "tpe, gp, qmc, random or grid", "set sampler: tpe"
    if sampler == "grid":
        space.grid()  # says what has no end
    if sampler == "qmc":
        yield from _about_qmc(sweep_config.study.sampler_options)
    options = sweep_config.study.sampler_options
    if sampler in ("random", "grid") and options:
        yield "study.sampler_options", f"{sampler} has none", "", "take them out"
    if sampler in ("tpe", "gp", "cmaes") and "seed" in options:
        # Every trial has a sampler of its own, seeded by this setting and the trial's number.
        what, do = "seed stands where study.seed is meant", f"set study.seed: {options['seed']}"
        yield "study.sampler_options", what, f"other arguments of the {sampler} sampler", do


def _about_qmc(options: FreeSection) -> Iterator[_Clash]:
    allowed = {"qmc_type": ("sobol", "halton"), "scramble": (True, False)}
    for name, value in options.items():
        if name not in allowed:
            what = f"qmc has no option {name!r}"
            yield "study.sampler_options", what, ", ".join(allowed), "take it out"
        elif not any(value is one or value == one for one in allowed[name]):
            values = " or ".join(map(str, allowed[name]))
            yield "study.sampler_options", f"{name} is {value!r}", values, ""


def _about_constraints(sweep_config: SweepConfig) -> Iterator[_Clash]:
    for metric, limit in sweep_config.constraints.items():
        sides = dict(limit) if isinstance(limit, FreeSection) else {}
        if not sides or set(sides) - {"min", "max"} or not all(map(_is_number, sides.values())):
            what = f"{limit!r} is no limit"
            yield f"constraints.{metric}", what, "{max: 20}, {min: 0.5}, or both", ""


def _about_first_trials(sweep_config: SweepConfig, space: Space) -> Iterator[_Clash]:
    for i, point in enumerate(sweep_config.first_trials):
        for name, value in point.items():
            one = space.searched.get(name)
            if one is None:
                what = f"{name} in number {i} is not searched"
                yield "first_trials", what, ", ".join(space.searched), ""
            elif not _holds(one, value):
                what = f"{name} in number {i} is never {value!r}"
                yield "first_trials", what, f"what space.{name} says", ""


def _about_free_names(space: Space, config: Config) -> Iterator[_Clash]:
    """In the user's own sections any name is allowed, so that a slip would search nothing."""
    settings = config.to_dict()
    for name in space.parameters:
        section, *path = name.split(".")
        if section not in ("model", "data"):
            continue
        there: Any = settings[section]
        for depth, key in enumerate(path):
            if not isinstance(there, Mapping):
                break
            near = similar_name(key, map(str, there))
            if near is not None:
                written = ".".join([section, *path[:depth], near])
                what = f"is not in the configuration, and {written} is"
                do = f"search {written}, or set {name} in the configuration, too, if it is another"
                yield f"space.{name}", what, "names of the configuration, or others", do
            there = there.get(key)


def _holds(one: FloatParameter | IntParameter | CategoricalParameter, value: Any) -> bool:
    if isinstance(one, CategoricalParameter):
        return value in one.choices
    return _is_number(value) and one.low <= value <= one.high


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _place(name: str, places: Mapping[Keys, str]) -> str:
    keys = tuple(name.split("."))
    return places.get(keys) or places.get(keys[:1]) or "sweep"


# --- the configuration ---


SamplerName = Literal["tpe", "gp", "cmaes", "qmc", "random", "grid"]
PrunerName = Literal[
    "median", "percentile", "successive_halving", "hyperband", "wilcoxon", "patient", "none"
]


def _names(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)) or len(set(map(str, value))) < max(len(value), 1):
        raise ValueError("not a list of different names")
    return tuple(value)


def _points(value: Any) -> tuple[FreeSection, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError("no list")
    return tuple(point if isinstance(point, FreeSection) else FreeSection(point) for point in value)


Names = Annotated[
    tuple[Text, ...],
    BeforeValidator(_names),
    PlainSerializer(list),
    Allowed("a list of different texts"),
]
Directions = Annotated[
    tuple[Direction, ...], PlainSerializer(list), Allowed("a list of maximize and minimize")
]
Points = Annotated[
    tuple[FreeSection, ...],
    BeforeValidator(_points),
    PlainSerializer(lambda points: [point.to_dict() for point in points]),
    Allowed("a list of parameters' values, such as [{optim.lr: 0.01}]"),
]


class StudyConfig(Section):
    """What is looked for, and how."""

    name: Text = "sweep"
    """The study's name, and the end of its folder's."""
    metric: Text | Names | None = None
    """The reported metric (or several) to improve; null: `checkpoint.monitor`, else val_loss."""
    direction: Direction | Auto | Directions = "auto"
    """Which is best; `auto`: as `checkpoint.mode` or the name says (see docs/search.md)."""
    trial_value: Literal["last", "best"] = "last"
    """Which of a trial's reports is its value."""
    sampler: SamplerName = "tpe"
    """What chooses the next parameters."""
    sampler_options: Free = FreeSection()
    """More arguments of Optuna's sampler, by their own names."""
    pruner: PrunerName | Auto = "auto"
    """What ends hopeless trials early; `auto`: median, none where there are several metrics."""
    pruner_options: Free = FreeSection()
    """More arguments of Optuna's pruner, by their own names."""
    seed: Seed = 0
    """With a trial's number it decides what the sampler draws for it."""


class Budget(Section):
    """How much, and how long."""

    n_trials: Count | None = None
    """Trials in all, over all sessions; null: as many as there is time for (grid: all points)."""
    timeout: Seconds | None = None
    """The sweep ends in time for this; null: no limit but the host's."""
    trial_timeout: Seconds | None = None
    """A job (a trial, or one fold of it) that takes longer is killed, and its trial has failed."""
    max_failures: CountFrom0 | None = 10
    """The sweep ends when more trials than this have failed; null: never for that."""
    retries: CountFrom0 = 0
    """How often a trial that raised, died or hung is tried again, from its checkpoint."""
    reserve_for_refit: Auto | NotNegative = "auto"
    """Seconds before the end that no trial may run into; `auto`: what the winner's refit takes."""


class FoldConfig(Section):
    """Cross-validation of every trial: its value is the mean over the folds."""

    k: Count | None = None
    """Folds; null: one training with its own split. The targets come with the call
    (`nb.sweep(..., targets=y)`), or from `load()` of the function's module."""
    kind: FoldKind = "stratified"
    """How the samples are divided, see :func:`nbtoolkit.make_folds`."""
    repeats: Count = 1
    """`stratified` and `kfold`: how often, each time divided otherwise."""
    seed: Seed = 0
    """Decides the division."""
    file: Text | None = None
    """Folds that were made before: a file that `folds.save` wrote; the rest then has no meaning."""


class ReevaluateTop(Section):
    """The leaders are trained again with other seeds before a winner is named."""

    k: CountFrom0 = 0
    """How many leaders; 0: the best trial wins as it is."""
    seeds: Count = 2
    """How many more seeds for each."""


class SweepConfig(Section):
    """All that is wished of a sweep: made by :func:`load_sweep_config`."""

    study: StudyConfig = StudyConfig()
    """What is looked for, and how."""
    budget: Budget = Budget()
    """How much, and how long."""
    placement: Literal["auto", "device_per_trial", "all_devices_per_trial"] = "auto"
    """Where a trial runs."""
    trials_per_device: Count = 1
    """`device_per_trial`: how many at once on each GPU; on the CPU there are as many as CPUs."""
    folds: FoldConfig = FoldConfig()
    """Cross-validation of every trial."""
    constraints: Free = FreeSection()
    """Limits on other reported metrics: `{latency_ms: {max: 20}}`."""
    first_trials: Points = ()
    """Parameters to try first."""
    warm_start: Text | None = None
    """Another sweep's folder, or a study's SQLite file, whose trials the sampler learns from."""
    reevaluate_top: ReevaluateTop = ReevaluateTop()
    """The leaders are trained again with other seeds."""
    space: Annotated[Free, Allowed("parameters by dotted name")] = FreeSection()
    """What is searched: see :mod:`nbtoolkit.study.space`."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that are made best (resolved: at least one)."""
        metric = self.study.metric
        return metric if isinstance(metric, tuple) else (metric or "val_loss",)

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The direction of each metric (resolved)."""
        wished = self.study.direction
        if isinstance(wished, tuple):
            return wished
        if wished == "auto":  # load_sweep_config resolves it
            return tuple(direction_of(name) or "minimize" for name in self.metrics)
        return (wished,) * len(self.metrics)

    @property
    def pruner(self) -> PrunerName:
        """The pruner, resolved."""
        if self.study.pruner != "auto":
            return self.study.pruner
        return "median" if len(self.metrics) == 1 else "none"

    def make_space(self) -> Space:
        """The space, checked when the configuration was loaded."""
        return Space(self.space)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts and lists; ``SweepConfig.model_validate`` takes it back."""
        return self.model_dump()

    def to_yaml(self) -> str:
        """Everything as a YAML text; :func:`load_sweep_config` reads it back."""
        return dump(self.to_dict())


def load_sweep_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    config: Config,
    *,
    n_trials: int | None = None,
    timeout: float | str | None = None,
    folds: int | Mapping[str, Any] | None = None,
) -> SweepConfig:
    """Read and check what is wished of a sweep.

    Args:
        source: a YAML or JSON file (found as :func:`nbtoolkit.load_config` finds its), the same as
            a dict, or a bare space: a dict of dotted names.
        config: what every trial's parameters are laid over; it must take them all.
        n_trials: beats ``budget.n_trials``.
        timeout: seconds, or a text such as ``"2h"``; beats ``budget.timeout``.
        folds: how many, or what stands under ``folds``; beats it.

    Returns:
        The configuration, with metric, direction, pruner and space written out.

    Raises:
        SpaceError: a name is unknown or a value is not allowed; all mistakes at once, each with
            its file and line.
        ConfigError: there is no such file, or it cannot be read.
    """
    layer = _plain_layer(source) if isinstance(source, Mapping) else file_layer(source)
    layer = merge([_with_sections(in_our_names(layer)), _call_layer(n_trials, timeout, folds)])
    sweep_config = _checked(layer)
    places = {keys[1:]: place for keys, place in layer.places.items() if keys[0] == "space"}
    space = Space(layer.values.get("space") or {}, places)
    space.check(config)
    refuse(clashes(sweep_config, space, config, layer.places), SpaceError)
    return _resolved(sweep_config, space, config, layer.places)


def _checked(layer: Layer) -> SweepConfig:
    found = list(layer.mistakes)
    try:
        sweep_config = SweepConfig.model_validate(layer.values)
    except ValidationError as error:
        refuse([*found, *mistakes(error, layer, SweepConfig)], SpaceError)
        raise  # not reached: there is a mistake for every validation error
    refuse(found, SpaceError)
    return sweep_config


def _resolved(
    sweep_config: SweepConfig, space: Space, config: Config, places: Mapping[Keys, str]
) -> SweepConfig:
    study = sweep_config.study
    metric = study.metric or config.checkpoint.monitor or "val_loss"
    names = metric if isinstance(metric, tuple) else (metric,)
    directions = study.direction
    if directions == "auto":
        directions = _judged(names, config, places)
    elif not isinstance(directions, tuple):
        directions = (directions,) * len(names)
    direction = directions if isinstance(metric, tuple) else directions[0]
    update = {"metric": metric, "direction": direction, "pruner": sweep_config.pruner}
    named = {"study": study.model_copy(update=update), "space": FreeSection(space.to_dict())}
    return sweep_config.model_copy(update=named)


def _judged(
    names: Sequence[str], config: Config, places: Mapping[Keys, str]
) -> tuple[Direction, ...]:
    """The metrics' directions, or SpaceError: a name does not say which values are best."""
    found = {name: resolve(name, config) for name in names}
    what = "whether the highest or the lowest {!r} is best cannot be told from its name"
    lines = "`direction: maximize` or `direction: minimize` under study"
    if len(names) > 1:
        lines = "under study a list of maximize and minimize, one for each metric"
    place, do = places.get(("study", "metric"), "study.metric"), "add the line that is right"
    unknown = [what.format(name) for name, direction in found.items() if direction is None]
    refuse([Mistake(place=place, what=one, allowed=lines, do=do) for one in unknown], SpaceError)
    return tuple(direction for direction in found.values() if direction is not None)


def _plain_layer(values: Mapping[str, Any]) -> Layer:
    """The layer of a dict: a place for every key, so that what is wrong can be named."""
    places: dict[Keys, str] = {(name,): f"sweep {name!r}" for name in values}
    for name, section in values.items():
        if isinstance(section, Mapping):
            places.update({(name, str(key)): f"sweep {f'{name}.{key}'!r}" for key in section})
    return Layer(values=dict(values), places=places)


def _with_sections(layer: Layer) -> Layer:
    """The layer with its space under ``space``, and no section left without settings."""
    values, places = dict(layer.values), dict(layer.places)
    if values and not set(values) & set(SweepConfig.model_fields):
        values, places = {"space": values}, {("space", *keys): at for keys, at in places.items()}
    sections = {name.partition(".")[0] for name in fields(SweepConfig) if "." in name} | {"space"}
    found = list(layer.mistakes)
    for name in sections & set(values):
        if values[name] is None:
            del values[name]  # `folds: null`
        elif not isinstance(values[name], Mapping):
            what = f"'{name}' is a section, not {values.pop(name)!r}"
            place = places.get((name,), name)
            found.append(Mistake(place=place, what=what, allowed="`name: value` lines under it"))
    return Layer(values=values, places=places, mistakes=tuple(found))


def _call_layer(
    n_trials: int | None, timeout: float | str | None, folds: int | Mapping[str, Any] | None
) -> Layer:
    """The layer of the call's own arguments."""
    values: dict[str, Any] = {}
    if n_trials is not None:
        values["budget"] = {"n_trials": n_trials}
    if timeout is not None:
        values.setdefault("budget", {})["timeout"] = timeout
    if folds is not None:
        values["folds"] = dict(folds) if isinstance(folds, Mapping) else {"k": folds}
    places: dict[Keys, str] = {
        (name, key): f"{key}=" for name, section in values.items() for key in section
    }
    return Layer(values=values, places=places)
