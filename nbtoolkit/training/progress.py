"""Keep the progress of a fit, and which of its epochs is the best."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nbtoolkit.config.aliases import similar_name
from nbtoolkit.config.directions import resolve
from nbtoolkit.errors import FitError
from nbtoolkit.run.checkpoints.checkpoint_store import State

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.training.sync import LossSum
    from nbtoolkit.worker.context import RunContext


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
    raise _no_metric(monitor, [*names, *(f"{stem}_<key>" for stem in stems)])


def _no_metric(monitor: str, names: Sequence[str]) -> FitError:
    near = similar_name(monitor, names)
    return FitError(
        f"checkpoint.monitor is {monitor!r}, which no epoch will have",
        allowed=", ".join(names),
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
        self._ctx = ctx
        self._checkpoint = config.checkpoint
        self._train = config.train
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
        self.epoch += 1
        self.values = values
        self.taken = 0
        self.loss = self.seen = 0.0
        value = values[self.monitored]
        better = self._is_better(value, self.best, by=0.0)
        if better:
            self.best = value
            self.best_epoch = self.epoch
            self.best_step = step
            self.best_values = values
        if self._is_better(value, self._reference, by=self._train.min_delta):
            self._reference = value
            self.stale = 0
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
            raise _no_metric(name, list(values))
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
        """Return the metrics of the epoch with whose weights the model ends, and the best epoch."""
        values = self.best_values if self.ends_with_best else self.values
        best = math.nan if self.best is None else self.best
        name = f"best_{self.monitored}"
        return {**values, name: best, "epoch": self.epoch, "best_epoch": self.best_epoch}

    def state(self) -> State:
        """Return the attributes, plain values for a checkpoint."""
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
