"""Wishes: what is wanted of a sweep, checked and frozen; a YAML file, a dict, or a bare space.

study: {name: digits, metric: val_accuracy, direction: maximize, sampler: tpe, pruner: median}
budget: {n_trials: 40, timeout: 2h}
space:
  optim.lr: {type: float, low: 1.0e-4, high: 1.0e-1, log: true}
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer, ValidationError

from nbtoolkit.config import Auto, Config, Section
from nbtoolkit.config_checks import fields, mistakes
from nbtoolkit.config_layers import file_layer, merge
from nbtoolkit.config_values import (
    Count,
    CountFrom0,
    Free,
    FreeSection,
    NotNegative,
    Says,
    Seconds,
    Seed,
    Text,
)
from nbtoolkit.direction import Direction, direction_of, resolve
from nbtoolkit.errors import SpaceError
from nbtoolkit.search.folds import FoldKind
from nbtoolkit.search.foreign_names import in_our_names
from nbtoolkit.search.space import Space
from nbtoolkit.search.wishes_checks import clashes
from nbtoolkit.yaml_lines import Keys, Layer, Mistake, dump, refuse

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
    Says("a list of different texts"),
]
Directions = Annotated[
    tuple[Direction, ...], PlainSerializer(list), Says("a list of maximize and minimize")
]
Points = Annotated[
    tuple[FreeSection, ...],
    BeforeValidator(_points),
    PlainSerializer(lambda points: [point.to_dict() for point in points]),
    Says("a list of parameters' values, such as [{optim.lr: 0.01}]"),
]


class StudyWishes(Section):
    """What is looked for, and how."""

    name: Text = "sweep"
    """The study's name, and the end of its folder's."""
    metric: Text | Names | None = None
    """The reported metric (or several) to improve; null: `checkpoint.monitor`, else val_loss."""
    direction: Direction | Auto | Directions = "auto"
    """Which is best; `auto`: as `checkpoint.mode` or the name says (see docs/search.md)."""
    value: Literal["last", "best"] = "last"
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
    keep_back: Auto | NotNegative = "auto"
    """Seconds before the end that no trial may run into; `auto`: what the winner's refit takes."""


class FoldWishes(Section):
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


class RepeatTop(Section):
    """The leaders are trained again with other seeds before a winner is named."""

    k: CountFrom0 = 0
    """How many leaders; 0: the best trial wins as it is."""
    seeds: Count = 2
    """How many more seeds for each."""


class Wishes(Section):
    """All that is wished of a sweep: made by :func:`load_wishes`."""

    study: StudyWishes = StudyWishes()
    """What is looked for, and how."""
    budget: Budget = Budget()
    """How much, and how long."""
    placement: Literal["auto", "device_per_trial", "all_devices_per_trial"] = "auto"
    """Where a trial runs."""
    trials_per_device: Count = 1
    """`device_per_trial`: how many at once on each GPU; on the CPU there are as many as CPUs."""
    folds: FoldWishes = FoldWishes()
    """Cross-validation of every trial."""
    constraints: Free = FreeSection()
    """Limits on other reported metrics: `{latency_ms: {max: 20}}`."""
    first_trials: Points = ()
    """Parameters to try first."""
    warm_start: Text | None = None
    """Another sweep's folder, or a study's SQLite file, whose trials the sampler learns from."""
    repeat_top: RepeatTop = RepeatTop()
    """The leaders are trained again with other seeds."""
    space: Annotated[Free, Says("parameters by dotted name")] = FreeSection()
    """What is searched: see :mod:`nbtoolkit.search.space`."""

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
        if wished == "auto":  # in a file that no sweep wrote; load_wishes resolves or refuses it
            return tuple(direction_of(name) or "minimize" for name in self.metrics)
        return (wished,) * len(self.metrics)

    @property
    def pruner(self) -> PrunerName:
        """The pruner, resolved."""
        if self.study.pruner != "auto":
            return self.study.pruner
        return "median" if len(self.metrics) == 1 else "none"

    def make_space(self) -> Space:
        """The space, checked when the wishes were loaded."""
        return Space(self.space)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts and lists; ``Wishes.model_validate`` takes it back."""
        return self.model_dump()

    def to_yaml(self) -> str:
        """Everything as a YAML text; :func:`load_wishes` reads it back."""
        return dump(self.to_dict())


def load_wishes(
    source: str | os.PathLike[str] | Mapping[str, Any],
    config: Config,
    *,
    n_trials: int | None = None,
    timeout: float | str | None = None,
    folds: int | Mapping[str, Any] | None = None,
) -> Wishes:
    """Read and check what is wished of a sweep.

    Args:
        source: a YAML or JSON file (found as :func:`nbtoolkit.load_config` finds its), the same as
            a dict, or a bare space: a dict of dotted names.
        config: what every trial's parameters are laid over; it must take them all.
        n_trials: beats ``budget.n_trials``.
        timeout: seconds, or a text such as ``"2h"``; beats ``budget.timeout``.
        folds: how many, or what stands under ``folds``; beats it.

    Returns:
        The wishes, with metric, direction, pruner and space written out.

    Raises:
        SpaceError: a name is unknown or a value is not allowed; all mistakes at once, each with
            its file and line.
        ConfigError: there is no such file, or it cannot be read.
    """
    layer = _plain_layer(source) if isinstance(source, Mapping) else file_layer(source)
    layer = merge([_with_sections(in_our_names(layer)), _call_layer(n_trials, timeout, folds)])
    wishes = _checked(layer)
    places = {keys[1:]: place for keys, place in layer.places.items() if keys[0] == "space"}
    space = Space(layer.values.get("space") or {}, places)
    space.check(config)
    refuse(clashes(wishes, space, config, layer.places), SpaceError)
    return _resolved(wishes, space, config, layer.places)


def _checked(layer: Layer) -> Wishes:
    found = list(layer.mistakes)
    try:
        wishes = Wishes.model_validate(layer.values)
    except ValidationError as error:
        refuse([*found, *mistakes(error, layer, Wishes)], SpaceError)
        raise  # not reached: there is a mistake for every validation error
    refuse(found, SpaceError)
    return wishes


def _resolved(wishes: Wishes, space: Space, config: Config, places: Mapping[Keys, str]) -> Wishes:
    study = wishes.study
    metric = study.metric or config.checkpoint.monitor or "val_loss"
    names = metric if isinstance(metric, tuple) else (metric,)
    directions = study.direction
    if directions == "auto":
        directions = _judged(names, config, places)
    elif not isinstance(directions, tuple):
        directions = (directions,) * len(names)
    direction = directions if isinstance(metric, tuple) else directions[0]
    update = {"metric": metric, "direction": direction, "pruner": wishes.pruner}
    named = {"study": study.model_copy(update=update), "space": FreeSection(space.to_dict())}
    return wishes.model_copy(update=named)


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
    if values and not set(values) & set(Wishes.model_fields):
        values, places = {"space": values}, {("space", *keys): at for keys, at in places.items()}
    sections = {name.partition(".")[0] for name in fields(Wishes) if "." in name} | {"space"}
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
