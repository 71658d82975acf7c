"""Replace settings that ask for a measurement by what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config

# Setting -> the value that asks for a measurement, and the function (train, config) -> settings
# that measures, or reads what was kept. It is imported when it is needed: tuning/ launches runs.
MEASURED: Mapping[str, tuple[object, str]] = {
    "distributed.strategy": ("measured", "nbtoolkit.tuning.calibration:measured_strategy"),
}


def resolve_measured(train: Callable[..., Any], config: Config) -> Config:
    """Measure, before a launch, each setting that asks for it.

    Args:
        train: the training function.
        config: the configuration of the launch.

    Returns:
        The configuration with the measured settings.

    Raises:
        TuningError: ``train`` cannot be measured.
    """
    for setting, (value, place) in MEASURED.items():
        section, _, name = setting.partition(".")
        if getattr(getattr(config, section), name) == value:
            module, _, function = place.partition(":")
            config = config.with_overrides(getattr(import_module(module), function)(train, config))
    return config
