"""Memory of a captured gigabyte: PSS of all our processes, over a launch without it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import nbtoolkit as nb
from tests.bench.figures import Figure, in_fresh_process, quiet_config

GIGABYTE = 1_000_000_000


def tree() -> list[int]:
    """This process and all that descend from it (the fork server's session included)."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def pss() -> int:
    """Bytes, each shared page counted once over all its users."""
    total = 0
    for pid in tree():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def captured(kind: str) -> Any:
    if kind == "nothing":
        return None
    if kind == "array":
        import numpy as np

        return np.ones(GIGABYTE // 8)
    import torch
    from torch.utils.data import TensorDataset

    if kind == "tensor":
        return torch.ones(GIGABYTE // 4)
    return TensorDataset(torch.ones(GIGABYTE // 400, 99), torch.ones(GIGABYTE // 400))


def measure(kind: str) -> int:
    """PSS of the whole tree while both ranks have read everything."""
    data = captured(kind)

    def train(config: nb.Config, ctx: nb.RunContext) -> float:
        tensors = [] if data is None else getattr(data, "tensors", (data,))
        total = sum(float(part.sum()) for part in tensors)
        (ctx.paths.folder / f"read-{ctx.rank}").touch()
        while not (ctx.paths.folder / "measured").exists():
            time.sleep(0.05)
        return total

    with quiet_config() as config:
        handle = nb.launch(train, config, processes=2, resume="never", display="off", wait=False)
        while not all((handle.paths.folder / f"read-{rank}").exists() for rank in range(2)):
            assert not handle.done()
            time.sleep(0.05)
        total = pss()
        (handle.paths.folder / "measured").touch()
        handle.result()
    return total


def figures() -> list[Figure]:
    base = in_fresh_process("tests.bench.memory", "nothing")
    found = []
    for kind in ("array", "tensor", "dataset"):
        more = (in_fresh_process("tests.bench.memory", kind) - base) / 1e9
        found.append(Figure(f"captured 1 GB {kind}: more than without it", more, "GB", 2.3, 2.3))
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
