"""A script for horovodrun: it launches one of its functions and prints each rank's result.

horovodrun -np 2 python tests/support/horovod_ranks.py own_loop '{"runtime.output_dir": "here"}'
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import nbtoolkit as nb
from nbtoolkit.tasks.digits import load


def parts(ctx: Any) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    """A model of other weights on each rank, its optimizer, and every second sample."""
    images, labels = load()
    torch.manual_seed(ctx.rank)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mine = slice(ctx.rank, 1792, ctx.world_size)
    return model, optimizer, images[mine], labels[mine]


def trained(ctx: Any, model: Any, optimizer: Any, images: Any, labels: Any) -> dict[str, Any]:
    for _ in range(2):
        for at in range(0, len(images), 16):
            loss = cross_entropy(model(images[at : at + 16]), labels[at : at + 16])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).double().mean()
    weights = torch.cat([one.detach().flatten() for one in model.parameters()])
    return {"weights": weights.double().sum().item(), "own_accuracy": right.item()}


def own_loop(config: Any, ctx: Any) -> dict[str, Any]:
    from nbtoolkit.integrations import horovod as nbh

    model, optimizer, images, labels = parts(ctx)
    model, optimizer = nbh.prepare(ctx, model, optimizer)
    result = trained(ctx, model, optimizer, images, labels)
    result["mean"] = nbh.metric_average(ctx, result["own_accuracy"], "accuracy")
    ctx.report({"accuracy": result["mean"]})
    return result


def own_loop_by_ddp(config: Any, ctx: Any) -> dict[str, Any]:
    model, optimizer, images, labels = parts(ctx)
    model, optimizer = ctx.prepare(model, optimizer)
    result = trained(ctx, model, optimizer, images, labels)
    every = torch.tensor(result["own_accuracy"], dtype=torch.float64)
    result["mean"] = ctx.accelerator.reduce(every, "mean").item()
    return result


def by_fit(config: Any, ctx: Any) -> dict[str, float]:
    from nbtoolkit.tasks.digits import train

    return train(config, ctx)


def dies(config: Any, ctx: Any) -> None:
    if ctx.rank == 1:
        os._exit(3)
    ctx.accelerator.wait_for_everyone()


def main(function: str, settings: str) -> None:
    result = nb.launch(globals()[function], json.loads(settings))
    told = {"rank": int(os.environ["HOROVOD_RANK"]), "values": result.values}
    told["folder"], told["metrics"] = str(result.paths.folder), dict(result.metrics)
    os.write(1, f"TOLD {json.dumps(told)}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
