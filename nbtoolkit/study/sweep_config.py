"""Define, load and check the configuration of a sweep: a YAML file, a dict, or a bare space.

study: {name: digits, metric: val_accuracy, direction: maximize, sampler: tpe, pruner: median}
budget: {n_trials: 40, timeout: 2h}
space:
  optim.lr: {type: float, low: 1.0e-4, high: 1.0e-1, log: true}
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard

from pydantic import BeforeValidator, PlainSerializer, ValidationError

from nbtoolkit.config.aliases import similar_name
from nbtoolkit.config.directions import Direction, direction_of, resolve
from nbtoolkit.config.fields import (
    Allowed,
    Auto,
    Count,
    CountFrom0,
    Free,
    FreeSection,
    NotNegative,
    Seconds,
    Section,
    Seed,
    Text,
    allowed_values,
)
from nbtoolkit.config.loading import Keys, Layer, Mistake, dump, file_layer, merge, mistakes, refuse
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import SpaceError
from nbtoolkit.folds.folds import FoldKind
from nbtoolkit.study.parameter import CategoricalParameter, Searched
from nbtoolkit.study.space import Space, translate_names

SamplerName = Literal["tpe", "gp", "cmaes", "qmc", "random", "grid"]
PrunerName = Literal[
    "median", "percentile", "successive_halving", "hyperband", "wilcoxon", "patient", "none"
]


def _names(value: object) -> tuple[object, ...]:
    if not isinstance(value, (list, tuple)) or len(set(map(str, value))) < max(len(value), 1):
        raise ValueError("not a list of different names")
    return tuple(value)


def _points(value: object) -> tuple[FreeSection, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError("no list")
    return tuple(point if isinstance(point, FreeSection) else FreeSection(point) for point in value)


Names = Annotated[
    tuple[Text, ...],
    BeforeValidator(_names),
    PlainSerializer(list),
    Allowed("a list of different strings"),
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
    """The objective, the sampler and the pruner."""

    name: Text = "sweep"
    """The name of the study. The name of the sweep's folder contains it."""
    metric: Text | Names | None = None
    """The reported metric, or a list of metrics, to optimize. null: the metric of
    `checkpoint.monitor`, or `val_loss` if that is null, too."""
    direction: Direction | Auto | Directions = "auto"
    """Whether the highest or the lowest value is best. `auto`: the name of the metric decides. But
    if `checkpoint.monitor` is this metric, `checkpoint.mode` decides. See docs/sweep/metric.md."""
    trial_value: Literal["last", "best"] = "last"
    """Whether the value of a trial is its last or its best reported value."""
    sampler: SamplerName = "tpe"
    """The method that chooses the parameters of the next trial: a sampler of Optuna."""
    sampler_options: Free = FreeSection()
    """More keyword arguments of Optuna's sampler."""
    pruner: PrunerName | Auto = "auto"
    """The method that ends bad trials early: a pruner of Optuna. `auto`: `median`, or `none` with
    several metrics."""
    pruner_options: Free = FreeSection()
    """More keyword arguments of Optuna's pruner."""
    seed: Seed = 0
    """The seed of the sampler. Each trial uses this seed together with its own number."""


class Budget(Section):
    """The number of trials and the time limits."""

    n_trials: Count | None = None
    """The total number of trials, over all sessions. null: as many as the time allows. If the
    sampler is `grid`, null means all points of the grid."""
    timeout: Seconds | None = None
    """The time limit of the sweep in each session. null: only the deadline of the session or the
    notebook limits it."""
    trial_timeout: Seconds | None = None
    """The time limit of a trial; with folds, of each fold. If it takes longer, it is killed, and
    the trial has failed. null: no limit."""
    max_failures: CountFrom0 | None = 10
    """When more trials than this number have failed in a session, the sweep ends with an error.
    null: no limit."""
    retries: CountFrom0 = 0
    """How often a trial starts again from its checkpoint after an exception, a hang or the death of
    a process."""
    reserve_for_refit: Auto | NotNegative = "auto"
    """The seconds at the end of the time limit that trials leave free, so that you can train once
    more with the best parameters. `auto`: the estimated time of this training."""


class FoldConfig(Section):
    """Cross-validation of every trial: its value is the mean over the folds."""

    k: Count | None = None
    """The number of folds. null: no folds; the training function splits the data itself. To make
    the folds, nbtoolkit takes the targets from the call (`nb.sweep(..., targets=y)`), or else from
    the function `load()` in the module of the training function."""
    kind: FoldKind | None = None
    """How the samples are divided into folds; see `nb.make_folds`. null: `group` if there are
    groups, otherwise `stratified`."""
    repeats: Count = 1
    """With `stratified` and `kfold`: how often the samples are divided, each time differently."""
    seed: Seed = 0
    """The seed of the division into folds."""
    file: Text | None = None
    """A file that `folds.save` has written. It replaces all other settings of this section."""


