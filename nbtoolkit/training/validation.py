"""Validation: loss and metrics of a whole data set, each sample once, on any number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import FitError
from nbtoolkit.training.data import Collate, Source, make_source
from nbtoolkit.training.metrics import Meter
from nbtoolkit.training.walk import walk

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
        self._source = None if data is None else _source(ctx, config, data, collate)

    def values(self, stepper: Stepper) -> dict[str, float]:
        """``val_loss`` and ``val_<metric>`` of all samples; called by all ranks, equal on all.

        None without a data set.
        """
        if self._source is None:
            return {}
        ctx = self._ctx
        meter = Meter(self._metrics, ctx.device, ranks=ctx.world_size)
        stepper.share_buffers()
        stepper.module.eval()
        batch = ctx.plan.batch_size_per_device
        for rows, samples in walk(self._source, batch, rank=ctx.rank, ranks=ctx.world_size):
            outputs, targets, loss = stepper.evaluate(rows)
            meter.add(loss, outputs, targets, samples)
        return {f"val_{name}": value for name, value in meter.result().items()}


def _source(ctx: RunContext, config: Config, data: Any, collate: Collate | None) -> Source:
    source = make_source(data, ctx.device, collate=collate, workers=config.train.workers)
    if len(source) == 0:
        raise FitError(
            "the validation set is empty",
            allowed="one sample or more, or valid_data=None",
            do="check the split or the filter that made it",
        )
    return source
