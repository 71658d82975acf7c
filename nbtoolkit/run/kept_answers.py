"""Read what was measured on this machine, by function, model, data and devices.

The file is ``<output_dir>/tuning.json``, one JSON object: a measurement's name -> a key -> the
answer with its date. A key is a hash of everything that the answer depends on, so a changed model
is measured again. ``nbtoolkit/tuning`` measures and writes the file; a launch only reads it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nbtoolkit.config.fields import flat_settings
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.launch_plan import Start
from nbtoolkit.environment.placement import MeasuredSpeed, strategy_is_open
from nbtoolkit.errors import TuningError
from nbtoolkit.run.identity import code_of
from nbtoolkit.run.paths import read_or_empty
from nbtoolkit.run.versions import versions

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config

FILE = "tuning.json"

# Settings on which speed and memory of a step depend, besides the free sections.
_SETTINGS = (
    "train.batch_size",
    "train.batch_size_per_device",
    "train.precision",
    "train.compile",
    "train.channels_last",
    "train.activation_checkpointing",
    "train.weight_averaging",
    "optim.name",
    "distributed.world_size",
    "distributed.device_ids",
)
_LIBRARIES = ("python", "torch", "accelerate")

Answer = dict[str, Any]
"""Plain values, and ``measured``: the unix time of the measurement."""


def answer_key(train: Callable[..., Any], config: Config, *more: object) -> str:
    """Identify what a measurement depends on.

    Args:
        train: the training function; its source and bound values count.
        config: ``model``, ``data`` and the settings that change a step's speed or memory count.
        more: anything else that counts.
    """
    settings = flat_settings(config.to_dict())
    hardware = detect_hardware()
    about = {
        "function": code_of(train),
        "model": config.model.to_dict(),
        "data": config.data.to_dict(),
        "settings": [settings.get(name) for name in _SETTINGS],
        "devices": [device.name for device in hardware.devices] or f"{hardware.cpu_count} CPUs",
        "versions": [versions().get(name) for name in _LIBRARIES],
        "more": more,
    }
    text = json.dumps(about, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def kept_answer(config: Config, name: str, key: str) -> Answer | None:
    """Return the answer that was kept under ``name`` and ``key``; None if there is none."""
    answer = read_answers(config).get(name, {}).get(key)
    return answer if isinstance(answer, dict) else None


def read_answers(config: Config) -> dict[str, dict[str, Answer]]:
    """All answers that were kept in the output folder."""
    return cast("dict[str, dict[str, Answer]]", read_or_empty(answers_file(config)))


def answers_file(config: Config) -> Path:
    """Return the file of the answers."""
    return Path(config.runtime.output_dir) / FILE


def speed_key(train: Callable[..., Any], config: Config, *more: object) -> str:
    """Identify what the throughput of a run depends on."""
    ranks = config.distributed
    options = (ranks.compression, ranks.bucket_cap_mb, ranks.find_unused_parameters)
    loading = (config.train.num_workers, config.train.gradient_accumulation_steps)
    return answer_key(train, config, options, loading, *more)


CALIBRATION = "strategies"


def calibration_key(train: Callable[..., Any], config: Config) -> str:
    """Identify what a calibration depends on; it measures every number of ranks that is usable."""
    return speed_key(train, config.with_overrides({"distributed.world_size": "auto"}))


def measured_speed(
    train: Callable[..., Any], config: Config, start: Start = "forkserver"
) -> MeasuredSpeed | None:
    """Return what a kept calibration has measured; None without one.

    Without any calibration in the output folder it costs the reading of a small file.

    Args:
        train: the training function.
        config: the configuration of the launch.
        start: how the launch starts its processes.

    Raises:
        TuningError: ``distributed.strategy`` is ``measured``, nothing else decides the number of
            processes, and no calibration is kept.
    """
    kept = None
    if read_answers(config).get(CALIBRATION):
        kept = kept_answer(config, CALIBRATION, calibration_key(train, config))
    if kept is None:
        settings = config.distributed
        if settings.strategy == "measured" and strategy_is_open(settings, start):
            raise _not_calibrated(config)
        return None
    measured = [row for row in kept["rows"] if row["samples_per_second"]]
    rows = {row["settings"]["distributed.strategy"]: row for row in measured}
    return MeasuredSpeed(
        speeds={name: row["samples_per_second"] for name, row in rows.items()},
        ranks=rows["ddp"]["processes"] if "ddp" in rows else 1,
        date=kept["measured"],
    )


def _not_calibrated(config: Config) -> TuningError:
    return TuningError(
        "distributed.strategy is measured, and no calibration of this function with this model, "
        f"these data and these devices is kept in {answers_file(config)}",
        allowed="measured after nb.calibrate; auto, which needs none",
        do="call nb.calibrate(train, config) once, then launch again",
    )
