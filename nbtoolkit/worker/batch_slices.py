"""Give each rank its slice of every batch of a user's own loader, no sample twice.

batches of 4, 9 samples    0 1 2 3 | 4 5 6 7 8      a rest smaller than the ranks joins the last
rank 0 of 2                0 1     | 4 5
rank 1 of 2                    2 3 |     6 7 8
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from nbtoolkit.errors import PlanError

if TYPE_CHECKING:
    from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

    from nbtoolkit.worker.context import RunContext


# --- rows of a batch ---
# Some samples of a batch, whatever it is made of.


class NotRows(Exception):
    """Something in a batch does not have one row a sample."""


def rows(batch: Any, low: int, high: int, size: int) -> Any:
    """The samples [low, high) of a batch of ``size``.

    Args:
        batch: a tensor with one row a sample, a list with one text or number a sample, or dicts,
            lists and tuples of these; its form is kept.
        low: the first sample.
        high: the one after the last.
        size: samples in the batch.

    Raises:
        NotRows: it is something else.
    """
    import torch

    if isinstance(batch, torch.Tensor) and batch.ndim and len(batch) == size:
        return batch[low:high]
    if isinstance(batch, Mapping):
        parts = {name: rows(one, low, high, size) for name, one in batch.items()}
        return parts if type(batch) is dict else type(batch)(**parts)
    if isinstance(batch, (list, tuple)):
        if len(batch) == size and all(isinstance(one, (str, int, float)) for one in batch):
            return batch[low:high]
        items = [rows(one, low, high, size) for one in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    raise NotRows


# --- loaders ---


Epoch: TypeAlias = "Callable[[int], Iterable[list[int]]]"
"""Epoch, from 0 -> the batches of all ranks, as indices."""

# What a loader was made with, and one of its slices is made with again.
_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)
_EVEN = "batches that the ranks share equally in training, any in an evaluation without gradients"
_REMEDY = (
    "in training pass DataLoader(..., drop_last=True), or use nb.fit, which weighs an uneven step; "
    "run an evaluation's whole loop under `with torch.no_grad():`"
)


def sliced(ctx: RunContext, loader: DataLoader[Any], number: int) -> DataLoader[Any]:
    """A loader of this rank's slices of ``loader``'s batches, on the rank's device.

    Every rank has as many batches as the others; together they have the samples that ``loader`` has
    on one rank, in its order. ``shuffle=True`` draws from the run's seed, ``number`` and the epoch,
    so that an epoch has the same batches on any number of ranks; another sampler draws on rank 0
    for all ranks.

    Args:
        ctx: the run's context.
        loader: its batch size is the global one; with a ``DistributedSampler`` it is that of one
            rank, as in the script that such a loader comes from.
        number: which of the function's loaders it is.

    Raises:
        PlanError: its batches cannot be sliced, or a training step could not be the mean over its
            samples. An uneven batch that shows only later raises when the loop comes to it.
    """
    from accelerate.data_loader import DataLoaderShard
    from torch.utils.data import IterableDataset

    if getattr(loader, "_is_accelerate_prepared", False):
        return loader
    made: Any
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        whole = _sliced_batches(ctx, loader)
        made = DataLoaderShard(whole, device=ctx.device, batch_size=None, collate_fn=_same)
    else:
        batches = _batches(ctx, loader, number)
        made = DataLoaderShard(
            loader.dataset,
            device=ctx.device,
            batch_sampler=batches,
            # Else accelerate takes the last batch for padded.
            _drop_last=True,
            **{name: getattr(loader, name) for name in _KEPT},
        )
    # Scripts call loader.sampler.set_epoch, some only where that sampler has it.
    made.sampler = loader.sampler
    made._is_accelerate_prepared = True
    prepared: DataLoader[Any] = made
    return prepared


class Batches:
    """The batch sampler of one rank: its slice of each batch of all ranks.

    Args:
        ctx: the run's context.
        epoch: makes the batches of an epoch, equal on all ranks.
        size: samples of a batch of all ranks; None: it varies.
        length: batches of an epoch; None: nobody knows.
        samples: of an epoch; None: nobody knows.
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
        self._batches, self._epoch = epoch, 0
        rest = 0 if samples is None or size is None else samples % size
        self._uneven = rest % self._ranks > 0
        joined = length is not None and length > 1 and 0 < rest < self._ranks
        self._length = length - 1 if joined and length is not None else length
        # For accelerate's counts.
        self.batch_size, self.drop_last = (size or 0) // self._ranks, False

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("a batch sampler without a length")
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        if self._uneven:
            _check_without_gradients("the last batch of a DataLoader", self._ranks)
        batches = self._batches(self._epoch)
        return _slices(batches, self._rank, self._ranks, size=len, join=list.__add__, part=_items)

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate before each walk."""
        self._epoch = epoch


def _batches(ctx: RunContext, loader: DataLoader[Any], number: int) -> Batches:
    """Slices of a loader's batch sampler."""
    from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

    given: Any = loader.batch_sampler
    if type(given) is not BatchSampler:
        return Batches(ctx, _on_rank_0(given), size=None, length=_length(given))
    sampler, length = given.sampler, _length(given)
    if isinstance(sampler, DistributedSampler):
        return _batches_of_ranks(ctx, sampler, given)
    size = _shared(given.batch_size, ctx.world_size)
    samples = None if given.drop_last else _length(sampler)
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        _check_even(samples, size, ctx.world_size)
        epoch = _seeded(sampler, given, (ctx.seed, number))
        return Batches(ctx, epoch, size=size, length=length, samples=samples)
    same = type(sampler) is SequentialSampler
    if not same:
        _check_even(samples, size, ctx.world_size)
    epoch = (lambda _: given) if same else _on_rank_0(given)
    return Batches(ctx, epoch, size=size, length=length, samples=samples)


