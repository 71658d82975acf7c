"""Synchronise losses, times and rank 0's control signal between the ranks, about once a second.

Between two synchronisations no rank waits for another except in DDP's own reduction, and nothing is
read from the device. A synchronisation is one all-reduce of a few numbers; with one rank there is
none. What it sums is logged, and the first loss that is not finite ends the training.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from nbtoolkit.errors import LossNotFinite
from nbtoolkit.training.losses import BatchLoss
from nbtoolkit.training.samples import MicroBatch
from nbtoolkit.worker.collectives import gather_on_all
from nbtoolkit.worker.watch import Signal, Watch

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel

    from nbtoolkit.training.step import TrainStep
    from nbtoolkit.worker.context import RunContext


class LossSum(NamedTuple):
    """The losses of some micro-batches."""

    loss: float
    """The sum of their means, each times its weight."""
    weight: float
    """The sum of their weights: the samples, if the loss is a mean over samples."""
    samples: int
    """The number of their samples."""


@dataclass(frozen=True)
class SyncResult:
    """The result of a synchronisation; the same on all ranks.

    Attributes:
        sums: the losses over all ranks, one sum for each log point since the last synchronisation,
            and one for the micro-batches after the last log point.
        signal: rank 0's.
        unsummed: of each rank the numbers it gave, see :func:`sync_ranks`.
        stop: whether a callback of any rank has asked to stop.
    """

    sums: list[LossSum]
    signal: Signal
    unsummed: list[list[float]]
    stop: bool

    @property
    def finite(self) -> bool:
        """Whether every loss was finite."""
        return all(math.isfinite(part.loss) for part in self.sums)


@dataclass(frozen=True)
class LogPoint:
    """An optimizer step whose values are logged at the next synchronisation.

    Attributes:
        step: optimizer steps done.
        micro_batches: micro-batches of the window up to here.
        rate: the learning rate.
        grad_norm: the gradient's norm, a scalar on the device.
        time: ``time.perf_counter()``.
    """

    step: int
    micro_batches: int
    rate: float
    grad_norm: Tensor | None
    time: float


class LossWindow:
    """This rank's losses since the last synchronisation; they stay on the device until then."""

    def __init__(self) -> None:
        self.losses: list[BatchLoss] = []
        self.micro_batches: list[MicroBatch] = []
        self.log_points: list[LogPoint] = []

    def add(self, loss: BatchLoss, micro_batch: MicroBatch) -> None:
        """Add a micro-batch and its loss (detached)."""
        self.losses.append(loss)
        self.micro_batches.append(micro_batch)

    def add_log_point(self, train_step: TrainStep) -> None:
        """Log the optimizer step that was just done, at the next synchronisation."""
        now = time.perf_counter()
        steps = train_step.steps_done
        self.log_points.append(
            LogPoint(steps, len(self.losses), train_step.rate, train_step.grad_norm, now)
        )

    def values(self) -> list[float]:
        """Return the mean loss of every micro-batch, read from the device."""
        import torch

        return torch.stack([loss.mean for loss in self.losses]).tolist() if self.losses else []

    def clear(self) -> None:
        """Start a new window."""
        self.losses = []
        self.micro_batches = []
        self.log_points = []

    def sums(self, values: list[float]) -> list[LossSum]:
        """Return the sums of the losses, see :attr:`SyncResult.sums`.

        Args:
            values: what :meth:`values` returned.
        """
        weights = self._weights()
        starts = [0, *(point.micro_batches for point in self.log_points)]
        ends = [*starts[1:], len(values)]
        return [
            self._sum(values[start:end], weights[start:end], self.micro_batches[start:end])
            for start, end in zip(starts, ends, strict=True)
        ]

    def _weights(self) -> list[float]:
        """Return the weight of every micro-batch, read from the device if it is there."""
        import torch

        if all(isinstance(loss.weight, float) for loss in self.losses):
            return [float(loss.weight) for loss in self.losses]
        weights = [torch.as_tensor(loss.weight, device=loss.mean.device) for loss in self.losses]
        return torch.stack([weight.double() for weight in weights]).tolist()

    @staticmethod
    def _sum(values: list[float], weights: list[float], micro_batches: list[MicroBatch]) -> LossSum:
        # A stand-in's loss does not count, even if it is not finite.
        counted = [
            (value, weight, micro_batch.samples)
            for value, weight, micro_batch in zip(values, weights, micro_batches, strict=True)
            if micro_batch.samples
        ]
        return LossSum(
            sum(value * weight for value, weight, _ in counted),
            sum(weight for _, weight, _ in counted),
            sum(samples for _, _, samples in counted),
        )