class SweepConfig(Section):
    """The configuration of a sweep. Made by :func:`load_sweep_config`."""

    study: StudyConfig = StudyConfig()
    """The objective, the sampler and the pruner."""
    budget: Budget = Budget()
    """The number of trials and the time limits."""
    placement: Literal["auto", "device_per_trial", "all_devices_per_trial"] = "auto"
    """The devices on which each trial runs. `auto`: usually one device per trial;
    docs/sweep/devices.md lists the exceptions."""
    trials_per_device: Count = 1
    """With `device_per_trial`: the number of trials that run at the same time on each GPU. Without
    GPUs, it has no effect: one trial runs per CPU, or fewer if the memory is small."""
    folds: FoldConfig = FoldConfig()
    """Cross-validation of every trial."""
    constraints: Free = FreeSection()
    """Limits for other reported metrics, such as `{latency_ms: {max: 20}}`. The best trial must
    meet them."""
    first_trials: Points = ()
    """The parameters of the first trials. The sampler chooses the parameters that an entry
    lacks."""
    warm_start: Text | None = None
    """The folder of another sweep, or the file of a study. The sampler also learns from its
    trials."""
    space: Annotated[Free, Allowed("parameters by dotted name")] = FreeSection()
    """The settings that the sweep varies, with their ranges; see docs/sweep/space.md."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics to improve; at least one."""
        metric = self.study.metric
        return metric if isinstance(metric, tuple) else (metric or "val_loss",)

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The direction of each metric."""
        direction = self.study.direction
        if isinstance(direction, tuple):
            return direction
        if direction == "auto":  # not made by load_sweep_config
            return tuple(direction_of(name) or "minimize" for name in self.metrics)
        return (direction,) * len(self.metrics)

    @property
    def pruner(self) -> PrunerName:
        """The pruner, with ``auto`` resolved."""
        if self.study.pruner != "auto":
            return self.study.pruner
        return "median" if len(self.metrics) == 1 else "none"

    def make_space(self) -> Space:
        """The space, checked when the configuration was loaded."""
        return Space(self.space)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts and lists; ``SweepConfig.model_validate`` reads it back."""
        return self.model_dump()

    def to_yaml(self) -> str:
        """Everything as a YAML text; :func:`load_sweep_config` reads it back."""
        return dump(self.to_dict())


# --- loading ---


def load_sweep_config(
    source: str | os.PathLike[str] | Mapping[str, object],
    config: Config,
    *,
    n_trials: int | None = None,
    timeout: float | str | None = None,
    folds: int | None = None,
) -> SweepConfig:
    """Load and check the configuration of a sweep.

    Args:
        source: a YAML or JSON file (found as :func:`nbtoolkit.load_config` finds its), the same as
            a dict, or a bare space: a dict of dotted names.
        config: the configuration that trials override; it must accept all parameters.
        n_trials: replaces ``budget.n_trials``.
        timeout: seconds, or a text such as ``"2h"``; replaces ``budget.timeout``.
        folds: replaces ``folds.k``.

    Returns:
        The configuration, with metric, direction, pruner and space resolved.

    Raises:
        SpaceError: a name is unknown or a value is not allowed; lists all mistakes, each with its
            file and line.
        ConfigError: there is no such file, or it cannot be read.
    """
    layer = _dict_layer(source) if isinstance(source, Mapping) else file_layer(source)
    layer = _with_sections(translate_names(layer))
    layer = merge([layer, _call_layer(n_trials, timeout, folds)])
    try:
        sweep_config = SweepConfig.model_validate(layer.values)
    except ValidationError as error:
        refuse([*layer.mistakes, *mistakes(error, layer, SweepConfig)], SpaceError)
        raise  # not reached: there is a mistake for every validation error
    refuse([*layer.mistakes], SpaceError)
    places = {keys[1:]: place for keys, place in layer.places.items() if keys[0] == "space"}
    space = Space(layer.values.get("space") or {}, places)
    space.check(config)
    refuse(_conflicts(sweep_config, space, config, layer.places), SpaceError)
    return _resolved(sweep_config, space, config, layer.places)


def _dict_layer(values: Mapping[str, object]) -> Layer:
    """The layer of a dict, with a place for every key."""
    places: dict[Keys, str] = {(name,): f"sweep {name!r}" for name in values}
    for name, section in values.items():
        if isinstance(section, Mapping):
            places.update({(name, str(key)): f"sweep {f'{name}.{key}'!r}" for key in section})
    return Layer(values=dict(values), places=places)