def _seeded(sampler: Any, given: BatchSampler, seed: tuple[int, int]) -> Epoch:
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


def _on_rank_0(given: Iterable[list[int]]) -> Epoch:
    """Batches that a sampler may draw at random: rank 0's, on all ranks."""

    def batches(epoch: int) -> Iterable[list[int]]:
        import torch.distributed as dist

        length = _length(given)
        if not dist.is_initialized():
            # At once, as on several ranks: a sampler then draws the same from torch's stream.
            return given if length is None else list(islice(given, length))
        if length is None:
            raise PlanError(
                f"a {type(given).__name__} has no length, so that an epoch has no end",
                allowed="samplers and batch samplers with __len__",
                do="give it __len__: the batches of an epoch",
            )
        box: list[Any] = [list(islice(given, length)) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box, src=0)
        drawn: list[list[int]] = box[0]
        return drawn

    return batches


def _batches_of_ranks(
    ctx: RunContext, sampler: DistributedSampler[Any], given: BatchSampler
) -> Batches:
    """The same steps as of a script whose ranks have this sampler; no sample comes twice."""
    from torch.utils.data import BatchSampler, DistributedSampler

    ranks = ctx.world_size
    if sampler.num_replicas != ranks:
        raise PlanError(
            f"a DistributedSampler divides its samples by {sampler.num_replicas}, but this run has "
            f"{ranks} ranks",
            allowed="a DistributedSampler of as many replicas as there are ranks, or none",
            do="delete sampler=DistributedSampler(...): ctx.prepare divides the batches (give it "
            "the batch size of all ranks together, and shuffle=True)",
        )
    size, total = given.batch_size * ranks, len(sampler.dataset)  # type: ignore[arg-type]
    count = total - total % ranks if sampler.drop_last else total
    samples = None if given.drop_last else count
    if sampler.shuffle:
        _check_even(samples, size, ranks)

    def batches(epoch: int) -> BatchSampler:
        whole: DistributedSampler[Any] = DistributedSampler(
            sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed
        )
        whole.set_epoch(sampler.epoch)  # as the script says it to its own
        return BatchSampler(list(whole)[:count], size, given.drop_last)

    length = len(batches(0)) if count else 0
    return Batches(ctx, batches, size=size, length=length, samples=samples)


