"""Make the folds that a sweep's file asks for."""

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
"""Kinds of folds that need only the number of samples."""


def configured_folds(settings: FoldConfig, task: str, targets: Any, groups: Any) -> Folds | None:
    """Make or load the folds of a sweep; None if its file asks for none.

    Args:
        settings: section ``folds`` of the sweep's file.
        task: name of the training function, whose module may provide the targets.
        targets: the call's ``targets``: shape (samples,), or the number of samples.
        groups: the call's ``groups``: shape (samples,).

    Raises:
        FoldError: there are no targets, or the folds cannot be made from them.
    """
    if settings.file is not None:
        return Folds.load(settings.file)
    if settings.k is None:
        if targets is not None or groups is not None:
            raise FoldError(
                "targets or groups were passed to a sweep without folds",
                allowed="targets= and groups= together with folds of the sweep's file",
                do="set folds: {k: 5} beside the space, or take targets= out",
            )
        return None
    if targets is None:
        targets, groups = _of_task(task, settings, groups)
    if isinstance(targets, int):
        if settings.kind not in _BY_NUMBER:
            raise FoldError(
                f"folds.kind is {settings.kind!r}, which needs each sample's target, not a number",
                allowed=f"a number for {' and '.join(_BY_NUMBER)}",
                do="pass targets=y, or set folds.kind: kfold",
            )
        targets = range(targets)
    grouped = "group" in settings.kind
    return make_folds(
        targets,
        k=settings.k,
        kind=settings.kind,
        groups=groups if grouped else None,
        seed=settings.seed,
        repeats=settings.repeats,
    )


def _of_task(task: str, settings: FoldConfig, groups: Any) -> tuple[Any, Any]:
    try:
        data: Sequence[Any] = find_data(task)
    except ConfigError as error:
        raise FoldError(
            f"folds.k is {settings.k}, and there are no targets for the folds: {error.what}",
            allowed="targets= of the call, folds=nb.make_folds(...), folds.file, or a module whose "
            "load() returns (inputs, targets)",
            do="pass them: nb.sweep(..., targets=y), with groups=g where folds.kind has groups",
        ) from None
    return data[1], data[2] if groups is None and len(data) > 2 else groups
