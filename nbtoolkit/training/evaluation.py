"""Evaluate and predict a whole data set, each sample once, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import FitError
from nbtoolkit.training.data import Collate, Source, make_source
from nbtoolkit.training.loader import IterableTrainLoader, is_iterable, length_of
from nbtoolkit.training.metrics import Meter
from nbtoolkit.training.sampler import GlobalBatchSampler
from nbtoolkit.worker.collectives import Rows, gather_on_all, in_order

if TYPE_CHECKING:
    import torch

    from nbtoolkit.config.schema import Config
    from nbtoolkit.training.step import Forward, TrainStep
    from nbtoolkit.worker.context import RunContext


# --- the loader ---
# Once through a whole data set, every rank its own part of it, each sample once.
#
# samples         0 1 2 3 4 5 | 6 7 8      steps of 2 samples a rank
# rank 0 of 3     0 1         | 6
# rank 1 of 3         2 3     |   7
# rank 2 of 3             4 5 |     8      nobody waits for anybody: no padding, no stand-ins


# Without gradients nothing is kept for a backward pass: batches so many times larger fit, too.
_LARGER = 4


def make_walk(
    ctx: RunContext,
    data: Any,
    *,
    batch: int | None = None,
    workers: int = 0,
    collate: Collate | None = None,
    what: str = "validation",
    or_else: str = "",
) -> Iterable[tuple[Any, int]]:
    """This rank's walk through ``data``, to be begun anew as often as wanted.

    Random augmentation draws the same for a sample in every walk.

    Args:
        ctx: the run's context.
        data: what :func:`~nbtoolkit.training.data.make_source` takes, or an iterable that is the
            same on all ranks: each reads all of it, and makes batches of its part only.
        batch: samples of this rank in one batch, at most; default: four times the plan's.
        workers: ``DataLoader`` processes of this rank; one at most for an iterable.
        collate: makes a batch from a list of samples; default: torch's.
        what: the set's name, for messages.
        or_else: what is allowed instead of a set, for messages.

    Returns:
        Batches on the device, with how many samples (not 0) they have.

    Raises:
        FitError: the data cannot be used or are empty (an iterable's walk tells that at its end).
    """
    batch = batch or _LARGER * ctx.plan.batch_size_per_device
    if is_iterable(data):
        return _StreamWalk(ctx, data, batch, min(workers, 1), collate, what)
    source = make_source(data, ctx.device, collate=collate, workers=workers, seed=ctx.seed)
    if len(source) == 0:
        raise FitError(
            f"the {what} set is empty",
            allowed="one sample or more" + or_else,
            do="check the split or the filter that made it",
        )
    return _IndexedWalk(source, batch, ctx.rank, ctx.world_size)


class _IndexedWalk:
    """Of a data set that is fetched by index; rank 0 has a batch if any rank has."""

    def __init__(self, source: Source, batch: int, rank: int, ranks: int) -> None:
        self._source, self._parts = source, list(_parts(len(source), batch, rank, ranks))

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        import torch

        indices = [torch.arange(low, high) for low, high in self._parts]
        sizes = [high - low for low, high in self._parts]
        batches = self._source.batches(torch.cat([torch.arange(0), *indices]), sizes)
        return zip(batches, sizes, strict=True)


def _parts(size: int, batch: int, rank: int, ranks: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, batch * ranks):
        step = min(batch * ranks, size - start)
        # rounded up: the first ranks have the one sample more
        low, high = (start - (-step * number // ranks) for number in (rank, rank + 1))
        if low < high:
            yield low, high


class _StreamWalk:
    """Of an iterable."""

    def __init__(
        self,
        ctx: RunContext,
        data: Any,
        batch: int,
        workers: int,
        collate: Collate | None,
        what: str,
    ) -> None:
        step, ranks = batch * ctx.world_size, ctx.world_size
        self._feed = IterableTrainLoader(
            data,
            GlobalBatchSampler(
                size=step, batch=step, micro=batch, seed=ctx.seed, rank=ctx.rank, ranks=ranks
            ),
            ctx.device,
            length=length_of(data),
            collate=collate,
            workers=workers,
            what=what,
        )

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        for batch, share in self._feed.walk(epoch=0):
            if share.samples:  # else a stand-in, for steps that the ranks take together
                yield batch, share.samples


# --- validation ---
# Loss and metrics of a whole data set, each sample once, on any number of ranks.


class Validator:
    """One rank's part of every validation.

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
        data: Any,
        metrics: dict[str, Any],
        collate: Collate | None,
    ) -> None:
        self._ctx, self._metrics = ctx, metrics
        self._walk = None
        if data is not None:
            workers, none = config.train.num_workers, ", or valid_data=None"
            self._walk = make_walk(ctx, data, workers=workers, collate=collate, or_else=none)

    def values(self, train_step: TrainStep) -> dict[str, float]:
        """``val_loss`` and ``val_<metric>`` of all samples; called by all ranks, equal on all.

        Without a data set: nothing.
        """
        if self._walk is None:
            return {}
        meter = Meter(self._metrics, self._ctx.device, ranks=self._ctx.world_size)
        train_step.share_buffers()
        train_step.module.eval()
        train_step.evaluated.eval()
        for rows, samples in self._walk:
            outputs, targets, loss = train_step.evaluate(rows, samples)
            meter.add(loss, outputs, targets, samples)
        return {f"val_{name}": value for name, value in meter.result().items()}