def _with_sections(layer: Layer) -> Layer:
    """The layer with a bare space under ``space``, and without sections that have no settings."""
    values, places, found = dict(layer.values), dict(layer.places), list(layer.mistakes)
    if values and not set(values) & set(SweepConfig.model_fields):
        values, places = {"space": values}, {("space", *keys): at for keys, at in places.items()}
    sections = {name.partition(".")[0] for name in allowed_values(SweepConfig) if "." in name} | {
        "space"
    }
    for name in sections & set(values):
        if values[name] is None:
            del values[name]  # `folds: null`
        elif not isinstance(values[name], Mapping):
            what = f"'{name}' is a section, not {values.pop(name)!r}"
            place = places.get((name,), name)
            found.append(Mistake(place=place, what=what, allowed="`name: value` lines under it"))
    return Layer(values=values, places=places, mistakes=tuple(found))


def _call_layer(n_trials: int | None, timeout: float | str | None, folds: int | None) -> Layer:
    """The layer of the call's own arguments."""
    arguments = {("budget", "n_trials"): n_trials, ("budget", "timeout"): timeout}
    arguments["folds", "k"] = folds
    values: dict[str, dict[str, object]] = {}
    places: dict[Keys, str] = {}
    for (section, key), value in arguments.items():
        if value is not None:
            values.setdefault(section, {})[key] = value
            places[section, key] = f"{key}="
    return Layer(values=values, places=places)


def _resolved(
    sweep_config: SweepConfig, space: Space, config: Config, places: Mapping[Keys, str]
) -> SweepConfig:
    """The configuration with metric, direction, pruner and space written out."""
    study = sweep_config.study
    metric = study.metric or config.checkpoint.monitor or "val_loss"
    names = metric if isinstance(metric, tuple) else (metric,)
    directions = study.direction
    if directions == "auto":
        directions = _directions_of(names, config, places)
    elif not isinstance(directions, tuple):
        directions = (directions,) * len(names)
    direction = directions if isinstance(metric, tuple) else directions[0]
    update = {"metric": metric, "direction": direction, "pruner": sweep_config.pruner}
    resolved = {"study": study.model_copy(update=update), "space": FreeSection(space.to_dict())}
    return sweep_config.model_copy(update=resolved)


def _directions_of(
    names: Sequence[str], config: Config, places: Mapping[Keys, str]
) -> tuple[Direction, ...]:
    """The directions of the metrics by their names.

    Raises:
        SpaceError: a name does not say which values are best.
    """
    directions = {name: resolve(name, config) for name in names}
    allowed = "`direction: maximize` or `direction: minimize` under study"
    if len(names) > 1:
        allowed = "under study a list of maximize and minimize, one for each metric"
    unknown = [
        Mistake(
            place=places.get(("study", "metric"), "study.metric"),
            what=f"whether the highest or the lowest {name!r} is best cannot be told from its name",
            allowed=allowed,
            do="add the line that is right",
        )
        for name, direction in directions.items()
        if direction is None
    ]
    refuse(unknown, SpaceError)
    return tuple(direction for direction in directions.values() if direction is not None)


# --- settings that do not fit together, or do not fit the space ---


class _Conflict(NamedTuple):
    setting: str
    what: str
    allowed: str = ""
    do: str = ""


def _conflicts(
    sweep_config: SweepConfig, space: Space, config: Config, places: Mapping[Keys, str]
) -> list[Mistake]:
    conflicts = [
        *_metric_conflicts(sweep_config),
        *_pruner_conflicts(sweep_config),
        *_budget_conflicts(sweep_config),
        *_sampler_conflicts(sweep_config, space),
        *_constraint_conflicts(sweep_config),
        *_first_trial_conflicts(sweep_config, space),
        *_misspelt_names(space, config),
    ]
    return [
        Mistake(place=_place(setting, places), what=f"{setting}: {what}", allowed=allowed, do=do)
        for setting, what, allowed, do in conflicts
    ]


def _metric_conflicts(sweep_config: SweepConfig) -> Iterator[_Conflict]:
    count, direction = len(sweep_config.metrics), sweep_config.study.direction
    if isinstance(direction, tuple) and len(direction) != count:
        what = f"{len(direction)} directions for {count} metrics"
        yield _Conflict("study.direction", what, "one for all, or one for each")
    if count > 1 and sweep_config.study.trial_value == "best":
        what = "best is not defined with several metrics"
        yield _Conflict("study.trial_value", what, "last", "let train() report what counts last")


