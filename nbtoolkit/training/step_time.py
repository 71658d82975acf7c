"""Measure how much of a step is loading, computing and waiting; profile a few steps.

A rank measures on its own clock how long it waits for batches. How long it waits for the gradients
of the others is in the statistics that DistributedDataParallel keeps: it records its first ten
steps, and then every hundredth (here on a CPU, where that costs nothing, every tenth). They have
the same names from torch 2.6 to 2.15, with gloo and with NCCL. Nothing here waits for a device: on
a GPU the loading of a batch may overlap with the computation of the one before.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from nbtoolkit.errors import RunStopped
from nbtoolkit.training.callbacks import Callback

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import profile

    from nbtoolkit.training.callbacks import FitState
    from nbtoolkit.worker.context import RunContext

T = TypeVar("T")

STRAGGLER = 1.1
"""A rank whose own work takes this many times the median's is reported."""

# Time over which the work of the ranks is compared. In a shorter time, and most of all in the first
# steps, what a rank loads, compiles or shares with other processes once would count.
JUDGED_SECONDS = 60.0
_ALWAYS_SAMPLED = 10  # DDP records each of the first ten steps
_SAMPLE_RATE, _CPU_SAMPLE_RATE = 100, 10  # then every hundredth (torch's default), or tenth


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
        self._since, self._data = time.perf_counter(), 0.0
        self._logged = [RankTime(0.0, 0.0, 0.0)] * ctx.world_size
        self._judged = self._logged
        self._judges = self._waits is not None

    def begin(self) -> None:
        """Start the clock: the time since the last :meth:`take` was not spent on steps."""
        self._since, self._data = time.perf_counter(), 0.0

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, and add up how long each of them takes to come."""
        began = time.perf_counter()
        for batch in batches:
            self._data += time.perf_counter() - began
            yield batch
            began = time.perf_counter()

    def take(self, steps: int) -> RankTime:
        """This rank's time since the last call or :meth:`begin`.

        Args:
            steps: optimizer steps in it.
        """
        now = time.perf_counter()
        wall, data = now - self._since, self._data
        self._since, self._data = now, 0.0
        waited = 0.0 if self._waits is None else self._waits.per_step() * steps
        return RankTime(wall, data, max(0.0, min(waited, wall - data)))

    def add(self, ranks: Sequence[Sequence[float]]) -> None:
        """Add what :meth:`take` returned on each rank; warns once of a straggler."""
        times = [RankTime(*one) for one in ranks]
        if self._waits is not None and self._waits.for_buffers:
            # The forward pass begins with rank 0's buffers, where the ranks wait until all have
            # their batches (gloo), or in the backward pass as without buffers (NCCL).
            last = max(one.data for one in times)
            times = [
                one._replace(communication=max(one.communication, last - one.data)) for one in times
            ]
        self._logged = _sums(self._logged, times)
        if self._judges:
            self._judged = _sums(self._judged, times)
            if self._judged[0].wall >= JUDGED_SECONDS:
                self._judge(self._judged)
                self._judged = [RankTime(0.0, 0.0, 0.0)] * len(times)

    def shares(self) -> dict[str, float]:
        """The shares of the wall time since the last call, to be logged: means over the ranks."""
        wall = sum(one.wall for one in self._logged) or 1.0
        data = sum(one.data for one in self._logged) / wall
        shares = {"data_share": data, "compute_share": 1.0 - data}
        if self._waits is not None:
            waited = sum(one.communication for one in self._logged) / wall
            shares |= {"compute_share": 1.0 - data - waited, "communication_share": waited}
        self._logged = [RankTime(0.0, 0.0, 0.0)] * len(self._logged)
        return shares

    def _judge(self, times: list[RankTime]) -> None:
        work, data = [one.work for one in times], [one.data for one in times]
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
        self._count, self._total, self._last = 0, 0.0, 0.0

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
        self._count, self._total = count, total
        return self._last


def _exposed(logged: dict[str, int], prefix: str) -> float:
    """Seconds of communication that do not overlap with the backward pass; logged in ns."""
    communication = logged.get(f"{prefix}backward_comm_time", 0)
    return (communication - logged.get(f"{prefix}backward_compute_comm_overlap_time", 0)) / 1e9


def _sums(one: Sequence[RankTime], other: Sequence[RankTime]) -> list[RankTime]:
    return [
        RankTime(*(a + b for a, b in zip(mine, more, strict=True)))
        for mine, more in zip(one, other, strict=True)
    ]


# --- the profile of a few steps (``train.profile``) ---


# Optimizer steps that pass first, that warm the profiler up, and that are recorded.
WAIT, WARM_UP, ACTIVE = 5, 2, 5

_ROWS, _NAME_WIDTH = 10, 40


class StepProfiler(Callback):
    """Records optimizer steps of the first epoch that this process trains, on each rank.

    The trace goes to ``ranks/<rank>/trace.json.gz`` of the run (for https://ui.perfetto.dev or
    chrome://tracing), and rank 0 prints the operators that took the most time. See
    https://docs.pytorch.org/docs/stable/profiler.html.

    Args:
        ctx: the run's context.
    """

    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx
        self._per_epoch: int | None = None
        self._total = WAIT + WARM_UP + ACTIVE
        self._profile: profile | None = None
        self._ready = False

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or isinstance(error, RunStopped):
            self.close()
            return
        with contextlib.suppress(RuntimeError):  # of a broken device: the first error matters
            self.close()

    def expect(self, per_epoch: int | None, total: int) -> None:
        """Say how many optimizer steps an epoch (None: unknown) and the run have."""
        self._per_epoch, self._total = per_epoch, total

    def on_train_epoch_start(self, state: FitState) -> None:
        """Start, in the first epoch that has a step left."""
        from torch.profiler import ProfilerActivity, profile, schedule

        if self._ready:
            return
        activities = [ProfilerActivity.CPU]
        if self._ctx.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        left = self._total - state.step
        if self._per_epoch is not None:
            left = min(left, state.epoch * self._per_epoch - state.step)
        if left < 1:
            return  # resumed after the last step of this epoch: the next one is recorded
        wait, warm_up, active = split_steps(left)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=warm_up, active=active, repeat=1),
            on_trace_ready=self._keep,
        )
        self._profile.start()

    def on_train_batch_end(self, state: FitState) -> None:
        """Count an optimizer step."""
        if self._profile is not None:
            self._profile.step()
            if self._ready:
                self.close()

    def on_train_epoch_end(self, state: FitState) -> None:
        """Stop, if the epoch was shorter than expected."""
        self.close()

    def close(self) -> None:
        """Stop; keeps what was recorded so far. May be called twice."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
            if not self._ready:
                self._ctx.print("profile: the run stopped before a step was recorded")
            self._ready = True

    def _keep(self, profile: profile) -> None:
        """Write the trace, and print the table; torch calls it when the last step is recorded."""
        if self._ready:
            return
        self._ready = True
        trace = self._ctx.paths.trace(self._ctx.rank)
        hidden = trace.with_name(f".{trace.name}")
        trace.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(hidden))
        os.replace(hidden, trace)
        device = "cuda" if self._ctx.device.type == "cuda" else "cpu"
        table = profile.key_averages().table(
            sort_by=f"self_{device}_time_total", row_limit=_ROWS, max_name_column_width=_NAME_WIDTH
        )
        self._ctx.print(f"{table}profile: {trace} (open it in https://ui.perfetto.dev)")


def split_steps(steps: int) -> tuple[int, int, int]:
    """How many of ``steps`` optimizer steps to wait for, to warm up in, and to record."""
    active = min(ACTIVE, max(1, steps // 2))
    warm_up = min(WARM_UP, steps - active)
    return min(WAIT, steps - active - warm_up), warm_up, active
