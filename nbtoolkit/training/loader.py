"""Deliver the training set to one rank, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import replace
from itertools import count, islice
from typing import TYPE_CHECKING, TypeAlias, cast

from nbtoolkit.errors import FitError
from nbtoolkit.training.data import Batch, Collate, Feed, Sample, make_source, noted, seed_sample
from nbtoolkit.training.model import smallest_share
from nbtoolkit.training.samples import (
    EpochOrder,
    MicroBatch,
    Passes,
    SampleWeights,
    check_steps,
    make_order,
)
from nbtoolkit.worker.batch_slices import digest, refuse_different
from nbtoolkit.worker.random_numbers import preserve_random_state

if TYPE_CHECKING:
    import torch
    from torch import nn

    from nbtoolkit.config.schema import Config
    from nbtoolkit.training.data import ArraySource, SampleSource
    from nbtoolkit.worker.context import RunContext


def make_train_loader(
    ctx: RunContext,
    config: Config,
    feed: Feed,
    *,
    sampler: Iterable[int] | None = None,
    sample_weights: SampleWeights | None = None,
    model: nn.Module | None = None,
) -> TrainLoader:
    """Make the loader of a training set; called on all ranks.

    Args:
        ctx: the run's context.
        config: ``train.drop_last``, ``train.num_workers``, ``train.max_steps``,
            ``train.sample_weights``.
        feed: what :func:`~nbtoolkit.training.data.make_source` takes, in the order of a
            permutation of (seed, epoch); or an iterable, in its own order (see
            :class:`StreamTrainLoader`).
        sampler: the user's, in place of the permutation.
        sample_weights: the user's, in place of ``train.sample_weights``.
        model: its batch norms decide how few samples a micro-batch may have.

    Raises:
        FitError: the data cannot be used, are empty, or have no whole batch under
            ``train.drop_last``; a stream of unknown length has no ``train.max_steps``.
    """
    smallest = 1 if model is None else smallest_share(model)
    batch = ctx.plan.global_batch_size
    data = feed.data
    if feed.batch_size not in (None, batch):
        ctx.print(
            f"fit: an optimizer step takes train.batch_size = {batch} samples, not the "
            f"{feed.batch_size} of the DataLoader"
        )
    if sample_weights is None:
        sample_weights = config.train.sample_weights
    if sampler is None and sample_weights is None:
        sampler = feed.sampler
    if is_stream(data):
        if sampler is not None or sample_weights is not None:
            raise FitError(
                f"a sampler or sample_weights cannot choose the samples of a stream, a "
                f"{type(data).__qualname__}",
                allowed="a sampler or sample_weights for data with __len__ and __getitem__",
                do="remove them, or let the stream itself choose its samples",
            )
        return _make_stream_loader(ctx, config, feed, smallest)
    source = make_source(feed, ctx.device, workers=config.train.num_workers, seed=ctx.seed)
    order = make_order(
        data, len(source), sampler, sample_weights, seed=ctx.seed, ranks=ctx.world_size
    )
    passes = _make_passes(ctx, config, feed, order.size, smallest)
    return MapTrainLoader(order, passes, source)


def _make_stream_loader(
    ctx: RunContext, config: Config, feed: Feed, smallest: int
) -> StreamTrainLoader:
    data = feed.data
    length = stream_length(data)
    if length is None and config.train.max_steps is None:
        raise FitError(
            f"the length of the training is unknown: a {type(data).__qualname__} has no length, "
            "and train.max_steps is not set",
            allowed="an iterable with __len__ (its samples in one epoch), or train.max_steps",
            do="set train.max_steps: <optimizer steps of the whole run>",
        )
    if feed.workers or config.train.num_workers:
        ctx.print("fit: no DataLoader workers: the training set is a stream, read by each rank")
    size = ctx.plan.global_batch_size if length is None else length
    passes = _make_passes(ctx, config, feed, size, smallest)
    return StreamTrainLoader(data, passes, ctx.device, seed=ctx.seed, collate=feed.collate)


def _make_passes(ctx: RunContext, config: Config, feed: Feed, size: int, smallest: int) -> Passes:
    passes = Passes(
        size=size,
        batch=ctx.plan.global_batch_size,
        micro=ctx.plan.batch_size_per_device,
        rank=ctx.rank,
        ranks=ctx.world_size,
        drop_last=config.train.drop_last or feed.drop_last,
        smallest=smallest,
    )
    return check_steps(passes)


class MapTrainLoader:
    """One rank's micro-batches of a training set with an index.

    The global batch of an optimizer step is the same on any number of ranks, with any accumulation
    and any number of workers; so are the random numbers of a sample. Samples that an epoch skips
    are not loaded.

    Attributes:
        order: how the samples are drawn, if not by a permutation; a resumed run must do the same.
    """

    def __init__(
        self, order: EpochOrder, passes: Passes, source: ArraySource | SampleSource
    ) -> None:
        self.order = order.name
        self._draw = order.draw
        self._passes = passes
        self._source = source

    @property
    def steps(self) -> int:
        """Optimizer steps of one epoch."""
        return self._passes.steps

    @property
    def single(self) -> str:
        """Which passes of an epoch have one sample; see :class:`Passes`."""
        return self._passes.single

    def batches(
        self, epoch: int, *, skip: int = 0, limit: int | None = None
    ) -> Iterator[tuple[Batch, MicroBatch]]:
        """Yield this rank's batches of an epoch, on the device, and what each counts for.

        Args:
            epoch: from 1; seeds the order and the random numbers of the samples.
            skip: optimizer steps at the epoch's beginning to leave out.
            limit: maximum number of optimizer steps; None: to the epoch's end.
        """
        passes = self._passes
        first = passes.count_micro_batches(skip)
        last = None if limit is None else passes.count_micro_batches(skip + limit)
        micro_batches = passes.micro_batches[first:last]
        sizes = passes.sizes[first:last]
        indices = passes.indices(self._draw(epoch))[sum(passes.sizes[:first]) :]
        batches = self._source.batches(indices, sizes, epoch=epoch)
        return zip(batches, micro_batches, strict=True)

    def sample_ids(self, epoch: int, step: int) -> list[int]:
        """Return the samples of all ranks, in order, in step ``step`` (from 0) of ``epoch``."""
        if step >= self.steps:
            return []
        batch_size = self._passes.batch
        ids: list[int] = self._draw(epoch)[step * batch_size :][:batch_size].tolist()
        return ids


_END = object()


class StreamTrainLoader:
    """One rank's micro-batches of a stream of samples, in its own order.

    Each rank reads the whole stream and makes batches of its part of every global batch only. All
    ranks therefore see its end, and weight a smaller last step without a collective. The stream
    must be the same on all ranks: the ranks compare the samples of the first step.

    Before each epoch ``set_epoch(epoch)`` of the data set is called if it exists (a Hugging Face
    ``IterableDataset`` shuffles by it). A resumed epoch reads the samples that are done again,
    without making batches of them. (The ``skip(n)`` of a shuffled Hugging Face stream gives another
    order from the second epoch on: datasets 5.2.) Python's, NumPy's and torch's global generators
    (the CPU's) are seeded with (seed, epoch) before ``__iter__`` and with (seed, epoch, position)
    before each sample: all ranks draw the same numbers.

    Args:
        data: has ``__iter__``; its ``len()``, if any, is the number of samples in one epoch.
        passes: divides each step; its size is not used.
        device: the device of the batches.
        seed: the run's.
        collate: makes a batch from a list of samples; default: torch's.
        name: the set's name in messages.
    """

    def __init__(
        self,
        data: object,
        passes: Passes,
        device: torch.device,
        *,
        seed: int,
        collate: Collate | None = None,
        name: str = "training",
    ) -> None:
        import torch.distributed as dist
        from torch.utils.data import default_collate

        self.order = ""
        self._passes = passes
        self._device = device
        self._seed = seed
        self._name = name
        self._data = cast("Iterable[Sample]", data)
        self._collate = collate or default_collate
        self._length = stream_length(data)
        self._lengths: dict[int, int] = {}  # epoch -> its samples, once all are read
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._compares = self._ranks > 1  # the first samples of all ranks

    @property
    def steps(self) -> int | None:
        """Optimizer steps of one epoch; None: the length of the stream is unknown."""
        return None if self._length is None else replace(self._passes, size=self._length).steps

    @property
    def single(self) -> str:
        """See :attr:`MapTrainLoader.single`; of unknown length, not that of the last step."""
        return replace(self._passes, size=self._length or self._passes.batch).single

    def batches(
        self, epoch: int, *, skip: int = 0, limit: int | None = None
    ) -> Iterator[tuple[Batch, MicroBatch]]:
        """See :meth:`MapTrainLoader.batches`.

        Raises:
            FitError: the epoch has no step, or not as many samples as the stream's ``len()``.
            PlanError: the ranks read different samples in the first step.
        """
        from accelerate.utils import send_to_device

        batch_size = self._passes.batch
        samples = self._samples(epoch, skip * batch_size)
        for number in count(skip) if limit is None else range(skip, skip + limit):
            with preserve_random_state():  # the user's code may draw
                step = list(islice(samples, batch_size))
                passes = replace(self._passes, size=len(step))
                parts = list(self._parts(step, passes))
            if self._compares:
                self._compares = False
                refuse_different(digest([sample for _, sample in step]), self._ranks)
            ended = len(step) < batch_size
            self._check(epoch, number, len(step), ended, resumed=number == skip > 0)
            for batch, micro_batch in zip(parts, passes.micro_batches, strict=True):
                yield send_to_device(batch, self._device, non_blocking=True), micro_batch
            if ended:
                return

    def sample_ids(self, epoch: int, step: int) -> list[int]:
        """Return the positions in the stream of the samples of a step that was handed out."""
        start = step * self._passes.batch
        end = start + self._passes.batch
        return list(range(start, min(end, self._lengths.get(epoch, end))))

    def _samples(self, epoch: int, skip: int) -> Iterator[tuple[int, Sample]]:
        """Yield the stream's samples of an epoch after those to skip, each with its position."""
        set_epoch = getattr(self._data, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        seed_sample(self._seed, epoch, -1)  # __iter__ may shuffle
        stream = iter(self._data)
        for position in count():
            seed_sample(self._seed, epoch, position)
            with noted(f"while loading sample {position} of the stream in epoch {epoch}"):
                sample = next(stream, _END)
            if sample is _END:
                return
            if position >= skip:
                yield position, sample

    def _parts(self, step: list[tuple[int, Sample]], passes: Passes) -> Iterator[Batch]:
        """Yield this rank's batches of a step."""
        import torch

        order = iter(passes.indices(torch.arange(len(step))).tolist())
        for micro_batch in passes.micro_batches:
            rows = [step[i] for i in islice(order, micro_batch.rows)]
            ids = [position for position, _ in rows][: micro_batch.samples]
            with noted(f"while loading a batch of the samples {ids} of the stream"):
                yield self._collate([sample for _, sample in rows])

    def _check(self, epoch: int, step: int, size: int, ended: bool, *, resumed: bool) -> None:
        """Refuse a stream that is empty, or longer or shorter than its ``len()``.

        Args:
            epoch: the epoch.
            step: the last step read.
            size: the samples of this step.
            ended: whether the stream has ended.
            resumed: whether this is the first step of a resumed epoch.
        """
        samples = step * self._passes.batch + size
        if resumed and size == 0:
            return  # the epoch was done already, and its length is not known
        if ended:
            self._lengths[epoch] = samples
        if samples == 0:
            raise FitError(
                f"the {self._name} stream gives no sample in epoch {epoch}",
                allowed="an iterable that restarts in every epoch (a generator is used up once)",
                do="pass an object whose __iter__ makes the generator",
            )
        length = self._length
        if length is not None and (samples > length or (ended and samples < length)):
            raise FitError(
                f"the {self._name} stream gave {samples} samples in epoch {epoch}, but its len() "
                f"is {length}",
                allowed="a length that is the number of samples, or none",
                do="correct its __len__, or remove it and set train.max_steps",
            )
        check_steps(replace(self._passes, size=samples))


def is_stream(data: object) -> bool:
    """Whether a data set can be iterated, but not indexed."""
    from torch.utils.data import IterableDataset

    iterable = hasattr(data, "__iter__") and not hasattr(data, "__getitem__")
    return isinstance(data, IterableDataset) or iterable  # IterableDataset has a __getitem__


def stream_length(data: object) -> int | None:
    """Return samples in one epoch of an iterable, by its ``len()``; None: it has none."""
    try:
        return len(cast("Sized", data))
    except (TypeError, NotImplementedError):
        return None


TrainLoader: TypeAlias = MapTrainLoader | StreamTrainLoader
"""One rank's micro-batches of a training set."""
