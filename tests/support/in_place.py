"""A script whose processes are ranks: it launches one of its functions and prints the result.

torchrun --nproc-per-node=2 tests/support/in_place.py works '{"runtime.output_dir": "somewhere"}'
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import nbtoolkit as nb
from nbtoolkit.errors import NestedLaunch


def works(config: Any, ctx: Any) -> dict[str, Any]:
    import torch

    ctx.print("said by the main rank")
    ctx.log({"loss": 0.5}, step=1)
    path = ctx.save({"weight": 3.0}, step=1)
    ctx.report({"score": 10.0 + ctx.rank}, step=1)
    return {
        "rank": ctx.rank,
        "world_size": ctx.world_size,
        "device": str(ctx.device),
        "saved": path.exists(),
        "sum": ctx.accelerator.reduce(torch.ones(1) * (ctx.rank + 1)).item(),
        "nested": nested(),
    }


def nested() -> str:
    try:
        nb.launch(works)
    except NestedLaunch as error:
        return error.what
    return "a launch inside a rank went through"


def reports_for_ever(config: Any, ctx: Any) -> None:
    """Rank 0 is the slow one: a signal to another finds it waiting in a collective."""
    import torch

    total = ctx.accelerator.reduce(torch.ones(1) * (ctx.rank + 1)).item()
    step = 0
    while True:
        ctx.report({"step": step, "sum": total}, step=step)
        step += 1
        time.sleep(0.05 if ctx.rank == 0 else 0.0)


def hears_inside_an_epoch(config: Any, ctx: Any) -> None:
    """Steps without an end and without a report; saves before it leaves."""
    import torch
    import torch.distributed as dist

    ctx.report({"epoch": 0})
    while True:
        news = torch.tensor([ctx.stop_requested()], dtype=torch.int)
        dist.all_reduce(news)
        if news.item():
            status = ctx.should_stop()
            ctx.note_saved("last.pt", 7, "last")
            raise nb.RunStopped(status)
        time.sleep(0.01)


def fails_on_rank_1(config: Any, ctx: Any) -> None:
    import torch.distributed as dist

    if ctx.rank == 1:
        raise ValueError("rank 1 had enough")
    dist.barrier()


def trains_by_hand(config: Any, ctx: Any) -> None:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = ctx.prepare(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def ends_the_group(config: Any, ctx: Any) -> int:
    """As accelerate's examples do; rank 1 is late with its value."""
    ctx.accelerator.wait_for_everyone()
    ctx.accelerator.end_training()
    time.sleep(0.3 * ctx.rank)
    return int(ctx.rank)


def main(function: str, settings: str) -> None:
    before, events = dict(os.environ), []
    result = nb.launch(globals()[function], json.loads(settings), on_event=events.append)
    names = {*before, *os.environ}
    told = {
        "rank": int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))),
        "status": result.status,
        "values": result.values,
        "metrics": result.metrics,
        "folder": str(result.paths.folder),
        "events": [event.type for event in events],
        "left": sorted(name for name in names if before.get(name) != os.environ.get(name)),
    }
    line = f"TOLD {json.dumps(told)}\n"
    os.write(1, line.encode())  # in one piece: two ranks write at the same time


if __name__ == "__main__":
    main(*sys.argv[1:])