# --- prediction ---


def predict(
    ctx: RunContext,
    model: torch.nn.Module,
    data: Any,
    *,
    step: Forward | None = None,
    collate: Collate | None = None,
    batch_size: int | None = None,
) -> Any:
    """What ``model`` says to every sample of ``data``; called by all ranks, which share the work.

    In evaluation mode, without gradients, in the plan's precision. Afterwards every layer is in the
    mode (training or evaluation) it was in; the model is on ``ctx.device``, with rank 0's buffers.

    Args:
        ctx: the run's context.
        model: equal on all ranks, as ``fit`` leaves it; a ``DistributedDataParallel`` is unwrapped.
        data: as :func:`nbtoolkit.fit` takes it, the same on all ranks. Targets may be missing: a
            batch is a tensor of inputs, or a pair (inputs, targets).
        step: ``step(model, batch)`` -> (outputs, targets), as in ``fit``; the outputs are taken.
        collate: makes a batch from a list of samples; default: torch's.
        batch_size: samples of one forward pass of one rank; default: four times the plan's, since
            nothing is kept for a backward pass.

    Returns:
        The outputs on the CPU, one row a sample, in the data set's order: a tensor, or a tuple,
        list or dict of tensors, as the model gives them. Half precision comes as float32. Every
        rank has all of them, gathered once, at the end.

    Raises:
        FitError: the data cannot be used or are empty, or the outputs are not tensors with one row
            a sample.
    """
    walk = make_walk(
        ctx,
        data,
        batch=batch_size,
        workers=ctx.config.train.num_workers,
        collate=collate,
        what="prediction",
    )
    module, forward = _unwrapped(model).to(ctx.device), step or _inputs_alone
    _share_buffers(module, ctx.world_size)
    mine = Rows()
    with _evaluating(ctx, module):
        for batch, samples in walk:
            mine.add(forward(module, batch)[0], samples)
    return in_order(gather_on_all(mine.part(), ctx.world_size))


def _inputs_alone(model: torch.nn.Module, batch: Any) -> tuple[Any, Any]:
    """The default step."""
    import torch

    if isinstance(batch, torch.Tensor):
        return model(batch), None
    if isinstance(batch, (tuple, list)) and len(batch) in (1, 2):
        return model(batch[0]), None
    raise FitError(
        f"a batch is neither inputs nor a pair (inputs, targets) but a {type(batch).__name__}",
        allowed="data sets of inputs, or of pairs, or a step of your own",
        do="pass step=lambda model, batch: (model(batch['x']), None) to predict",
    )


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own model: DDP's forward talks to the other ranks, which have other batches."""
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        return model
    module: torch.nn.Module = model.module
    return module


def _share_buffers(module: torch.nn.Module, ranks: int) -> None:
    """Give every rank rank 0's buffers: each rank's batch-norm saw its own batches."""
    import torch.distributed as dist

    if ranks > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)


@contextmanager
def _evaluating(ctx: RunContext, module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, the plan's precision; then each layer's mode as it was."""
    import torch

    modes = [(layer, layer.training) for layer in module.modules()]
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(ctx.plan.precision)
    module.eval()
    try:
        with torch.no_grad(), torch.autocast(ctx.device.type, half, enabled=half is not None):
            yield
    finally:
        for layer, training in modes:
            layer.training = training
