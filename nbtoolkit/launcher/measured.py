"""Measure the settings that ask for it, before a launch is planned."""

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

# Setting -> the value that asks for a measurement, and the function that measures. It is imported
# by this name, and only if asked for: the tuning folder imports the launcher, and may be deleted.
MEASURED = {
    "distributed.strategy": ("measured", "nbtoolkit.tuning.auto:strategy"),
    "train.num_workers": ("auto", "nbtoolkit.tuning.auto:num_workers"),
    "optim.lr": ("auto", "nbtoolkit.tuning.auto:learning_rate"),
}


def unmeasured(config: Config) -> list[str]:
    """The settings of :data:`MEASURED` that ask for a measurement."""
    return [name for name, (asks, _) in MEASURED.items() if attrgetter(name)(config) == asks]


def measure_auto(
    train: Callable[..., Any],
    config: Config,
    resume: str | os.PathLike[str],
    display: Display,
    *,
    searched: Container[str] = (),
    fold: Fold | None = None,
) -> Config:
    """Replace the settings that ask for a measurement by what is measured now, or was.

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
        asks, place = MEASURED[name]
        if detect_host().is_rank:
            if asks == "auto":
                measured("auto", name)
            continue  # the strategy of ranks that run is decided
        module, _, function = place.partition(":")
        try:
            measure = getattr(import_module(module), function)
        except ModuleNotFoundError as error:
            raise TuningError(
                f"{name} is {asks}, and what measures it is missing: {error}",
                allowed=f"another value; {asks} where there is the module {module}",
                do=f"set {name} to another value",
            ) from error
        settings, why = measure(train, config, resume, fold)
        if display != "off":
            value = settings[name]
            shown = value if isinstance(value, str) else f"{value:g}"
            print(f"{name}: {asks} -> {shown} ({why})", flush=True)
        config = config.with_overrides(settings)
    return config
