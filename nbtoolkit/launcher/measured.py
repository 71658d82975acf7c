"""Measure the settings that ask for it, before a launch is planned.

``distributed.strategy: auto`` asks for it on several GPUs once a run of the same function, model
and data settings has trained for :data:`LONG_RUN`. Not before: to measure is to call the function
two or three times more, which a run of a minute does not pay for, and a user who tries a function
does not expect.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container
from operator import attrgetter
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from nbtoolkit.config.schema import Config, load_config, measured
from nbtoolkit.environment.deadline import span, time_limit
from nbtoolkit.environment.hardware import Hardware
from nbtoolkit.environment.launch_plan import Start
from nbtoolkit.environment.placement import MeasuredSpeed, strategy_is_open
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import ConfigError, TuningError
from nbtoolkit.host import Host, detect_host
from nbtoolkit.run.events import EventReader, MetricsLogged, RunStarted
from nbtoolkit.run.fingerprint import source_hash
from nbtoolkit.run.kept_answers import calibration_key, keep_answer, kept_answer, measured_speed
from nbtoolkit.run.output import Display, to_stdout
from nbtoolkit.run.paths import RunPaths, runs_in
from nbtoolkit.run.serialization import one_line
from nbtoolkit.run.versions_record import read_versions

if TYPE_CHECKING:
    from nbtoolkit.folds.folds import Fold

# Setting -> the value that asks for a measurement, and the function that measures. It is imported
# by this name, and only if asked for: the tuning folder imports the launcher, and may be deleted.
MEASURED = {
    "distributed.strategy": ("measured", "nbtoolkit.tuning.speed:auto_strategy"),
    "train.num_workers": ("auto", "nbtoolkit.tuning.speed:auto_num_workers"),
    "optim.lr": ("auto", "nbtoolkit.tuning.learning_rate:auto_learning_rate"),
}

LONG_RUN = 600.0
"""Seconds of training from which a measurement of at most a minute is worth its time."""

_CALIBRATE = "nbtoolkit.tuning.speed:calibrate_within"
_CALIBRATE_SECONDS = 60.0
_REFUSED = "not_calibrated"  # the name of kept answers
_TIME_LEFT = 1800.0  # seconds that a run must have before its deadline
_NEWEST = 20  # runs that are looked at


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
        try:
            measure = resolve_name(place)
        except ModuleNotFoundError as error:
            module = place.partition(":")[0]
            raise TuningError(
                f"{name} is {asks}, and what measures it is missing: {error}",
                allowed=f"another value; {asks} where there is the module {module}",
                do=f"set {name} to another value",
            ) from error
        settings, why = measure(train, config, resume, fold)
        value = settings[name]
        shown = value if isinstance(value, str) else f"{value:g}"
        _say(f"{name}: {asks} -> {shown} ({why})", display)
        config = config.with_overrides(settings)
    return config


# --- distributed.strategy: auto ---


def calibrate_long(
    train: Callable[..., Any],
    config: Config,
    host: Host,
    hardware: Hardware,
    start: Start,
    display: Display,
) -> MeasuredSpeed | None:
    """Calibrate a function that is known to train for long; None if it is not, or that fails.

    It takes about a minute at most, and is not tried again if it fails.

    Args:
        train: the training function; no calibration of it was kept.
        config: the configuration of the launch.
        host: the host of this process.
        hardware: its devices; fewer than two equal GPUs are not measured.
        start: how the launch starts its processes.
        display: ``"off"`` prints nothing.
    """
    settings = config.distributed
    asks = settings.strategy == "auto" and strategy_is_open(settings, start) and not host.is_rank
    if not asks or len(hardware.usable) < 2 or config.train.max_steps is not None:
        return None
    deadline = time_limit(config).deadline
    if deadline is not None and deadline - time.time() < _TIME_LEFT:
        return None
    if make_plan(config, host, hardware, start=start).strategy != "ddp":
        return None
    key = calibration_key(train, config)
    earlier = None if kept_answer(config, _REFUSED, key) else _long_run(train, config, key)
    if earlier is None:
        return None
    paths, seconds = earlier
    _say(
        f"distributed.strategy: auto: measuring one GPU, DDP and DataParallel, for about "
        f"{span(_CALIBRATE_SECONDS)} at most, because {paths.run_id} trained for "
        f"{span(seconds)} (strategy: ddp measures nothing)",
        display,
    )
    try:
        _say(resolve_name(_CALIBRATE)(train, config, _CALIBRATE_SECONDS), display)
    except Exception as error:  # the launch goes on as without it; the function's own comes again
        reason = one_line(type(error).__name__, str(error))
        keep_answer(config, _REFUSED, key, {"reason": reason})
        _say(f"distributed.strategy: auto: not measured: {reason}", display)
        return None
    return measured_speed(train, config)


def _say(text: str, display: Display) -> None:
    if display != "off":
        to_stdout(f"{text}\n", flush=True)


def _long_run(train: Callable[..., Any], config: Config, key: str) -> tuple[RunPaths, float] | None:
    """Find a run of the same function and settings that ``nb.fit`` has trained for long."""
    source = source_hash(train)
    for paths in runs_in(config.runtime.output_dir)[:_NEWEST]:
        if not _may_be_long(paths) or read_versions(paths).get("source") != source:
            continue
        try:
            same = calibration_key(train, load_config(paths.config, env=None)) == key
        except ConfigError:  # of another version, or damaged
            continue
        if same and (seconds := _trained_for(paths)) >= LONG_RUN:
            return paths, seconds
    return None


def _may_be_long(paths: RunPaths) -> bool:
    """Whether a run's events span :data:`LONG_RUN`; reads only the first of them."""
    first = next(EventReader(paths.events).read(), None)
    return first is not None and paths.events.stat().st_mtime - first.t >= LONG_RUN


def _trained_for(paths: RunPaths) -> float:
    """Seconds between the first and the last step that ``nb.fit`` logged in one attempt."""
    longest, first = 0.0, None
    for event in EventReader(paths.events).read():
        if isinstance(event, RunStarted):
            first = None
        elif isinstance(event, MetricsLogged) and "samples_per_second" in event.values:
            first = event.t if first is None else first
            longest = max(longest, event.t - first)
    return longest
