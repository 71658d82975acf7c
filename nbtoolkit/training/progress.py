"""Progress: how far a run is, its best epoch, and the checkpoints that remember both."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from nbtoolkit.errors import FitError
from nbtoolkit.training.stepper import Stepper

if TYPE_CHECKING:
    from nbtoolkit.config import Config
    from nbtoolkit.runtime.context import RunContext

_LOW = ("loss", "error")  # metrics whose names end so are best when lowest (checkpoint.mode: auto)

# Calls of fit in each run: the second one of a training function has checkpoints of its own.
_fits: WeakKeyDictionary[RunContext, int] = WeakKeyDictionary()


class Progress:
    """What a resumed run has to know besides the weights. Make one with :meth:`of`.

    Attributes:
        epoch: epochs done.
        values: the metrics of the last one.
        best: the best value of the monitored metric; None: no epoch is done.
        best_epoch: when it was reached.
    """

    def __init__(self, ctx: RunContext, config: Config, stepper: Stepper) -> None:
        self._ctx, self._checkpoint, self._stepper = ctx, config.checkpoint, stepper
        number = _fits[ctx] = _fits.get(ctx, 0) + 1
        self._suffix = "" if number == 1 else f"-{number}"
        self._epochs, self._said = config.train.epochs, 0.0
        self.epoch = 0
        self.values: dict[str, float] = {}
        self.best: float | None = None
        self.best_epoch = 0

    @classmethod
    def of(cls, ctx: RunContext, config: Config, stepper: Stepper) -> Progress:
        """The progress of this run; a ``last`` checkpoint is restored into ``stepper``."""
        progress = cls(ctx, config, stepper)
        kind = f"last{progress._suffix}"
        state = ctx.load(kind) if config.checkpoint.enabled else None
        if state is not None:
            stepper.restore(state, source=str(ctx.paths.checkpoints / f"{kind}.pt"))
            progress.epoch, progress.values = state["epoch"], state["values"]
            progress.best, progress.best_epoch = state["best"], state["best_epoch"]
            ctx.print(f"fit: going on after epoch {progress.epoch}")
        return progress

    def end_epoch(self, epoch: int, values: dict[str, float]) -> None:
        """Take in an epoch's metrics and save; called by all ranks."""
        self.epoch, self.values = epoch, values
        name = self._monitored(values)
        better = self._better(name, values[name])
        if better:
            self.best, self.best_epoch = values[name], epoch
        if self._checkpoint.enabled:
            state = {**self._stepper.state(), **self._state()}
            if better:
                self._ctx.save(state, kind=f"best{self._suffix}", step=self._stepper.step)
            self._ctx.save(state, kind=f"last{self._suffix}", step=self._stepper.step)
        self._say()

    def summary(self) -> dict[str, float]:
        """The last epoch's metrics and the best one's."""
        best = {f"best_{self._monitored(self.values)}": self.best} if self.best is not None else {}
        return {**self.values, **best, "epoch": self.epoch, "best_epoch": self.best_epoch}

    def _say(self) -> None:
        """A line a second at most: epochs may take milliseconds."""
        if self.epoch == self._epochs or time.monotonic() - self._said >= 1.0:
            self._said = time.monotonic()
            values = "  ".join(f"{name} {value:.4f}" for name, value in self.values.items())
            self._ctx.print(f"epoch {self.epoch}/{self._epochs}  {values}")

    def _monitored(self, values: dict[str, float]) -> str:
        """The metric that decides which epoch is best."""
        name = self._checkpoint.monitor or ("val_loss" if "val_loss" in values else "train_loss")
        if name not in values:
            raise FitError(
                f"checkpoint.monitor is {name!r}, which no epoch has",
                allowed=", ".join(values),
                do="set checkpoint.monitor to one of these, or pass a metric of that name to fit",
            )
        return name

    def _better(self, name: str, value: float) -> bool:
        if self.best is None or math.isnan(self.best):
            return True
        low = self._checkpoint.mode == "min" or (
            self._checkpoint.mode == "auto" and name.endswith(_LOW)
        )
        return value < self.best if low else value > self.best

    def _state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("epoch", "values", "best", "best_epoch")}
