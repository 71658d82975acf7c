"""Find the loader processes, precision, options and strategy with which a step is fastest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nbtoolkit.config.aliases import refuse_other_launchers_names
from nbtoolkit.config.schema import Config, ConfigLike, as_config
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import NbtoolkitError, TuningError
from nbtoolkit.host import detect_host
from nbtoolkit.launcher.train_function import Train
from nbtoolkit.run.kept_answers import CALIBRATION, calibration_key
from nbtoolkit.run.output import to_stdout
from nbtoolkit.run.serialization import one_line
from nbtoolkit.text_table import counted, number, setting
from nbtoolkit.tuning.answer import FinderResult, ShortRun, Subject
from nbtoolkit.tuning.probe import probe

_STEPS = 40  # of each measurement; the second half counts
_SYNC = {"checkpoint.every_steps": 10}  # wait for the device so often, in steps
_GAIN = 1.03  # a throughput counts as higher from this factor on
_LOADS = 0.1  # share of a step that waits for its batch: less is not worth a process
_LONGEST = 45.0  # seconds after which no further number of workers is measured

# A strategy trains for at least so many seconds. A log point covers 5 steps: measuring each would
# add to a short step.
_SECONDS, _STEPS_PER_POINT = 2.0, 5
# The fastest of two rounds counts: another program on the machine only makes a round slower. In the
# second one nothing starts that would probably end after a minute.
_ROUNDS, _LONGEST_ROUNDS = 2, 60.0

_STRATEGY = "distributed.strategy"


@dataclass(frozen=True, kw_only=True)
class SpeedRow(ShortRun):
    """One measured choice of settings.

    Attributes:
        settings: what was changed; empty: nothing.
        processes: ranks.
        loss: the mean loss of the last quarter of the steps; None if it failed.
        data_share: the share of its time in which a step waits for its batch.
    """

    settings: Mapping[str, Any]
    processes: int = 1
    loss: float | None = None
    data_share: float = 0.0


@dataclass(frozen=True, kw_only=True, repr=False)
class SpeedTable(FinderResult):
    """The result of :func:`find_num_workers`, :func:`find_speedups` and :func:`calibrate`.

    Attributes:
        rows: the measurements, in the order in which they were made. The first row is the base,
            with which the others are compared.
        choice: the index of the suggested row.
        batch_size: the number of samples per optimizer step, over all ranks.
    """

    rows: tuple[SpeedRow, ...]
    choice: int
    batch_size: int

    @property
    def chosen(self) -> SpeedRow:
        """The suggested row."""
        return self.rows[self.choice]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for ``config.with_overrides``; empty if the base is suggested."""
        return dict(self.chosen.settings)

    def relative(self, row: SpeedRow) -> float | None:
        """Return the throughput of a row divided by that of the base; None if either failed."""
        base = self.rows[0].samples_per_second
        return row.samples_per_second / base if base and not row.reason else None

    @property
    def why(self) -> str:
        """The suggestion and the reason for it, as a line of text."""
        base, ratio = self.rows[0], self.relative(self.chosen)
        more = f", {ratio:.2f} x {_text(base.settings)}" if ratio and self.choice else ""
        ranks = f" on {counted(self.chosen.processes, 'rank')}" if self.chosen.processes > 1 else ""
        return (
            f"{_text(self.settings)}: {number(self.chosen.samples_per_second)} samples/s{more}, "
            f"at batch {self.batch_size}{ranks}; {self.cost}"
        )

    def columns(self) -> tuple[list[str], list[list[str]]]:
        """Return the columns' names and each row's texts; a star marks the suggestion."""
        return ["settings", "ranks", "samples/s", "relative", "GB", "loss", "failed"], [
            [
                ("* " if row is self.chosen else "") + _text(row.settings),
                str(row.processes),
                *map(number, (row.samples_per_second, self.relative(row), row.memory, row.loss)),
                row.reason,
            ]
            for row in self.rows
        ]


