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

    local = {
        "torch": torch.__version__.partition("+")[0],
        "nbtoolkit": __version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        FUNCTION: own_source(train),
    }
    gathered = gather_on_all((platform.node(), local), ranks)
    refuse_differences([f"rank {rank} ({node})" for rank, (node, _) in enumerate(gathered)],
                       [versions for _, versions in gathered])  # fmt: skip


def refuse_differences(names: Sequence[str], versions: Sequence[Mapping[str, str]]) -> None:
    """Refuse ranks that differ from the first.

    Args:
        names: of the ranks, for the message.
        versions: each rank's versions, and the source of its function.

    Raises:
        LaunchError: names the first difference.
    """
    first = versions[0]
    for name, other in zip(names, versions, strict=True):
        for key in first:
            if other.get(key) == first[key]:
                continue
            if key == FUNCTION:
                fault = f"{key} of {name} has another source than that of {names[0]}"
                do = "copy the script to every machine (or use a shared folder), and start again"
            else:
                fault = f"{name} has {key} {other.get(key)}, and {names[0]} has {first[key]}"
                do = f"install one version of {key} on all machines, and start again"
            raise LaunchError(
                f"the ranks do not run the same code: {fault}",
                allowed="the same training function, torch, nbtoolkit and Python on all machines",
                do=do,
            )
