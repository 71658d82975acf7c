"""Process groups over gloo, without the line that torch 2.10 prints for each of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