@refuse_other_launchers_names
def find_num_workers(
    train: Train, config: ConfigLike = None, *, processes: int | None = None, force: bool = False
) -> SpeedTable:
    """Suggest ``train.num_workers``: the smallest number within 3% of the best throughput.

    It measures 0, 1, 2, 4, ... worker processes, up to the number of CPUs of a rank, with 40
    optimizer steps each, in new processes. It stops after two numbers in a row that bring less than
    3%, and after 45 s. If a step with 0 worker processes waits for its batch for less than a tenth
    of its time, as with data in memory, no other numbers are measured. A ``DataLoader`` with a
    ``num_workers`` of its own keeps this number.

    Args:
        train: a training function that calls :func:`nbtoolkit.fit` with the configuration it gets.
        config: the configuration of the run to come.
        processes: the number of ranks; None: as ``config`` says.
        force: measure again, even if an answer was kept (see :func:`nbtoolkit.find_learning_rate`).

    Raises:
        TuningError: memory ran out, or a loss is not finite.
        Exception: the exception of the training function.
    """
    subject = Subject(train, as_config(config, processes))

    def measure() -> SpeedTable:
        began, rows, workers, most, vain = time.monotonic(), list[SpeedRow](), 0, 1, 0
        while workers <= most and vain < 2 and time.monotonic() - began < _LONGEST:
            row, plan = _measured(subject, {"train.num_workers": workers})
            best = max([one.samples_per_second for one in rows], default=0.0)
            vain = 0 if row.samples_per_second > best * _GAIN else vain + 1
            rows.append(row)
            most = plan.threads_per_rank
            if not workers and row.data_share < _LOADS:
                break
            workers = max(1, 2 * workers)
        good = max(one.samples_per_second for one in rows) / _GAIN
        return _table(rows, next(one for one in rows if one.samples_per_second >= good), plan)

    found = subject.find(SpeedTable, "num_workers", subject.key(), measure, force=force)
    to_stdout(f"{found.why}\n", flush=True)
    return found


@refuse_other_launchers_names
def find_speedups(
    train: Train,
    config: ConfigLike = None,
    *,
    precision: bool = True,
    channels_last: bool = True,
    compile: bool = True,
    processes: int | None = None,
    force: bool = False,
) -> SpeedTable:
    """Measure which precision and which options make the steps of ``nb.fit`` faster.

    It first measures ``config`` as it is, and then each other precision that the device computes
    natively. Then it adds ``train.channels_last`` to the fastest settings so far, and at last
    ``train.compile``. Each measurement takes 40 optimizer steps, in new processes. Settings count
    as faster only if they bring 3% or more. Settings that fail (no compiler, out of memory) are a
    row of the table with the reason.

    Compare the losses in the table, too: all of them are losses after the same samples.

    Args:
        train: a training function that calls :func:`nbtoolkit.fit` with the configuration it gets.
        config: the configuration of the run to come.
        precision: whether to try other values of ``train.precision``.
        channels_last: whether to try ``train.channels_last``.
        compile: whether to try ``train.compile``; the time to compile is not part of a step's time.
        processes: the number of ranks; None: as ``config`` says.
        force: measure again, even if an answer was kept (see :func:`nbtoolkit.find_learning_rate`).

    Raises:
        TuningError: with ``config`` as it is, memory ran out, or a loss is not finite.
        Exception: the exception of the training function, with ``config`` as it is.
    """
    config = as_config(config, processes)
    subject, wished = Subject(train, config), {"channels_last": channels_last, "compile": compile}
    options = [
        name for name, wanted in wished.items() if wanted and not getattr(config.train, name)
    ]

    def measure() -> SpeedTable:
        best, plan = _measured(subject, {})
        rows = [best]
        values: dict[str, list[Any]] = {"precision": _precisions(plan) if precision else []}
        values |= {name: [True] for name in options}
        for name, others in values.items():
            base = best.settings
            for value in others:
                settings = {**base, f"train.{name}": value}
                try:
                    rows.append(_measured(subject, settings)[0])
                except Exception as error:  # a row of the table
                    rows.append(SpeedRow(settings=settings, reason=_reason(error)))
                if rows[-1].samples_per_second > best.samples_per_second * _GAIN:
                    best = rows[-1]
        return _table(rows, best, plan)

    key = subject.key(precision, channels_last, compile)
    found = subject.find(SpeedTable, "speedups", key, measure, force=force)
    to_stdout(f"{found!r}\n", flush=True)
    return found


def _precisions(plan: LaunchPlan) -> list[str]:
    """The precisions that the device of a run computes natively, without the run's own."""
    weakest = min((device.capability for device in detect_hardware().devices), default=(0, 0))
    cpu = plan.device_type == "cpu"
    native = {"fp32": True, "fp16": not cpu and weakest >= (7, 0), "bf16": cpu or weakest >= (8, 0)}
    return [name for name, computed in native.items() if computed and name != plan.precision]


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
    subject, planned, key = Subject(train, config), _planned(config), calibration_key(train, config)

    def measure() -> SpeedTable:
        rows = _measure_all(subject, planned)
        return _table(rows, max(rows, key=lambda row: row.samples_per_second), _usual_plan(config))

    found = subject.find(SpeedTable, CALIBRATION, key, measure, force=force)
    if [row.processes for row in found.rows] != [row.processes for row in planned]:
        found = subject.find(SpeedTable, CALIBRATION, key, measure, force=True)
    to_stdout(f"{found.why}\n", flush=True)
    return found


