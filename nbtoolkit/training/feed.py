"""Feed: how the training set comes to one rank, pass by pass, in every epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from nbtoolkit.errors import FitError
from nbtoolkit.training.data import Collate, Source, make_source
from nbtoolkit.training.iterable import IterableFeed, is_iterable, length_of
from nbtoolkit.training.order import Order, Share, check_steps
from nbtoolkit.training.samples import SampleLog

if TYPE_CHECKING:
    from torch import Tensor

    from nbtoolkit.config import Config
    from nbtoolkit.runtime.context import RunContext


class Feed(Protocol):
    """One rank's walks through the training set.

    The global batch of an optimizer step is the same on any number of ranks, with any accumulation
    and any number of workers; so is what is drawn at random for a sample.
    """

    @property
    def steps(self) -> int | None:
        """Optimizer steps of one epoch; None: a stream of unknown length."""

    def walk(
        self, epoch: int, *, skip: int = 0, limit: int | None = None
    ) -> Iterator[tuple[Any, Share]]:
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


def make_feed(
    ctx: RunContext, config: Config, data: Any, *, collate: Collate | None = None, fit: int = 1
) -> Feed:
    """The feed of a training set; called on all ranks.

    Args:
        ctx: the run's context.
        config: ``train.drop_last``, ``train.workers``, ``train.max_steps``, ``tracking.samples``.
        data: what :func:`~nbtoolkit.training.data.make_source` takes, walked in the order of a
            permutation of (seed, epoch); or an iterable, walked in its own order (see
            :class:`~nbtoolkit.training.iterable.IterableFeed`).
        collate: makes a batch from a list of samples; default: torch's.
        fit: which call of fit in the training function this is, for the record of the samples.

    Raises:
        FitError: the data cannot be used, are empty, or have no whole batch under
            ``train.drop_last``; a stream of unknown length has no ``train.max_steps``.
    """
    if is_iterable(data):
        return _iterable_feed(ctx, config, data, collate, _log(ctx, config, fit))
    workers = config.train.workers
    source = make_source(data, ctx.device, collate=collate, workers=workers, seed=ctx.seed)
    return MapFeed(_order(ctx, config, len(source)), source, _log(ctx, config, fit))


class MapFeed:
    """A data set that is fetched by index: what an epoch skips is never looked at."""

    def __init__(self, order: Order, source: Source, log: SampleLog | None = None) -> None:
        self._order, self._source, self._log = order, source, log

    @property
    def steps(self) -> int:
        """See :class:`Feed`."""
        return self._order.steps

    def walk(
        self, epoch: int, *, skip: int = 0, limit: int | None = None
    ) -> Iterator[tuple[Any, Share]]:
        """See :class:`Feed`."""
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
        """See :class:`Feed`."""
        return self._order.step_ids(epoch, step)


def _ids(indices: Tensor, sizes: list[int], shares: list[Share]) -> Iterator[list[int]]:
    """The samples of every pass, without stand-ins."""
    start = 0
    for size, share in zip(sizes, shares, strict=True):
        yield indices[start : start + share.samples].tolist()
        start += size


def _iterable_feed(
    ctx: RunContext, config: Config, data: Any, collate: Collate | None, log: SampleLog | None
) -> IterableFeed:
    length, workers = length_of(data), config.train.workers
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
    return IterableFeed(
        data, order, ctx.device, length=length, collate=collate, workers=min(workers, 1), log=log
    )


def _order(ctx: RunContext, config: Config, size: int) -> Order:
    order = Order(
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
    if not config.tracking.samples:
        return None
    return SampleLog(ctx.paths.samples(ctx.rank), ranks=ctx.world_size, fit=fit)
