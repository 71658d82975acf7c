"""Keep a fit's progress, its best epoch, its logged values and the ranks' random state."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from nbtoolkit.config.aliases import similar_name
from nbtoolkit.config.directions import resolve
from nbtoolkit.errors import FitError
from nbtoolkit.training.sync import LogPoint, LossSum
from nbtoolkit.worker.collectives import gather_on_all

if TYPE_CHECKING:
    import torch

    from nbtoolkit.config.schema import Config
    from nbtoolkit.worker.context import RunContext

State: TypeAlias = dict[str, Any]
"""A state as a checkpoint holds it: nested dicts and lists of tensors and plain values."""


# --- progress ---


def check_monitor(config: Config, names: Sequence[str], stems: Sequence[str]) -> None:
    """Refuse a ``checkpoint.monitor`` that no epoch will have.

    Args:
        config: the fit's.
        names: the metrics of its epochs.
        stems: those of them that may become ``<stem>_<key>``.

    Raises:
        FitError: names the metrics.
    """
    monitor = config.checkpoint.monitor
    if monitor is None or monitor in names or monitor.startswith(tuple(f"{s}_" for s in stems)):
        return
    near = similar_name(monitor, names)
    raise FitError(
        f"checkpoint.monitor is {monitor!r}, which no epoch will have",
        allowed=", ".join([*names, *(f"{stem}_<key>" for stem in stems)]),
        do=f"set checkpoint.monitor: {near}"
        if near
        else "set checkpoint.monitor to one of these, or pass a metric of that name to fit",
    )


class TrainState:
    """The progress of a fit.

    Attributes:
        epoch: epochs done.
        taken: optimizer steps done in the current epoch.
        loss: the sum of the current epoch's losses, over all ranks, each times its weight.
        seen: the sum of these weights: the samples, if the loss is a mean over samples.
        stopped: why a callback has ended the training; "": it has not.
        values: the metrics of the last epoch done.
        best: the best value of the monitored metric; None: no epoch has had a number (NaN is none).
        best_epoch: the epoch of this value.
        best_step: optimizer steps done at its end.
        best_values: the metrics of this epoch.
        stale: epochs since the last improvement by more than ``train.min_delta``.

    Raises:
        FitError: the direction of ``checkpoint.monitor`` is unknown.
    """

    def __init__(self, ctx: RunContext, config: Config) -> None:
        self._ctx, self._checkpoint, self._train = ctx, config.checkpoint, config.train
        # Without a monitor it is a loss: val_loss or train_loss.
        direction = resolve(self._checkpoint.monitor or "val_loss", config)
        if direction is None:
            raise FitError(
                f"the name {self._checkpoint.monitor!r} (checkpoint.monitor) does not say whether "
                "its highest or its lowest value is best",
                allowed="`mode: max` or `mode: min` under checkpoint",
                do="add the line that applies",
            )
        self._minimize = direction == "minimize"
        self._printed_at = 0.0
        self._reference: float | None = None
        self.epoch = self.taken = 0
        self.loss = self.seen = 0.0
        self.stopped = ""
        self.values: dict[str, float] = {}
        self.best_values: dict[str, float] = {}
        self.best: float | None = None
        self.best_epoch = self.best_step = self.stale = 0

    def add(self, part: LossSum) -> None:
        """Add losses of the current epoch."""
        self.loss += part.loss
        self.seen += part.weight

    @property
    def train_loss(self) -> float:
        """The mean loss of the current epoch so far."""
        return self.loss / (self.seen or math.nan)

    @property
    def stopped_early(self) -> bool:
        """Whether ``train.early_stopping_patience`` is used up."""
        patience = self._train.early_stopping_patience
        return patience is not None and self.stale >= patience

    def end_epoch(self, values: dict[str, float], step: int) -> bool:
        """End the current epoch with its metrics; returns whether it is the best so far."""
        self.epoch, self.values = self.epoch + 1, values
        self.taken = 0
        self.loss = self.seen = 0.0
        value = values[self.monitored]
        better = self._is_better(value, self.best, by=0.0)
        if better:
            self.best, self.best_epoch, self.best_step = value, self.epoch, step
            self.best_values = values
        if self._is_better(value, self._reference, by=self._train.min_delta):
            self._reference, self.stale = value, 0
        else:
            self.stale += 1
        self._print()
        return better

    @property
    def monitored(self) -> str:
        """The metric that decides which epoch is best.

        Raises:
            FitError: the epochs have no metric of the name in ``checkpoint.monitor``.
        """
        values = self.values
        name = self._checkpoint.monitor or ("val_loss" if "val_loss" in values else "train_loss")
        if name not in values:
            raise FitError(
                f"checkpoint.monitor is {name!r}, which no epoch has",
                allowed=", ".join(values),
                do="set checkpoint.monitor to one of these, or pass a metric of that name to fit",
            )
        return name

    @property
    def has_best(self) -> bool:
        """Whether an epoch can be best: not by the training loss alone."""
        return self._checkpoint.monitor is not None or "val_loss" in self.values

    @property
    def ends_with_best(self) -> bool:
        """Whether the model ends with the weights of another epoch than the last."""
        wanted = self._checkpoint.weights == "best" and self.has_best
        return wanted and self.best is not None and self.best_epoch != self.epoch

    def summary(self) -> dict[str, float]:
        """The metrics of the epoch with whose weights the model ends, and the best epoch."""
        values = self.best_values if self.ends_with_best else self.values
        best = math.nan if self.best is None else self.best
        name = f"best_{self.monitored}"
        return {**values, name: best, "epoch": self.epoch, "best_epoch": self.best_epoch}

    def state(self) -> State:
        """The attributes, plain values for a checkpoint."""
        attributes = {name: value for name, value in vars(self).items() if name[0] != "_"}
        return {"reference": self._reference, **attributes}

    def restore(self, state: State) -> None:
        """Continue from a :meth:`state`."""
        for name, value in state.items():
            setattr(self, "_reference" if name == "reference" else name, value)

    def _is_better(self, value: float, than: float | None, *, by: float) -> bool:
        if math.isnan(value):
            return False
        if than is None:
            return True
        return value < than - by if self._minimize else value > than + by

    def _print(self) -> None:
        """Print the epoch's metrics, at most once a second: epochs may take milliseconds."""
        last = self.epoch == self._train.epochs or self.stopped_early
        if last or time.monotonic() - self._printed_at >= 1.0:
            self._printed_at = time.monotonic()
            values = "  ".join(f"{name} {value:.4f}" for name, value in self.values.items())
            self._ctx.print(f"epoch {self.epoch}/{self._train.epochs}  {values}")
        if self.stopped_early:
            best = f"a {self.monitored} that is a number"
            if self.best is not None:
                best = f"a better {self.monitored} than epoch {self.best_epoch}'s {self.best:.6g}"
            self._ctx.print(
                f"fit: stops early, {self.stale} epochs without {best} "
                "(train.early_stopping_patience)"
            )


