"""Measure several choices of settings with short runs, and keep the fastest: ``nb.compare``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nbtoolkit.config.aliases import refuse_other_launchers_names
from nbtoolkit.config.schema import Config, ConfigLike, as_config
from nbtoolkit.errors import TuningError
from nbtoolkit.extras.tuning.answer import FinderResult, ShortRun, Subject
from nbtoolkit.extras.tuning.probe import probe
from nbtoolkit.launcher.train_function import Train
from nbtoolkit.run.kept_answers import speed_key
from nbtoolkit.run.output import to_stdout
from nbtoolkit.text_table import counted, number, setting
from nbtoolkit.wire.serialization import one_line

_STEPS = 40  # of each measurement; the second half counts
_SYNC = {"checkpoint.every_steps": 10}  # wait for the device so often, in steps
_STEPS_PER_POINT = 5  # measuring each would add to a short step
_GAIN = 1.03  # a throughput counts as higher from this factor on

# The fastest of two rounds counts: another program on the machine only makes a round slower. In the
# second one nothing starts that would probably end after a minute.
_ROUNDS = 2
_LONGEST_ROUNDS = 60.0


@dataclass(frozen=True, kw_only=True)
class SpeedRow(ShortRun):
    """One measured choice of settings.

    Attributes:
        settings: what was changed; empty: nothing.
        processes: ranks.
        batch_size: the number of samples per optimizer step, over all ranks; 0 if it failed.
        loss: the mean loss of the last quarter of the steps; None if it failed.
    """

    settings: Mapping[str, Any]
    processes: int = 1
    batch_size: int = 0
    loss: float | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class SpeedTable(FinderResult):
    """The result of :func:`compare` and :func:`calibrate`.

    Attributes:
        rows: the measurements, in the order of the settings. The others are compared with the first
            row.
        choice: the index of the suggested row.
    """

    rows: tuple[SpeedRow, ...]
    choice: int

    @property
    def chosen(self) -> SpeedRow:
        """The suggested row."""
        return self.rows[self.choice]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for ``config.with_overrides``."""
        return dict(self.chosen.settings)

    def relative(self, row: SpeedRow) -> float | None:
        """Return a row's throughput divided by that of the first row; None if either failed."""
        first = self.rows[0].samples_per_second
        return row.samples_per_second / first if first and not row.reason else None

    @property
    def why(self) -> str:
        """The suggestion and the reason for it, as a line of text."""
        chosen = self.chosen
        ratio = self.relative(self.chosen)
        more = f", {ratio:.2f} x {_text(self.rows[0].settings)}" if ratio and self.choice else ""
        ranks = f" on {counted(chosen.processes, 'rank')}" if chosen.processes > 1 else ""
        return (
            f"{_text(self.settings)}: {number(chosen.samples_per_second)} samples/s{more}, "
            f"at batch {chosen.batch_size}{ranks}; {self.cost}"
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
def compare(
    train: Train,
    config: ConfigLike = None,
    settings: Sequence[Mapping[str, Any]] = (),
    *,
    processes: int | None = None,
    force: bool = False,
) -> SpeedTable:
    """Measure how fast a training function trains with each of several choices of settings.

    ``train`` runs for 40 optimizer steps with each choice, in new processes and temporary runs;
    then once more with each choice, if this takes less than a minute. The faster time counts. A
    choice that fails (no compiler, out of memory) is a row of the table with the reason.

    The suggestion is the first choice whose throughput is within 3% of the highest. So list what
    you prefer first, such as ``{}``, the configuration as it is. Compare the losses in the table,
    too: all of them are losses after the same number of steps.

    The answer is kept in ``<output_dir>/tuning.json``. A later call uses it again if the function,
    the devices, the library versions and the settings that affect a step are the same.

    Args:
        train: a training function that calls :func:`nbtoolkit.fit` with the configuration it gets.
        config: the configuration of the run to come.
        settings: the choices, each as ``config.with_overrides`` takes them.
        processes: the number of ranks; None: as ``config`` says.
        force: measure again, even if an answer was kept.

    Raises:
        ConfigError: a setting is unknown, or its value is not allowed.
        TuningError: there are no choices, none could be measured, or the function does not train
            with ``nb.fit``.
        Exception: the exception of the training function, if no choice could be measured.
    """
    subject = Subject(train, as_config(config, processes))
    choices = _checked(subject.config, settings)

    def measure() -> SpeedTable:
        rows = measure_in_turn(choices, lambda row: measured_row(subject, row))
        least = max(row.samples_per_second for row in rows) / _GAIN
        choice = next(at for at, row in enumerate(rows) if row.samples_per_second >= least)
        return SpeedTable(rows=tuple(rows), choice=choice)

    key = speed_key(train, subject.config, [row.settings for row in choices])
    table = subject.find(SpeedTable, "compare", key, measure, force=force)
    to_stdout(f"{table!r}\n", flush=True)
    return table


def _checked(config: Config, settings: Sequence[Mapping[str, Any]]) -> list[SpeedRow]:
    """Return a row for each choice; refuse a setting that is unknown before anything starts."""
    if isinstance(settings, Mapping) or not settings:
        raise TuningError(
            f"settings is {settings!r}",
            allowed="a list with at least one dict of settings",
            do='nb.compare(train, config, [{}, {"train.channels_last": True}])',
        )
    for choice in settings:
        config.with_overrides(choice)
    return [SpeedRow(settings=dict(choice)) for choice in settings]


def measure_in_turn(
    rows: Sequence[SpeedRow], measure: Callable[[SpeedRow], SpeedRow]
) -> list[SpeedRow]:
    """Measure all rows in turn; twice if that is quick.

    Args:
        rows: what to measure; a row with a reason has failed already.
        measure: measures a row.

    Raises:
        TuningError: no row could be measured.
        Exception: the first error of ``measure``, if no row could be measured.
    """
    best = list(rows)
    errors = list[Exception]()
    began = time.monotonic()
    longest = 0.0
    for turn, at in enumerate([*range(len(best))] * _ROUNDS):
        row = best[at]
        start = time.monotonic()
        again = turn >= len(best)
        late = again and start - began + longest > _LONGEST_ROUNDS
        if late or row.reason:
            continue
        try:
            now = measure(row)
        except Exception as error:  # of the user's function, or of the ranks' group
            errors.append(error)
            now = replace(row, samples_per_second=0.0, reason=reason_of(error))
        if now.reason or now.samples_per_second > row.samples_per_second:
            best[at] = now
        longest = max(longest, time.monotonic() - start)
    if not all(row.reason for row in best):
        return best
    if errors:
        raise errors[0]
    reasons = "; ".join(f"{_text(row.settings)}: {row.reason}" for row in best)
    raise TuningError(
        f"nothing could be measured: {reasons}",
        allowed="a function that can do some steps with at least one of the settings",
        do="launch it with one process, and correct what the error reports",
    )


def measured_row(subject: Subject, row: SpeedRow, *, seconds: float = 0.0) -> SpeedRow:
    """Measure a choice of settings, by steps or by ``seconds``; if it fails, the row says why."""
    every = {"tracking.log_every_n_steps": _STEPS_PER_POINT} if seconds else _SYNC
    result = probe(subject, {**every, **row.settings}, steps=_STEPS, seconds=seconds)
    if result.status != "measured":
        return replace(row, reason=one_line(result.status.replace("_", " "), result.reason))
    assert result.plan is not None  # it has measured steps
    steps = result.steps[-len(result.steps) // 4 :]
    return replace(
        row,
        processes=result.plan.processes,
        batch_size=result.plan.global_batch_size,
        samples_per_second=result.samples_per_second,
        memory=result.memory,
        loss=statistics.fmean(step.loss for step in steps),
    )


def reason_of(error: Exception) -> str:
    """Return why a measurement failed, in a line."""
    return one_line(type(error).__name__, str(error))


def _text(settings: Mapping[str, Any]) -> str:
    shown = (f"{name}: {setting(value)}" for name, value in settings.items())
    return ", ".join(shown) or "no change"
