"""Check that the ranks of torchrun or Slurm, on several machines, run the same code.

With other versions of torch, or another training function, ranks form a group all the same, and
then wait for each other forever or train different models.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbtoolkit.errors import LaunchError
from nbtoolkit.run.identity import own_source
from nbtoolkit.version import __version__
from nbtoolkit.worker.collectives import gather_on_all

FUNCTION = "the training function"
"""What is compared by its source, without the values that are bound to it."""


def check_same_code(train: Callable[..., Any], ranks: int) -> None:
    """Compare code and versions of all ranks, which call this in their group.

    Raises:
        LaunchError: a rank differs from rank 0; the same on all ranks.
    """
    if ranks == 1:
        return
    import torch

    own = {
        "torch": torch.__version__.partition("+")[0],
        "nbtoolkit": __version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        FUNCTION: own_source(train),
    }
    found = gather_on_all((platform.node(), own), ranks)
    refuse_differences([f"rank {rank} ({node})" for rank, (node, _) in enumerate(found)],
                       [one for _, one in found])  # fmt: skip


def refuse_differences(names: Sequence[str], found: Sequence[Mapping[str, str]]) -> None:
    """Refuse ranks that differ from the first.

    Args:
        names: of the ranks, for the message.
        found: each rank's versions, and the source of its function.

    Raises:
        LaunchError: names the first difference.
    """
    first = found[0]
    for name, other in zip(names, found, strict=True):
        for what in first:
            if other.get(what) == first[what]:
                continue
            if what == FUNCTION:
                fault = f"{what} of {name} has another source than that of {names[0]}"
                do = "copy the script to every machine (or use a shared folder), and start again"
            else:
                fault = f"{name} has {what} {other.get(what)}, and {names[0]} has {first[what]}"
                do = f"install one version of {what} on all machines, and start again"
            raise LaunchError(
                f"the ranks do not run the same code: {fault}",
                allowed="the same training function, torch, nbtoolkit and Python on all machines",
                do=do,
            )
