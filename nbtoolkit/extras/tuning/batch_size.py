"""Find the largest micro-batch that fits into the memory of every rank, and the fastest one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbtoolkit.config.aliases import refuse_other_launchers_names
from nbtoolkit.config.schema import ConfigLike, as_config
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.launch_plan import LaunchPlan
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.errors import TuningError
from nbtoolkit.extras.tuning.answer import FinderResult, ShortRun, Subject
from nbtoolkit.extras.tuning.probe import probe
from nbtoolkit.host import detect_host
from nbtoolkit.launcher.train_function import Train
from nbtoolkit.run.output import to_stdout
from nbtoolkit.text_table import counted, duration, number
from nbtoolkit.views.figure import Chart, curves_chart

LARGEST = 8192
"""The largest micro-batch that is tried by default."""

SECONDS = 60.0
"""No probe starts if it would probably end later."""

_START = 8  # samples per rank in the first probe; a batch norm refuses 1
_WITHIN = 0.02  # of the best throughput: as fast
_GAIN = 1.05  # on the CPU: a doubling that gains less is no gain
_OVER = f"{duration(SECONDS)} are over"


@dataclass(frozen=True, kw_only=True)
class MeasuredBatch(ShortRun):
    """What a probe with one micro-batch has shown; with a reason it did not fit.

    Attributes:
        samples: in a forward pass of one rank.
    """

    samples: int


@dataclass(frozen=True, kw_only=True, repr=False)
class BatchSize(FinderResult):
    """The result of :func:`find_batch_size`.

    A micro-batch consists of the samples that one rank processes in one forward pass.

    Attributes:
        rows: the measurements, one for each size of the micro-batch, in ascending order.
        stopped: the reason why no larger micro-batch was tried.
        batch_size: the number of samples per optimizer step, over all ranks; it is that of the
            configuration.
        ranks: the number of ranks.
    """

    rows: tuple[MeasuredBatch, ...]
    stopped: str
    batch_size: int
    ranks: int

    @property
    def fitting(self) -> list[MeasuredBatch]:
        """The rows whose micro-batch fits into memory."""
        return [row for row in self.rows if not row.reason]

    @property
    def largest(self) -> int:
        """The size of the largest micro-batch that fits into memory."""
        return max(row.samples for row in self.fitting)

    @property
    def fastest(self) -> int:
        """The size of the smallest micro-batch whose throughput is within 2% of the best."""
        least = (1 - _WITHIN) * max(row.samples_per_second for row in self.fitting)
        return min(row.samples for row in self.fitting if row.samples_per_second >= least)

    @property
    def accumulation_steps(self) -> int:
        """The smallest number of accumulation steps whose micro-batches fit into memory."""
        each = self.batch_size // self.ranks
        return next(n for n in range(1, each + 1) if each % n == 0 and each // n <= self.largest)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for ``config.with_overrides``. They keep the batch size."""
        return {
            "train.batch_size": self.batch_size,
            "train.batch_size_per_device": None,
            "train.gradient_accumulation_steps": self.accumulation_steps,
        }

    def plot(self) -> Chart:
        """Draw the throughput and the memory for each size of the micro-batch."""
        rates = [(float(row.samples), row.samples_per_second) for row in self.fitting]
        memory = [(float(row.samples), row.memory) for row in self.fitting]
        fast = [point for point in rates if point[0] == self.fastest]
        speed = {"throughput": rates, f"fastest: {self.fastest}": fast}
        charts = {"samples/s": speed, "memory (GB)": {"memory of a rank": memory}}
        curves = {("micro-batch", unit): named for unit, named in charts.items()}
        return curves_chart("micro-batches", curves)

    @property
    def why(self) -> str:
        """The result as a line of text."""
        steps = counted(self.accumulation_steps, "accumulation step")
        return (
            f"micro-batches of up to {self.largest} samples fit ({self.stopped}), {self.fastest} "
            f"is as fast as any; batch {self.batch_size} on {counted(self.ranks, 'rank')} needs "
            f"{steps}; {self.cost}"
        )

    def columns(self) -> tuple[list[str], list[list[str]]]:
        """Return the names of the columns, and the texts of each row."""
        return ["micro-batch", "samples/s", "memory (GB)"], [
            [str(row.samples), "", "out of memory"]
            if row.reason
            else [str(row.samples), number(row.samples_per_second), number(row.memory)]
            for row in self.rows
        ]


