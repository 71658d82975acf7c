"""Wishes that are right one by one and wrong together, or with the space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nbtoolkit.config_values import FreeSection
from nbtoolkit.names import meant
from nbtoolkit.search.parameter import CategoricalParameter, FloatParameter, IntParameter
from nbtoolkit.yaml_lines import Keys, Mistake

if TYPE_CHECKING:
    from nbtoolkit.config import Config
    from nbtoolkit.search.space import Space
    from nbtoolkit.search.wishes import Wishes


def clashes(
    wishes: Wishes, space: Space, config: Config, places: Mapping[Keys, str]
) -> list[Mistake]:
    """Everything that does not fit together.

    Args:
        wishes: each checked by itself.
        space: what is searched.
        config: what every trial's parameters are laid over.
        places: where the settings stand.
    """
    found = [
        *_about_metrics(wishes),
        *_about_pruning(wishes),
        *_about_ends(wishes),
        *_about_sampling(wishes, space),
        *_about_constraints(wishes),
        *_about_first_trials(wishes, space),
        *_about_free_names(space, config),
    ]
    return [
        Mistake(place=_place(name, places), what=f"{name}: {what}", allowed=allowed, do=do)
        for name, what, allowed, do in found
    ]


_Clash = tuple[str, str, str, str]
"""The setting, what is wrong with it, what is allowed, what to do."""


def _about_metrics(wishes: Wishes) -> Iterator[_Clash]:
    several, direction = len(wishes.metrics), wishes.study.direction
    if isinstance(direction, tuple) and len(direction) != several:
        what = f"{len(direction)} directions for {several} metrics"
        yield "study.direction", what, "one for all, or one for each", ""
    if several > 1 and wishes.study.value == "best":
        what = "best is not defined with several metrics"
        yield "study.value", what, "last", "let train() report what counts last"
    if several > 1 and wishes.repeat_top.k:
        what = "there is no order of leaders with several metrics"
        yield "repeat_top.k", what, "0", "take repeat_top out"


def _about_pruning(wishes: Wishes) -> Iterator[_Clash]:
    pruner = wishes.pruner
    if len(wishes.metrics) > 1 and pruner != "none":
        what = f"{pruner} compares one metric, here are {len(wishes.metrics)}"
        yield "study.pruner", what, "none", "take the pruner out, or all metrics but one"
    if pruner == "wilcoxon" and wishes.folds.k is None and wishes.folds.file is None:
        what = "wilcoxon compares trials fold by fold, and there are no folds"
        yield "study.pruner", what, "median, percentile, ...", "set folds, or pruner: median"
    if pruner == "percentile" and "percentile" not in wishes.study.pruner_options:
        what = "percentile needs to know which"
        yield "study.pruner_options", what, "{percentile: 25.0}", "set the percentile"
    if pruner == "none" and wishes.study.pruner_options:
        yield "study.pruner_options", "there is no pruner", "", "take them out"


def _about_ends(wishes: Wishes) -> Iterator[_Clash]:
    budget = wishes.budget
    if budget.n_trials is None and budget.timeout is None and wishes.study.sampler != "grid":
        do = 'pass n_trials=20 or timeout="2h", or set them under budget'
        yield "budget", "has no end", "n_trials or timeout (or both)", do


def _about_sampling(wishes: Wishes, space: Space) -> Iterator[_Clash]:
    sampler = wishes.study.sampler
    if len(wishes.metrics) > 1 and sampler == "cmaes":
        what = "cmaes improves one metric, here are several"
        yield "study.sampler", what, "tpe, gp, qmc, random or grid", "set sampler: tpe"
    if sampler == "grid":
        space.grid()  # says what has no end
    if sampler == "qmc":
        yield from _about_qmc(wishes.study.sampler_options)
    options = wishes.study.sampler_options
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


def _about_constraints(wishes: Wishes) -> Iterator[_Clash]:
    for metric, limit in wishes.constraints.items():
        sides = dict(limit) if isinstance(limit, FreeSection) else {}
        if not sides or set(sides) - {"min", "max"} or not all(map(_is_number, sides.values())):
            what = f"{limit!r} is no limit"
            yield f"constraints.{metric}", what, "{max: 20}, {min: 0.5}, or both", ""


def _about_first_trials(wishes: Wishes, space: Space) -> Iterator[_Clash]:
    for i, point in enumerate(wishes.first_trials):
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
            near = meant(key, map(str, there))
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
