"""Divide batches among the ranks, such that each sample goes to one rank.

batches of 4, 9 samples    0 1 2 3 | 4 5 6 7 8      a rest smaller than the ranks joins the last
rank 0 of 2                0 1     | 4 5 6
rank 1 of 2                    2 3 |       7 8
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from typing import Any, TypeVar

from nbtoolkit.errors import PlanError
from nbtoolkit.worker.collectives import gather_on_all

Batch = TypeVar("Batch")


def shard(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """``rank``'s contiguous part [low, high) of ``range(size)``; the first may be larger by one."""
    return -(-size * rank // ranks), -(-size * (rank + 1) // ranks)


class Shares:
    """How the ranks share the batches of one loader.

    Args:
        rank: this rank.
        ranks: that share the batches.
        expected: the uneven batch that will come, known from the sizes; None: it is not known.

    Attributes:
        expected: see above.
        divided: each batch of the newest iteration that is divided and not read yet, in order:
            a sampler runs ahead of the loop. None: the batch is even.
    """

    def __init__(self, rank: int, ranks: int, expected: str | None = None) -> None:
        self._rank = rank
        self._ranks = ranks
        self.expected = expected
        self.divided: deque[str | None] = deque()

    def divide(
        self,
        batches: Iterable[Batch],
        size: Callable[[Batch], int],
        join: Callable[[Batch, Batch], Batch],
    ) -> Iterator[tuple[Batch, slice]]:
        """Iterate over whole batches, each with the samples of this rank.

        Args:
            batches: of all ranks.
            size: number of samples in a batch.
            join: one batch of two.

        Raises:
            PlanError: there is not one sample for each rank.
        """
        divided = self.divided = deque()
        for group in self._groups(batches, size):
            batch = reduce(join, group)
            samples = size(batch)
            if samples < self._ranks:
                raise PlanError(
                    f"a loader's only batch has {samples} samples for {self._ranks} ranks",
                    allowed="at least one sample per rank",
                    do="use fewer ranks (distributed.world_size), or more data",
                )
            even = len(group) == 1 and samples % self._ranks == 0
            divided.append(None if even else f"a batch of {samples} samples")
            yield batch, slice(*shard(samples, self._rank, self._ranks))

    def _groups(
        self, batches: Iterable[Batch], size: Callable[[Batch], int]
    ) -> Iterator[list[Batch]]:
        """Batches of fewer samples than ranks with those that follow them, at the end the last."""
        ready: list[Batch] = []
        rest: list[Batch] = []
        for batch in batches:
            rest.append(batch)
            if sum(map(size, rest)) < self._ranks:
                continue
            if ready:
                yield ready
            ready = rest
            rest = []
        if ready or rest:
            yield ready + rest


class NotRows(Exception):
    """Something in a batch does not have one row per sample; its argument: the type."""


def rows(batch: Any, low: int, high: int, size: int) -> Any:
    """Return the samples [low, high) of a batch of ``size``, in the structure of the batch.

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
    raise NotRows(type(batch).__name__)


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
    """Return a hash of the tensors, arrays, texts and numbers of a batch or of samples."""
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
