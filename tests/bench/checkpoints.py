"""Writing and reading a checkpoint, over torch's own functions."""

from __future__ import annotations

import json
from collections.abc import Callable

import nbtoolkit as nb
from tests.bench.figures import Figure, in_fresh_process, quiet_config
from tests.bench.peers import take_turns

MEGABYTES = (1, 16, 128)
PLAIN = {"write": "torch.save, not synced", "read": "torch.load"}


def checkpoint(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    """Median seconds to write and to read ``data.megabytes``, with ctx and with torch."""
    import torch

    state = {"weights": torch.rand(config.data.megabytes * 250_000)}
    file = ctx.paths.folder / "plain.pt"
    ctx.save(state)
    torch.save(state, file)
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: ctx.save(state),
        PLAIN["write"]: lambda: torch.save(state, file),
        "read": ctx.load,
        PLAIN["read"]: lambda: torch.load(file, weights_only=True),
    }
    return take_turns(calls, 3)


def measure(megabytes: int) -> dict[str, float]:
    """What :func:`checkpoint` returns, in a launch of one rank."""
    with quiet_config(**{"data.megabytes": megabytes}) as config:
        run = nb.launch(checkpoint, config, processes=1, resume="never", display="off")
        value: dict[str, float] = run.value
    return value


def figures() -> list[Figure]:
    rows = []
    for size, found in in_fresh_process("tests.bench.checkpoints").items():
        for verb, plain in PLAIN.items():
            rows.append(Figure(f"{verb} a checkpoint of {size} MB", found[verb] * 1e3, "ms"))
            rows.append(Figure(f"the same, over {plain}", found[verb] / found[plain], "x"))
    return rows


if __name__ == "__main__":
    print(json.dumps({size: measure(size) for size in MEGABYTES}))
