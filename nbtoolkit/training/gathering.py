"""Gathering: what several batches and several ranks have, put together on the CPU, in their order.

Objects travel over gloo, whatever the gradients take: a set's outputs need not fit on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import FitError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


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


def rows(data: Any, samples: int) -> Any:
    """A batch's outputs (or targets) as copies on the CPU; half precision comes as float32.

    Args:
        data: a tensor, or tensors in tuples, lists and dicts, with one row a sample.
        samples: how many rows that is.

    Raises:
        FitError: it holds something else, or another number of rows.
    """
    from accelerate.utils import recursively_apply

    def copied(leaf: Any) -> Tensor:
        return _copied(leaf, samples)

    return recursively_apply(copied, data, test_type=lambda leaf: True)


def joined(batches: Sequence[Any]) -> Any:
    """What :func:`rows` gave for one batch after another, as one, in the same form.

    Raises:
        FitError: the batches' rows differ in shape.
    """
    from accelerate.utils import concatenate

    try:
        return concatenate(list(batches))
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

    return world if dist.get_backend(world) == "gloo" else dist.new_group(backend="gloo")
