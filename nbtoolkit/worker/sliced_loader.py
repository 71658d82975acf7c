"""Make a loader of one rank's slices of the batches of a user's own loader.

The ranks divide the indices of a data set before they read it (:class:`RankBatchSampler`). A stream
has no indices: every rank reads it whole, and takes its rows (:class:`RankStream`).

Imports torch and accelerate; import it inside functions only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import concatenate, find_batch_size
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from nbtoolkit.errors import PlanError
from nbtoolkit.text_table import counted
from nbtoolkit.worker.batch_slices import NotRows, Shares, digest, refuse_different, rows
from nbtoolkit.worker.collectives import broadcast
from nbtoolkit.worker.even_steps import EvenSteps, Reading
from nbtoolkit.worker.random_numbers import derive_seed

if TYPE_CHECKING:
    from nbtoolkit.worker.context import RunContext

Drawn = TypeVar("Drawn")
Epoch: TypeAlias = Callable[[int], Iterable[Drawn]]
"""Number of an epoch, from 0 -> what a sampler draws in it, equal on all ranks."""

# Options that a loader of slices takes over from the user's loader.
_LOADER_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


def slice_loader(
    ctx: RunContext, loader: DataLoader[object], number: int, steps: EvenSteps
) -> DataLoader[object]:
    """Return a loader of this rank's slices of ``loader``'s batches, on the rank's device.

    All ranks have the same number of batches; together they have the samples of ``loader``, in its
    order. ``shuffle=True`` draws from the run's seed, ``number`` and the epoch, so that an epoch
    has the same batches on any number of ranks; any other sampler draws on rank 0 for all ranks.

    Args:
        ctx: the run's context.
        loader: its batch size is the global one; with a ``DistributedSampler`` it is the batch size
            of one rank, as in scripts for torchrun.
        number: the loader's position among the loaders of a call of ``ctx.prepare``, from 0.
        steps: refuses a backward pass for a batch that the ranks cannot share equally.

    Raises:
        PlanError: the batches cannot be sliced.
    """
    if getattr(loader, "_is_accelerate_prepared", False):
        return loader
    source: RankStream | RankBatchSampler
    options: dict[str, Any]
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        source = RankStream(ctx, loader)
        options = {"dataset": source, "batch_size": None, "collate_fn": _as_it_is}
    else:
        source = RankBatchSampler(ctx, global_batches(ctx, loader, number))
        options = {name: getattr(loader, name) for name in _LOADER_OPTIONS}
        options["dataset"] = loader.dataset
        options["batch_sampler"] = source
        options["worker_init_fn"] = ctx.draws.watched(loader.worker_init_fn)
        # Else accelerate assumes that the last batch is padded.
        options["_drop_last"] = True
    prepared: Any = SlicedLoader(
        _name(loader, number), source.shares, steps, device=ctx.device, **options
    )
    prepared.sampler = loader.sampler  # scripts call loader.sampler.set_epoch
    prepared._is_accelerate_prepared = True
    slices: DataLoader[object] = prepared
    return slices


class SlicedLoader(DataLoaderShard):  # type: ignore[misc]
    """A loader of one rank's slices, which tells how even the loop's present batch is.

    Args:
        name: the user's loader, for error messages.
        shares: how the ranks share its batches; filled while they are divided.
        steps: is told which batch the loop has.
        options: of ``DataLoaderShard``.
    """

    def __init__(self, name: str, shares: Shares, steps: EvenSteps, **options: Any) -> None:
        super().__init__(**options)
        self._name = name
        self._shares = shares
        self._steps = steps

    def __iter__(self) -> Iterator[object]:
        reading = Reading(self._name, self._shares.expected)
        divided: deque[str | None] | None = None
        try:
            for batch in super().__iter__():
                if divided is None:
                    # The slices of this iteration; another one may begin before this one ends.
                    divided = self._shares.divided
                self._steps.read(reading, divided.popleft())
                yield batch
        finally:
            self._steps.end(reading)


@dataclass(frozen=True)
class GlobalBatches:
    """The batches of all ranks, as lists of indices.

    Attributes:
        of_epoch: the batches of an epoch.
        length: batches per epoch; None: unknown.
        size: samples of a batch; None: it varies.
        samples: samples per epoch; None: unknown.
    """

    of_epoch: Epoch[list[int]]
    length: int | None
    size: int | None = None
    samples: int | None = None

    def uneven(self, ranks: int) -> str | None:
        """Return the uneven batch that an epoch will have.

        None: it has none, or it is not known.
        """
        if self.size is None or self.samples is None:
            return None
        if self.size % ranks:
            return f"a batch has {counted(self.size, 'sample')}"
        rest = self.samples % self.size
        if rest % ranks == 0:
            return None
        return (
            f"the last batch has {counted(rest, 'sample')} ({self.samples} in batches of "
            f"{self.size})"
        )

    def slices(self, ranks: int) -> int | None:
        """Return the number of batches that :meth:`Shares.divide` makes of an epoch's.

        None: unknown.
        """
        if self.size is None or self.samples is None:
            return self.length
        whole = self.size * -(-ranks // self.size)  # of as many batches as the ranks need
        number = self.samples // whole + (self.samples % whole >= ranks)
        return max(number, min(self.samples, 1))


class RankBatchSampler:
    """The batch sampler of one rank: its slice of each global batch.

    Args:
        ctx: the run's context.
        batches: of all ranks.

    Attributes:
        shares: how the ranks share the batches.
    """

    def __init__(self, ctx: RunContext, batches: GlobalBatches) -> None:
        self._draws = ctx.draws.add_loader()
        self._batches = batches
        self._epoch = 0
        self.shares = Shares(ctx.rank, ctx.world_size, batches.uneven(ctx.world_size))
        self._length = batches.slices(ctx.world_size)
        # accelerate reads these.
        self.batch_size = (batches.size or 0) // ctx.world_size
        self.drop_last = False

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this batch sampler has no length")
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        # A DataLoader calls this before it draws the seed of its workers.
        self._draws.begin_pass(self._epoch)
        batches = self._batches.of_epoch(self._epoch)
        divided = self.shares.divide(batches, len, list.__add__)
        return (batch[part] for batch, part in divided)

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch; accelerate calls it before each one."""
        self._epoch = epoch


