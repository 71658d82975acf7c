"""Evaluate and predict a whole data set, each sample once, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, cast

from nbtoolkit.config.schema import measured
from nbtoolkit.errors import FitError
from nbtoolkit.training.loading.data import Batch, Collate, Source, make_source
from nbtoolkit.training.loading.epoch_order import make_order
from nbtoolkit.training.loading.loader import StreamTrainLoader, is_stream
from nbtoolkit.training.loading.sampler import GlobalBatchSampler
from nbtoolkit.training.loading.torch_loader import take_apart
from nbtoolkit.training.metrics import Meter, Metric
from nbtoolkit.training.model import broadcast_buffers, half_precision
from nbtoolkit.worker.collectives import Rows, gather_on_all, in_order

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nbtoolkit.config.schema import Config
    from nbtoolkit.training.step import Forward, TrainStep
    from nbtoolkit.worker.context import RunContext

# Without gradients nothing is kept for a backward pass: batches so many times larger fit, too.
_LARGER = 4


def make_evaluation_loader(
    ctx: RunContext,
    data: object,
    *,
    batch_size: int | None = None,
    workers: int = 0,
    collate: Collate | None = None,
    name: Literal["validation", "prediction"] = "validation",
) -> _MapLoader | _StreamLoader:
    """Make the loader of this rank's part of ``data``; it can be iterated any number of times.

    Random augmentation draws the same for a sample in every iteration. The ranks take their batches
    in turn, without padding::

        samples         0 1 2 3 4 5 | 6 7 8      steps of 2 samples per rank
        rank 0 of 3     0 1         | 6
        rank 1 of 3         2 3     |   7
        rank 2 of 3             4 5 |     8

    Args:
        ctx: the run's context.
        data: what :func:`~nbtoolkit.training.loading.data.make_source` takes, or an iterable that
            is the same on all ranks: each reads all of it, and makes batches of its part only; or
            a ``DataLoader`` of either.
        batch_size: samples of this rank in one batch, at most; default: four times the plan's.
        workers: ``DataLoader`` processes of this rank; one at most for an iterable.
        collate: makes a batch from a list of samples; default: torch's.
        name: the set's name, for messages.

    Returns:
        Batches on the device, each with its number of samples (at least 1).

    Raises:
        FitError: the data cannot be used or are empty (of an iterable: at the end of an iteration).
    """
    size = batch_size or _LARGER * ctx.plan.batch_size_per_device
    feed = take_apart(data, collate=collate, workers=workers)
    data, collate, workers = feed.data, feed.collate, feed.workers
    if is_stream(data):
        step, ranks = size * ctx.world_size, ctx.world_size
        sampler = GlobalBatchSampler(
            size=step, batch=step, micro=size, seed=ctx.seed, rank=ctx.rank, ranks=ranks
        )
        workers = min(workers, 1)
        return _StreamLoader(
            StreamTrainLoader(
                data, sampler, ctx.device, collate=collate, workers=workers, name=name
            )
        )
    source = make_source(data, ctx.device, collate=collate, workers=workers, seed=ctx.seed)
    if len(source) == 0:
        raise FitError(
            f"the {name} set is empty",
            allowed="one sample or more" + (", or valid_data=None" if name == "validation" else ""),
            do="check the split or the filter that made it",
        )
    order = make_order(data, len(source), feed.sampler, None, seed=ctx.seed, ranks=ctx.world_size)
    chosen = None if order is None else order.draw(0)
    return _MapLoader(source, size, ctx.rank, ctx.world_size, chosen)


class _MapLoader:
    """Loads a data set, or the samples ``chosen``, by index; rank 0 has a batch if any has.

    Attributes:
        samples: of all ranks.
    """

    def __init__(
        self, source: Source, batch_size: int, rank: int, ranks: int, chosen: Tensor | None
    ) -> None:
        self._source, self._chosen = source, chosen
        self.samples = len(source) if chosen is None else len(chosen)
        self._slices = list(_rank_slices(self.samples, batch_size, rank, ranks))

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        import torch

        indices = [torch.arange(low, high) for low, high in self._slices]
        sizes = [high - low for low, high in self._slices]
        mine = torch.cat([torch.arange(0), *indices])
        batches = self._source.batches(mine if self._chosen is None else self._chosen[mine], sizes)
        return zip(batches, sizes, strict=True)


def _rank_slices(size: int, batch_size: int, rank: int, ranks: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, batch_size * ranks):
        step = min(batch_size * ranks, size - start)
        # rounded up: the first ranks have the one sample more
        low, high = (start - (-step * number // ranks) for number in (rank, rank + 1))
        if low < high:
            yield low, high


class _StreamLoader:
    """Loads an iterable."""

    samples = None  # known at its end

    def __init__(self, loader: StreamTrainLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        for batch, micro_batch in self._loader.batches(epoch=0):
            if micro_batch.samples:  # else a stand-in, which training steps need
                yield batch, micro_batch.samples


class Validator:
    """Validates a model; one per rank.

    Args:
        ctx: the run's context.
        config: ``train.num_workers`` is used.
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
        data: object,
        metrics: Mapping[str, Metric],
        collate: Collate | None,
    ) -> None:
        self._ctx, self._metrics = ctx, metrics
        self._loader: Iterable[tuple[Batch, int]] | None = None
        if data is not None:
            workers = measured(config.train.num_workers, "train.num_workers")
            self._loader = make_evaluation_loader(ctx, data, workers=workers, collate=collate)

    def values(self, train_step: TrainStep) -> dict[str, float]:
        """``val_loss`` and ``val_<metric>`` of all samples; called by all ranks, equal on all.

        Empty without a data set.
        """
        if self._loader is None:
            return {}
        ctx, given = self._ctx, train_step.loss
        meter = Meter(self._metrics, ctx.device, ranks=ctx.world_size, loss=given)
        train_step.broadcast_buffers()
        train_step.module.eval()
        train_step.evaluated_module.eval()
        with train_step.strategy.evaluating():
            for batch, samples in self._loader:
                outputs, targets, loss = train_step.evaluate(batch, samples)
                meter.add(loss, outputs, targets, samples)
        return {f"val_{name}": value for name, value in meter.result().items()}


