"""Rows: some samples of a batch, whatever it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