@refuse_other_launchers_names
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
    in new processes on all ranks, until a rank runs out of memory. Then it tries sizes in between.
    It stops when the largest size that fits and the smallest size that does not fit are close: they
    differ by at most 1/8, or by one sample. Your own runs do not change.

    The search ends earlier if a size reaches the argument ``largest``, if a step takes the whole
    data set, or after about 60 s. On the CPU, it also ends after two doublings in a row that raise
    the throughput by less than 5%: larger sizes would only use the main memory of the machine.
    (This rule does not apply to sizes up to a rank's part of the configured batch.)

    Validation is measured, too, because ``fit`` validates with four times the micro-batch. A longer
    run may need more memory, because of fragmentation and of samples of different sizes.

    The answer is kept in ``<output_dir>/tuning.json``. A later call uses it again if the function,
    the devices, the library versions and the settings that affect a step are the same.

    Args:
        train: a training function that calls :func:`nbtoolkit.fit`.
        config: the configuration of the run to come.
        processes: the number of ranks; None: as ``config`` says.
        largest: the largest micro-batch to try, at least 1; default: 8192.
        force: measure again, even if an answer was kept.

    Raises:
        TuningError: not even one sample fits, ``largest`` is below 1, or the function does not
            train with ``nb.fit``.
        Exception: the exception of the training function.
    """
    if largest is not None and largest < 1:
        raise TuningError(f"largest is {largest}", allowed="1 and more", do="leave it out")
    subject = Subject(train, as_config(config, processes))
    search = _Search(subject, largest or LARGEST)
    result = subject.find(BatchSize, "batch_size", subject.key(largest), search.run, force=force)
    to_stdout(f"{result.why}\n", flush=True)
    return result


class _Search:
    """Tries micro-batches: doubles them until one does not fit, then bisects."""

    def __init__(self, subject: Subject, most: int) -> None:
        self._subject = subject
        self._most = most
        self._rows: dict[int, MeasuredBatch] = {}
        self._longest = 0.0
        self._whole = False

    def run(self) -> BatchSize:
        """Try until the largest micro-batch that fits is known."""
        self._began = time.monotonic()
        plan = make_plan(self._subject.config, detect_host(), detect_hardware())
        stopped = self._try_sizes(plan)
        batch = plan.global_batch_size
        rows = tuple(self._rows[size] for size in sorted(self._rows))
        return BatchSize(rows=rows, stopped=stopped, batch_size=batch, ranks=plan.processes)

    def _try_sizes(self, plan: LaunchPlan) -> str:
        """Fill the rows; returns why nothing larger was tried."""
        size = min(_START, self._most)
        fits = 0
        fails = 0
        while not fits or not fails:
            if self._fits(size, plan.processes):
                fits = size
                if not fails and (why := self._end(size, plan)):
                    return why
                size = min(2 * size, self._most)
            elif size == 1:
                raise TuningError(
                    f"not even one sample per rank fits: {plan.processes} x 1 ran out of memory; "
                    "how much the model needs is unknown",
                    allowed="a model whose weights, gradients and optimizer state fit into a "
                    "device's memory, with the activations of one sample",
                    do="use a smaller model or smaller inputs, train.activation_checkpointing: "
                    "true, or a train.precision of 16 bits",
                )
            else:
                fails = size
                size = fits or size // 2
        while fails - fits > max(1, fits // 8):
            if self._late():
                return f"{fails} ran out of memory; none between was tried: {_OVER}"
            middle = (fits + fails) // 2
            if self._fits(middle, plan.processes):
                fits = middle
            else:
                fails = middle
        return f"{fails} ran out of memory"

    def _fits(self, size: int, ranks: int) -> bool:
        """Probe a micro-batch; True if it fits, also if the data set has fewer samples."""
        settings: Mapping[str, object] = {
            "train.batch_size": size * ranks,
            "train.batch_size_per_device": None,
            "train.gradient_accumulation_steps": 1,
            "train.drop_last": False,
        }
        result = probe(self._subject, settings, steps=max(4, min(64, 1024 // size)))
        self._longest = max(self._longest, result.seconds)
        self._whole = result.epochs >= len(result.steps) > 1
        if result.status == "out_of_memory":
            self._rows[size] = MeasuredBatch(samples=size, reason=result.reason)
            return False
        if not self._whole or not self._rows:
            rate = result.samples_per_second
            memory = result.memory
            self._rows[size] = MeasuredBatch(samples=size, samples_per_second=rate, memory=memory)
        return True

    def _end(self, size: int, plan: LaunchPlan) -> str:
        """Why nothing larger is tried; empty if it is."""
        rates = [row.samples_per_second for row in self._rows.values()][-3:]
        slow = len(rates) == 3 and rates[2] < _GAIN * rates[1] and rates[1] < _GAIN * rates[0]
        if self._whole:
            return "a step takes the whole data set"
        if size >= self._most:
            return f"no more than {self._most} were tried"
        if self._late():
            return f"nothing larger was tried: {_OVER}"
        needed = plan.batch_size_per_device * plan.accumulate
        if plan.device_type == "cpu" and slow and size >= needed:
            return "two doublings gained less than 5%"
        return ""

    def _late(self) -> bool:
        return time.monotonic() - self._began + self._longest > SECONDS
