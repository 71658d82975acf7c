"""Keep a fit's progress, its best epoch, its memory use and its logged values."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nbtoolkit.config.aliases import similar_name
from nbtoolkit.config.validation import resolve
from nbtoolkit.errors import FitError
from nbtoolkit.training.sync import LogPoint, LossSum

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.worker.context import RunContext


# --- memory ---
# How much memory a rank uses: its device's, or its own on the CPU.


def memory_used(ctx: RunContext) -> float:
    """This rank's memory in GB (10^9 bytes).

    On a GPU the most that torch's tensors took since the last call
    (``torch.cuda.max_memory_allocated``); on the CPU the resident memory now.
    """
    if ctx.device.type == "cuda":
        import torch

        most = torch.cuda.max_memory_allocated(ctx.device)
        torch.cuda.reset_peak_memory_stats(ctx.device)
        return most / 1e9
    import psutil

    return float(psutil.Process().memory_info().rss) / 1e9


# --- progress ---
# How far a fit is, its best epoch, and whether that is long ago.


# What a resumed fit has to know besides weights and optimizer.
_KEPT = (
    "epoch",
    "taken",
    "loss",
    "seen",
    "values",
    "best",
    "best_epoch",
    "best_step",
    "stale",
    "best_values",
)


def check_monitor(config: Config, names: Sequence[str], stems: Sequence[str]) -> None:
    """Refuse a ``checkpoint.monitor`` that no epoch will have.

    Args:
        config: the fit's.
        names: the metrics that its epochs will have.
        stems: those of them that may turn out to be ``<stem>_<key>``.

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
    """How far a fit is.

    Attributes:
        epoch: epochs done.
        taken: optimizer steps done in the epoch under way.
        loss: the sum of its losses so far, over all ranks, each times its weight.
        seen: the sum of these weights: the samples, where the loss is a mean over samples.
        values: the metrics of the last epoch done.
        best: the best value of the monitored metric; None: no epoch is done.
        best_epoch: when it was reached.
        best_step: optimizer steps done by then.
        best_values: the metrics of that epoch.
        stale: epochs done since something better by more than ``train.min_delta``.
    """

    def __init__(self, ctx: RunContext, config: Config) -> None:
        self._ctx, self._checkpoint, self._train = ctx, config.checkpoint, config.train
        # Without a monitor it is a loss: val_loss or train_loss.
        direction = resolve(self._checkpoint.monitor or "val_loss", config)
        if direction is None:
            raise FitError(
                f"whether the highest or the lowest {self._checkpoint.monitor!r} is best cannot be "
                f"told from its name (checkpoint.monitor)",
                allowed="`mode: max` or `mode: min` under checkpoint",
                do="add the line that is right",
            )
        self._lowest = direction == "minimize"
        self._said = 0.0
        self._reference: float | None = None
        self.epoch = self.taken = 0
        self.loss = self.seen = 0.0
        self.values: dict[str, float] = {}
        self.best_values: dict[str, float] = {}
        self.best: float | None = None
        self.best_epoch = self.best_step = self.stale = 0

    def add(self, part: LossSum) -> None:
        """Take in losses of the epoch under way."""
        self.loss += part.loss
        self.seen += part.weight

    @property
    def train_loss(self) -> float:
        """The mean loss of the epoch under way, so far."""
        return self.loss / self.seen if self.seen else math.nan

    @property
    def stopped_early(self) -> bool:
        """Whether ``train.early_stopping_patience`` is used up."""
        patience = self._train.early_stopping_patience
        return patience is not None and self.stale >= patience

    def end_epoch(self, values: dict[str, float], step: int) -> bool:
        """Take in a whole epoch's metrics; returns whether it is the best so far."""
        self.epoch, self.values = self.epoch + 1, values
        self.taken = 0
        self.loss = self.seen = 0.0
        value = values[self.monitored]
        better = self._better(value, self.best, by=0.0)
        if better:
            self.best, self.best_epoch, self.best_step = value, self.epoch, step
            self.best_values = values
        if self._better(value, self._reference, by=self._train.min_delta):
            self._reference, self.stale = value, 0
        else:
            self.stale += 1
        self._say()
        return better

    @property
    def monitored(self) -> str:
        """The metric that decides which epoch is best.

        Raises:
            FitError: ``checkpoint.monitor`` names none that the epochs have.
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
    def judged(self) -> bool:
        """Whether an epoch can be best: the training loss alone does not tell."""
        return self._checkpoint.monitor is not None or "val_loss" in self.values

    @property
    def ends_with_best(self) -> bool:
        """Whether the model is left with the weights of another epoch than the last."""
        wanted = self._checkpoint.weights == "best" and self.judged
        return wanted and self.best_epoch != self.epoch

    def summary(self) -> dict[str, float]:
        """The metrics of the epoch whose weights are left, and which epoch was the best."""
        values = self.best_values if self.ends_with_best else self.values
        best = {f"best_{self.monitored}": self.best} if self.best is not None else {}
        return {**values, **best, "epoch": self.epoch, "best_epoch": self.best_epoch}

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"reference": self._reference, **{name: getattr(self, name) for name in _KEPT}}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state`."""
        self._reference = state["reference"]
        for name in _KEPT:
            setattr(self, name, state[name])

    def _better(self, value: float, than: float | None, *, by: float) -> bool:
        if than is None or math.isnan(than):
            return True
        return value < than - by if self._lowest else value > than + by

    def _say(self) -> None:
        """A line a second at most: epochs may take milliseconds."""
        last = self.epoch == self._train.epochs or self.stopped_early
        if last or time.monotonic() - self._said >= 1.0:
            self._said = time.monotonic()
            values = "  ".join(f"{name} {value:.4f}" for name, value in self.values.items())
            self._ctx.print(f"epoch {self.epoch}/{self._train.epochs}  {values}")
        if self.stopped_early:
            self._ctx.print(
                f"fit: ends early, {self.stale} epochs without a better {self.monitored} than "
                f"epoch {self.best_epoch}'s {self.best:.6g} (train.early_stopping_patience)"
            )


