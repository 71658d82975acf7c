"""Deliver the training set to one rank, epoch by epoch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from nbtoolkit.errors import FitError
from nbtoolkit.training.data import Collate, Loader, Source, make_source, naming
from nbtoolkit.training.rng import seed_sample
from nbtoolkit.training.sampler import GlobalBatchSampler, MicroBatch, Pass, SampleLog, check_steps

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nbtoolkit.config.schema import Config
    from nbtoolkit.worker.context import RunContext


# --- iterable data ---
# A training set without an index; every rank reads it, and takes its part.


_END = object()


class IterableTrainLoader:
    """A stream of samples, in its own order; see :class:`~nbtoolkit.training.loader.TrainLoader`.

    Each rank reads the whole stream and makes batches of its part of every global batch only. So
    all of them see its end, and weight the uneven last step without asking each other. The stream
    must be the same on all ranks: not one that gives each rank or node a part.

    Before each epoch ``set_epoch(epoch)`` of the data set is called if it has that (a Hugging Face
    ``IterableDataset`` has), which is to shuffle it anew. A resumed epoch reads the samples that
    are done once more; they make no batches. (The ``skip(n)`` of a shuffled Hugging Face stream
    gives another order from the second epoch on: datasets 5.2.) Random numbers from Python's,
    NumPy's and torch's global streams (the CPU's) are seeded with (seed, epoch) before ``__iter__``
    and with (seed, epoch, position) before each sample: every rank draws the same.
    """

    def __init__(
        self,
        data: Any,
        order: GlobalBatchSampler,
        device: torch.device,
        *,
        length: int | None = None,
        collate: Collate | None = None,
        workers: int = 0,
        log: SampleLog | None = None,
        what: str = "training",
    ) -> None:
        """Prepare to read.

        Args:
            data: has ``__iter__``.
            order: how a step is divided; its size does not matter.
            device: where the batches go.
            length: samples in one epoch; None: not known.
            collate: makes a batch from a list of samples; default: torch's.
            workers: 0, or 1: read in a process of its own (two would mix up the order).
            log: where the samples of every step are noted.
            what: the set's name, for messages.
        """
        self._order, self._device, self._length, self._log = order, device, length, log
        self._what = what
        self._walks = 0
        self._ends: dict[int, int] = {}  # epoch -> its samples, once they are all read
        self._loader = Loader(
            _Reader(data, order, collate), workers=workers, pin=device.type == "cuda"
        )

    @property
    def steps(self) -> int | None:
        """See :class:`~nbtoolkit.training.loader.TrainLoader`."""
        return None if self._length is None else replace(self._order, size=self._length).steps

    def walk(
        self, epoch: int, *, skip: int = 0, limit: int | None = None
    ) -> Iterator[tuple[Any, MicroBatch]]:
        """See :class:`~nbtoolkit.training.loader.TrainLoader`.

        Raises:
            FitError: the epoch has no step, or not as many samples as the stream said.
        """
        passes = self._passes(epoch, skip, limit)
        if self._log is not None:
            return self._log.noting(epoch, skip, passes)
        return ((batch, share) for batch, share, _ in passes)

    def sample_ids(self, epoch: int, step: int) -> list[int]:
        """See :class:`~nbtoolkit.training.loader.TrainLoader`."""
        start = step * self._order.batch
        end = start + self._order.batch
        return list(range(start, min(end, self._ends.get(epoch, end))))

    def _passes(self, epoch: int, skip: int, limit: int | None) -> Iterator[Pass]:
        from accelerate.utils import send_to_device

        self._walks += 1
        key = _Walk(self._walks, epoch, skip * self._order.batch)
        keys = repeat(key) if limit is None else repeat(key, limit)
        for number, step in enumerate(self._loader.items(keys), start=skip):
            ended = step.size < self._order.batch
            self._check(epoch, number, step.size, ended, resumed=number == skip > 0)
            shares = replace(self._order, size=step.size).shares
            for batch, share, ids in zip(step.batches, shares, step.ids, strict=True):
                yield send_to_device(batch, self._device, non_blocking=True), share, ids
            if ended:
                return

    def _check(self, epoch: int, step: int, size: int, ended: bool, *, resumed: bool) -> None:
        """Refuse what the last step, of ``size`` samples, shows the stream to be."""
        samples = step * self._order.batch + size
        if resumed and size == 0:
            return  # the epoch was done already; how long it was is not seen
        if ended:
            self._ends[epoch] = samples
        if samples == 0:
            raise FitError(
                f"the {self._what} stream gives no sample in epoch {epoch}",
                allowed="an iterable that begins anew in every epoch (a generator is used up once)",
                do="pass an object whose __iter__ makes the generator",
            )
        length = self._length
        if length is not None and (samples > length or (ended and samples < length)):
            raise FitError(
                f"the {self._what} stream gave {samples} samples in epoch {epoch}, but its len() "
                f"is {length}",
                allowed="a length that is the number of samples, or none",
                do="correct its __len__, or remove it and set train.max_steps",
            )
        check_steps(replace(self._order, size=samples))


class _Walk(NamedTuple):
    """What the reader needs to know; the same for every step of one walk."""

    number: int
    epoch: int
    skip: int  # samples


class _Step(NamedTuple):
    """This rank's part of one optimizer step."""

    size: int
    """Samples of the global batch; fewer than a whole one, or none: the stream is at its end."""
    ids: list[list[int]]
    """Their positions in the stream, pass by pass; a stand-in has none."""
    batches: list[Any]


class _Reader:
    """Reads a stream, step after step; it stays where it is between two calls."""

    def __init__(self, data: Any, order: GlobalBatchSampler, collate: Collate | None) -> None:
        from torch.utils.data import default_collate

        self._data, self._order, self._collate = data, order, collate or default_collate
        self._walk: _Walk | None = None
        self._samples: Iterator[tuple[int, Any]] = iter(())

    def __call__(self, walk: _Walk) -> _Step:
        if walk != self._walk:
            self._walk, self._samples = walk, self._opened(walk)
        return self._step(list(islice(self._samples, self._order.batch)))

    def _opened(self, walk: _Walk) -> Iterator[tuple[int, Any]]:
        """The stream's samples, with their positions, after what is to be skipped."""
        stream = self._start_epoch(walk.epoch)
        for position in count():
            seed_sample(self._order.seed, walk.epoch, position)
            what = f"sample {position} of the stream in epoch {walk.epoch}"
            with naming(what), _not_as_a_worker():
                sample = next(stream, _END)
            if sample is _END:
                return
            if position >= walk.skip:
                yield position, sample

    def _start_epoch(self, epoch: int) -> Iterator[Any]:
        if callable(getattr(self._data, "set_epoch", None)):
            self._data.set_epoch(epoch)
        seed_sample(self._order.seed, epoch, -1)  # __iter__ may shuffle
        with _not_as_a_worker():
            return iter(self._data)

    def _step(self, samples: list[tuple[int, Any]]) -> _Step:
        """What this rank needs of one global batch."""
        import torch

        order = replace(self._order, size=len(samples))
        mine = iter(order.mine(torch.arange(len(samples))).tolist())
        ids, batches = [], []
        for size, share in zip(order.sizes, order.shares, strict=True):
            some = [samples[i] for i in islice(mine, size)]
            ids.append([position for position, _ in some][: share.samples])
            with naming(f"a batch of the samples {ids[-1]} of the stream"):
                batches.append(self._collate([sample for _, sample in some]))
        return _Step(len(samples), ids, batches)


@contextmanager
def _not_as_a_worker() -> Iterator[None]:
    """Inside, nothing tells that this is a DataLoader's worker.

    A data set may give each worker a part; a Hugging Face stream shuffles in another order as soon
    as there is a worker (datasets 5.2). But a stream is read by one alone, or by none.
    """
    from torch.utils.data._utils import worker

    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info


def is_iterable(data: Any) -> bool:
    """Whether a training set is to be read as a stream: it can be iterated, but not indexed."""
    from torch.utils.data import DataLoader, IterableDataset

    if isinstance(data, DataLoader):
        return False
    iterable = hasattr(data, "__iter__") and not hasattr(data, "__getitem__")
    return isinstance(data, IterableDataset) or iterable  # IterableDataset has a __getitem__


def length_of(data: Any) -> int | None:
    """Samples in one epoch of an iterable; None: it does not say."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


# --- map-style data ---


class TrainLoader(Protocol):
    """One rank's walks through the training set.

    The global batch of an optimizer step is the same on any number of ranks, with any accumulation
    and any number of workers; so is what is drawn at random for a sample.
    """

    @property
    def steps(self) -> int | None:
        """Optimizer steps of one epoch; None: a stream of unknown length."""

    def walk(
        self, epoch: int, *, skip: int = 0, limit: int | None = None
    ) -> Iterator[tuple[Any, MicroBatch]]:
        """This rank's passes of an epoch: a batch on the device, and what it counts for.

        Args:
            epoch: from 1; decides the order and what is drawn at random.
            skip: optimizer steps of the epoch that are done already.
            limit: optimizer steps to make at most; None: to the epoch's end.
        """

    def sample_ids(self, epoch: int, step: int) -> list[int]:
        """The samples of all ranks in optimizer step ``step`` (from 0) of ``epoch``, in order.

        Positions in the data set, or in the stream. For a stream: of a step that was handed out.
        """


def make_train_loader(
    ctx: RunContext, config: Config, data: Any, *, collate: Collate | None = None, fit: int = 1
) -> TrainLoader:
    """The feed of a training set; called on all ranks.

    Args:
        ctx: the run's context.
        config: ``train.drop_last``, ``train.num_workers``, ``train.max_steps``,
            ``tracking.record_samples``.
        data: what :func:`~nbtoolkit.training.data.make_source` takes, walked in the order of a
            permutation of (seed, epoch); or an iterable, walked in its own order (see
            :class:`~nbtoolkit.training.loader.IterableTrainLoader`).
        collate: makes a batch from a list of samples; default: torch's.
        fit: which call of fit in the training function this is, for the record of the samples.

    Raises:
        FitError: the data cannot be used, are empty, or have no whole batch under
            ``train.drop_last``; a stream of unknown length has no ``train.max_steps``.
    """
    if is_iterable(data):
        return _iterable_feed(ctx, config, data, collate, _log(ctx, config, fit))
    workers = config.train.num_workers
    source = make_source(data, ctx.device, collate=collate, workers=workers, seed=ctx.seed)
    return MapTrainLoader(_order(ctx, config, len(source)), source, _log(ctx, config, fit))


class MapTrainLoader:
    """A data set that is fetched by index: what an epoch skips is never looked at."""

    def __init__(
        self, order: GlobalBatchSampler, source: Source, log: SampleLog | None = None
    ) -> None:
        self._order, self._source, self._log = order, source, log

    @property
    def steps(self) -> int:
        """See :class:`TrainLoader`."""
        return self._order.steps

    def walk(
        self, epoch: int, *, skip: int = 0, limit: int | None = None
    ) -> Iterator[tuple[Any, MicroBatch]]:
        """See :class:`TrainLoader`."""
        order = self._order
        first = order.passes(skip)
        last = None if limit is None else order.passes(skip + limit)
        shares, sizes = order.shares[first:last], order.sizes[first:last]
        indices = order.indices(epoch)[sum(order.sizes[:first]) :]
        batches = self._source.batches(indices, sizes, epoch=epoch)
        if self._log is None:  # nothing between the arrays and the loop: 2 us a pass
            return zip(batches, shares, strict=True)
        ids = _ids(indices, sizes, shares)
        return self._log.noting(epoch, skip, zip(batches, shares, ids, strict=True))

    def sample_ids(self, epoch: int, step: int) -> list[int]:
        """See :class:`TrainLoader`."""
        return self._order.step_ids(epoch, step)


def _ids(indices: Tensor, sizes: list[int], shares: list[MicroBatch]) -> Iterator[list[int]]:
    """The samples of every pass, without stand-ins."""
    start = 0
    for size, share in zip(sizes, shares, strict=True):
        yield indices[start : start + share.samples].tolist()
        start += size


def _iterable_feed(
    ctx: RunContext, config: Config, data: Any, collate: Collate | None, log: SampleLog | None
) -> IterableTrainLoader:
    length, workers = length_of(data), config.train.num_workers
    if length is None and config.train.max_steps is None:
        raise FitError(
            f"nobody knows how long training is to be: a {type(data).__qualname__} has no length, "
            "and train.max_steps is not set",
            allowed="an iterable with __len__ (its samples in one epoch), or train.max_steps",
            do="set train.max_steps: <optimizer steps of the whole run>",
        )
    if workers > 1:
        ctx.print(f"fit: one DataLoader worker a rank, not {workers}: the training set is a stream")
    order = _order(ctx, config, ctx.plan.global_batch_size if length is None else length)
    return IterableTrainLoader(
        data, order, ctx.device, length=length, collate=collate, workers=min(workers, 1), log=log
    )


def _order(ctx: RunContext, config: Config, size: int) -> GlobalBatchSampler:
    order = GlobalBatchSampler(
        size=size,
        batch=ctx.plan.global_batch_size,
        micro=ctx.plan.batch_size_per_device,
        seed=ctx.seed,
        rank=ctx.rank,
        ranks=ctx.world_size,
        drop_last=config.train.drop_last,
    )
    return check_steps(order)


def _log(ctx: RunContext, config: Config, fit: int) -> SampleLog | None:
    if not config.tracking.record_samples:
        return None
    return SampleLog(ctx.paths.samples(ctx.rank), ranks=ctx.world_size, fit=fit)
