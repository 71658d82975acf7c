"""nb.fit on one NVIDIA GPU compared with plain loops; checkpoint time, memory, launches."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import nbtoolkit as nb
from tests.bench.figures import Figure, in_fresh_process, median, quiet_config
from tests.bench.training import SMALL, compare, stall

ROUNDS = 5
STEPS = 150
BATCH = 256
BUSY = {
    **SMALL,
    "train.batch_size": BATCH,
    "train.max_steps": STEPS,
    "train.precision": "bf16",
    "checkpoint.enabled": False,
}


# A step takes less than a millisecond here, and writing 100 MB a few tenths of a second.
STALL = {
    **SMALL,
    "train.batch_size": 1,
    "train.max_steps": 7_000,
    "checkpoint.every_steps": 1_000,
    "tracking.log_every_n_steps": 1_000,
}
FEW = {**SMALL, "train.max_steps": 1_000}


def network() -> Any:
    """Convolutions of 256 channels over images of 3x32x32: the GPU is busy, the CPU is ahead."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers: list[Any] = [nn.Conv2d(3, 256, 3, padding=1), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Conv2d(256, 256, 3, padding=1), nn.BatchNorm2d(256), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def by_hand(images: Any, labels: Any, device: Any) -> tuple[float, float]:
    """Seconds a step, and the peak of memory in bytes, of the loop of PyTorch's AMP recipe."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = TensorDataset(images, labels)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True, pin_memory=True)
    torch.cuda.reset_peak_memory_stats()
    step, start = 0, time.perf_counter()
    while step < STEPS:
        for batch, targets in loader:
            if step == STEPS:
                break
            batch, targets = batch.to(device, non_blocking=True), targets.to(device)
            with torch.autocast("cuda", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    float(loss)
    return (time.perf_counter() - start) / STEPS, torch.cuda.max_memory_allocated()


def by_fit(config: nb.Config, ctx: nb.RunContext, images: Any, labels: Any) -> tuple[float, float]:
    """The same of nb.fit."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    loss = torch.nn.functional.cross_entropy
    nb.fit(ctx, config, network(), (images, labels), None, loss=loss)
    return (time.perf_counter() - start) / STEPS, torch.cuda.max_memory_allocated()


def busy(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    """Both loops in turn, in one process."""
    import torch

    images, labels = torch.randn(8 * BATCH, 3, 32, 32), torch.randint(10, (8 * BATCH,))
    by_hand(images, labels, ctx.device)  # cuDNN chooses its kernels
    seen: dict[str, list[float]] = {"hand": [], "fit": [], "hand_peak": [], "fit_peak": []}
    for _ in range(ROUNDS):
        torch.cuda.empty_cache()
        for name, found in (
            ("hand", by_hand(images, labels, ctx.device)),
            ("fit", by_fit(config, ctx, images, labels)),
        ):
            seen[name].append(found[0])
            seen[f"{name}_peak"].append(found[1])
    return {name: median(values) for name, values in seen.items()}


def nothing(config: nb.Config, ctx: nb.RunContext) -> str:
    """A tensor on the device: CUDA is started."""
    import torch

    return str(torch.ones(1, device=ctx.device).device)


def run(which: str) -> dict[str, float]:
    """One of the comparisons, in a rank on the GPU."""
    functions = {"small": (compare, FEW), "busy": (busy, BUSY), "stall": (stall, STALL)}
    function, sweep_config = functions[which]
    with quiet_config(**sweep_config) as config:
        result = nb.launch(function, config, processes=1, resume="never", display="off")
        assert result.plan.device_type == "cuda", result.plan.explain()
        return dict(result.value)


def launches() -> dict[str, float]:
    """Seconds of the first launch of a process, and of those after it."""
    seconds = []
    with quiet_config() as config:
        for _ in range(1 + ROUNDS):
            start = time.perf_counter()
            found = nb.launch(nothing, config, processes=1, resume="never", display="off")
            assert found.value == "cuda:0"
            seconds.append(time.perf_counter() - start)
    return {"first": seconds[0], "later": median(seconds[1:])}


def figures() -> list[Figure]:
    here = "tests.bench.gpu"
    small = in_fresh_process(here, "run", "small")
    big = in_fresh_process(here, "run", "busy")
    saving = in_fresh_process(here, "run", "stall")
    launched = in_fresh_process(here, "launches")
    return [
        Figure("fit's step on a GPU, MLP, against a loop", small["fit"] / small["hand"], "x", 1.15),
        Figure("the same, absolute", small["fit"] * 1e6, "us"),
        Figure("the loop, absolute", small["hand"] * 1e6, "us"),
        Figure(
            "both with validation after each epoch", small["fit_valid"] / small["hand_valid"], "x"
        ),
        Figure("fit's step on a busy GPU, bf16", big["fit"] / big["hand"], "x", 1.05),
        Figure("the same, absolute", big["fit"] * 1e3, "ms"),
        Figure(
            "its peak of memory against the loop's", big["fit_peak"] / big["hand_peak"], "x", 1.05
        ),
        Figure("stall of a 100 MB checkpoint on the GPU", saving["stall"] * 1e3, "ms"),
        Figure("the first launch on a GPU", launched["first"], "s"),
        Figure("a later one", launched["later"], "s"),
    ]


if __name__ == "__main__":
    call = globals()[sys.argv[1]]
    print(json.dumps(call(*sys.argv[2:])))
