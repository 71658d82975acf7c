"""Columns: one value a sample, in whatever the user keeps it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import FoldError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def as_column(values: Any, name: str, *, n_samples: int | None = None) -> NDArray[Any]:
    """One value a sample, as an array of shape (n,).

    Args:
        values: a list, array, tensor or Series.
        name: what it is, for the message.
        n_samples: how many there must be; None: any number.

    Raises:
        FoldError: it has another shape or length.
    """
    import numpy as np

    if hasattr(values, "detach"):  # a tensor, on whatever device
        values = values.detach().cpu()
    array = np.asarray(values)
    if array.ndim != 1:
        raise FoldError(
            f"{name} has the shape {array.shape}, not one value for each sample",
            allowed="a list, array, tensor or Series of shape (n,)",
            do=f"pass a column: {name}[:, 0], or for one-hot labels {name}.argmax(axis=1)",
        )
    if n_samples is not None and len(array) != n_samples:
        raise FoldError(
            f"{name} has {len(array)} values for {n_samples} samples",
            allowed="one for each sample, in the data set's order",
            do=f"pass the {name} of the same samples",
        )
    return array


def digest_of(targets: NDArray[Any]) -> str:
    """16 hex digits over the targets, the same for a list, an array and a tensor of them."""
    kind = {"b": "<i8", "i": "<i8", "u": "<i8", "f": "<f8"}.get(targets.dtype.kind)
    data = targets.astype(kind).tobytes() if kind else "\n".join(map(str, targets)).encode()
    return hashlib.sha256(data).hexdigest()[:16]
