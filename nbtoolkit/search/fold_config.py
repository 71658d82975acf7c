"""Make the folds that a sweep's file asks for from the targets at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import ConfigError, FoldError
from nbtoolkit.folds.folds import Folds
from nbtoolkit.folds.make_folds import make_folds
from nbtoolkit.tasks.find import find_data

if TYPE_CHECKING:
    from nbtoolkit.study.sweep_config import FoldConfig

_BY_NUMBER = ("kfold", "time")
"""Kinds that need to know only how many samples there are."""


def configured_folds(wish: FoldConfig, task: str, targets: Any, groups: Any) -> Folds | None:
    """Make the folds, or read them; None: none are wished.

    Args:
        wish: ``folds`` of the sweep's file.
        task: the function's name, whose module may have the targets.
        targets: the call's: a target for each sample, or how many samples there are.
        groups: the call's.

    Raises:
        FoldError: there is nothing to make them from, or they cannot be made so.
    """
    if wish.file is not None:
        return Folds.load(wish.file)
    if wish.k is None:
        if targets is not None or groups is not None:
            raise FoldError(
                "the sweep was given targets, and no folds are wished",
                allowed="targets= and groups= together with folds of the sweep's file",
                do="set folds: {k: 5} beside the space, or take targets= out",
            )
        return None
    if targets is None:
        targets, groups = _of_task(task, wish, groups)
    if isinstance(targets, int):
        if wish.kind not in _BY_NUMBER:
            raise FoldError(
                f"folds.kind is {wish.kind!r}, which needs every sample's target, not their number",
                allowed=f"a number for {' and '.join(_BY_NUMBER)}",
                do="pass targets=y, or set folds.kind: kfold",
            )
        targets = range(targets)
    grouped = "group" in wish.kind
    return make_folds(
        targets,
        k=wish.k,
        kind=wish.kind,
        groups=groups if grouped else None,
        seed=wish.seed,
        repeats=wish.repeats,
    )


def _of_task(task: str, wish: FoldConfig, groups: Any) -> tuple[Any, Any]:
    try:
        data: Sequence[Any] = find_data(task)
    except ConfigError as error:
        raise FoldError(
            f"folds.k is {wish.k}, and there are no targets to make the folds from: {error.what}",
            allowed="targets= of the call, folds=nb.make_folds(...), folds.file, or a module whose "
            "load() returns (inputs, targets)",
            do="pass them: nb.sweep(..., targets=y), with groups=g where folds.kind has groups",
        ) from None
    return data[1], data[2] if groups is None and len(data) > 2 else groups
