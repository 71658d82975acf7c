"""Give each rank a slice of every batch of a user's own loader; no sample is repeated.

batches of 4, 9 samples    0 1 2 3 | 4 5 6 7 8      a rest smaller than the ranks joins the last
rank 0 of 2                0 1     | 4 5
rank 1 of 2                    2 3 |     6 7 8
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from nbtoolkit.errors import PlanError
from nbtoolkit.worker.collectives import broadcast, gather_on_all
from nbtoolkit.worker.even_steps import EvenSteps, Shares, Uneven

if TYPE_CHECKING:
    from torch.utils.data import (
        BatchSampler,
        DataLoader,
        DistributedSampler,
        IterableDataset,
        RandomSampler,
    )

    from nbtoolkit.worker.context import RunContext

Batch = TypeVar("Batch")

# --- rows of a batch ---


class NotRows(Exception):
    """Something in a batch does not have one row per sample."""


def rows(batch: Any, low: int, high: int, size: int) -> Any:
    """The samples [low, high) of a batch of ``size``, in the structure of the batch.

    Args:
        batch: a tensor with one row per sample, a list with one text or number per sample, or
            dicts, lists and tuples of these.
        low: the first sample.
        high: the sample after the last.
        size: number of samples in the batch.

    Raises:
        NotRows: the batch contains something else.
    """
    import torch

    if isinstance(batch, torch.Tensor) and batch.ndim and len(batch) == size:
        return batch[low:high]
    if isinstance(batch, Mapping):
        parts = {name: rows(item, low, high, size) for name, item in batch.items()}
        return parts if type(batch) is dict else type(batch)(**parts)
    if isinstance(batch, (list, tuple)):
        if len(batch) == size and all(isinstance(item, (str, int, float)) for item in batch):
            return batch[low:high]
        items = [rows(item, low, high, size) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    raise NotRows


# --- loaders ---


Epoch: TypeAlias = "Callable[[int], Iterable[list[int]]]"
"""Number of an epoch, from 0 -> the batches of all ranks, as lists of indices."""

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
    """A loader of this rank's slices of ``loader``'s batches, on the rank's device.

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
    from torch.utils.data import IterableDataset

    from nbtoolkit.worker.sliced_loader import SlicedLoader

    if getattr(loader, "_is_accelerate_prepared", False):
        return loader
    name = _name(loader, number)
    prepared: Any
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        shares = Shares()
        prepared = SlicedLoader(
            _batch_slices(ctx, loader, shares),
            name,
            shares,
            steps,
            device=ctx.device,
            batch_size=None,
            collate_fn=_same,
        )
    else:
        sampler = _index_slices(ctx, loader, number)
        prepared = SlicedLoader(
            loader.dataset,
            name,
            sampler.shares,
            steps,
            device=ctx.device,
            batch_sampler=sampler,
            # Else accelerate assumes that the last batch is padded.
            _drop_last=True,
            worker_init_fn=ctx.draws.watched(loader.worker_init_fn),
            **{name: getattr(loader, name) for name in _LOADER_OPTIONS},
        )
    prepared.sampler = loader.sampler  # scripts call loader.sampler.set_epoch
    prepared._is_accelerate_prepared = True
    slices: DataLoader[object] = prepared
    return slices