def global_batches(ctx: RunContext, loader: DataLoader[object], number: int) -> GlobalBatches:
    """Return the batches of a loader's batch sampler.

    Args:
        ctx: the run's context.
        loader: of a data set with indices.
        number: the loader's position; see :func:`slice_loader`.

    Raises:
        PlanError: its sampler is of another number of ranks, or has no end.
    """
    given: Any = loader.batch_sampler
    if type(given) is not BatchSampler:
        return GlobalBatches(_drawn_on_rank_0(ctx, given), _length(given))
    sampler: Any = given.sampler
    size = given.batch_size
    samples = _length(sampler)
    if isinstance(sampler, DistributedSampler):
        order, samples = _undivided(sampler, ctx.world_size)
        size *= ctx.world_size
    else:
        order = _order(ctx, sampler, number)

    def batches(epoch: int) -> BatchSampler:
        return BatchSampler(order(epoch), size, given.drop_last)

    if samples is None:
        return GlobalBatches(batches, length=None, size=size)
    if given.drop_last:
        samples -= samples % size
    return GlobalBatches(batches, length=-(-samples // size), size=size, samples=samples)


def _order(ctx: RunContext, sampler: Any, number: int) -> Epoch[int]:
    if type(sampler) is SequentialSampler:
        return lambda _: sampler
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        return lambda epoch: _seeded(sampler, derive_seed(ctx.seed, number, epoch))
    return _drawn_on_rank_0(ctx, sampler)


def _seeded(sampler: RandomSampler, seed: int) -> RandomSampler:
    seeded = copy(sampler)
    seeded.generator = torch.Generator().manual_seed(seed)
    return seeded


def _undivided(sampler: DistributedSampler[object], ranks: int) -> tuple[Epoch[int], int]:
    """Return the order of all replicas together, and its samples: none is repeated.

    The steps are those of a script whose ranks have this sampler.
    """
    if sampler.num_replicas != ranks:
        raise PlanError(
            f"a DistributedSampler divides its samples by {sampler.num_replicas}, but this run has "
            f"{ranks} ranks",
            allowed="a DistributedSampler with one replica per rank, or none",
            do="delete sampler=DistributedSampler(...): ctx.prepare divides the batches (pass the "
            "global batch size and shuffle=True)",
        )
    samples = len(sampler.dataset)  # type: ignore[arg-type]
    if sampler.drop_last:
        samples -= samples % ranks

    def order(_: int) -> list[int]:
        whole: DistributedSampler[int] = DistributedSampler(
            sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed
        )
        whole.set_epoch(sampler.epoch)  # the script sets it
        return list(whole)[:samples]

    return order, samples


def _drawn_on_rank_0(ctx: RunContext, sampler: Iterable[Drawn]) -> Epoch[Drawn]:
    """Return what rank 0 draws, on all ranks: the sampler may draw at random."""
    length = _length(sampler)
    if length is None and ctx.world_size > 1:
        raise PlanError(
            f"a {type(sampler).__name__} has no length, so that an epoch has no end",
            allowed="samplers and batch samplers with __len__",
            do="give it __len__: what it draws per epoch",
        )

    def draw(_: int) -> Iterable[Drawn]:
        if length is None:
            return sampler
        # A list on one rank, too: the sampler then draws the same from torch's generator.
        drawn = list(islice(sampler, length)) if ctx.is_main else []
        return broadcast(drawn, ctx.world_size)

    return draw


class RankStream(IterableDataset[object]):
    """This rank's slices of whole batches; every rank's own loader workers make all batches.

    For streams, and for data sets that make batches by themselves (``batch_size=None``).

    Args:
        ctx: the run's context.
        loader: the user's.

    Attributes:
        shares: how the ranks share the batches.
    """

    def __init__(self, ctx: RunContext, loader: DataLoader[object]) -> None:
        self._ranks = ctx.world_size
        self._loader = loader
        self._epoch = 0
        self._draws = ctx.draws.add_loader()
        self.shares = Shares(ctx.rank, ctx.world_size)

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch; accelerate calls it before each one."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[object]:
        self._draws.begin_pass(self._epoch)
        batches = self._checked(self._draws.in_common(self._loader, self._epoch))
        try:
            for batch, part in self.shares.divide(batches, _samples, _joined):
                yield rows(batch, part.start, part.stop, _samples(batch))
        except NotRows as error:
            raise PlanError(
                f"a batch of the type {error} cannot be shared among the ranks",
                allowed="tensors with one row per sample, lists of texts, and dicts, lists, tuples "
                "of them",
                do="let collate_fn make tensors",
            ) from None

    def _checked(self, batches: Iterable[object]) -> Iterator[object]:
        """Yield the batches, if the first one is equal on all ranks."""
        for number, batch in enumerate(batches):
            if number == 0 and self._ranks > 1:
                refuse_different(digest(batch), self._ranks)
            yield batch


def _samples(batch: object) -> int:
    """Return number of samples in a batch: rows of its first tensor."""
    try:
        size: int | None = find_batch_size(batch)
    except TypeError:
        size = None
    if size is None:
        raise NotRows(type(batch).__name__)
    return size


def _joined(first: object, second: object) -> object:
    return concatenate([first, second])


def _as_it_is(batch: object) -> object:
    return batch


def _name(loader: DataLoader[object], number: int) -> str:
    """Return a loader for the user: its position, and what it was made of."""
    data = type(loader.dataset).__name__
    samples = _length(loader.dataset)
    of = data if samples is None else f"{data} of {samples} samples"
    size = "" if loader.batch_size is None else f", batch_size={loader.batch_size}"
    return f"DataLoader {number + 1} of ctx.prepare ({of}{size})"


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None
