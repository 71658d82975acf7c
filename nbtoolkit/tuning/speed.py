"""Find the loader processes, the precision and the options with which a step is fastest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nbtoolkit.config.schema import ConfigLike, as_config
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.errors import TuningError
from nbtoolkit.launcher.launch import Train
from nbtoolkit.run.kept_answers import answer_key, keep_answer, kept_answer
from nbtoolkit.run.serialization import one_line
from nbtoolkit.text_table import html_columns, number, text_columns
from nbtoolkit.tuning.probe import Probe, probe

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config

_STEPS = 40  # of each measurement; the second half counts
_SYNC = {"checkpoint.every_steps": 10}  # wait for the device so often, in steps
_GAIN = 1.03  # a throughput counts as higher from this factor on
_LOADS = 0.1  # share of a step that waits for its batch: less is not worth a process
_LONGEST = 45.0  # seconds after which no further measurement starts


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """One measured choice of settings.

    Attributes:
        settings: what was changed; empty: nothing.
        samples_per_second: over all ranks; 0 if it failed.
        memory: the largest memory of a rank in GB.
        loss: the mean loss of the last quarter of the steps; None if it failed.
        reason: why it failed; empty if it did not.
    """

    settings: Mapping[str, Any]
    samples_per_second: float = 0.0
    memory: float = 0.0
    loss: float | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class SpeedTable:
    """The result of :func:`find_num_workers` and :func:`find_speedups`.

    Attributes:
        rows: what was measured, in its order; the first row is the base.
        choice: the index of the suggested row.
        seconds: what the measurement took.
        kept: whether it was measured earlier, and kept.
    """

    rows: Sequence[SpeedRow]
    choice: int
    seconds: float
    kept: bool = field(default=False, compare=False)

    @property
    def chosen(self) -> SpeedRow:
        """The suggested row."""
        return self.rows[self.choice]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for ``config.with_overrides``; empty: the base is fastest."""
        return dict(self.chosen.settings)

    @property
    def why(self) -> str:
        """The reason for the choice, in a line."""
        chosen, base = self.chosen.samples_per_second, self.rows[0].samples_per_second
        cost = f"measured in {self.seconds:.1f} s" if not self.kept else "kept; force=True measures"
        return (
            f"{number(chosen)} samples/s, {chosen / base:.2f} x the {number(base)} of "
            f"{_text(self.rows[0].settings)}; {cost}"
        )

    def __repr__(self) -> str:
        return f"{text_columns(*self._table())}\n{_text(self.settings)}: {self.why}"

    def _repr_html_(self) -> str:
        return f"{html_columns(*self._table())}<div>{_text(self.settings)}: {self.why}</div>"

    def _table(self) -> tuple[list[str], list[list[str]]]:
        rows = [
            [
                ("* " if index == self.choice else "") + _text(row.settings),
                *(number(one) for one in (row.samples_per_second, row.memory, row.loss)),
                row.reason,
            ]
            for index, row in enumerate(self.rows)
        ]
        return ["settings", "samples/s", "GB", "loss", "failed"], rows


def find_num_workers(
    train: Train, config: ConfigLike = None, *, processes: int | None = None, force: bool = False
) -> SpeedTable:
    """Suggest ``train.num_workers``: the smallest number within 3% of the best throughput.

    Measured are 0, 1, 2, 4, ... processes, up to the CPUs of a rank, by 40 optimizer steps each in
    processes of their own; not those after two numbers that brought less than 3%, and only 0 if a
    step then waits for its batch for less than a tenth of its time, as with data in memory. A
    ``DataLoader`` with its own ``num_workers`` keeps them.

    Args:
        train: a training function that calls :func:`nbtoolkit.fit` with the configuration it gets.
        config: the configuration of the run to come; ``train.num_workers`` may be ``auto``.
        processes: ranks; None: as ``config`` says.
        force: measure, also if there is a kept answer (see :func:`nbtoolkit.find_learning_rate`).

    Raises:
        TuningError: memory ran out, or a loss is not finite.
        Exception: the function's own.
    """
    found = measure_num_workers(train, as_config(config, processes), force=force)
    print(f"{_text(found.settings)}: {found.why}", flush=True)
    return found