class RankBatchSampler:
    """The batch sampler of one rank: its slice of each global batch.

    Args:
        ctx: the run's context.
        epoch: returns the batches of an epoch, equal on all ranks.
        size: samples of a global batch; None: it varies.
        length: batches per epoch; None: unknown.
        samples: samples per epoch; None: unknown, or a multiple of ``size``.

    Attributes:
        shares: how the ranks share the batches.
    """

    def __init__(
        self,
        ctx: RunContext,
        epoch: Epoch,
        *,
        size: int | None,
        length: int | None,
        samples: int | None = None,
    ) -> None:
        self._rank, self._ranks = ctx.rank, ctx.world_size
        self._draws = ctx.draws.add_loader()
        self._batches, self._epoch = epoch, 0
        self.shares = Shares(_expected(size, samples, self._ranks))
        self._length = _slice_count(size, length, samples, self._ranks)
        # accelerate reads these.
        self.batch_size, self.drop_last = (size or 0) // self._ranks, False

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this batch sampler has no length")
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        # A DataLoader calls this before it draws the seed of its workers.
        self._draws.begin_pass(self._epoch)
        batches = self._batches(self._epoch)
        return _slices(
            batches, self._rank, self._ranks, self.shares, size=len, join=list.__add__, part=_items
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch; accelerate calls it before each one."""
        self._epoch = epoch


def _expected(size: int | None, samples: int | None, ranks: int) -> Uneven | None:
    """The uneven batch that an epoch will have; None: it has none, or it is not known."""
    if size is None:
        return None
    if size % ranks:
        multiples = [n for n in (size - size % ranks, size + ranks - size % ranks) if n]
        return Uneven(
            f"its batches have {size} samples",
            f"batch_size is global: choose {' or '.join(map(str, multiples))}",
        )
    rest = 0 if samples is None else samples % size
    if rest % ranks:
        return Uneven(f"its last batch has {rest} samples ({samples} in batches of {size})")
    return None


def _slice_count(
    size: int | None, length: int | None, samples: int | None, ranks: int
) -> int | None:
    """The number of batches that :func:`_slices` makes of an epoch's; None: unknown."""
    if size is None or length is None:
        return length
    whole = size * -(-ranks // size)  # of as many batches as the ranks need
    samples = size * length if samples is None else samples
    return max(1, samples // whole + (samples % whole >= ranks)) if samples else 0


def _index_slices(ctx: RunContext, loader: DataLoader[object], number: int) -> RankBatchSampler:
    """This rank's slices of the batches of a loader's batch sampler."""
    from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

    given: Any = loader.batch_sampler
    length = _length(given)
    if type(given) is not BatchSampler:
        return RankBatchSampler(ctx, _drawn_on_rank_0(ctx, given), size=None, length=length)
    sampler: Any = given.sampler
    if isinstance(sampler, DistributedSampler):
        return _distributed_slices(ctx, sampler, given)
    samples = None if given.drop_last else _length(sampler)
    in_order = type(sampler) is SequentialSampler
    epoch: Epoch
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        epoch = _seeded(sampler, given, (ctx.seed, number))
    else:
        epoch = (lambda _: given) if in_order else _drawn_on_rank_0(ctx, given)
    return RankBatchSampler(ctx, epoch, size=given.batch_size, length=length, samples=samples)


def _seeded(sampler: RandomSampler, given: BatchSampler, seed: tuple[int, int]) -> Epoch:
    """Shuffled batches that depend only on the seed and the epoch."""
    import torch
    from torch.utils.data import BatchSampler, RandomSampler

    def batches(epoch: int) -> BatchSampler:
        text = ":".join(map(str, (*seed, epoch))).encode()
        drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
        order = RandomSampler(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
            generator=torch.Generator().manual_seed(drawn),
        )
        return BatchSampler(order, given.batch_size, given.drop_last)

    return batches


def _drawn_on_rank_0(ctx: RunContext, given: Iterable[list[int]]) -> Epoch:
    """Rank 0's batches, on all ranks: the sampler may draw at random."""

    def batches(epoch: int) -> Iterable[list[int]]:
        length = _length(given)
        if ctx.world_size == 1:
            # A list, as on several ranks: the sampler then draws the same from torch's generator.
            return given if length is None else list(islice(given, length))
        if length is None:
            raise PlanError(
                f"a {type(given).__name__} has no length, so that an epoch has no end",
                allowed="samplers and batch samplers with __len__",
                do="give it __len__: the number of batches per epoch",
            )
        drawn = list(islice(given, length)) if ctx.is_main else []
        return broadcast(drawn, ctx.world_size)

    return batches


def _distributed_slices(
    ctx: RunContext, sampler: DistributedSampler[object], given: BatchSampler
) -> RankBatchSampler:
    """The same steps as in a script whose ranks have this sampler; no sample is repeated."""
    from torch.utils.data import BatchSampler, DistributedSampler

    ranks = ctx.world_size
    if sampler.num_replicas != ranks:
        raise PlanError(
            f"a DistributedSampler divides its samples by {sampler.num_replicas}, but this run has "
            f"{ranks} ranks",
            allowed="a DistributedSampler with one replica per rank, or none",
            do="delete sampler=DistributedSampler(...): ctx.prepare divides the batches (pass the "
            "global batch size and shuffle=True)",
        )
    size, total = given.batch_size * ranks, len(sampler.dataset)  # type: ignore[arg-type]
    count = total - total % ranks if sampler.drop_last else total
    samples = None if given.drop_last else count

    def batches(epoch: int) -> BatchSampler:
        undivided: DistributedSampler[int] = DistributedSampler(
            sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed
        )
        undivided.set_epoch(sampler.epoch)  # the script sets it
        return BatchSampler(list(undivided)[:count], size, given.drop_last)

    length = len(batches(0)) if count else 0
    return RankBatchSampler(ctx, batches, size=size, length=length, samples=samples)


def _batch_slices(
    ctx: RunContext, loader: DataLoader[object], shares: Shares
) -> IterableDataset[object]:
    """This rank's slices of whole batches; every rank's own loader workers make all batches.

    For streams, and for data sets that make batches by themselves (``batch_size=None``).
    """
    from accelerate.utils import concatenate
    from torch.utils.data import IterableDataset

    def join(first: object, second: object) -> object:
        return concatenate([first, second])

    draws = ctx.draws.add_loader()

    class Slices(IterableDataset):  # type: ignore[type-arg]
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[object]:
            draws.begin_pass(self.epoch)
            batches = _checked(ctx, draws.in_common(loader, self.epoch))
            return _slices(
                batches, ctx.rank, ctx.world_size, shares, size=_size, join=join, part=_part
            )

        def __len__(self) -> int:
            return len(loader)

    return Slices()


def _slices(
    batches: Iterable[Batch],
    rank: int,
    ranks: int,
    shares: Shares,
    *,
    size: Callable[[Batch], int],
    join: Callable[[Batch, Batch], Batch],
    part: Callable[[Batch, int, int], Batch],
) -> Iterator[Batch]:
    """This rank's part of every batch; tells ``shares`` how even it is.

    Batches of fewer samples than ranks join those that follow them, at the end the last one.
    """
    sliced = shares.sliced = deque()

    def slice_of(joined: list[Batch]) -> Batch:
        batch = reduce(join, joined)
        samples = size(batch)
        if samples < ranks:
            raise PlanError(
                f"a loader's only batch has {samples} samples for {ranks} ranks",
                allowed="at least one sample per rank",
                do="use fewer ranks (distributed.world_size), or more data",
            )
        even = len(joined) == 1 and samples % ranks == 0
        sliced.append(None if even else Uneven(f"a batch of {samples} samples"))
        return part(batch, samples * rank // ranks, samples * (rank + 1) // ranks)

    ready: list[Batch] = []
    rest: list[Batch] = []
    for batch in batches:
        rest.append(batch)
        if sum(map(size, rest)) < ranks:
            continue
        if ready:
            yield slice_of(ready)
        ready, rest = rest, []
    if ready or rest:
        yield slice_of(ready + rest)


def _checked(ctx: RunContext, batches: Iterable[object]) -> Iterator[object]:
    """The batches, if the first one is equal on all ranks.

    Raises:
        PlanError: it differs.
    """
    for number, batch in enumerate(batches):
        if number == 0 and ctx.world_size > 1:
            refuse_different(digest(batch), ctx.world_size)
        yield batch


def refuse_different(digest: str, ranks: int) -> None:
    """Refuse a stream that is not equal on all ranks; a collective.

    Args:
        digest: of what this rank reads first.
        ranks: the number of ranks.

    Raises:
        PlanError: another rank reads something else.
    """
    if len(set(gather_on_all(digest, ranks))) > 1:
        raise PlanError(
            "the ranks read different batches from a loader that they should share",
            allowed="a stream that is equal on all ranks",
            do="seed its random numbers with ctx.seed; a stream that divides itself among the "
            "ranks loses samples here: give nb.fit and ctx.prepare the whole stream, or write your "
            "own loop, and move its batches to ctx.device",
        )


def digest(batch: object) -> str:
    """A hash of the tensors, arrays, texts and numbers of a batch, or of a list of samples."""
    import numpy as np
    import torch
    from accelerate.utils import recursively_apply

    value = hashlib.blake2b(digest_size=16)

    def hashed(part: object) -> bool:
        return isinstance(part, (torch.Tensor, np.ndarray, np.generic, str, bytes, int, float))

    def add(part: object) -> object:
        if isinstance(part, torch.Tensor):
            value.update(str(part.shape).encode())
            value.update(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, (np.ndarray, np.generic)) and part.dtype.kind != "O":
            value.update(str(part.shape).encode() + part.tobytes())
        else:
            value.update(repr(part).encode())
        return part

    recursively_apply(add, batch, test_type=hashed)
    return value.hexdigest()


def _size(batch: object) -> int:
    """Number of samples in a batch: rows of its first tensor."""
    from accelerate.utils import find_batch_size

    try:
        size: int | None = find_batch_size(batch)
    except TypeError:
        size = None
    if size is None:
        raise _not_divisible(batch)
    return size


def _part(batch: object, low: int, high: int) -> object:
    try:
        part: object = rows(batch, low, high, _size(batch))
    except NotRows:
        raise _not_divisible(batch) from None
    return part


def _name(loader: DataLoader[object], number: int) -> str:
    """A loader for the user: its position, and what it was made of."""
    data = type(loader.dataset).__name__
    samples = _length(loader.dataset)
    of = data if samples is None else f"{data} of {samples} samples"
    size = "" if loader.batch_size is None else f", batch_size={loader.batch_size}"
    return f"DataLoader {number + 1} of ctx.prepare ({of}{size})"


def _not_divisible(batch: object) -> PlanError:
    return PlanError(
        f"a batch of the type {type(batch).__name__} cannot be shared among the ranks",
        allowed="tensors with one row per sample, lists of texts, and dicts, lists, tuples of them",
        do="let collate_fn make tensors",
    )


def _items(batch: list[int], low: int, high: int) -> list[int]:
    return batch[low:high]


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None


def _same(batch: Batch) -> Batch:
    return batch
