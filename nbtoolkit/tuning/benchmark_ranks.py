"""What the ranks of a benchmark run, and the settings of all its runs."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.config.schema import measured
from nbtoolkit.run.checkpoint_store import has_checkpoint
from nbtoolkit.tasks.digits import load, make_model
from nbtoolkit.training.loop import fit

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.worker.context import RunContext

BATCH = 32
"""Samples of one rank per step."""
RATE = 0.05
_ROUNDS = 5

PLAIN: dict[str, object] = {
    "tracking.mlflow": False,
    "tracking.device_metrics": False,
    "runtime.deadline": None,
    "runtime.pack": False,
    "checkpoint.enabled": False,
    "optim.name": "sgd",
    "optim.lr": RATE,
    "optim.momentum": 0.0,
    "optim.weight_decay": 0.0,
    "optim.schedule": "constant",
    "optim.warmup_ratio": 0.0,
    "train.precision": "fp32",
}
"""Settings of all runs of a benchmark: the optimizer of a loop by hand, and nothing is written."""

PEERS: dict[str, str | None] = {
    "hand-written DDP": None,
    "hand-written DDP, indexed tensors": None,
    "nb.fit": None,
    "accelerate": "accelerate",
    "Lightning": "lightning",
    "Hugging Face Trainer": "transformers",
}
"""Ways to train -> the package that each needs; the others relate to the first one."""


def empty(config: Config, ctx: RunContext) -> int:
    """Return the rank: a launch that does nothing else."""
    return ctx.rank


def compare_steps(config: Config, ctx: RunContext) -> dict[str, float]:
    """Median seconds of a step by hand and by fit, in turn, on the same batches."""
    import torch
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)
    images, labels = load()
    number, order = config.train.max_steps or 1, torch.randperm(len(images))
    epoch = len(images) // BATCH * BATCH

    def by_hand() -> None:
        model = make_model(config).to(ctx.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for step in range(number):
            first = step * BATCH % epoch
            chosen = order[first : first + BATCH]
            inputs, targets = images[chosen].to(ctx.device), labels[chosen].to(ctx.device)
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        float(loss)  # a GPU may be behind

    def by_fit() -> None:
        data, rows = (images, labels), order[:epoch].tolist()
        fit(ctx, config, make_model(config), data, None, loss=cross_entropy, sampler=rows)

    loops: dict[str, Callable[[], None]] = {"loop by hand": by_hand, "nb.fit": by_fit}
    seen: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(_ROUNDS + 1):
        for name in loops if turn % 2 else reversed(loops):
            begin = time.perf_counter()
            loops[name]()
            seen[name].append((time.perf_counter() - begin) / number)
    return {name: statistics.median(values[1:]) for name, values in seen.items()}


def all_reduce(config: Config, ctx: RunContext) -> dict[str, list[float]]:
    """Median seconds of an all-reduce by back end, for each of ``data.sizes`` (bytes)."""
    import torch
    import torch.distributed as dist

    gpu, found = ctx.device.type == "cuda", dict[str, list[float]]()
    for backend in ["gloo", "nccl"] if gpu else ["gloo"]:
        group = dist.new_group(backend=backend)
        device = ctx.device if backend == "nccl" else torch.device("cpu")
        found[backend] = []
        for size in config.data.sizes:
            tensor = torch.zeros(size // 4, device=device)
            spent = []
            # From 50 of the smallest to 5 of the largest.
            for _ in range(2 + max(5, min(50, (1 << 26) // size))):
                dist.barrier(group)
                begin = time.perf_counter()
                dist.all_reduce(tensor, group=group)
                if gpu:
                    torch.cuda.synchronize()
                spent.append(time.perf_counter() - begin)
            found[backend].append(statistics.median(spent[2:]))
    return found


def memory_used(config: Config, ctx: RunContext) -> dict[str, float]:
    """Bytes of this rank: its own, and with those that it shares."""
    import psutil

    used = psutil.Process().memory_full_info()
    return {"uss": used.uss, "rss": used.rss}


def checkpoint(config: Config, ctx: RunContext) -> dict[str, float]:
    """Median seconds to write and to read ``data.megabytes``, with ctx and with torch."""
    import torch

    state = {"weights": torch.rand(config.data.megabytes * 250_000)}
    file = ctx.paths.folder / "plain.pt"
    calls: dict[str, Callable[[], Any]] = {
        "write": lambda: ctx.save(state),
        "torch write": lambda: torch.save(state, file),
        "read": ctx.load,
        "torch read": lambda: torch.load(file, weights_only=True),
    }
    seen: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(4):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            seen[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values[1:]) for name, values in seen.items()}


def trial(config: Config, ctx: RunContext) -> dict[str, float]:
    """A trial of ``data.seconds``, which writes down when it began and ended."""
    begin = time.time()
    time.sleep(config.data.seconds)
    with open(config.data.file, "a") as file:
        file.write(f"{begin} {time.time()}\n")
    return {"score": measured(config.optim.lr, "optim.lr")}


def killed(config: Config, ctx: RunContext) -> float:
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

    fit(ctx, config, make_model(config), load(), None, loss=cross_entropy, step=forward)
    return began