def sync_ranks(
    ctx: RunContext,
    watch: Watch,
    step: int,
    sums: list[LossSum],
    *,
    stop: bool = False,
    unsummed: Sequence[float] = (),
) -> SyncResult:
    """Synchronise after ``step`` optimizer steps, in the agreement of the watch; a collective.

    Args:
        ctx: the run's context.
        watch: of this fit.
        step: optimizer steps done.
        sums: this rank's, from :meth:`LossWindow.sums`; equally many on all ranks.
        stop: whether a callback of this rank has asked to stop.
        unsummed: numbers of this rank, not summed; equally many on all ranks.
    """
    table = [0.0] * (ctx.world_size * len(unsummed))
    table[ctx.rank * len(unsummed) : (ctx.rank + 1) * len(unsummed)] = unsummed
    flat = [float(number) for part in sums for number in part]
    signal, (stops, *numbers) = watch.agree(step, [float(stop), *table, *flat])
    table, flat = numbers[: len(table)], numbers[len(table) :]
    rows = [
        table[rank * len(unsummed) : (rank + 1) * len(unsummed)] for rank in range(ctx.world_size)
    ]
    columns = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    total = [LossSum(loss, weight, int(samples)) for loss, weight, samples in columns]
    return SyncResult(total, signal, rows, stops > 0)


# Seconds between two readings of the memory: one takes 10 us, a small model's step 150.
_MEMORY_INTERVAL = 1.0


def memory_used(ctx: RunContext) -> float:
    """Return this rank's memory in GB (10^9 bytes).

    On a GPU the peak of torch's tensors since the last call (``torch.cuda.max_memory_allocated``);
    on the CPU the resident memory now.
    """
    if ctx.device.type == "cuda":
        import torch

        peak = torch.cuda.max_memory_allocated(ctx.device)
        torch.cuda.reset_peak_memory_stats(ctx.device)
        return peak / 1e9
    import psutil

    return float(psutil.Process().memory_info().rss) / 1e9


class MetricLogger:
    """Logs the mean loss, throughput and memory since the last log point."""

    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx
        self._since = time.perf_counter()
        self._sum = LossSum(0.0, 0.0, 0)
        self._spent = 0.0
        self._memory = 0.0
        self._read_at = -_MEMORY_INTERVAL

    def memory(self) -> float:
        """Return this rank's memory of the device (on the CPU: resident) in GB, a second old."""
        now = time.monotonic()
        if now - self._read_at >= _MEMORY_INTERVAL:
            self._memory = memory_used(self._ctx)
            self._read_at = now
        return self._memory

    def begin(self) -> None:
        """Start the clock of an epoch, at the time that the last one spent since its log point."""
        self._since = time.perf_counter() - self._spent

    def end(self) -> None:
        """Stop the clock: what follows is no training."""
        self._spent = time.perf_counter() - self._since

    def add(self, part: LossSum) -> None:
        """Add losses."""
        total = self._sum
        self._sum = LossSum(
            total.loss + part.loss, total.weight + part.weight, total.samples + part.samples
        )

    def write(self, point: LogPoint, memory: list[float], more: Mapping[str, float]) -> None:
        """Log the values of a log point.

        Args:
            point: the optimizer step they belong to.
            memory: every rank's, in GB.
            more: values to log beside them.
        """
        total = self._sum
        if not total.samples:
            return  # fp16 has skipped these steps
        values = {
            "loss": total.loss / total.weight if total.weight else 0.0,
            "lr": point.rate,
            "samples_per_second": total.samples / (point.time - self._since),
            **{f"memory_gb_rank{rank}": used for rank, used in enumerate(memory)},
            **more,
        }
        if point.grad_norm is not None:
            values["grad_norm"] = float(point.grad_norm)
        self._ctx.log(values, step=point.step)
        self._since = point.time
        self._sum = LossSum(0.0, 0.0, 0)


# A rank measures on its own clock how long it waits for batches. How long it waits for the
# gradients of the others is in the statistics that DistributedDataParallel keeps: it records its
# first ten steps, and then every hundredth (here on a CPU, where that costs nothing, every tenth).
# They have the same names from torch 2.6 to 2.15, with gloo and with NCCL. Nothing here waits for a
# device: on a GPU the loading of a batch may overlap with the computation of the one before.

T = TypeVar("T")

STRAGGLER = 1.1
"""A rank whose own work takes this many times the median's is reported."""

# Time over which the work of the ranks is compared. In a shorter time, and most of all in the first
# steps, what a rank loads, compiles or shares with other processes once would count.
JUDGED_SECONDS = 60.0
_ALWAYS_SAMPLED = 10  # DDP records each of the first ten steps
# then every hundredth (torch's default), or tenth
_SAMPLE_RATE = 100
_CPU_SAMPLE_RATE = 10


