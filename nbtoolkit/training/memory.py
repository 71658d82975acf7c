"""How much memory a rank uses: its device's, or its own on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbtoolkit.runtime.context import RunContext

_PAGE = os.sysconf("SC_PAGE_SIZE")


def memory_used(ctx: RunContext) -> float:
    """This rank's memory in GB (10^9 bytes).

    On a GPU the most that torch's tensors took since the last call
    (``torch.cuda.max_memory_allocated``); on the CPU the resident memory now.
    """
    if ctx.device.type == "cuda":
        import torch

        most = torch.cuda.max_memory_allocated(ctx.device)
        torch.cuda.reset_peak_memory_stats(ctx.device)
        return most / 1e9
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / 1e9
