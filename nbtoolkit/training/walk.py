"""Walk: once through a whole data set, every rank its own part of it, without padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbtoolkit.training.data import Source


def walk(source: Source, batch: int, *, rank: int, ranks: int) -> Iterator[tuple[Any, int]]:
    """One rank's batches and their sizes: the ranks' parts follow each other in the set's order.

    Parts differ by at most one sample. Where there are fewer samples than ranks, the last ranks
    have none (rank 0 always has one: it computes the metrics).
    """
    import torch

    low, high = (-(-len(source) * number // ranks) for number in (rank, rank + 1))
    sizes = [min(batch, high - start) for start in range(low, high, batch)]
    return zip(source.batches(torch.arange(low, high), sizes), sizes, strict=True)