# --- logged values ---


_EVERY = 1.0  # seconds between two looks at the memory: one takes 10 us, a small model's step 150


class MetricLogger:
    """Sums since the last entry, and when that was."""

    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx
        self._since, self._seen = time.perf_counter(), LossSum(0.0, 0.0, 0)
        self._memory, self._looked_at = 0.0, -_EVERY

    def memory(self) -> float:
        """This rank's device memory (on the CPU: resident memory) in GB, at most a second old."""
        now = time.monotonic()
        if now - self._looked_at >= _EVERY:
            self._memory, self._looked_at = memory_used(self._ctx), now
        return self._memory

    def begin(self) -> None:
        """Do not count the time since the last entry: it went into something else."""
        self._since = time.perf_counter()

    def add(self, part: LossSum) -> None:
        """Take in some losses."""
        seen = self._seen
        self._seen = LossSum(
            seen.loss + part.loss, seen.weight + part.weight, seen.samples + part.samples
        )

    def write(self, mark: LogPoint, memory: list[float]) -> None:
        """Log what there is, at the marked optimizer step; ``memory`` is every rank's."""
        seen = self._seen
        if not seen.samples:
            return  # fp16 has left out these steps
        values = {
            "loss": seen.loss / seen.weight if seen.weight else 0.0,
            "lr": mark.rate,
            "samples_per_second": seen.samples / (mark.at - self._since),
            **{f"memory_gb_rank{rank}": used for rank, used in enumerate(memory)},
        }
        if mark.grad_norm is not None:
            values["grad_norm"] = float(mark.grad_norm)
        self._ctx.log(values, step=mark.step)
        self._since, self._seen = mark.at, LossSum(0.0, 0.0, 0)
