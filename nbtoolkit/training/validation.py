"""Validation: loss and metrics of a whole data set, each sample once, on any number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import FitError
from nbtoolkit.training.data import Collate, Source, make_source
from nbtoolkit.training.metrics import Meter
from nbtoolkit.training.order import shard

if TYPE_CHECKING:
    from nbtoolkit.config import Config
    from nbtoolkit.runtime.context import RunContext
    from nbtoolkit.training.stepper import Stepper


class Validator:
    """One rank's part of every validation: a shard without padding, each sample counts once."""

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
        """``val_loss`` and the metrics over all samples of all ranks; none without a data set."""
        import torch

        if self._source is None:
            return {}
        ctx, size, batch = self._ctx, len(self._source), self._ctx.plan.batch_size_per_device
        low, high = shard(size, ctx.rank, ctx.world_size)
        sizes = [min(batch, high - start) for start in range(low, high, batch)]
        meter = Meter(self._metrics, ctx.device, ranks=ctx.world_size, samples=size)
        stepper.share_buffers()
        stepper.module.eval()
        batches = self._source.batches(torch.arange(low, high), sizes)
        for rows, count in zip(batches, sizes, strict=True):
            outputs, targets, loss = stepper.evaluate(rows)
            meter.add(loss, outputs, targets, count)
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
