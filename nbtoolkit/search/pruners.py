"""Pruners: what ends hopeless trials early. Imports Optuna: load it late."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import optuna
from optuna.pruners import BasePruner

from nbtoolkit.errors import SpaceError

if TYPE_CHECKING:
    from nbtoolkit.search.wishes import Wishes

_CLASSES: dict[str, Callable[..., BasePruner]] = {
    "median": optuna.pruners.MedianPruner,
    "percentile": optuna.pruners.PercentilePruner,
    "successive_halving": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
    "wilcoxon": optuna.pruners.WilcoxonPruner,
    "patient": optuna.pruners.PatientPruner,
    "none": optuna.pruners.NopPruner,
}


def make_pruner(wishes: Wishes) -> BasePruner:
    """The pruner that is wished for.

    ``patient`` waits ``patience`` reports (5) without a better one, then asks the median.

    Raises:
        SpaceError: the pruner does not know one of its options, or does not take its value.
    """
    options: dict[str, Any] = wishes.study.pruner_options.to_dict()
    if wishes.pruner == "patient":
        options = {"wrapped_pruner": optuna.pruners.MedianPruner(), "patience": 5, **options}
    try:
        with warnings.catch_warnings():  # Optuna calls two of them experimental
            warnings.simplefilter("ignore")
            return _CLASSES[wishes.pruner](**options)
    except (TypeError, ValueError) as error:
        cls = getattr(_CLASSES[wishes.pruner], "__name__", wishes.pruner)
        allowed = f"the arguments of Optuna's {cls}"
        raise SpaceError(f"study.pruner_options: {error}", allowed=allowed) from error
