"""Validation: loss and metrics of a whole data set, each sample once, on any number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbtoolkit.training.data import Collate
from nbtoolkit.training.metrics import Meter
from nbtoolkit.training.walk import make_walk

if TYPE_CHECKING:
    from nbtoolkit.config import Config
    from nbtoolkit.runtime.context import RunContext
    from nbtoolkit.training.stepper import Stepper


class Validator:
    """One rank's part of every validation.

    Args:
        ctx: the run's context.
        config: ``train.workers`` is used.
        data: a data set as :func:`nbtoolkit.fit` takes it; None: no validation.
        metrics: by name, from :func:`~nbtoolkit.training.metrics.named_metrics`.
        collate: makes a batch from a list of samples.

    Raises:
        FitError: the data set is empty or cannot be used.
    """

    def __init__(
        self,
        ctx: RunContext,
        config: Config,
        data: Any,
        metrics: dict[str, Any],
        collate: Collate | None,
    ) -> None:
        self._ctx, self._metrics = ctx, metrics
        self._walk = None
        if data is not None:
            workers, none = config.train.workers, ", or valid_data=None"
            self._walk = make_walk(ctx, data, workers=workers, collate=collate, or_else=none)

    def values(self, stepper: Stepper) -> dict[str, float]:
        """``val_loss`` and ``val_<metric>`` of all samples; called by all ranks, equal on all.

        Without a data set: nothing.
        """
        if self._walk is None:
            return {}
        meter = Meter(self._metrics, self._ctx.device, ranks=self._ctx.world_size)
        stepper.share_buffers()
        stepper.module.eval()
        stepper.evaluated.eval()
        for rows, samples in self._walk:
            outputs, targets, loss = stepper.evaluate(rows, samples)
            meter.add(loss, outputs, targets, samples)
        return {f"val_{name}": value for name, value in meter.result().items()}
