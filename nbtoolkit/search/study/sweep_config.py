"""Define, load and check the configuration of a sweep: a YAML file, a dict, or a bare space.

study: {name: digits, metric: val_accuracy, direction: maximize, sampler: tpe, pruner: median}
budget: {n_trials: 40, timeout: 2h}
space:
  optim.lr: {type: float, low: 1.0e-4, high: 1.0e-1, log: true}
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, PlainSerializer, ValidationError

from nbtoolkit.config.aliases import similar_name
from nbtoolkit.config.directions import Direction, resolve
from nbtoolkit.config.fields import (
    FREE,
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
)
from nbtoolkit.config.loading import (
    Keys,
    Layer,
    Mistake,
    Overrides,
    dump,
    file_layer,
    merge,
    mistakes,
    override_layer,
    refuse,
)
from nbtoolkit.config.schema import Config
from nbtoolkit.environment.installed import install_line
from nbtoolkit.errors import MissingExtra, SpaceError
from nbtoolkit.search.folds.folds import FoldKind
from nbtoolkit.search.study.notation import translate_names

if TYPE_CHECKING:
    from nbtoolkit.search.study.space import Space

SamplerName = Literal["tpe", "gp", "cmaes", "qmc", "random", "grid"]
PrunerName = Literal[
    "median", "percentile", "successive_halving", "hyperband", "wilcoxon", "patient", "none"
]
Names = Annotated[
    tuple[Text, ...], Field(min_length=1), PlainSerializer(list), Allowed("a list of strings")
]
Directions = Annotated[
    tuple[Direction, ...], PlainSerializer(list), Allowed("a list of maximize and minimize")
]
Points = Annotated[
    tuple[Free, ...],
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
        return ("minimize" if direction == "auto" else direction,) * len(self.metrics)

    @property
    def pruner(self) -> PrunerName:
        """The pruner, with ``auto`` resolved."""
        if self.study.pruner != "auto":
            return self.study.pruner
        return "median" if len(self.metrics) == 1 else "none"

    def make_space(self, places: Mapping[Keys, str] | None = None) -> Space:
        """Make the space.

        Args:
            places: where each parameter is written, for messages.

        Raises:
            SpaceError: a parameter is wrong, or there is nothing to search.
            MissingExtra: Optuna is not installed.
        """
        try:
            from nbtoolkit.search.study.space import Space
        except ImportError as error:
            problem = f"a sweep needs Optuna: {error}"
            raise MissingExtra(problem, do=install_line("search")) from error
        return Space(self.space.to_dict(), places)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts and lists; ``SweepConfig.model_validate`` reads it back."""
        return self.model_dump()

    def to_yaml(self) -> str:
        """Everything as a YAML text; :func:`load_sweep_config` reads it back."""
        return dump(self.to_dict())


def load_sweep_config(
    source: str | os.PathLike[str] | Mapping[str, object],
    config: Config,
    *,
    n_trials: int | None = None,
    timeout: float | str | None = None,
    folds: int | None = None,
    overrides: Overrides | None = None,
) -> SweepConfig:
    """Load and check the configuration of a sweep.

    Args:
        source: a YAML or JSON file (found as :func:`nbtoolkit.load_config` finds its), the same as
            a dict, or a bare space: a dict of dotted names.
        config: the configuration that trials override; it must accept all parameters.
        n_trials: replaces ``budget.n_trials``.
        timeout: seconds, or a text such as ``"2h"``; replaces ``budget.timeout``.
        folds: replaces ``folds.k``.
        overrides: more settings that replace those of ``source``, by dotted name, or strings such
            as ``"study.sampler=random"``.

    Returns:
        The configuration, with metric, direction, pruner and space resolved.

    Raises:
        SpaceError: a name is unknown or a value is not allowed; lists all mistakes, each with its
            file and line.
        ConfigError: there is no such file, or it cannot be read.
        MissingExtra: Optuna is not installed.
    """
    layer = _dict_layer(source) if isinstance(source, Mapping) else file_layer(source)
    call = {"budget.n_trials": n_trials, "budget.timeout": timeout, "folds.k": folds}
    given = {name: value for name, value in call.items() if value is not None}
    source_layer = _with_sections(translate_names(layer))
    layer = merge([source_layer, override_layer(overrides), override_layer(given)])
    try:
        sweep_config = SweepConfig.model_validate(layer.values)
    except ValidationError as error:
        refuse([*layer.mistakes, *mistakes(error, layer, SweepConfig)], SpaceError)
        raise  # not reached: there is a mistake for every validation error
    refuse([*layer.mistakes], SpaceError)
    places = {keys[1:]: place for keys, place in layer.places.items() if keys[0] == "space"}
    space = sweep_config.make_space(places)
    space.check(config)
    metric = sweep_config.study.metric or config.checkpoint.monitor or "val_loss"
    study = sweep_config.study.model_copy(update={"metric": metric})
    sweep_config = sweep_config.model_copy(update={"study": study})
    conflicts = [
        Mistake(place=_place(setting, layer.places), what=f"{setting}: {problem}", do=do)
        for setting, problem, do in _conflicts(sweep_config, space, config)
    ]
    refuse(conflicts, SpaceError)
    return _resolved(sweep_config, space, config)


def _dict_layer(values: Mapping[str, object]) -> Layer:
    """Return the layer of a dict, with a place for every key."""
    places: dict[Keys, str] = {(name,): f"sweep {name!r}" for name in values}
    for name, section in values.items():
        if isinstance(section, Mapping):
            places.update({(name, str(key)): f"sweep {f'{name}.{key}'!r}" for key in section})
    return Layer(values=dict(values), places=places)