# --- logged values ---


# Seconds between two readings of the memory: one takes 10 us, a small model's step 150.
_MEMORY_INTERVAL = 1.0


def memory_used(ctx: RunContext) -> float:
    """This rank's memory in GB (10^9 bytes).

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
        self._since, self._sum = time.perf_counter(), LossSum(0.0, 0.0, 0)
        self._spent = 0.0
        self._memory, self._read_at = 0.0, -_MEMORY_INTERVAL

    def memory(self) -> float:
        """This rank's device memory (on the CPU: resident memory) in GB, at most a second old."""
        now = time.monotonic()
        if now - self._read_at >= _MEMORY_INTERVAL:
            self._memory, self._read_at = memory_used(self._ctx), now
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
        self._since, self._sum = point.time, LossSum(0.0, 0.0, 0)


# --- random state ---


RandomState: TypeAlias = dict[str, Any]
"""The states of one rank's generators: tensors and plain values."""


def gather_random_states(device: torch.device, ranks: int) -> list[RandomState]:
    """The states of all ranks' generators, by rank; a collective when there are several ranks."""
    return gather_on_all(_random_state(device), ranks)


def _random_state(device: torch.device) -> RandomState:
    import numpy as np
    import torch

    version, words, gauss = random.getstate()
    numbers = np.random.get_state(legacy=False)
    keys, position = numbers["state"]["key"], numbers["state"]["pos"]
    has_gauss, cached = numbers["has_gauss"], numbers["gauss"]
    state = {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [torch.from_numpy(keys.astype(np.int64)), int(position), has_gauss, float(cached)],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: RandomState, device: torch.device) -> None:
    """Set this process's generators to one of :func:`gather_random_states`."""
    import numpy as np
    import torch

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
