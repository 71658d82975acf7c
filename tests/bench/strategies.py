"""FSDP beside DDP on two ranks: memory of weights and optimizer, time of a step."""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import nbtoolkit as nb
from tests.bench.figures import Figure, in_fresh_process, median, quiet_config

STEPS, PAIRS, WIDTH, BLOCKS = 40, 3, 384, 6


def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    """Bytes of weights and optimizer state on this rank in the last step, and seconds of a step."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        for _ in range(BLOCKS)
    ]
    model = nn.Sequential(*layers)
    found: dict[str, float] = {}
    times: list[float] = []

    def local(tensor: Any) -> int:
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return int(own.numel() * own.element_size())

    class Measure(nb.Callback):
        def on_train_batch_end(self, state: Any) -> None:
            times.append(time.perf_counter())
            if state.step == STEPS:
                states = state.optimizer.state.values()
                moments = [moment for state_of_one in states for moment in state_of_one.values()]
                found["bytes"] = sum(local(one) for one in [*state.model.parameters(), *moments])

    data = torch.randn(32 * STEPS, WIDTH)
    nb.fit(
        ctx, config, model, (data, data), None, loss=nn.functional.mse_loss, callbacks=[Measure()]
    )
    gaps = [after - before for before, after in itertools.pairwise(times[5:])]
    return {**found, "seconds": median(gaps)}


def measure(strategy: str) -> dict[str, float]:
    """The values of a launch's rank that has the most."""
    settings = {
        "distributed.strategy": strategy,
        "train.batch_size": 32,
        "train.epochs": 1,
        "checkpoint.enabled": False,
    }
    with quiet_config(**settings) as config:
        values = nb.launch(train, config, processes=2, resume="never", display="off").values
    return {name: max(one[name] for one in values) for name in values[0]}


def figures() -> list[Figure]:
    kinds = ("fsdp", "ddp")
    runs = [
        {kind: in_fresh_process("tests.bench.strategies", kind) for kind in kinds}
        for _ in range(PAIRS)
    ]

    def ratio(kind: str, name: str) -> float:
        return median([run[kind][name] / run["ddp"][name] for run in runs])

    return [
        Figure("fsdp/ddp, 2 ranks: weights and optimizer", ratio("fsdp", "bytes"), "x", 0.6, 0.6),
        Figure("fsdp/ddp, 2 gloo ranks on CPUs: step", ratio("fsdp", "seconds"), "x"),
    ]


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
