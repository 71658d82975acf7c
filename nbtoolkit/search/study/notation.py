"""Read the short forms of a sweep's file, and the names that other tools have for its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbtoolkit.config.loading import Layer, Mistake


def expand(value: object) -> dict[str, Any]:
    """Write a parameter in full: a list is short for choices, another value for a constant.

    A type that is left out follows from the other keys.
    """
    if isinstance(value, (list, tuple)):
        return {"type": "categorical", "choices": list(value)}
    if not isinstance(value, Mapping):
        return {"type": "constant", "value": value}
    kind = None if "type" in value else _obvious_type(value)
    return dict(value) if kind is None else {"type": kind, **value}


def _obvious_type(keys: Mapping[str, object]) -> str | None:
    if {"low", "high"} & set(keys):
        numbers = [keys[name] for name in ("low", "high", "step") if keys.get(name) is not None]
        return "int" if all(isinstance(number, int) for number in numbers) else "float"
    if "choices" in keys:
        return "categorical"
    return "constant" if "value" in keys else None


_NAMES = {
    "k_fold": {"n_splits": "folds.k", "random_seed": "folds.seed", "stratified": "folds.kind"},
    "sampling": {
        "algorithm": "study.sampler",
        "max_trials": "budget.n_trials",
        "timeout_minutes": "budget.timeout",
    },
    "early_termination": {"policy": "study.pruner"},
    "trials_per_gpu": {"": "trials_per_device"},
}
"""Key of another tool's file -> its keys -> our setting. A plain value belongs to the first."""

_VALUES: dict[str, dict[object, str]] = {
    "study.sampler": {"bayesian": "tpe", "bayes": "tpe", "sobol": "qmc", "cma-es": "cmaes"},
    "study.pruner": {
        "median_stopping": "median",
        "truncation_selection": "percentile",
        "asha": "successive_halving",
    },
    "folds.kind": {True: "stratified", False: "kfold"},
}
_NO_EFFECT = ("save_splits", "use_for_final_training")
"""Keys of ``k_fold`` that belong to another call."""


def translate_names(layer: Layer) -> Layer:
    """Translate ``k_fold, sampling, early_termination, trials_per_gpu`` of a sweep's file.

    A setting of ours in the same file takes precedence.
    """
    values = {name: value for name, value in layer.values.items() if name not in _NAMES}
    places = dict(layer.places)
    mistakes = list(layer.mistakes)
    for name, settings in _NAMES.items():
        place = places.get((name,), name)
        for key, value in _options(name, layer.values).items():
            if key not in settings:
                sections = dict.fromkeys(s.partition(".")[0] for s in settings.values())
                do = f"see {' and '.join(sections)} in docs/sweep/space.md"
                mistakes.append(Mistake(place=place, what=f"{name!r} has no {key!r} here", do=do))
                continue
            setting = settings[key]
            value = f"{value}m" if key == "timeout_minutes" else value
            if isinstance(value, str | bool):
                value = _VALUES.get(setting, {}).get(value, value)
            section, _, field = setting.rpartition(".")
            if section:
                ours = values.get(section)
                values[section] = {field: value, **(ours if isinstance(ours, Mapping) else {})}
                places.setdefault((section, field), place)
            else:
                values.setdefault(field, value)
            places.setdefault((section or field,), place)
    return Layer(values=values, places=places, mistakes=tuple(mistakes))


def _options(name: str, values: Mapping[str, object]) -> dict[str, object]:
    """Return what a key of another tool's file holds, by its own keys."""
    if name not in values:
        return {}
    given = values[name]
    if not isinstance(given, Mapping):
        return {next(iter(_NAMES[name])): given}
    if name != "k_fold":
        return dict(given)
    if not (given.get("enabled", True) and given.get("use_for_hpo", True)):
        return {}
    implied = {"enabled": True, "use_for_hpo": True, "shuffle": True}
    folds = {"n_splits": 5, "stratified": True, **given}
    return {
        key: value
        for key, value in folds.items()
        if key not in _NO_EFFECT and implied.get(key) != value
    }
