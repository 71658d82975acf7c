"""Create gloo groups, and gather values of several batches and ranks on the CPU, in order.

Objects travel over gloo, whatever the gradients take: a set's outputs need not fit on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from nbtoolkit.errors import FitError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


# --- gloo ---
# Process groups over gloo, without the line that torch 2.10 prints for each of them.


# "[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1", from
# C++ on stdout (github.com/jax-ml/jax/issues/32673): seen with torch 2.10, not with 2.6 and 2.11.
_CONNECTED = b"[Gloo] Rank "


def new_gloo_group() -> ProcessGroup:
    """A group of all ranks whose collectives stay on the CPU; every rank calls it."""
    import torch.distributed as dist

    with without_gloo_lines():
        group: ProcessGroup = dist.new_group(backend="gloo")
        return group


@contextmanager
def without_gloo_lines() -> Iterator[None]:
    """Leave gloo's lines out of what the block writes to stdout; the rest is written at its end."""
    stdout, held = os.dup(1), os.memfd_create("stdout")
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


# --- gathering ---


Part: TypeAlias = tuple[Any, list[int]]


def gather_on_first(value: Any, ranks: int) -> list[Any] | None:
    """Every rank's ``value``, by rank, on rank 0; None on the others. A collective when several."""
    import torch.distributed as dist

    if ranks == 1:
        return [value]
    boxes: list[Any] | None = [None] * ranks if dist.get_rank() == 0 else None
    dist.gather_object(value, boxes, dst=0, group=_cpu_group(dist.group.WORLD))
    return boxes


def gather_on_all(value: Any, ranks: int) -> list[Any]:
    """Every rank's ``value``, by rank, on every rank. A collective when there are several."""
    import torch.distributed as dist

    boxes: list[Any] = [value] * ranks
    if ranks > 1:
        dist.all_gather_object(boxes, value, group=_cpu_group(dist.group.WORLD))
    return boxes


def tell_all(value: Any, ranks: int) -> Any:
    """Rank 0's ``value``, on every rank. A collective when there are several."""
    import torch.distributed as dist

    box = [value]
    if ranks > 1:
        dist.broadcast_object_list(box, src=0, group=_cpu_group(dist.group.WORLD))
    return box[0]


class Rows:
    """Outputs (or targets) of one rank's batches, as copies on the CPU.

    Half precision comes as float32, which NumPy knows too.
    """

    def __init__(self) -> None:
        self._batches: list[Any] = []
        self._sizes: list[int] = []

    def add(self, data: Any, samples: int) -> None:
        """Take in a batch.

        Args:
            data: a tensor, or tensors in tuples, lists and dicts, with one row a sample.
            samples: how many rows that is.

        Raises:
            FitError: it holds something else, or another number of rows.
        """
        from accelerate.utils import recursively_apply

        def copied(leaf: Any) -> Tensor:
            return _copied(leaf, samples)

        self._batches.append(recursively_apply(copied, data, test_type=lambda leaf: True))
        self._sizes.append(samples)

    def part(self) -> Part | None:
        """All rows in the form of ``data``, and the batches' sizes; None: there was no batch.

        Raises:
            FitError: the batches' rows differ in shape.
        """
        return (_joined(self._batches), self._sizes) if self._batches else None


def in_order(parts: Sequence[Part | None]) -> Any:
    """The rows of all ranks in the data set's order.

    Args:
        parts: by rank; the ranks took their batches in turn, and one of them had one.

    Raises:
        FitError: the ranks' rows differ in shape.
    """
    import torch
    from accelerate.utils import recursively_apply

    there = [part for part in parts if part is not None]
    turns = [torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) for _, sizes in there]
    order = torch.cat(turns).argsort(stable=True)  # of one turn: by rank, as they are
    return recursively_apply(lambda column: column[order], _joined([rows for rows, _ in there]))


def _joined(batches: list[Any]) -> Any:
    from accelerate.utils import concatenate

    try:
        return concatenate(batches)
    except RuntimeError as error:
        raise FitError(
            f"the outputs of two batches cannot be put together: {error}",
            allowed="rows of one shape",
            do="pad them in a step of your own",
        ) from error


def _copied(leaf: Any, samples: int) -> Tensor:
    import torch

    if isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (samples,):
        half = leaf.dtype in (torch.float16, torch.bfloat16)
        return leaf.detach().to("cpu", torch.float32 if half else leaf.dtype, copy=True)
    tensor = isinstance(leaf, torch.Tensor)
    what = f"a tensor of shape {tuple(leaf.shape)}" if tensor else f"a {type(leaf).__name__}"
    raise FitError(
        f"the outputs of {samples} samples hold {what}",
        allowed="a tensor, or tensors in tuples, lists and dicts, with one row a sample",
        do="return these from the model, or from a step of your own",
    )


@cache
def _cpu_group(world: ProcessGroup) -> ProcessGroup:
    """The group whose collectives stay on the CPU; made once, by all ranks, for each ``world``."""
    import torch.distributed as dist

    return world if dist.get_backend(world) == "gloo" else new_gloo_group()
