"""Each integration over its framework alone: the same training, on one rank, in pairs.

    python -m tests.bench.integrations lightning

Both trainings of a pair run in one rank, one after the other, and write a checkpoint after each
epoch; which of them comes first alternates. A framework that is not installed is left out. On a
machine in use, the ratio of CPU times is exact, and that of the clock is not.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbtoolkit as nb
from tests.bench.figures import Figure, in_fresh_process, median, quiet_config

PAIRS = 21
EPOCHS = 2
BATCHES = 300
BATCH = 64
WIDTH = 256


def numbers() -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn(BATCH * BATCHES, WIDTH, generator=generator), torch.zeros(BATCH * BATCHES, 1)


def mlp() -> Any:
    import torch

    layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1)
    return torch.nn.Sequential(*layers)


Taken = tuple[float, float]
"""Seconds of the clock, and of the CPU."""


def lightning(ctx: Any, ours: bool, folder: Path) -> Taken:
    """The time of a training, with the integration or alone; alone it saves below ``folder``."""
    import lightning
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    from nbtoolkit.integrations import lightning as nbl

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    own = {"max_epochs": EPOCHS, "enable_model_summary": False}
    if ours:
        trainer = lightning.Trainer(**nbl.trainer_arguments(ctx, **own))
    else:
        own |= {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(callbacks=[ModelCheckpoint(folder)], **own)
    data = torch.utils.data.TensorDataset(*numbers())
    return timed(lambda: trainer.fit(Module(), torch.utils.data.DataLoader(data, BATCH)))


def transformers(ctx: Any, ours: bool, folder: Path) -> Taken:
    import torch
    from transformers import Trainer, TrainingArguments

    from nbtoolkit.integrations import transformers as nbt

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            return {"loss": torch.nn.functional.mse_loss(self.model(x), labels)}

    own = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH,
        "logging_steps": 50,
        "save_strategy": "epoch",
        "save_total_limit": 2,
        "disable_tqdm": True,
    }
    if ours:
        arguments = nbt.training_arguments(ctx, gradient_accumulation_steps=1, **own)
    else:
        arguments = TrainingArguments(str(folder), use_cpu=True, report_to="none", **own)
    rows = [{"x": x, "labels": y} for x, y in zip(*numbers(), strict=True)]
    trainer = Trainer(Model(), arguments, train_dataset=rows)
    return timed(trainer.train)


def keras(ctx: Any, ours: bool, folder: Path) -> Taken:
    from nbtoolkit.integrations import keras as nbk

    return keras_fit(nbk.callback(ctx) if ours else None, folder)


def tensorflow(ctx: Any, ours: bool, folder: Path) -> Taken:
    from nbtoolkit.integrations import keras as nbk

    # Also alone: TensorFlow's threads are set once in a process.
    with nbk.strategy(ctx).scope():
        return keras_fit(nbk.callback(ctx) if ours else None, folder)


def keras_fit(callback: Any, folder: Path) -> Taken:
    """A training of Keras with its own callback that saves, or with this one."""
    import keras

    layers = keras.layers.Dense(WIDTH, activation="relu"), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile(loss="mse", optimizer="sgd")
    callbacks = [callback or keras.callbacks.BackupAndRestore(folder)]
    x, y = (part.numpy() for part in numbers())
    fit = {"batch_size": BATCH, "epochs": EPOCHS, "verbose": 0, "shuffle": False}
    return timed(lambda: model.fit(x, y, callbacks=callbacks, **fit))


TRAININGS = {one.__name__: one for one in (lightning, transformers, keras, tensorflow)}


def timed(train: Callable[[], object]) -> Taken:
    start = time.perf_counter(), time.process_time()
    train()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def pairs(name: str) -> dict[str, float]:
    """The medians of the ratios with/alone."""
    os.environ["KERAS_BACKEND"] = "tensorflow" if name == "tensorflow" else "torch"
    run = TRAININGS[name]

    def train(config: nb.Config, ctx: nb.RunContext) -> list[Taken]:
        import torch

        torch.set_num_threads(1)  # threads of OpenMP wait for each other in a loop
        ratios = list[Taken]()
        for number in range(PAIRS + 1):
            with tempfile.TemporaryDirectory(dir=ctx.paths.folder) as folder:
                # A pair before this one has saved, and each begins anew.
                shutil.rmtree(ctx.paths.checkpoints, ignore_errors=True)
                order = (True, False) if number % 2 else (False, True)
                taken = {ours: run(ctx, ours, Path(folder)) for ours in order}
            clock, cpu = (
                ours / alone for ours, alone in zip(taken[True], taken[False], strict=True)
            )
            ratios.append((clock, cpu))
        return ratios[1:]  # the first pair imports and warms up

    with quiet_config() as config:
        ratios = nb.launch(train, config, processes=1, display="off").value
    clocks, cpus = zip(*ratios, strict=True)
    return {"seconds": median(list(clocks)), "CPU seconds": median(list(cpus))}


def figures() -> list[Figure]:
    found = [name for name in TRAININGS if find_spec(name) is not None]
    return [
        Figure(f"{name}: {of} with the integration over alone, one rank", value, "x", target=1.03)
        for name in found
        for of, value in in_fresh_process("tests.bench.integrations", name).items()
    ]


if __name__ == "__main__":
    print(json.dumps(pairs(sys.argv[1])))
