"""The training loop compared with plain loops: step, checkpoint time, memory, resume."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import nbtoolkit as nb
from tests.bench.figures import Figure, in_fresh_process, median, quiet_config

ROUNDS = 5
STEPS = 6_000
BATCH = 32
SMALL = {
    "optim.name": "sgd",
    "optim.lr": 0.05,
    "optim.momentum": 0.0,
    "optim.weight_decay": 0.0,
    "optim.schedule": "constant",
    "optim.warmup_ratio": 0.0,
    "train.batch_size": BATCH,
    "train.epochs": 10_000,
    "train.max_steps": STEPS,
}


def mlp() -> Any:
    """The digits' MLP: 64-256-10."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))


def digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Training and validation part."""
    from nbtoolkit.tasks.digits import load

    images, labels = load()
    return (images[360:], labels[360:]), (images[:360], labels[:360])


def by_hand(
    train: Any, valid: Any, model: Any, rows: Callable[[int], Any], device: Any, steps: int
) -> float:
    """Seconds a step of the loop one would write; `rows(step)` are a step's samples.

    It keeps and logs nothing; with `valid` it looks at loss and accuracy after each epoch.
    """
    import torch

    (images, labels), epoch = train, len(train[0]) // BATCH + 1
    valid = valid and [part.to(device) for part in valid]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    start = time.perf_counter()
    for step in range(steps):
        chosen = rows(step)
        inputs, targets = images[chosen].to(device), labels[chosen].to(device)
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if valid is not None and (step + 1) % epoch == 0:
            validate(model, *valid)
    float(loss)  # a GPU may be behind
    return (time.perf_counter() - start) / steps


def validate(model: Any, images: Any, labels: Any) -> tuple[float, float]:
    """Loss and accuracy, as one would write it; under DDP every rank looks at all samples."""
    import torch

    model.eval()
    with torch.no_grad():
        outputs = getattr(model, "module", model)(images)
        loss = torch.nn.functional.cross_entropy(outputs, labels)
        accuracy = (outputs.argmax(1) == labels).float().mean()
    model.train()
    return loss.item(), accuracy.item()


def by_fit(config: nb.Config, ctx: nb.RunContext, train: Any, valid: Any) -> float:
    """Seconds a step of nb.fit: logging, metrics, position and checkpoints included."""
    import torch

    model = mlp()
    start = time.perf_counter()
    nb.fit(
        ctx, config, model, train, valid,
        loss=torch.nn.functional.cross_entropy, metrics=["accuracy"] if valid else None,
    )  # fmt: skip
    return (time.perf_counter() - start) / config.train.max_steps


def compare(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    """Both loops in turn, in the same ranks: a slow moment of the machine hits both."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    (train, valid), steps = digits(), config.train.max_steps
    mine = BATCH // ctx.world_size
    order = torch.cat([torch.randperm(1437)[:1408] for _ in range(140)])

    def rows(step: int) -> Any:
        start = step * BATCH + ctx.rank * mine
        return order[start : start + mine]

    def plain() -> Any:
        model = mlp().to(ctx.device)
        return model if ctx.world_size == 1 else DistributedDataParallel(model)

    seen: dict[str, list[float]] = {"hand": [], "fit": [], "hand_valid": [], "fit_valid": []}
    for _ in range(ROUNDS):
        seen["hand"].append(by_hand(train, None, plain(), rows, ctx.device, steps))
        seen["fit"].append(by_fit(config, ctx, train, None))
        seen["hand_valid"].append(by_hand(train, valid, plain(), rows, ctx.device, steps))
        seen["fit_valid"].append(by_fit(config, ctx, train, valid))
    return {name: median(seconds) for name, seconds in seen.items()}


def steps(processes: int) -> dict[str, float]:
    """Medians of a step's seconds."""
    with quiet_config(**SMALL) as config:
        found = nb.launch(compare, config, processes=processes, resume="never", display="off").value
    return dict(found)


def inputs_compared(config: nb.Config, ctx: nb.RunContext) -> list[float]:
    """Pairs in turn: fit with an optimizer object, callbacks and sample weights, over without."""
    import torch

    torch.set_num_threads(1)
    (train, valid), cross_entropy = digits(), torch.nn.functional.cross_entropy
    weights = torch.rand(len(train[0]), generator=torch.Generator().manual_seed(0)) + 0.5

    class Best(nb.Callback):
        best = 0.0

        def on_validation_end(self, state: nb.FitState) -> dict[str, float]:
            self.best = max(self.best, state.metrics["val_accuracy"])
            return {"best_accuracy": self.best}

        def state_dict(self) -> dict[str, Any]:
            return {"best": self.best}

    def seconds(**given: Any) -> float:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
        own = {"optimizer": optimizer, **given} if given else {}
        start = time.perf_counter()
        nb.fit(
            ctx, config, model, train, valid, loss=cross_entropy, metrics=["accuracy"], **own
        )  # fmt: skip
        return time.perf_counter() - start

    seconds()
    given = {"sample_weights": weights, "callbacks": [Best(), nb.Callback()]}
    return [seconds(**given) / seconds() for _ in range(2 * ROUNDS)]


