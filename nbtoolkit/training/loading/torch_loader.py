"""Take the data set, the sampler and the settings out of a ``torch.utils.data.DataLoader``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nbtoolkit.errors import FitError
from nbtoolkit.training.loading.data import Collate


@dataclass(frozen=True)
class Feed:
    """What ``fit`` trains or evaluates on.

    Attributes:
        data: a data set in any form but a ``DataLoader``.
        collate: makes a batch from a list of samples; None: torch's.
        workers: ``DataLoader`` processes of each rank.
        sampler: the order or choice of the samples; None: a permutation of all.
        drop_last: whether the loader leaves out an incomplete batch.
        batch_size: the loader's; None: there was no loader.
    """

    data: object
    collate: Collate | None
    workers: int
    sampler: Iterable[int] | None = None
    drop_last: bool = False
    batch_size: int | None = None


def take_apart(data: object, *, collate: Collate | None, workers: int) -> Feed:
    """What a ``DataLoader`` is made of; other data stay as they are.

    A shuffling loader gives no sampler: the permutation of ``fit`` does the same. Nor does a
    ``DistributedSampler``: ``fit`` divides the samples among the ranks itself.

    Args:
        data: what the user passed.
        collate: the user's, in place of the loader's.
        workers: in place of a loader's 0.

    Raises:
        FitError: the loader makes its batches by a ``batch_sampler`` of its own, or none.
    """
    from torch.utils.data import DataLoader, IterableDataset, RandomSampler, default_collate
    from torch.utils.data.distributed import DistributedSampler

    if not isinstance(data, DataLoader):
        return Feed(data, collate, workers)
    if data.batch_size is None:
        own = "a batch_sampler of its own" if data.batch_sampler is not None else "batch_size=None"
        raise FitError(
            f"the DataLoader has {own}, but fit makes the batches (of train.batch_size)",
            allowed="a DataLoader with batch_size, and with shuffle or a sampler",
            do="pass the data set, or a DataLoader with the sampler inside (not one that "
            "ctx.prepare returned)",
        )
    dataset: Any = data.dataset
    sampler: Any = data.sampler
    shuffles = (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(dataset)
    )
    if isinstance(dataset, IterableDataset) or shuffles or isinstance(sampler, DistributedSampler):
        sampler = None
    if collate is None and data.collate_fn is not default_collate:
        collate = data.collate_fn
    workers = data.num_workers or workers
    return Feed(dataset, collate, workers, sampler, data.drop_last, data.batch_size)
