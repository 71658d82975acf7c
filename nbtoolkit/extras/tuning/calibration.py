"""Measure the strategies of this machine for a training function: ``nb.calibrate``."""

from __future__ import annotations

from typing import Any

from nbtoolkit.config.aliases import refuse_other_launchers_names
from nbtoolkit.config.schema import Config, ConfigLike, as_config
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import NbtoolkitError
from nbtoolkit.extras.tuning.answer import Subject
from nbtoolkit.extras.tuning.compare import (
    SpeedRow,
    SpeedTable,
    measure_in_turn,
    measured_row,
    reason_of,
)
from nbtoolkit.host import detect_host
from nbtoolkit.launcher.train_function import Train
from nbtoolkit.run.kept_answers import CALIBRATION, calibration_key
from nbtoolkit.run.output import to_stdout

_STRATEGY = "distributed.strategy"
_SECONDS = 2.0
"""A strategy trains for at least so long."""


@refuse_other_launchers_names
def calibrate(train: Train, config: ConfigLike = None, *, force: bool = False) -> SpeedTable:
    """Measure how fast one process, DDP and DataParallel train on this machine.

    One process trains on one device (on the CPU: on all CPUs). DDP trains on all usable devices (on
    the CPU: with two ranks, or ``distributed.world_size``). DataParallel trains on several equal
    GPUs, if there are any. All have the global batch size of ``config``, and train in temporary
    runs for 20 steps or one second after a warm-up, whichever is longer. A strategy that fails is a
    row of the table with the reason.

    The result is kept in ``<output_dir>/tuning.json``, for this function, model and devices. A
    later launch with ``distributed.strategy: auto`` or ``measured`` then uses another strategy than
    the usual one if it was more than 5% faster. :attr:`RunResult.efficiency` is the throughput of a
    run, compared with the speed of one device in this result.

    Args:
        train: a training function that calls :func:`nbtoolkit.fit`.
        config: the configuration of the run to come.
        force: measure again, even if a result was kept.

    Raises:
        TuningError: no strategy could be measured, or the function does not train with ``nb.fit``.
        Exception: the exception of the training function, if no strategy could be measured.
    """
    config = as_config(config)
    subject = Subject(train, config)
    planned = _planned(config)
    key = calibration_key(train, config)

    def measure_row(row: SpeedRow) -> SpeedRow:
        same_batch = _same_batch(config, row.settings[_STRATEGY])
        fair = Subject(train, config.with_overrides(same_batch))
        return measured_row(fair, row, seconds=_SECONDS)

    def measure() -> SpeedTable:
        rows = measure_in_turn(planned, measure_row)
        choice = max(range(len(rows)), key=lambda at: rows[at].samples_per_second)
        return SpeedTable(rows=tuple(rows), choice=choice)

    table = subject.find(SpeedTable, CALIBRATION, key, measure, force=force)
    if [row.processes for row in table.rows] != [row.processes for row in planned]:
        table = subject.find(SpeedTable, CALIBRATION, key, measure, force=True)
    to_stdout(f"{table.why}\n", flush=True)
    return table


def _planned(config: Config) -> list[SpeedRow]:
    """Return the strategies of this machine, not measured yet; one without a plan has a reason."""
    hardware = detect_hardware()
    ranks = config.distributed
    rows = list[SpeedRow]()
    gpus = len(hardware.usable)
    several = (
        gpus > 1 or (not gpus and hardware.cpu_count > 1) or ranks.world_size not in ("auto", 1)
    )
    for strategy in ["single", *["ddp"] * several, *["dp"] * (gpus > 1)]:
        settings: dict[str, Any] = {_STRATEGY: strategy}
        if ranks.enabled != "auto":
            settings["distributed.enabled"] = "auto"
        if ranks.world_size != "auto" and (strategy != "ddp" or ranks.world_size == 1):
            settings["distributed.world_size"] = "auto"
        try:
            overrides = {**settings, **_same_batch(config, strategy)}
            plan = make_plan(config.with_overrides(overrides), detect_host(), hardware)
        except NbtoolkitError as error:
            rows.append(SpeedRow(settings=settings, reason=reason_of(error)))
            continue
        if plan.strategy == strategy:  # unequal GPUs form no group
            rows.append(SpeedRow(settings=settings, processes=plan.processes))
    return rows


def _same_batch(config: Config, strategy: str) -> dict[str, object]:
    """Return the settings with which a strategy has the global batch of the run."""
    if config.train.batch_size_per_device is None:
        return {}
    plan = _usual_plan(config)
    passes = plan.accumulate * (plan.processes if strategy == "single" else 1)
    return {
        "train.batch_size": plan.global_batch_size,
        "train.batch_size_per_device": None,
        "train.gradient_accumulation_steps": passes,
        "optim.lr_rule": "none",
    }


def _usual_plan(config: Config) -> LaunchPlan:
    """Return the plan of the run if nothing is measured."""
    usual = config.with_overrides({_STRATEGY: "auto", "distributed.enabled": "auto"})
    return make_plan(usual, detect_host(), detect_hardware())