def measure_num_workers(
    train: Train, config: Config, *, force: bool = False, runs: Train | None = None
) -> SpeedTable:
    """Do what :func:`find_num_workers` does, and print nothing.

    Args:
        train: the function that the answer is kept for.
        config: see there.
        force: measure again.
        runs: what runs in place of ``train``.
    """
    key = answer_key(train, config)
    if not force and (kept := _kept(config, "num_workers", key)):
        return kept
    began, rows, workers, most, vain = time.monotonic(), list[SpeedRow](), 0, 1, 0
    while workers <= most and vain < 2 and time.monotonic() - began < _LONGEST:
        row, result = _measured(runs or train, config, {"train.num_workers": workers})
        best = max([one.samples_per_second for one in rows], default=0.0)
        vain = 0 if row.samples_per_second > best * _GAIN else vain + 1
        rows.append(row)
        most = result.plan.threads_per_rank if result.plan else 1
        if not workers and result.data_share < _LOADS:
            break
        workers = max(1, 2 * workers)
    good = max(one.samples_per_second for one in rows) / _GAIN
    choice = next(i for i, one in enumerate(rows) if one.samples_per_second >= good)
    return _keep(config, "num_workers", key, rows, choice, began)


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

    First ``config`` as it is, then each other precision that the device computes natively, then
    with the fastest so far ``train.channels_last``, then ``train.compile``; 40 optimizer steps
    each, in processes of their own. A choice counts as faster from 3% on. What fails (no compiler,
    out of memory) is a row with the reason.

    Compare the losses, too: they are those after the same samples.

    Args:
        train: a training function that calls :func:`nbtoolkit.fit` with the configuration it gets.
        config: the configuration of the run to come.
        precision: try other values of ``train.precision``.
        channels_last: try ``train.channels_last``.
        compile: try ``train.compile``; the time to compile does not count as a step's.
        processes: ranks; None: as ``config`` says.
        force: measure, also if there is a kept answer (see :func:`nbtoolkit.find_learning_rate`).

    Raises:
        TuningError: memory ran out, or a loss is not finite, with ``config`` as it is.
        Exception: the function's own, with ``config`` as it is.
    """
    config = as_config(config, processes)
    key = answer_key(train, config, precision, channels_last, compile)
    found = None if force else _kept(config, "speedups", key)
    if found is None:
        began = time.monotonic()
        row, result = _measured(train, config, {})
        rows, choice = [row], 0
        names = _precisions(result) if precision else []
        options = {"channels_last": channels_last, "compile": compile}
        wanted = [name for name, on in options.items() if on and not getattr(config.train, name)]
        rounds: list[list[dict[str, Any]]] = [[{"train.precision": name} for name in names]]
        rounds += [[{f"train.{name}": True}] for name in wanted]
        for settings in rounds:
            base = rows[choice]
            for one in settings:
                rows.append(_tried(train, config, {**base.settings, **one}))
                if rows[-1].samples_per_second > rows[choice].samples_per_second * _GAIN:
                    choice = len(rows) - 1
        found = _keep(config, "speedups", key, rows, choice, began)
    print(f"{found!r}", flush=True)
    return found


def _precisions(result: Probe) -> list[str]:
    """The precisions that the device of a run computes natively, without the run's own."""
    assert result.plan is not None
    weakest = min((device.capability for device in detect_hardware().devices), default=(0, 0))
    if result.plan.device_type == "cpu":
        names = ["fp32", "bf16"]
    else:
        names = ["fp32", *["fp16"] * (weakest >= (7, 0)), *["bf16"] * (weakest >= (8, 0))]
    return [name for name in names if name != result.plan.precision]


def _tried(train: Train, config: Config, settings: Mapping[str, Any]) -> SpeedRow:
    """A row; with the reason if the function raises with these settings."""
    try:
        return _measured(train, config, settings)[0]
    except Exception as error:
        return SpeedRow(settings=settings, reason=one_line(type(error).__name__, str(error)))


def _measured(train: Train, config: Config, settings: Mapping[str, Any]) -> tuple[SpeedRow, Probe]:
    result = probe(train, config, {**_SYNC, **settings}, steps=_STEPS)
    if result.status != "measured":
        raise TuningError(
            f"{result.status.replace('_', ' ')} with {_text(settings)}: {result.reason}",
            allowed="a configuration with which a run does some steps",
            do="lower train.batch_size, or optim.lr",
        )
    loss = statistics.fmean(step.loss for step in result.steps[-_STEPS // 4 :])
    rate, memory = result.samples_per_second, result.memory
    row = SpeedRow(settings=settings, samples_per_second=rate, memory=memory, loss=loss)
    return row, result


def _text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in settings.items()) or "no change"


def _kept(config: Config, name: str, key: str) -> SpeedTable | None:
    if (kept := kept_answer(config, name, key)) is None:
        return None
    rows = [SpeedRow(**row) for row in kept["rows"]]
    return SpeedTable(rows=rows, choice=kept["choice"], seconds=kept["seconds"], kept=True)


def _keep(
    config: Config, name: str, key: str, rows: list[SpeedRow], choice: int, began: float
) -> SpeedTable:
    found = SpeedTable(rows=rows, choice=choice, seconds=time.monotonic() - began)
    values = {**asdict(found), "rows": [asdict(row) for row in rows]}
    keep_answer(config, name, key, values)
    return found
