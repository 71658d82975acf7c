"""Map the names that other tools' files use for a sweep's settings to ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nbtoolkit.config.suggestions import RENAMED, new_name
from nbtoolkit.config.yaml_source import Keys, Layer, Mistake

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
