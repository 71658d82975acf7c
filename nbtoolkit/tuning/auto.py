"""Measure the settings that are ``auto``, for :mod:`nbtoolkit.launcher.measured`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.config.schema import load_config
from nbtoolkit.errors import ConfigError
from nbtoolkit.launcher.launch import Train
from nbtoolkit.run.paths import runs_in
from nbtoolkit.run.resume import changed_settings, find_named_run, read_versions, source_hash
from nbtoolkit.tuning.calibration import measured_strategy
from nbtoolkit.tuning.learning_rate import DEFAULT, measure_learning_rate
from nbtoolkit.tuning.speed import measure_num_workers

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.folds.folds import Fold
    from nbtoolkit.worker.context import RunContext

Resume = str | os.PathLike[str]
Measured = tuple[dict[str, Any], str]
"""Settings, and in words why these."""


def learning_rate(train: Train, config: Config, resume: Resume, fold: Fold | None) -> Measured:
    """Return ``optim.lr``, and why: of the run to resume, kept, or measured now.

    Args:
        train: the training function.
        config: the configuration, in which it is ``auto``.
        resume: as for :func:`nbtoolkit.launch`.
        fold: the value of ``ctx.fold`` in the measurement.

    Raises:
        ResumeError: there is no run of the name ``resume``.
        TuningError: it cannot be measured.
    """
    if (earlier := _rate_to_resume(train, config, resume)) is not None:
        rate, why = earlier
        return {"optim.lr": rate}, why
    found = measure_learning_rate(train, config, DEFAULT, runs=partial(_with_fold, train, fold))
    return {"optim.lr": found.suggestion}, found.why


def num_workers(train: Train, config: Config, resume: Resume, fold: Fold | None) -> Measured:
    """Return ``train.num_workers``, and why: kept, or measured now.

    Args:
        train: the training function.
        config: the configuration, in which it is ``auto``.
        resume: not used: the workers do not change what a run computes.
        fold: the value of ``ctx.fold`` in the measurement.

    Raises:
        TuningError: it cannot be measured.
    """
    found = measure_num_workers(train, config, runs=partial(_with_fold, train, fold))
    return {"train.num_workers": found.chosen.settings["train.num_workers"]}, found.why


def strategy(train: Train, config: Config, resume: Resume, fold: Fold | None) -> Measured:
    """Return the settings of the fastest strategy, and why.

    Args:
        train: the training function.
        config: the configuration, in which ``distributed.strategy`` is ``measured``.
        resume: not used: the number of ranks does not change what a run computes.
        fold: the value of ``ctx.fold`` in the measurement.

    Raises:
        TuningError: no strategy can be measured.
    """
    measured = train if fold is None else partial(_with_fold, train, fold)
    return measured_strategy(measured, config)


def _rate_to_resume(train: Train, config: Config, resume: Resume) -> tuple[float, str] | None:
    """The rate of the unfinished run that differs from the launch in nothing else."""
    if resume == "never":
        return None
    folder = Path(config.runtime.output_dir)
    runs = runs_in(folder) if resume == "auto" else [find_named_run(resume, folder)]
    for paths in runs:
        about = read_versions(paths)
        if about.get("source") != source_hash(train) or (resume == "auto" and paths.completed()):
            continue
        try:
            before = load_config(paths.config, env=None)
        except ConfigError:  # of another version, or damaged: it cannot be resumed either
            continue
        rate = before.optim.lr
        same = config.with_overrides({"optim.lr": rate})
        if rate != "auto" and not changed_settings(before, same, may_train_longer=resume != "auto"):
            return rate, f"as in {paths.run_id}"
    return None


def _with_fold(train: Train, fold: Fold | None, config: Config, ctx: RunContext) -> Any:
    """Call a training function that sees a fold, outside a cross-validation."""
    ctx._fold = fold
    return train(config, ctx)