def _with_sections(layer: Layer) -> Layer:
    """Return the layer with a bare space under ``space``, and without empty sections."""
    values = dict(layer.values)
    places = dict(layer.places)
    layer_mistakes = list(layer.mistakes)
    if values and not set(values) & set(SweepConfig.model_fields):
        values = {"space": values}
        places = {("space", *keys): at for keys, at in places.items()}
    for name in {"study", "budget", "folds", "space"} & set(values):
        if values[name] is None:
            del values[name]  # `folds: null`
        elif not isinstance(values[name], Mapping):
            problem = f"'{name}' is a section, not {values.pop(name)!r}"
            place = places.get((name,), name)
            layer_mistakes.append(
                Mistake(place=place, what=problem, allowed="`name: value` lines under it")
            )
    return Layer(values=values, places=places, mistakes=tuple(layer_mistakes))


def _resolved(sweep_config: SweepConfig, space: Space, config: Config) -> SweepConfig:
    """Return the configuration with direction, pruner and space written out."""
    study = sweep_config.study
    directions = sweep_config.directions
    if study.direction == "auto":
        directions = tuple(resolve(name, config) or "minimize" for name in sweep_config.metrics)
    direction = directions if isinstance(study.metric, tuple) else directions[0]
    update = {"direction": direction, "pruner": sweep_config.pruner}
    resolved = {"study": study.model_copy(update=update), "space": FreeSection(space.parameters)}
    return sweep_config.model_copy(update=resolved)


Conflict: TypeAlias = tuple[str, str, str]
"""A setting, what does not fit, and what to do about it."""


def _conflicts(sweep_config: SweepConfig, space: Space, config: Config) -> Iterator[Conflict]:
    study = sweep_config.study
    budget = sweep_config.budget
    folds = sweep_config.folds
    yield from _metric_conflicts(sweep_config, config)
    if study.sampler == "grid":
        space.grid()  # raises if the grid has no end
    elif budget.n_trials is None and budget.timeout is None:
        do = 'pass n_trials=20 or timeout="2h", or set them under budget'
        yield "budget", "has no end", do
    if sweep_config.pruner == "wilcoxon" and folds.k is None and folds.file is None:
        problem = "wilcoxon compares trials fold by fold, and there are no folds"
        yield "study.pruner", problem, "set folds, or pruner: median"
    yield from _option_conflicts(sweep_config)
    for metric, limit in sweep_config.constraints.items():
        sides = limit.to_dict() if isinstance(limit, FreeSection) else {}
        numbers = {type(bound) for bound in sides.values()} <= {int, float}
        if not sides or not numbers or set(sides) - {"min", "max"}:
            yield f"constraints.{metric}", f"{limit!r} is no limit", "write {max: 20}, {min: 0.5}"
    for i, point in enumerate(sweep_config.first_trials):
        for problem in space.outside(point.to_dict()):
            yield "first_trials", f"number {i}: {problem}", "see the space"
    yield from _misspelt_names(space, config)


def _metric_conflicts(sweep_config: SweepConfig, config: Config) -> Iterator[Conflict]:
    study = sweep_config.study
    names = sweep_config.metrics
    if len(sweep_config.directions) != len(names):
        problem = f"{len(sweep_config.directions)} directions for {len(names)} metrics"
        yield "study.direction", problem, "write one for all, or one for each"
    for name in names if study.direction == "auto" else ():
        if resolve(name, config) is None:
            which = f"whether the highest or the lowest {name!r} is best"
            do = "add `direction: maximize` or `direction: minimize` under study"
            do += "; of several metrics, one for each metric"
            yield "study.metric", f"{which} cannot be told from its name", do
    if len(names) == 1:
        return
    if study.trial_value == "best":
        do = "set last, and let train() report what counts last"
        yield "study.trial_value", "best is not defined with several metrics", do
    if sweep_config.pruner != "none":
        problem = f"{sweep_config.pruner} compares one metric, and there are {len(names)}"
        yield "study.pruner", problem, "remove the pruner, or all metrics but one"
    if study.sampler == "cmaes":
        problem = "cmaes improves one metric, and there are several"
        yield "study.sampler", problem, "set tpe, gp, qmc, random or grid"


def _option_conflicts(sweep_config: SweepConfig) -> Iterator[Conflict]:
    from nbtoolkit.search.study.samplers import make_pruner, make_sampler

    seed = sweep_config.study.sampler_options.get("seed")
    if seed is not None:
        # Every trial has a sampler of its own, seeded by study.seed and the trial's number.
        problem = "seed stands where study.seed is meant"
        yield "study.sampler_options", problem, f"set study.seed: {seed}"
    makers: tuple[Callable[[SweepConfig], object], ...] = (make_sampler, make_pruner)
    for make in makers:
        try:
            make(sweep_config)
        except SpaceError as error:
            setting, _, problem = error.what.partition(": ")
            yield setting, problem, f"see {error.allowed}"


def _misspelt_names(space: Space, config: Config) -> Iterator[Conflict]:
    """In the user's own sections any name is allowed: searching a misspelt one has no effect."""
    settings = config.to_dict()
    for name in space.parameters:
        section, *path = name.split(".")
        if section not in FREE:
            continue
        values: object = settings[section]
        for depth, key in enumerate(path):
            if not isinstance(values, Mapping):
                break
            near = similar_name(key, map(str, values))
            if near is not None:
                existing = ".".join([section, *path[:depth], near])
                problem = f"is not in the configuration, and {existing} is"
                do = f"search {existing}, or add {name} to the configuration if it is another one"
                yield f"space.{name}", problem, do
            values = values.get(key)


def _place(setting: str, places: Mapping[Keys, str]) -> str:
    section, _, name = setting.partition(".")
    return places.get((section, name)) or places.get((section,)) or "sweep"
