"""Walk: once through a whole data set, every rank its own part of it, each sample once.

samples         0 1 2 3 4 5 | 6 7 8      steps of 2 samples a rank
rank 0 of 3     0 1         | 6
rank 1 of 3         2 3     |   7
rank 2 of 3             4 5 |     8      nobody waits for anybody: no padding, no stand-ins
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import FitError
from nbtoolkit.training.data import Collate, Source, make_source
from nbtoolkit.training.iterable import IterableFeed, is_iterable, length_of
from nbtoolkit.training.order import Order

if TYPE_CHECKING:
    from nbtoolkit.runtime.context import RunContext

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
        self._feed = IterableFeed(
            data,
            Order(size=step, batch=step, micro=batch, seed=ctx.seed, rank=ctx.rank, ranks=ranks),
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