def _planned(config: Config) -> list[SpeedRow]:
    """Return the strategies of this machine, not measured yet; one without a plan has a reason."""
    hardware, own, found = detect_hardware(), config.distributed, list[SpeedRow]()
    gpus = len(hardware.usable)
    several = gpus > 1 or (not gpus and hardware.cpu_count > 1) or own.world_size not in ("auto", 1)
    for strategy in ["single", *["ddp"] * several, *["dp"] * (gpus > 1)]:
        settings: dict[str, Any] = {_STRATEGY: strategy}
        if own.enabled != "auto":
            settings["distributed.enabled"] = "auto"
        if own.world_size != "auto" and (strategy != "ddp" or own.world_size == 1):
            settings["distributed.world_size"] = "auto"
        try:
            overrides = {**settings, **_same_batch(config, strategy)}
            plan = make_plan(config.with_overrides(overrides), detect_host(), hardware)
        except NbtoolkitError as error:
            found.append(SpeedRow(settings=settings, reason=_reason(error)))
            continue
        if plan.strategy == strategy:  # unequal GPUs form no group
            found.append(SpeedRow(settings=settings, processes=plan.processes))
    return found


def _same_batch(config: Config, strategy: str) -> dict[str, object]:
    """The settings with which a strategy has the global batch of the run."""
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
    """The plan of the run if nothing is measured."""
    usual = config.with_overrides({_STRATEGY: "auto", "distributed.enabled": "auto"})
    return make_plan(usual, detect_host(), detect_hardware())


def _measure_all(subject: Subject, planned: list[SpeedRow]) -> list[SpeedRow]:
    """Measure all strategies in turn; twice if that is quick."""
    rows, errors, began, longest = list(planned), list[Exception](), time.monotonic(), 0.0
    for turn, at in enumerate([*range(len(rows))] * _ROUNDS):
        row, start = rows[at], time.monotonic()
        again = turn >= len(rows)
        late = again and start - began + longest > _LONGEST_ROUNDS
        if late or row.reason:
            continue
        same_batch = _same_batch(subject.config, row.settings[_STRATEGY])
        fair = replace(subject, config=subject.config.with_overrides(same_batch))
        try:
            now, _ = _measured(fair, row.settings, seconds=_SECONDS)
        except Exception as error:  # of the user's function, or of the ranks' group
            errors.append(error)
            now = replace(row, samples_per_second=0.0, reason=_reason(error))
        if now.reason or now.samples_per_second > row.samples_per_second:
            rows[at] = now
        longest = max(longest, time.monotonic() - start)
    if not all(row.reason for row in rows):
        return rows
    if errors:
        raise errors[0]
    reasons = "; ".join(f"{row.settings[_STRATEGY]}: {row.reason}" for row in rows)
    raise TuningError(
        f"no strategy could be measured: {reasons}",
        allowed="a function of which at least one process can do some steps",
        do="launch it with distributed.strategy: single, and correct what the error reports",
    )


# --- one row ---


def _measured(
    subject: Subject, settings: Mapping[str, Any], *, seconds: float = 0.0
) -> tuple[SpeedRow, LaunchPlan]:
    """Measure a choice of settings, by steps or by ``seconds``."""
    every = {"tracking.log_every_n_steps": _STEPS_PER_POINT} if seconds else _SYNC
    result = probe(subject, {**every, **settings}, steps=_STEPS, seconds=seconds)
    if result.status != "measured":
        raise TuningError(
            f"{result.status.replace('_', ' ')} with {_text(settings)}: {result.reason}",
            allowed="a configuration with which a run does some steps",
            do="lower train.batch_size, or optim.lr",
        )
    assert result.plan is not None  # it has measured steps
    steps = result.steps[-len(result.steps) // 4 :]
    row = SpeedRow(
        settings=settings,
        processes=result.plan.processes,
        samples_per_second=result.samples_per_second,
        memory=result.memory,
        loss=statistics.fmean(step.loss for step in steps),
        data_share=statistics.fmean(result.data_shares or [0.0]),
    )
    return row, result.plan


def _table(rows: list[SpeedRow], chosen: SpeedRow, plan: LaunchPlan) -> SpeedTable:
    batch = plan.global_batch_size
    return SpeedTable(rows=tuple(rows), choice=rows.index(chosen), batch_size=batch)


def _reason(error: Exception) -> str:
    return one_line(type(error).__name__, str(error))


def _text(settings: Mapping[str, Any]) -> str:
    shown = (f"{name}: {setting(value)}" for name, value in settings.items())
    return ", ".join(shown) or "no change"
