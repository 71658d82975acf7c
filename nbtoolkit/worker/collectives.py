"""Create gloo groups, and gather values of several batches and ranks on the CPU, in order.

Objects are sent over gloo, whatever backend the gradients use: outputs need not fit on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from nbtoolkit.errors import FitError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


# "[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1", from
# C++ on stdout (github.com/jax-ml/jax/issues/32673): seen with torch 2.10, not with 2.6 and 2.11.
_CONNECTED = b"[Gloo] Rank "


def new_gloo_group(timeout: float | None = None) -> ProcessGroup:
    """Return a group of all ranks for collectives on the CPU; every rank calls it.

    Args:
        timeout: seconds that a collective may take; None: torch's half an hour. A new group does
            not have the limit of the default one.
    """
    import torch.distributed as dist

    limit = None if timeout is None else timedelta(seconds=timeout)
    with without_gloo_lines():
        group: ProcessGroup = dist.new_group(backend="gloo", timeout=limit)
        return group


@contextmanager
def without_gloo_lines() -> Iterator[None]:
    """Remove gloo's lines from the block's stdout, which is written at the end of the block."""
    stdout = os.dup(1)
    held = os.memfd_create("stdout")
    os.dup2(held, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        written = os.pread(held, os.fstat(held).st_size, 0)
        os.close(held)
        lines = written.splitlines(keepends=True)
        if kept := b"".join(line for line in lines if not line.startswith(_CONNECTED)):
            os.write(1, kept)


Part: TypeAlias = tuple[Any, list[int]]
"""All rows of one rank, and the sizes of its batches."""

T = TypeVar("T")


def gather_on_first(value: T, ranks: int) -> list[T] | None:
    """Every rank's ``value``, by rank, on rank 0; None on the others. A collective."""
    import torch.distributed as dist

    if ranks == 1:
        return [value]
    values = [value] * ranks if dist.get_rank() == 0 else None
    dist.gather_object(value, values, dst=0, group=_cpu_group(dist.group.WORLD))
    return values


def gather_on_all(value: T, ranks: int) -> list[T]:
    """Every rank's ``value``, by rank, on every rank. A collective."""
    import torch.distributed as dist

    values = [value] * ranks
    if ranks > 1:
        dist.all_gather_object(values, value, group=_cpu_group(dist.group.WORLD))
    return values


def broadcast(value: T, ranks: int) -> T:
    """Rank 0's ``value``, on every rank. A collective."""
    import torch.distributed as dist

    values = [value]
    if ranks > 1:
        dist.broadcast_object_list(values, src=0, group=_cpu_group(dist.group.WORLD))
    return values[0]


class Rows:
    """Outputs (or targets) of one rank's batches, as copies on the CPU.

    Half precision becomes float32, since NumPy has no bfloat16.
    """

    def __init__(self) -> None:
        self._batches: list[object] = []
        self._sizes: list[int] = []

    def add(self, data: object, samples: int) -> None:
        """Add a batch.

        Args:
            data: a tensor, or tensors in tuples, lists and dicts, with one row per sample.
            samples: number of rows.

        Raises:
            FitError: it contains something else, or another number of rows.
        """
        from accelerate.utils import recursively_apply

        def copied(leaf: object) -> Tensor:
            return _copied(leaf, samples)

        self._batches.append(recursively_apply(copied, data, test_type=lambda leaf: True))
        self._sizes.append(samples)

    def part(self) -> Part | None:
        """All rows in the structure of ``data``, and the batch sizes; None: there was no batch.

        Raises:
            FitError: the rows of the batches differ in shape.
        """
        return (_joined(self._batches), self._sizes) if self._batches else None


def in_order(parts: Sequence[Part | None]) -> Any:
    """Return the rows of all ranks, in the order of the data set.

    Args:
        parts: by rank; the batches of the data set went to the ranks in turn. At least one rank
            has a batch.

    Raises:
        FitError: the rows of the ranks differ in shape.
    """
    import torch
    from accelerate.utils import recursively_apply

    present = [part for part in parts if part is not None]
    turns = [
        torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) for _, sizes in present
    ]
    order = torch.cat(turns).argsort(stable=True)  # stable: within a turn, by rank
    return recursively_apply(lambda column: column[order], _joined([rows for rows, _ in present]))


def _joined(batches: Sequence[object]) -> Any:
    from accelerate.utils import concatenate

    try:
        return concatenate(batches)
    except RuntimeError as error:
        raise FitError(
            f"the outputs of two batches cannot be concatenated: {error}",
            allowed="rows of one shape",
            do="pad them in a step of your own",
        ) from error


def _copied(leaf: object, samples: int) -> Tensor:
    import torch

    if isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (samples,):
        half = leaf.dtype in (torch.float16, torch.bfloat16)
        return leaf.detach().to("cpu", torch.float32 if half else leaf.dtype, copy=True)
    description = f"a {type(leaf).__name__}"
    if isinstance(leaf, torch.Tensor):
        description = f"a tensor of shape {tuple(leaf.shape)}"
    raise FitError(
        f"the outputs of {samples} samples hold {description}",
        allowed="a tensor, or tensors in tuples, lists and dicts, with one row per sample",
        do="return these from the model, or from a step of your own",
    )


@cache
def _cpu_group(world: ProcessGroup) -> ProcessGroup:
    """Return the group for collectives on the CPU; created once per ``world``, by all ranks."""
    import torch.distributed as dist

    return world if dist.get_backend(world) == "gloo" else new_gloo_group()
