"""ctx.prepare: an own loop's parts on this rank, with loader batch = global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import PlanError

if TYPE_CHECKING:
    from nbtoolkit.runtime.context import RunContext


def prepare(ctx: RunContext, *objects: Any) -> Any:
    """``Accelerator.prepare`` after a check of the batch sizes; see :meth:`RunContext.prepare`."""
    from torch.utils.data import DataLoader

    for item in objects:
        if isinstance(item, DataLoader) and item.batch_size and item.batch_size % ctx.world_size:
            size, ranks = item.batch_size, ctx.world_size
            below, above = size - size % ranks, size + ranks - size % ranks
            raise PlanError(
                f"a DataLoader's batch_size is {size}, which {ranks} ranks cannot divide",
                allowed=f"multiples of {ranks}: " + ", ".join(str(n) for n in (below, above) if n),
                do="batch_size is global: choose a multiple of the number of ranks",
            )
    return ctx.accelerator.prepare(*objects)
