"""Measure the settings that are ``auto`` and need a measurement, before a launch is planned."""

from __future__ import annotations

import os
from collections.abc import Callable, Container
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from nbtoolkit.config.schema import Config, measured
from nbtoolkit.errors import TuningError
from nbtoolkit.host import detect_host
from nbtoolkit.run.output import Display

if TYPE_CHECKING:
    from nbtoolkit.folds.folds import Fold

# Setting -> the function that measures it. It is imported by this name, and only for a setting that
# is `auto`: the tuning folder imports the launcher, and may be deleted.
MEASURED = {
    "train.num_workers": "nbtoolkit.tuning.auto:num_workers",
    "optim.lr": "nbtoolkit.tuning.auto:learning_rate",
}


def unmeasured(config: Config) -> list[str]:
    """The settings of :data:`MEASURED` that are ``auto``."""
    return [name for name in MEASURED if attrgetter(name)(config) == "auto"]


def measure_auto(
    train: Callable[..., Any],
    config: Config,
    resume: str | os.PathLike[str],
    display: Display,
    *,
    searched: Container[str] = (),
    fold: Fold | None = None,
) -> Config:
    """Replace the settings that are ``auto`` by what is measured now, or was.

    Args:
        train: the training function.
        config: the configuration of the launch.
        resume: as for the launch.
        display: ``"off"`` prints nothing.
        searched: settings that the launch chooses itself.
        fold: the value of ``ctx.fold`` in the measurement.

    Raises:
        ConfigError: this process is a rank of another launcher.
        TuningError: ``nbtoolkit.tuning`` is missing, or the setting cannot be measured.
        Exception: the function's own.
    """
    for name in unmeasured(config):
        if name in searched:
            continue
        if detect_host().is_rank:
            measured("auto", name)
        module, _, function = MEASURED[name].partition(":")
        try:
            measure = getattr(import_module(module), function)
        except ModuleNotFoundError as error:
            raise TuningError(
                f"{name} is auto, and what measures it is missing: {error}",
                allowed=f"a number; auto where there is the module {module}",
                do=f"set {name} to a number",
            ) from error
        value, why = measure(train, config, resume, fold)
        if display != "off":
            print(f"{name}: auto -> {value:g} ({why})", flush=True)
        config = config.with_overrides({name: value})
    return config