def _pruner_conflicts(sweep_config: SweepConfig) -> Iterator[_Conflict]:
    pruner, options = sweep_config.pruner, sweep_config.study.pruner_options
    if len(sweep_config.metrics) > 1 and pruner != "none":
        what = f"{pruner} compares one metric, and there are {len(sweep_config.metrics)}"
        yield _Conflict("study.pruner", what, "none", "remove the pruner, or all metrics but one")
    if pruner == "wilcoxon" and sweep_config.folds.k is None and sweep_config.folds.file is None:
        what = "wilcoxon compares trials fold by fold, and there are no folds"
        do = "set folds, or pruner: median"
        yield _Conflict("study.pruner", what, "median, percentile, ...", do)
    if pruner == "percentile" and "percentile" not in options:
        what = "percentile needs to know which"
        yield _Conflict("study.pruner_options", what, "{percentile: 25.0}", "set the percentile")
    if pruner == "none" and options:
        yield _Conflict("study.pruner_options", "there is no pruner", do="remove them")


def _budget_conflicts(sweep_config: SweepConfig) -> Iterator[_Conflict]:
    budget = sweep_config.budget
    if budget.n_trials is None and budget.timeout is None and sweep_config.study.sampler != "grid":
        do = 'pass n_trials=20 or timeout="2h", or set them under budget'
        yield _Conflict("budget", "has no end", "n_trials or timeout (or both)", do)


def _sampler_conflicts(sweep_config: SweepConfig, space: Space) -> Iterator[_Conflict]:
    sampler, options = sweep_config.study.sampler, sweep_config.study.sampler_options
    if len(sweep_config.metrics) > 1 and sampler == "cmaes":
        what = "cmaes improves one metric, and there are several"
        yield _Conflict("study.sampler", what, "tpe, gp, qmc, random or grid", "set sampler: tpe")
    if sampler == "grid":
        space.grid()  # raises if the grid has no end
    if sampler == "qmc":
        yield from _qmc_conflicts(options)
    if sampler in ("random", "grid") and options:
        yield _Conflict("study.sampler_options", f"{sampler} has none", do="remove them")
    if sampler in ("tpe", "gp", "cmaes") and "seed" in options:
        # Every trial has a sampler of its own, seeded by study.seed and the trial's number.
        what, do = "seed stands where study.seed is meant", f"set study.seed: {options['seed']}"
        allowed = f"other arguments of the {sampler} sampler"
        yield _Conflict("study.sampler_options", what, allowed, do)


def _qmc_conflicts(options: FreeSection) -> Iterator[_Conflict]:
    allowed = {"qmc_type": ("sobol", "halton"), "scramble": (True, False)}
    for name, value in options.items():
        if name not in allowed:
            what = f"qmc has no option {name!r}"
            yield _Conflict("study.sampler_options", what, ", ".join(allowed), "remove it")
        elif value not in allowed[name]:
            values = " or ".join(map(str, allowed[name]))
            yield _Conflict("study.sampler_options", f"{name} is {value!r}", values)


def _constraint_conflicts(sweep_config: SweepConfig) -> Iterator[_Conflict]:
    for metric, limit in sweep_config.constraints.items():
        sides = dict(limit) if isinstance(limit, FreeSection) else {}
        if not sides or set(sides) - {"min", "max"} or not all(map(_is_number, sides.values())):
            what = f"{limit!r} is no limit"
            yield _Conflict(f"constraints.{metric}", what, "{max: 20}, {min: 0.5}, or both")


def _first_trial_conflicts(sweep_config: SweepConfig, space: Space) -> Iterator[_Conflict]:
    for i, point in enumerate(sweep_config.first_trials):
        for name, value in point.items():
            parameter = space.searched.get(name)
            if parameter is None:
                what = f"{name} in number {i} is not searched"
                yield _Conflict("first_trials", what, ", ".join(space.searched))
            elif not _can_take(parameter, value):
                what = f"{name} in number {i} is never {value!r}"
                yield _Conflict("first_trials", what, f"the values of space.{name}")


def _misspelt_names(space: Space, config: Config) -> Iterator[_Conflict]:
    """In the user's own sections any name is allowed: searching a misspelt one has no effect."""
    settings = config.to_dict()
    for name in space.parameters:
        section, *path = name.split(".")
        if section not in ("model", "data"):
            continue
        values: object = settings[section]
        for depth, key in enumerate(path):
            if not isinstance(values, Mapping):
                break
            near = similar_name(key, map(str, values))
            if near is not None:
                existing = ".".join([section, *path[:depth], near])
                what = f"is not in the configuration, and {existing} is"
                do = f"search {existing}, or add {name} to the configuration if it is another one"
                yield _Conflict(f"space.{name}", what, "names in the configuration, or others", do)
            values = values.get(key)


def _can_take(parameter: Searched, value: object) -> bool:
    if isinstance(parameter, CategoricalParameter):
        return value in parameter.choices
    return _is_number(value) and parameter.low <= value <= parameter.high


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _place(setting: str, places: Mapping[Keys, str]) -> str:
    keys = tuple(setting.split("."))
    return places.get(keys) or places.get(keys[:1]) or "sweep"