def _sliced_batches(ctx: RunContext, loader: DataLoader[Any]) -> Any:
    """Whole batches, made by the loader's own workers on every rank, of which each takes a slice.

    For streams, and for data sets that make batches by themselves (``batch_size=None``).
    """
    from accelerate.utils import concatenate
    from torch.utils.data import IterableDataset

    def join(one: Any, other: Any) -> Any:
        return concatenate([one, other])

    class Slices(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            batches = _checked(iter(loader))
            return _slices(
                batches, ctx.rank, ctx.world_size, size=_size, join=join, part=_part_of_batch
            )

        def __len__(self) -> int:
            return len(loader)

    return Slices()


def _slices(
    batches: Iterable[Any],
    rank: int,
    ranks: int,
    *,
    size: Callable[[Any], int],
    join: Callable[[Any, Any], Any],
    part: Callable[[Any, int, int], Any],
) -> Iterator[Any]:
    """This rank's part of every batch; one that has not a sample for each rank joins the last."""

    def mine(batch: Any) -> Any:
        samples = size(batch)
        if samples < ranks:
            raise PlanError(
                f"a loader's only batch has {samples} samples for {ranks} ranks",
                allowed="one sample or more for each rank",
                do="take fewer ranks (distributed.world_size), or more data",
            )
        if samples % ranks:
            _check_without_gradients(f"a batch of {samples} samples", ranks)
        return part(batch, samples * rank // ranks, samples * (rank + 1) // ranks)

    held = None
    for batch in batches:
        if held is not None and size(batch) < ranks:
            _check_without_gradients(f"a batch of {size(batch)} samples", ranks)
            held = join(held, batch)
            continue
        if held is not None:
            yield mine(held)
        held = batch
    if held is not None:
        yield mine(held)


def _shared(size: int, ranks: int) -> int:
    """``size``, if the ranks can share it."""
    if size % ranks:
        below, above = size - size % ranks, size + ranks - size % ranks
        raise PlanError(
            f"a DataLoader's batch_size is {size}, which {ranks} ranks cannot divide",
            allowed=f"multiples of {ranks}: " + ", ".join(str(n) for n in (below, above) if n),
            do="batch_size is global: choose a multiple of the number of ranks",
        )
    return size


def _check_even(samples: int | None, size: int, ranks: int) -> None:
    """Of a shuffled loader, which is one for training: its last step is knowable now."""
    rest = 0 if samples is None else samples % size
    if rest % ranks:
        raise _uneven(
            f"the last batch of a shuffled DataLoader has {rest} samples ({samples} in batches of "
            f"{size})",
            ranks,
        )


def _check_without_gradients(what: str, ranks: int) -> None:
    import torch

    if torch.is_grad_enabled():
        raise _uneven(what, ranks)


def _uneven(what: str, ranks: int) -> PlanError:
    return PlanError(
        f"{what}, which {ranks} ranks cannot share equally: a training step of them would not be "
        "the mean over its samples",
        allowed=_EVEN,
        do=_REMEDY,
    )


def _checked(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches, if the first is the same on all ranks."""
    import torch.distributed as dist

    for number, batch in enumerate(batches):
        if number == 0 and dist.is_initialized():
            marks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(marks, _digest(batch))
            if len(set(marks)) > 1:
                raise PlanError(
                    "the ranks read different batches from a loader that they are to share",
                    allowed="a stream that is the same on all ranks",
                    do="seed what it draws at random with ctx.seed; a stream that divides itself "
                    "among the ranks is not for ctx.prepare: move its batches to ctx.device",
                )
        yield batch


def _digest(batch: Any) -> str:
    """What the tensors of a batch hold, in a few characters."""
    import torch
    from accelerate.utils import recursively_apply

    digest = hashlib.blake2b(digest_size=16)

    def add(tensor: torch.Tensor) -> torch.Tensor:
        digest.update(str(tensor.shape).encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return tensor

    recursively_apply(add, batch)
    return digest.hexdigest()


def _size(batch: Any) -> int:
    """Samples in a batch: rows of its first tensor."""
    from accelerate.utils import find_batch_size

    try:
        size: int | None = find_batch_size(batch)
    except TypeError:
        size = None
    if size is None:
        raise _no_rows(batch)
    return size


def _part_of_batch(batch: Any, low: int, high: int) -> Any:
    try:
        return rows(batch, low, high, _size(batch))
    except NotRows:
        raise _no_rows(batch) from None


def _no_rows(batch: Any) -> PlanError:
    return PlanError(
        f"a batch of the type {type(batch).__name__} cannot be shared among the ranks",
        allowed="tensors with one row a sample, lists of texts, and dicts, lists, tuples of them",
        do="let collate_fn make tensors",
    )


def _items(batch: list[int], low: int, high: int) -> list[int]:
    return batch[low:high]


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None


def _same(batch: Any) -> Any:
    return batch
