"""Keep the ranks that torchrun has restarted apart from the ranks before them.

torchrun keeps one store through all its restarts (torch 2.4 to 2.13). A new rank that asks for the
address of another one may read the address of the rank that died: gloo then fails with
``connectFullMesh failed``, or hangs (https://github.com/pytorch/pytorch/issues/135712).
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL_SECONDS = 0.01


def attempt_store(
    rank: int, world_size: int, timeout: float, environ: Mapping[str, str] = os.environ
) -> Store | None:
    """Return a store that the ranks of this attempt share with no earlier one.

    No variable of torchrun names the attempt alike on all machines
    (``TORCHELASTIC_RESTART_COUNT`` counts the failures of one agent). Rank 0 therefore makes up a
    name, and hands it to each rank that answers.

    Args:
        rank: of this process.
        world_size: the number of ranks.
        timeout: in seconds, how long rank 0 and the others wait for each other.
        environ: has the address of torchrun's store.

    Returns:
        The store, or None where ranks do not share a store of torchrun's.

    Raises:
        TimeoutError: on rank 0, a rank did not answer.
        torch.distributed.DistStoreError: on another rank, rank 0 did not answer.
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    # Public names that torch.distributed does not declare as exported.
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=timeout),
    )
    me = uuid.uuid4().hex
    if rank == 0:
        _name_ranks(store, me, world_size, timeout)
        return PrefixStore(me, store)
    store.set(f"nbtoolkit/rank/{rank}", me)
    name = store.get(f"nbtoolkit/name/{me}").decode()
    store.set(f"nbtoolkit/joined/{name}/{rank}", "")
    return PrefixStore(name, store)


def _name_ranks(store: Store, name: str, world_size: int, timeout: float) -> None:
    """Hand the name to the other ranks until each has taken it; dead ranks take none."""
    deadline = time.monotonic() + timeout
    missing = list(range(1, world_size))
    while missing := [r for r in missing if not store.check([f"nbtoolkit/joined/{name}/{r}"])]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {missing} did not answer within {timeout:.0f} s")
        for rank in missing:
            if store.check([f"nbtoolkit/rank/{rank}"]):
                member = store.get(f"nbtoolkit/rank/{rank}").decode()
                store.set(f"nbtoolkit/name/{member}", name)
        time.sleep(_POLL_SECONDS)
