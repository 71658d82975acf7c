"""A script for torchrun: in the first attempt rank 1 dies in step 5, alone or with its agent.

torchrun --nproc-per-node=2 --max-restarts=3 tests/support/restarted.py rank somewhere
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
from torch import nn

import nbtoolkit as nb


def train(config: Any, ctx: Any) -> dict[str, Any]:
    mark = ctx.paths.folder.parent / "died"

    class Die(nb.Callback):
        def on_train_batch_end(self, state: Any) -> None:
            if state.step == 5 and ctx.rank == 1 and not mark.exists():
                mark.touch()
                if config.model.dies == "agent":
                    os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
    data = x, x[:, :3].argmax(dim=1)
    callbacks = [Die()] if config.model.dies != "nobody" else []
    loss = nn.functional.cross_entropy
    values = nb.fit(ctx, config, model, data, data, loss=loss, callbacks=callbacks)
    return {**values, "world_size": ctx.world_size}


def main(dies: str, folder: str) -> None:
    settings = {
        "runtime.output_dir": folder,
        "tracking.mlflow": False,
        "model.dies": dies,
        "train.batch_size": 12,
        "train.epochs": 3,
        "checkpoint.every_steps": 2,
    }
    result = nb.launch(train, settings)
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    told = {"rank": os.environ.get("RANK"), "restarts": restarts, "value": result.value}
    os.write(1, f"TOLD {json.dumps(told)}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
