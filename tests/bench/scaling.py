"""Weak scaling of ``nb.fit`` on two gloo ranks, over DDP by hand and over the loop without DDP.

    python -m tests.bench.scaling mlp|cnn [LAUNCHES]

All three train in turn in the ranks of one launch, one thread each, with 32 samples per rank and
step. Each launch has other settings of ``distributed``; the loss at the end is what they cost. With
a number of launches, all have the usual settings.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import nbtoolkit as nb
from tests.bench import peers
from tests.bench.figures import Figure, in_fresh_process, quiet_config

STEPS, ROUNDS = 300, 3
ALONE, OVER_DDP = "without DDP", "over DDP by hand"
SETTINGS: dict[str, dict[str, object]] = {
    "as it is": {},
    "bucket_cap_mb: 0.02": {"bucket_cap_mb": 0.02},
    "static_graph": {"static_graph": True},
    "compression: fp16": {"compression": "fp16"},
}


def compare(config: nb.Config, ctx: nb.RunContext) -> dict[str, dict[str, float]]:
    """Rates and final losses of the loops, in turn."""
    peers.TRAIN[ALONE] = _alone
    return peers.compare(config, ctx)


def _alone(work: Any) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    images, labels = work.data
    optimizer = torch.optim.SGD(work.model.parameters(), lr=peers.RATE)
    rows = torch.arange(len(images)).view(work.steps, work.ctx.world_size, peers.BATCH)
    for chosen in rows[:, work.ctx.rank]:
        loss = cross_entropy(work.model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def measure(kind: str, own: dict[str, object]) -> dict[str, float]:
    """Fit's rate over DDP's and over the loop's without DDP, its loss and waiting, in a launch."""
    settings = {
        **peers.PLAIN,
        **{f"distributed.{key}": value for key, value in own.items()},
        "data.peers": [ALONE, peers.INDEXED, peers.FIT],
        "data.rounds": ROUNDS,
        "model.kind": kind,
        "train.batch_size": 2 * peers.BATCH,
        "train.max_steps": STEPS,
        "train.epochs": 1,
    }
    with quiet_config(**settings) as config:
        run = nb.launch(compare, config, processes=2, resume="never", display="off")
        value, waiting = run.value, run.step_time.get("communication_share", 0.0)
    rates = {peer: one["rate"] for peer, one in value.items()}
    return {
        OVER_DDP: rates[peers.FIT] / rates[peers.INDEXED],
        "over the loop without DDP": rates[peers.FIT] / rates[ALONE],
        "final loss": value[peers.FIT]["loss"],
        "waiting for the other rank": waiting,
    }


def scaling(kind: str) -> dict[str, dict[str, float]]:
    """Settings -> what :func:`measure` returns."""
    return {name: measure(kind, own) for name, own in SETTINGS.items()}


def repeated(kind: str, launches: str) -> dict[str, float]:
    """Quartiles of fit's rate over DDP's, with the usual settings in many launches."""
    found = [measure(kind, {})[OVER_DDP] for _ in range(int(launches))]
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return {"low": low, "median": middle, "high": high}


def figures() -> list[Figure]:
    rows = []
    for kind in ("mlp", "cnn"):
        for name, values in in_fresh_process("tests.bench.scaling", kind).items():
            for what, value in values.items():
                unit = "" if what == "final loss" else "x"
                rows.append(Figure(f"fit, {kind.upper()}, {name}: {what}", value, unit))
    return rows


if __name__ == "__main__":
    call = repeated if len(sys.argv) > 2 else scaling
    print(json.dumps(call(*sys.argv[1:])))