def inputs() -> dict[str, float]:
    """The median ratio of fit with a user's own parts, over fit without."""
    with quiet_config(**{**SMALL, "train.max_steps": STEPS // 2}) as config:
        ratios = nb.launch(
            inputs_compared, config, processes=1, resume="never", display="off"
        ).value
    return {"ratio": median(ratios)}


def stall(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    """How much later the forward pass after a checkpoint of 100 MB comes, and a plain copy."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Linear(5_000, 5_000, bias=False)  # 100 MB
    moments: list[float] = []

    def forward(model: Any, batch: Any) -> tuple[Any, Any]:
        moments.append(time.perf_counter())
        return model.weight[0, :1] * batch[0], batch[0]

    data = torch.randn(400, 1)
    nb.fit(ctx, config, model, (data, data), None, loss=torch.nn.functional.mse_loss, step=forward)
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    every = config.checkpoint.every_steps
    saving = gaps[every - 1 :: every][1:]  # the first one makes the memory for the copies
    others = [gap for number, gap in enumerate(gaps, start=1) if number % every]
    copies = []
    for _ in range(ROUNDS):
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        start = time.perf_counter()
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        copies.append(time.perf_counter() - start)
        del state
    return {
        "stall": median(saving) - median(others),
        "step": median(others),
        "copy": median(copies),
        "saves": len(saving),
    }


def checkpoint_stall() -> dict[str, float]:
    """Seconds of the stall and of the copy."""
    sweep_config = {
        **SMALL,
        "train.batch_size": 1,
        "train.max_steps": 350,
        "checkpoint.every_steps": 50,
        "tracking.log_every_n_steps": 50,
    }
    with quiet_config(**sweep_config) as config:
        return dict(nb.launch(stall, config, processes=1, resume="never", display="off").value)


def growth(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
    """Resident memory after a tenth of the steps, and at the end, in MB."""
    import torch

    from nbtoolkit.training.sync import memory_used

    torch.set_num_threads(1)
    train, valid = digits()
    seen: list[float] = []
    count = 0

    def forward(model: Any, batch: Any) -> tuple[Any, Any]:
        nonlocal count
        count += model.training
        if count in (1_000, 9_999) and model.training:
            seen.append(memory_used(ctx) * 1e3)
        return model(batch[0]), batch[1]

    nb.fit(
        ctx, config, mlp(), train, valid,
        loss=torch.nn.functional.cross_entropy, metrics=["accuracy"], step=forward,
    )  # fmt: skip
    return {"early": seen[0], "late": seen[1]}


def memory_growth() -> dict[str, float]:
    """MB over 10,000 steps and 100 checkpoints."""
    sweep_config = {**SMALL, "train.max_steps": 10_000, "checkpoint.every_steps": 100}
    with quiet_config(**sweep_config) as config:
        return dict(nb.launch(growth, config, processes=1, resume="never", display="off").value)


def large_epoch(config: nb.Config, ctx: nb.RunContext) -> float:
    """Seconds to the first batch; the first attempt is killed behind 90% of the epoch."""
    import torch

    from nbtoolkit.run.checkpoints.checkpoint_store import has_checkpoint

    start = time.perf_counter()
    first = 0.0
    data = torch.zeros(1_000_000, 4)
    count = 0

    def forward(model: Any, batch: Any) -> tuple[Any, Any]:
        nonlocal first, count
        first = first or time.perf_counter() - start
        count += 1
        if count == 910:  # of 1,000: killed when the checkpoint of step 900 is there
            while not has_checkpoint(ctx.paths.checkpoints):
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch), batch[:, :1]

    nb.fit(
        ctx, config, torch.nn.Linear(4, 1), data, None,
        loss=torch.nn.functional.mse_loss, step=forward,
    )  # fmt: skip
    return first


def resume_seconds() -> dict[str, float]:
    """From the rank's call of the function to its first batch, at 90% of 1,000,000 samples."""
    found = []
    for _ in range(ROUNDS):
        sweep_config = {
            **SMALL,
            "train.batch_size": 1_000,
            "train.epochs": 1,
            "train.max_steps": 1_000,
        }
        with quiet_config(**sweep_config, **{"checkpoint.every_steps": 900}) as config:
            try:
                nb.launch(large_epoch, config, processes=1, display="off")
            except nb.errors.WorkerDied:
                found.append(nb.launch(large_epoch, config, processes=1, display="off").value)
    return {"first_batch": median(found)}


def figures() -> list[Figure]:
    one = in_fresh_process("tests.bench.training", "steps", "1")
    two = in_fresh_process("tests.bench.training", "steps", "2")
    saving = in_fresh_process("tests.bench.training", "checkpoint_stall")
    memory = in_fresh_process("tests.bench.training", "memory_growth")
    resumed = in_fresh_process("tests.bench.training", "resume_seconds")
    own_parts = in_fresh_process("tests.bench.training", "inputs")
    stalled = saving["stall"] / saving["copy"]
    grown = memory["late"] - memory["early"]
    return [
        Figure("fit's step against a hand-indexed loop", one["fit"] / one["hand"], "x", 1.15, 1.3),
        Figure("the same, absolute", one["fit"] * 1e6, "us"),
        Figure(
            "both with validation after each epoch",
            one["fit_valid"] / one["hand_valid"],
            "x",
            1.15,
            1.3,
        ),
        Figure(
            "fit's step, 2 ranks, against DDP by hand", two["fit"] / two["hand"], "x", 1.05, 1.2
        ),
        Figure("the same, absolute", two["fit"] * 1e6, "us"),
        Figure(
            "fit with an optimizer object, callbacks and sample weights, over fit without",
            own_parts["ratio"],
            "x",
            1.03,
            1.1,
        ),
        Figure("stall of a 100 MB checkpoint against a copy of it", stalled, "x", 1.5, 2.5),
        Figure("the copy, absolute", saving["copy"] * 1e3, "ms"),
        Figure("memory: 10,000 steps, 100 checkpoints, over 1,000 steps", grown, "MB", 5.0, 20.0),
        Figure("first batch at 90% of 1,000,000 samples", resumed["first_batch"], "s", 1.0, 2.0),
    ]


if __name__ == "__main__":
    call = globals()[sys.argv[1]]
    print(json.dumps(call(*map(int, sys.argv[2:]))))
