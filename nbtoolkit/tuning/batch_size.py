"""Find the largest micro-batch that fits into the memory of every rank, and the fastest one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nbtoolkit.config.schema import ConfigLike, as_config
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import TuningError
from nbtoolkit.host import detect_host
from nbtoolkit.launcher.launch import Train
from nbtoolkit.run.kept_answers import answer_key, keep_answer, kept_answer
from nbtoolkit.text_table import counted, duration, html_columns, html_table, number, text_columns
from nbtoolkit.tuning.probe import probe
from nbtoolkit.views.chart import BEST, RUNNING, Axis, Series, chart
from nbtoolkit.views.figure import Chart

LARGEST = 8192
"""The largest micro-batch that is tried by default."""

SECONDS = 60.0
"""No probe starts if it would probably end later."""

_START = 8  # samples per rank in the first probe; a batch norm refuses 1
_WITHIN = 0.02  # of the best throughput: as fast
_GAIN = 1.05  # on the CPU: a doubling that gains less is no gain
_HEADER = ("micro-batch", "samples/s", "memory (GB)")


@dataclass(frozen=True, kw_only=True)
class MeasuredBatch:
    """What a probe with one micro-batch has shown.

    Attributes:
        samples: in a forward pass of one rank.
        fits: whether no rank ran out of memory.
        samples_per_second: over all ranks; 0 if it does not fit.
        memory: the largest memory of a rank, in GB; 0 if it does not fit.
    """

    samples: int
    fits: bool
    samples_per_second: float
    memory: float

    def row(self) -> list[str]:
        """The values of its row in a table."""
        if not self.fits:
            return [str(self.samples), "", "out of memory"]
        return [str(self.samples), number(self.samples_per_second), number(self.memory)]


@dataclass(frozen=True, kw_only=True, repr=False)
class BatchSize:
    """The result of :func:`find_batch_size`.

    A micro-batch is what one rank takes in one forward pass.

    Attributes:
        measured: every probe, by the size of its micro-batch.
        stopped: why nothing larger was tried.
        batch_size: the samples of an optimizer step of the configuration, over all ranks.
        ranks: number of ranks.
        seconds: what the measurement took.
        kept: whether it was measured earlier, and kept.
    """

    measured: Sequence[MeasuredBatch]
    stopped: str
    batch_size: int
    ranks: int
    seconds: float
    kept: bool = False

    @property
    def largest(self) -> int:
        """The largest micro-batch that fits."""
        return max(one.samples for one in self.measured if one.fits)

    @property
    def fastest(self) -> int:
        """The smallest micro-batch with a throughput within 2% of the best."""
        fitting = [one for one in self.measured if one.fits]
        best = max(one.samples_per_second for one in fitting)
        least = (1 - _WITHIN) * best
        return min(one.samples for one in fitting if one.samples_per_second >= least)

    @property
    def accumulation_steps(self) -> int:
        """The fewest micro-batches that make the batch of the configuration, and fit."""
        each = self.batch_size // self.ranks
        return next(n for n in range(1, each + 1) if each % n == 0 and each // n <= self.largest)

    @property
    def settings(self) -> dict[str, object]:
        """Settings for ``config.with_overrides``: the batch stays the same."""
        return {
            "train.batch_size": self.batch_size,
            "train.batch_size_per_device": None,
            "train.gradient_accumulation_steps": self.accumulation_steps,
        }

    def plot(self) -> Chart:
        """Draw throughput and memory by micro-batch."""
        fitting = [one for one in self.measured if one.fits]
        rates = [(float(one.samples), one.samples_per_second) for one in fitting]
        memory = [(float(one.samples), one.memory) for one in fitting]
        fast = [point for point in rates if point[0] == self.fastest]
        across = Axis("micro-batch", log=True)
        best = Series(f"fastest: {self.fastest}", fast, "ring", BEST)
        speed = [Series("throughput", rates), best]
        upper = chart(speed, x=across, y=Axis("samples/s", low=0.0), legend=True)
        lines = [Series("memory of a rank", memory, colour=RUNNING)]
        lower = chart(lines, x=across, y=Axis("memory (GB)", low=0.0))
        return Chart("micro-batches", f'<div style="max-width:560px">{upper}{lower}</div>')

    @property
    def why(self) -> str:
        """What was found, in a line."""
        steps = counted(self.accumulation_steps, "accumulation step")
        cost = "kept; force=True measures" if self.kept else f"measured in {self.seconds:.1f} s"
        return (
            f"micro-batches of up to {self.largest} samples fit ({self.stopped}), {self.fastest} "
            f"is as fast as any; batch {self.batch_size} on {counted(self.ranks, 'rank')} needs "
            f"{steps}; {cost}"
        )

    def __repr__(self) -> str:
        return f"BatchSize: {self.why}\n{text_columns(_HEADER, self._rows())}"

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object]] = [("largest that fits", self.largest)]
        rows += [("fastest", self.fastest), *self.settings.items(), ("why", self.why)]
        table = html_columns(_HEADER, self._rows())
        return html_table("micro-batch", rows) + table + self.plot().html

    def _rows(self) -> list[list[str]]:
        return [one.row() for one in self.measured]


def find_batch_size(
    train: Train,
    config: ConfigLike = None,
    *,
    processes: int | None = None,
    largest: int | None = None,
    force: bool = False,
) -> BatchSize:
    """Find the largest micro-batch that fits into the memory of every rank.

    ``train`` runs for some optimizer steps with micro-batches of 8, 16, 32, ... samples, each time
    in new processes on all ranks, until a rank runs out of memory; then sizes between are tried,
    until the largest that fits is known to 1/8 (below 16 samples exactly). No run of yours changes.
    The search also ends at ``largest``, when a step takes the whole data set, after about 60 s,
    and on the CPU when two doublings in a row gain less than 5% of throughput, so that the machine
    does not run out of memory; but not below the batch of the configuration.

    Validation is measured, too: ``fit`` validates with four times the micro-batch. The memory of
    a longer run may be larger, as fragmentation and samples of varying size need more.

    The answer is kept in ``<output_dir>/tuning.json`` and used again for the same function, model,
    data settings, batch and devices.

    Args:
        train: a training function that calls :func:`nbtoolkit.fit`.
        config: the configuration of the run to come.
        processes: ranks; None: as ``config`` says.
        largest: the largest micro-batch to try, at least 1; default: 8192.
        force: measure, also if there is a kept answer.

    Raises:
        TuningError: not even one sample fits, ``largest`` is below 1, or the function does not
            train by ``nb.fit``.
        Exception: the function's own.
    """
    config = as_config(config, processes)
    if largest is not None and largest < 1:
        raise TuningError(f"largest is {largest}", allowed="1 and more", do="leave it out")
    key = answer_key(train, config, largest)
    kept = None if force else kept_answer(config, "batch_size", key)
    if kept is not None:
        measured = [MeasuredBatch(**one) for one in kept.pop("rows")]
        del kept["measured"]
        found = BatchSize(measured=measured, **kept, kept=True)
    else:
        plan = make_plan(config, detect_host(), detect_hardware())
        search = _Search(train, config, plan, largest or LARGEST)
        search.run()
        values: dict[str, Any] = {
            "stopped": search.stopped,
            "batch_size": plan.global_batch_size,
            "ranks": plan.processes,
            "seconds": search.seconds,
        }
        measured = [search.measured[size] for size in sorted(search.measured)]
        keep_answer(config, "batch_size", key, {**values, "rows": [*map(asdict, measured)]})
        found = BatchSize(measured=measured, **values)
    print(found.why, flush=True)
    return found


class _Search:
    """Tries micro-batches: doubles them until one does not fit, then bisects."""

    def __init__(self, train: Train, config: Any, plan: LaunchPlan, most: int) -> None:
        self._train, self._config, self._most = train, config, most
        self._ranks, self._on_cpu = plan.processes, plan.device_type == "cpu"
        self._needed = plan.batch_size_per_device * plan.accumulate
        self._began, self._longest, self._whole = time.monotonic(), 0.0, False
        self.measured: dict[int, MeasuredBatch] = {}
        self.stopped = ""

    @property
    def seconds(self) -> float:
        """What the search has taken so far."""
        return time.monotonic() - self._began

    def run(self) -> None:
        """Try until the largest micro-batch that fits is known."""
        size, fits, fails = min(_START, self._most), 0, 0
        while not fits or not fails:
            if self._fits(size):
                fits = size
                if not fails and self._ends_at(size):
                    return
                size = min(2 * size, self._most)
            elif size == 1:
                raise self._none_fits()
            else:
                fails, size = size, fits or size // 2
        self.stopped = f"{fails} ran out of memory"
        while fails - fits > max(1, fits // 8):
            if self._late():
                self.stopped += f"; none between was tried: {duration(SECONDS)} are over"
                return
            middle = (fits + fails) // 2
            fits, fails = (middle, fails) if self._fits(middle) else (fits, middle)
            self.stopped = f"{fails} ran out of memory"

    def _fits(self, size: int) -> bool:
        """Probe a micro-batch; True if it fits, also if the data set has fewer samples."""
        settings: Mapping[str, object] = {
            "train.batch_size": size * self._ranks,
            "train.batch_size_per_device": None,
            "train.gradient_accumulation_steps": 1,
            "train.drop_last": False,
        }
        steps = max(4, min(64, 1024 // size))
        found = probe(self._train, self._config, settings, steps=steps)
        self._longest = max(self._longest, found.seconds)
        self._whole = found.epochs >= len(found.steps) > 1
        fits = found.status != "out_of_memory"
        if not self._whole or not self.measured:
            rate, memory = (found.samples_per_second, found.memory) if fits else (0.0, 0.0)
            self.measured[size] = MeasuredBatch(
                samples=size, fits=fits, samples_per_second=rate, memory=memory
            )
        return fits

    def _ends_at(self, size: int) -> bool:
        """Whether nothing larger is tried; notes why."""
        rates = [one.samples_per_second for one in self.measured.values()][-3:]
        slow = len(rates) == 3 and rates[2] < _GAIN * rates[1] and rates[1] < _GAIN * rates[0]
        if self._whole:
            self.stopped = "a step takes the whole data set"
        elif size >= self._most:
            self.stopped = f"no more than {self._most} were tried"
        elif self._late():
            self.stopped = f"nothing larger was tried: {duration(SECONDS)} are over"
        elif self._on_cpu and slow and size >= self._needed:
            self.stopped = "two doublings gained less than 5%"
        return bool(self.stopped)

    def _late(self) -> bool:
        return self.seconds + self._longest > SECONDS

    def _none_fits(self) -> TuningError:
        return TuningError(
            f"not even one sample per rank fits: {self._ranks} x 1 ran out of memory; how much the "
            "model needs is unknown",
            allowed="a model whose weights, gradients and optimizer state fit into a device's "
            "memory, with the activations of one sample",
            do="use a smaller model or smaller inputs, train.activation_checkpointing: true, or a "
            "train.precision of 16 bits",
        )
