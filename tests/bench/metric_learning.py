"""Metric learning on two ranks: memory of gathered embeddings, and speed of the contrastive loss.

The two loops of the second figure have the same encoder under DDP and the same samples, and take
turns in the same ranks. They differ in the negatives: of the rank, or gathered from both ranks.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import nbtoolkit as nb
from tests.bench.figures import Figure, in_fresh_process, median, quiet_config

ROWS, WIDTH = 100_000, 512
ROUNDS, STEPS, BATCH = 7, 20, 128


def kilobytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{name}:\s+(\d+)", status)[0])


def gathers(config: Any, ctx: Any) -> float:
    """The peak of this rank's memory while it gathers, less what it had before, in full copies."""
    import torch
    from torch.utils.data import TensorDataset

    from nbtoolkit.extras.metric_learning.retrieval import gather_embeddings

    numbers, labels = torch.arange(float(ROWS))[:, None], torch.arange(ROWS)
    model = torch.nn.Linear(1, WIDTH)

    def step(model: Any, batch: Any) -> tuple[Any, Any]:
        return model(batch[0]), batch[1]

    gather_embeddings(ctx, model, TensorDataset(numbers[:1], labels[:1]), step=step)  # imports
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = kilobytes("VmRSS")
    result = gather_embeddings(ctx, model, TensorDataset(numbers, labels), step=step)
    assert (result is not None) == ctx.is_main
    return (kilobytes("VmHWM") - before) * 1024 / (ROWS * WIDTH * 4)


def encoder() -> Any:
    """A small CNN on images of 32 x 32 pixels."""
    from torch import nn

    layers: list[nn.Module] = []
    for channels, more in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(channels, more, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 128))


def trains(config: Any, ctx: Any) -> list[float]:
    """Throughput with the gathered loss / without, in pairs of rounds."""
    import torch
    from pytorch_metric_learning.losses import SupConLoss
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    rows = BATCH // ctx.world_size
    images, labels = torch.randn(rows, 3, 32, 32), torch.arange(rows) % 16
    model = DistributedDataParallel(encoder().to(ctx.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = images.to(ctx.device), labels.to(ctx.device)

    contrast = SupConLoss()
    of_all_ranks = nb.all_rows(contrast)

    def seconds(gather: bool) -> float:
        torch.distributed.barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            loss = (of_all_ranks if gather else contrast)(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loss.item()  # a GPU may be behind
        return time.perf_counter() - start

    pairs = []
    for number in range(ROUNDS + 1):
        order = (True, False) if number % 2 else (False, True)
        times = {gather: seconds(gather) for gather in order}
        pairs.append(times[True] / times[False])
    return pairs[1:]  # the first round warms up


def scores() -> list[float]:
    """Accuracy of two stages, and of direct classification with as many epochs, for three seeds."""
    from nbtoolkit.extras.metric_learning import train

    found = []
    direct = {"stages": [2], "stage2.train.epochs": 30, "stage2.optim.lr": 3e-3}
    for seed in range(3):
        settings = {"model.stage1.train.epochs": 20, "model.stage2.train.epochs": 10, "seed": seed}
        with quiet_config(**settings, file="config/metric_learning.yaml") as config:
            one = config.with_overrides({f"model.{name}": value for name, value in direct.items()})
            for stages in (config, one):
                run = nb.launch(train, stages, processes=2, resume="never", display="off")
                found.append(run.value["val_accuracy"])
    return found


def measure(which: str) -> list[float]:
    if which == "scores":
        return scores()
    with quiet_config() as config:
        if which == "memory":
            return list(nb.launch(gathers, config, processes=2, display="off").values)
        return list(nb.launch(trains, config, processes=2, display="off").value)


def figures() -> list[Figure]:
    module, name = "tests.bench.metric_learning", f"gathering {ROWS:,} x {WIDTH} floats, 2 ranks"
    main, other = in_fresh_process(module, "memory")
    slower = median(in_fresh_process(module, "speed"))
    accuracy = in_fresh_process(module, "scores")
    both, direct = statistics.mean(accuracy[::2]), statistics.mean(accuracy[1::2])
    return [
        Figure(f"{name}: memory of the main rank", main, "copies", target=1.3, gate=1.3),
        Figure(f"{name}: memory of the other rank", other, "copies", target=0.2, gate=0.2),
        Figure("digits: error of two stages, 3 seeds", 1 - both, "", 0.03, gate=0.05),
        Figure("digits: direct accuracy less that of two stages", direct - both, "", 0.005, 0.02),
        # 0.9 of the throughput
        Figure("contrastive step of 2 ranks: gathered / own rows", slower, "x", 1.11, gate=1.25),
    ]


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
