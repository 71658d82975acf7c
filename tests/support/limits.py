"""Real limits of memory and file size for a process; a model whose memory grows with its batch."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernels import until
from torch import nn

CGROUPS = Path("/sys/fs/cgroup/memory")  # of version 1; version 2 needs a delegated folder


def limit_addresses(megabytes: int) -> None:
    """Let this process map so much more memory: an allocation above raises an exception."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """A full disk: the system refuses to let a file grow further."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def memory_cgroup(name: str, megabytes: int) -> Iterator[Path]:
    """A control group whose processes the kernel kills above a limit; skips where none is allowed.

    Pages that a process had before it joined do not count.
    """
    folder = CGROUPS / name
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        (folder / "memory.limit_in_bytes").write_text(str(megabytes * 2**20))
        yield folder
    finally:
        # A killed process is a member until its parent has waited for it and its pages are freed.
        until(lambda: is_removed(folder), f"{folder} to have no members", seconds=60)


def is_removed(folder: Path) -> bool:
    """Removes an empty control group; False while it still has members."""
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise
    return True


class Hungry(nn.Module):
    """Passes its input on, and needs ``megabytes`` for each sample meanwhile.

    Without ``touches`` they are addresses only: no page is used.
    """

    def __init__(self, megabytes: int, *, touches: bool) -> None:
        super().__init__()
        self.size, self.make = megabytes * 2**18, torch.ones if touches else torch.zeros

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        held = self.make(len(inputs), self.size)
        return inputs + 0 * held[0, 0]
