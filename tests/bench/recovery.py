"""From the SIGKILL of a rank to the exception in the kernel, and to the first resumed step."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbtoolkit as nb
from nbtoolkit.errors import WorkerDied
from nbtoolkit.run.checkpoints.checkpoint_store import has_checkpoint
from nbtoolkit.tasks.digits import load, make_model
from tests.bench.figures import Figure, in_fresh_process, quiet_config

SETTINGS = {"checkpoint.every_steps": 20, "train.epochs": 4, "train.batch_size": 64}


def killed(config: nb.Config, ctx: nb.RunContext) -> float:
    """Train; the last rank kills itself once. Returns when the first step began."""
    from torch.nn.functional import cross_entropy

    mark, began = Path(config.data.file), 0.0
    resumed, victim = mark.exists(), ctx.rank == ctx.world_size - 1

    def forward(model: Any, batch: Any) -> tuple[Any, Any]:
        nonlocal began
        began = began or time.time()
        if victim and not resumed and has_checkpoint(ctx.paths.checkpoints):
            mark.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch[0]), batch[1]

    nb.fit(ctx, config, make_model(config), load(), None, loss=cross_entropy, step=forward)
    return began


def measure() -> dict[str, float]:
    """Seconds of both, on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "killed.txt"
        with quiet_config(**SETTINGS, **{"data.file": str(file)}) as config:
            with suppress(WorkerDied):
                nb.launch(killed, config, processes=2, display="off")
            raised, at = time.time(), float(file.read_text())
            first = nb.launch(killed, config, processes=2, display="off").value
    return {"raised": raised - at, "resumed": first - at}


def figures() -> list[Figure]:
    found = in_fresh_process("tests.bench.recovery")
    return [
        Figure("SIGKILL of a rank to the exception in the kernel", found["raised"], "s"),
        Figure("SIGKILL to the first resumed step of a new launch", found["resumed"], "s"),
    ]


if __name__ == "__main__":
    print(json.dumps(measure()))