class RankTime(NamedTuple):
    """Seconds of one rank since the last synchronisation."""

    wall: float
    data: float
    """Waiting for the next batch."""
    communication: float
    """Waiting for other ranks, and for gradients on their way."""

    @property
    def work(self) -> float:
        """Its own work, without waiting for others."""
        return self.wall - self.communication


class StepClock:
    """Measures one rank's steps, and reports the shares of all ranks.

    Args:
        ctx: the run's context.
        model: as the step calls it; wrapped by DDP on several ranks.
    """

    def __init__(self, ctx: RunContext, model: nn.Module) -> None:
        self._ctx = ctx
        self._waits = _Waits(model, ctx) if hasattr(model, "_get_ddp_logging_data") else None
        self._since = time.perf_counter()
        self._data = 0.0
        self._logged = [RankTime(0.0, 0.0, 0.0)] * ctx.world_size
        self._judged = self._logged
        self._judges = self._waits is not None

    def begin(self) -> None:
        """Start the clock: the time since the last :meth:`take` was not spent on steps."""
        self._since = time.perf_counter()
        self._data = 0.0

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, and add up how long each of them takes to come."""
        began = time.perf_counter()
        for batch in batches:
            self._data += time.perf_counter() - began
            yield batch
            began = time.perf_counter()

    def take(self, steps: int) -> RankTime:
        """Return this rank's time since the last call or :meth:`begin`.

        Args:
            steps: optimizer steps in it.
        """
        now = time.perf_counter()
        wall = now - self._since
        data = self._data
        self._since = now
        self._data = 0.0
        waited = 0.0 if self._waits is None else self._waits.per_step() * steps
        return RankTime(wall, data, max(0.0, min(waited, wall - data)))

    def add(self, ranks: Sequence[Sequence[float]]) -> None:
        """Add what :meth:`take` returned on each rank; warns once of a straggler."""
        times = [RankTime(*row) for row in ranks]
        if self._waits is not None and self._waits.for_buffers:
            # The forward pass begins with rank 0's buffers, where the ranks wait until all have
            # their batches (gloo), or in the backward pass as without buffers (NCCL).
            last = max(timing.data for timing in times)
            times = [
                timing._replace(communication=max(timing.communication, last - timing.data))
                for timing in times
            ]
        self._logged = _sums(self._logged, times)
        if self._judges:
            self._judged = _sums(self._judged, times)
            if self._judged[0].wall >= JUDGED_SECONDS:
                self._judge(self._judged)
                self._judged = [RankTime(0.0, 0.0, 0.0)] * len(times)

    def shares(self) -> dict[str, float]:
        """Return the shares of the wall time since the last call, as means over the ranks."""
        wall = sum(timing.wall for timing in self._logged) or 1.0
        data = sum(timing.data for timing in self._logged) / wall
        shares = {"data_share": data, "compute_share": 1.0 - data}
        if self._waits is not None:
            waited = sum(timing.communication for timing in self._logged) / wall
            shares |= {"compute_share": 1.0 - data - waited, "communication_share": waited}
        self._logged = [RankTime(0.0, 0.0, 0.0)] * len(self._logged)
        return shares

    def _judge(self, times: list[RankTime]) -> None:
        work = [timing.work for timing in times]
        data = [timing.data for timing in times]
        slowest = max(range(len(work)), key=work.__getitem__)
        usual = statistics.median_low(work)
        if work[slowest] < STRAGGLER * usual:
            return
        self._judges = False
        more = work[slowest] - usual
        loading = data[slowest] - statistics.median_low(data) > more / 2
        look = (
            "it waits for its batches: look at the samples it loads, or raise train.num_workers"
            if loading
            else "it computes for longer: look for other processes on its device (nvidia-smi, top) "
            "or a slower device"
        )
        longer = f"{work[slowest] / usual:.3g} times as long as the median rank's"
        self._ctx.message(
            f"rank {slowest} is the straggler: its own work takes {longer} ({more:.2f} s more in "
            f"{times[slowest].wall:.2f} s), and the other ranks wait for it: {look}",
            level="warning",
        )


class _Waits:
    """How long a rank waits in a step for gradients, after its own backward pass.

    Attributes:
        for_buffers: whether the forward pass begins with rank 0's buffers.
    """

    def __init__(self, model: nn.Module, ctx: RunContext) -> None:
        self._ddp = cast("DistributedDataParallel", model)
        self._rate = _CPU_SAMPLE_RATE if ctx.device.type == "cpu" else _SAMPLE_RATE
        self._ddp._set_ddp_runtime_logging_sample_rate(self._rate)
        buffers = next(iter(model.buffers()), None) is not None
        self.for_buffers = buffers and bool(ctx.plan.ddp.get("broadcast_buffers", True))
        self._count = 0
        self._total = 0.0
        self._last = 0.0

    def per_step(self) -> float:
        """Seconds a step, in the mean over the steps that were recorded since the last call."""
        logged = self._ddp._get_ddp_logging_data()
        step = int(logged.get("iteration", 0))
        later = step // self._rate - _ALWAYS_SAMPLED // self._rate
        count = step if step <= _ALWAYS_SAMPLED else _ALWAYS_SAMPLED + later
        total = count * _exposed(logged, "avg_")
        if self._count:
            if count > self._count:
                self._last = (total - self._total) / (count - self._count)
        elif count > 1:  # in the first step the ranks wait for the last of them to start
            self._last = _exposed(logged, "")
        self._count = count
        self._total = total
        return self._last


def _exposed(logged: dict[str, int], prefix: str) -> float:
    """Seconds of communication that do not overlap with the backward pass; logged in ns."""
    communication = logged.get(f"{prefix}backward_comm_time", 0)
    return (communication - logged.get(f"{prefix}backward_compute_comm_overlap_time", 0)) / 1e9


def _sums(times: Sequence[RankTime], other: Sequence[RankTime]) -> list[RankTime]:
    return [
        RankTime(*(a + b for a, b in zip(mine, more, strict=True)))
        for mine, more in zip(times, other, strict=True)
    ]


_SHOWN = 20  # samples named in the message


class StepLoss(NamedTuple):
    """One rank's loss of one micro-batch of an optimizer step."""

    step: int
    """Optimizer steps of the run done with it: the number under which it is logged."""
    epoch: int
    """From 1."""
    in_epoch: int
    """The optimizer step within the epoch, from 0."""
    loss: float
    """The mean over the micro-batch's samples."""


