"""Data, launches and comparisons for training code of others on one and two processes.

The codes are restated, not copied: the architecture, the objects and the order of calls are those
of the source that each names; names, comments and prints are not. Lines that a user has to change
have the comment ``# nbtoolkit``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import nbtoolkit as nb
from nbtoolkit.config.schema import Config

CLOSE = 2e-5  # BLAS sums in another order on a busy machine: 1.1e-5 was seen
FIT = {"train__epochs": 2, "train__batch_size": 12, "optim__lr": 0.05}
Value = dict[str, Any]


class Rows(Dataset):  # type: ignore[type-arg]
    """Samples in memory, which remember in what order this process has read them."""

    def __init__(self, *columns: Tensor, names: tuple[str, ...] = ()) -> None:
        self.columns, self.names, self.read = columns, names, list[int]()

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Any:
        self.read.append(int(index))
        row = tuple(column[index] for column in self.columns)
        return dict(zip(self.names, row, strict=True)) if self.names else row


def images(size: int, seed: int = 0, *, channels: int = 1, side: int = 8, classes: int = 3) -> Rows:
    """Images whose class is the row that is brightest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, channels, side, side, generator=generator)
    y = torch.randint(classes, (size,), generator=generator)
    x[torch.arange(size), :, y] += 1.0
    return Rows(x, y)


def numbers_of(model: nn.Module) -> Tensor:
    """All weights in one tensor, on their own."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def launched(
    train: Callable[..., Any], folder: Path, processes: int, **overrides: Any
) -> list[Value]:
    """What the ranks returned; a setting is written with two underscores for its dot."""
    settings = {name.replace("__", "."): value for name, value in overrides.items()}
    plain = {"tracking.mlflow": False, "runtime.output_dir": str(folder)}
    config = Config().with_overrides({**plain, **settings})
    return nb.launch(train, config, processes=processes, display="off").values


def gap(one: Any, other: Any) -> float:
    """The largest difference between two nested values of numbers."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max((gap(one[name], other[name]) for name in one), default=0.0)
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        return max(map(gap, one, other), default=0.0)
    one, other = (torch.as_tensor(value, dtype=torch.float64) for value in (one, other))
    assert one.shape == other.shape
    return float((one - other).abs().max()) if one.numel() else 0.0


def equal_on_two(
    train: Callable[..., Any], folder: Path, batch: int | None = None, **overrides: Any
) -> Value:
    """Run ``train`` on one process and on two, and compare; what the one returned.

    Args:
        train: returns ``start`` and ``weights`` (:func:`numbers_of` the models), ``results``
            (numbers of the whole run, the same on every rank), and ``read``, the samples that this
            rank has read, of an epoch after the other.
        folder: for the runs.
        batch: of one optimizer step; None: what was read is not compared.
        overrides: settings.
    """
    (alone,) = launched(train, folder, 1, **overrides)
    ranks = launched(train, folder, 2, **overrides)
    assert len(ranks) == 2
    # The training did something, and what it did is no NaN.
    assert (alone["weights"] - alone["start"]).abs().max() > 1e-3
    for rank in ranks:
        for name in ("start", "weights", "results"):
            difference = gap(alone[name], rank[name])
            assert difference < CLOSE, f"{name}: {difference:.2g} apart"
    if batch is not None:
        parts = [list(_cut(rank["read"], len(alone["read"]), batch)) for rank in ranks]
        steps = zip(*parts, strict=True)
        assert list(chain.from_iterable(chain.from_iterable(steps))) == alone["read"]
        assert all(len(rank["read"]) == len(alone["read"]) // 2 for rank in ranks)
    return alone


def _cut(read: list[int], total: int, batch: int) -> list[list[int]]:
    """One rank's samples of each step; ``batch`` divides what an epoch reads."""
    assert total % batch == 0
    half = batch // 2
    return [read[low : low + half] for low in range(0, len(read), half)]