def predict(
    ctx: RunContext,
    model: torch.nn.Module,
    data: object,
    *,
    step: Forward | None = None,
    collate: Collate | None = None,
    batch_size: int | None = None,
) -> Batch:
    """Compute the outputs of ``model`` for every sample; called by all ranks, which share the work.

    In evaluation mode, without gradients, in the plan's precision. Afterwards every layer is in the
    mode (training or evaluation) it was in; the model is on ``ctx.device``, with rank 0's buffers.

    Args:
        ctx: the run's context.
        model: equal on all ranks, as ``fit`` leaves it; a ``DistributedDataParallel`` is unwrapped.
        data: as :func:`nbtoolkit.fit` takes it, the same on all ranks. Targets are optional: a
            batch is a tensor of inputs, or a pair (inputs, targets).
        step: ``step(model, batch)`` -> (outputs, targets), as in ``fit``; only the outputs are
            used.
        collate: makes a batch from a list of samples; default: torch's.
        batch_size: samples of one forward pass of one rank; default: four times the plan's, since
            nothing is kept for a backward pass.

    Returns:
        The outputs on the CPU, one row per sample, in the data set's order: a tensor, or a tuple,
        list or dict of tensors, as the model returns them. Half precision becomes float32. Every
        rank gets all of them, gathered once, at the end.

    Raises:
        FitError: the data cannot be used or are empty, or the outputs are not tensors with one row
            per sample.
    """
    loader = make_evaluation_loader(
        ctx,
        data,
        batch_size=batch_size,
        workers=measured(ctx.config.train.num_workers, "train.num_workers"),
        collate=collate,
        name="prediction",
    )
    rows, forward = Rows(), step or forward_inputs
    with evaluation_mode(ctx, model) as module:
        for batch, samples in loader:
            rows.add(forward(module, batch)[0], samples)
    return in_order(gather_on_all(rows.part(), ctx.world_size))


def forward_inputs(model: torch.nn.Module, batch: Batch) -> tuple[Batch, None]:
    """The default step of :func:`predict`: a batch is inputs, or a pair (inputs, targets)."""
    import torch

    if isinstance(batch, torch.Tensor):
        return model(batch), None
    if isinstance(batch, (tuple, list)) and len(batch) in (1, 2):
        return model(batch[0]), None
    raise FitError(
        f"a batch is neither inputs nor a pair (inputs, targets) but a {type(batch).__name__}",
        allowed="data sets of inputs, or of pairs, or your own step",
        do="pass step=lambda model, batch: (model(batch['x']), None) to predict",
    )


@contextmanager
def evaluation_mode(ctx: RunContext, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Evaluation mode without gradients in the plan's precision; restores each layer's mode.

    Called by all ranks.

    Args:
        ctx: the run's context.
        model: may be wrapped in ``DistributedDataParallel``.

    Yields:
        The model, unwrapped, on ``ctx.device``, with rank 0's buffers.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(model, DistributedDataParallel):  # its forward has collectives
        model = cast("torch.nn.Module", model.module)
    module = model.to(ctx.device)
    broadcast_buffers(module, ctx.world_size)
    modes = [(layer, layer.training) for layer in module.modules()]
    dtype = half_precision(ctx)
    module.eval()
    try:
        with torch.no_grad(), torch.autocast(ctx.device.type, dtype, enabled=dtype is not None):
            yield module
    finally:
        for layer, training in modes:
            layer.training = training