def raise_if_not_finite(
    ctx: RunContext,
    losses: Sequence[StepLoss],
    sample_ids: Callable[[int, int], Sequence[int]],
    *,
    tolerant: bool,
    rate: float | None = None,
    grad_norm: float | None = None,
) -> None:
    """Raise the same error on all ranks for the first step whose loss is not finite.

    A collective: called by **all** ranks, and only when the sum of the losses over all ranks is not
    finite.

    Under fp16 one batch may overflow. Its gradients are then not finite either, so the scaler skips
    the step and halves its scale, and the weights stay good: such a step is only printed, as long
    as the scale can still fall (``tolerant``). So is a step whose targets are all ignored.

    Args:
        ctx: the run's context.
        losses: this rank's losses since the last synchronisation.
        sample_ids: ``(epoch, step in it)`` -> the samples of that step's global batch.
        tolerant: :attr:`TrainStep.keeps_weights`, equal on all ranks.
        rate: the present learning rate, for the message.
        grad_norm: the gradient's norm when it was last measured, for the message.

    Raises:
        LossNotFinite: names the first step that is not finite, and its samples.
    """
    wrong = not_finite(loss for part in gather_on_all(losses, ctx.world_size) for loss in part)
    if wrong and not tolerant:
        first = wrong[0]
        raise _not_finite_error(first, sample_ids(first.epoch, first.in_epoch), rate, grad_norm)
    for step in dict.fromkeys(loss.step for loss in wrong):
        ctx.print(
            f"fit: the loss of optimizer step {step} is not finite, and did not change the weights"
        )


def not_finite(losses: Iterable[StepLoss]) -> list[StepLoss]:
    """Return the losses that are infinite or NaN, sorted by step."""
    wrong = [loss for loss in losses if not math.isfinite(loss.loss)]
    return sorted(wrong, key=lambda loss: loss.step)


def _not_finite_error(
    first: StepLoss, samples: Sequence[int], rate: float | None, grad_norm: float | None
) -> LossNotFinite:
    more = f" and {len(samples) - _SHOWN} more" if len(samples) > _SHOWN else ""
    known = (("learning rate", rate), ("gradient norm", grad_norm))
    now = ", ".join(f"{name} {value:g}" for name, value in known if value and math.isfinite(value))
    return LossNotFinite(
        f"the loss of optimizer step {first.step} (step {first.in_epoch + 1} of epoch "
        f"{first.epoch}) is {first.loss}{f'; {now}' if now else ''}\n"
        f"  Its batch: samples {', '.join(map(str, samples[:_SHOWN]))}{more}",
        allowed="losses that are finite numbers",
        do="look at these samples (a NaN among the inputs?); lower optim.lr, or set "
        "train.max_grad_norm: 1.0",
    )
