"""Train the digits by hand, with ``nb.fit`` and with other frameworks, in the ranks of one group.

This module is a program of its own, which :mod:`nbtoolkit.tuning.benchmark` starts: it imports
torch, and its ranks are started by ``torch.multiprocessing``, not by nbtoolkit. All trainings take
the same global batches in the same steps from the same initial weights; the loss at the end shows
that. What is timed is the time between two forward passes, so that the start of a framework counts
for none of them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler, TensorDataset

from nbtoolkit.config.schema import Config, load_config
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.launcher.launch import launch
from nbtoolkit.run.transport import free_port
from nbtoolkit.tasks.digits import load, make_model
from nbtoolkit.training.loop import fit
from nbtoolkit.tuning.benchmark_ranks import BATCH, PEERS, PLAIN, RATE, empty

if TYPE_CHECKING:
    from nbtoolkit.worker.context import RunContext

RANKS = 2


# --- launch ---


def launches(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of a launch of an empty function: ours first and warm, and others, in turn."""
    from accelerate import notebook_launcher

    settings = {**PLAIN, "runtime.output_dir": str(folder)}
    config = load_config(env=None, overrides=settings)
    ours = partial(launch, empty, config, processes=RANKS, resume="never", display="off")
    found = {"nb.launch, first in a kernel": [_seconds(ours)]}
    slow = "torch.multiprocessing.spawn"
    others: dict[str, Callable[[], object]] = {
        "accelerate.notebook_launcher": lambda: notebook_launcher(
            _join_accelerate, num_processes=RANKS, use_port=str(free_port())
        ),
        "nb.launch, later": ours,
        slow: lambda: spawn(_join, (free_port(),), nprocs=RANKS),
    }
    for number in range(rounds):
        # A spawn takes seconds: it gets a third of the rounds.
        names = [name for name in others if name != slow or number % 3 == 0]
        for name in names if number % 2 else reversed(names):
            found.setdefault(name, []).append(_seconds(others[name]))
    return found


def _join_accelerate() -> None:
    from accelerate import PartialState

    PartialState()  # forms the process group, as a training function does first


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        call()
    return time.perf_counter() - begin


def _join(rank: int, port: int) -> torch.device:
    """Make this process a rank of a group."""
    os.environ.update(_variables(rank, port))
    device = torch.device("cpu")
    if detect_hardware().devices:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    return device


def _variables(rank: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    return {name: str(value) for name, value in place.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


# --- the same work for all ---


class Watched(nn.Module):
    """A model that notes when its forward passes began: at step ``warm``, and at the last one."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        super().__init__()
        self.model, self.count = model, 0
        self.marks = {steps // 4: 0.0, steps - 1: 0.0}

    def forward(self, inputs: Tensor) -> Tensor:
        """Call the model."""
        if self.count in self.marks:
            if inputs.is_cuda:
                torch.cuda.synchronize()
            self.marks[self.count] = time.perf_counter()
        self.count += 1
        outputs: Tensor = self.model(inputs)
        return outputs

    def samples_per_second(self) -> float:
        """Throughput of all ranks between the marks."""
        (first, begin), (last, end) = self.marks.items()
        return (last - first) * BATCH * RANKS / (end - begin)


@dataclass(frozen=True)
class Work:
    """A training: ``steps`` global batches of the digits, in their order."""

    kind: str
    steps: int
    rank: int
    device: torch.device
    folder: Path

    def model(self) -> Watched:
        """The model, with the same weights each time, on the device."""
        torch.manual_seed(0)
        config = load_config(env=None, overrides={"model.kind": self.kind})
        return Watched(make_model(config), self.steps).to(self.device)

    def data(self) -> TensorDataset:
        """As many samples as the steps take."""
        images, labels = load()
        rows = torch.arange(self.steps * BATCH * RANKS) % len(images)
        return TensorDataset(images[rows], labels[rows])

    def loss(self, model: Watched) -> float:
        """Loss of the trained model on the first samples: equal trainings have an equal one."""
        images, labels = (part[:512].to(self.device) for part in load())
        with torch.no_grad():
            return float(cross_entropy(model.model(images), labels))


def _by_hand(work: Work, model: Watched, batches: Iterator[list[Tensor]]) -> None:
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE)
    for batch in batches:
        images, labels = (part.to(work.device) for part in batch)
        loss = cross_entropy(ddp(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _loader(work: Work, model: Watched) -> None:
    """DDP as in torch's tutorial: a DataLoader with a DistributedSampler."""
    _by_hand(work, model, iter(_batches(work.data())))


def _batches(data: TensorDataset) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=False)
    return DataLoader(data, BATCH, sampler=sampler)


def _indexed(work: Work, model: Watched) -> None:
    """DDP with batches taken from the tensors by index, which is what fit does."""
    images, labels = work.data().tensors
    rows = torch.arange(len(images)).view(work.steps, RANKS, BATCH)[:, work.rank]
    _by_hand(work, model, ([images[chosen], labels[chosen]] for chosen in rows))


def _fit(work: Work, model: Watched) -> None:
    """Call fit in these ranks, which find the group as those of torchrun do."""
    data = work.data().tensors

    def train(config: Config, ctx: RunContext) -> None:
        fit(ctx, config, model, data, None, loss=cross_entropy, sampler=range(len(data[0])))

    settings = {"train.batch_size": BATCH * RANKS, "train.epochs": 1}
    folder = {"runtime.output_dir": str(work.folder)}
    config = load_config(env=None, overrides={**PLAIN, **settings, **folder})
    launch(train, config, resume="never", display="off")


def _accelerate(work: Work, model: Watched) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=work.device.type == "cpu")
    ddp, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=RATE), DataLoader(work.data(), BATCH)
    )
    for images, labels in loader:
        loss = cross_entropy(ddp(images), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()


def _lightning(work: Work, model: Watched) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    quiet: dict[str, Any] = dict.fromkeys(
        ("enable_checkpointing", "enable_progress_bar", "logger"), False
    )
    place: dict[str, Any] = {
        "accelerator": "cpu" if work.device.type == "cpu" else "cuda",
        "devices": RANKS,
    }
    trainer = lightning.Trainer(strategy="ddp", max_epochs=1, **place, **quiet)
    # With a sampler of its own it would shuffle.
    trainer.fit(Module(), _batches(work.data()))


def _transformers(work: Work, model: Watched) -> None:
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": cross_entropy(self.net(x), labels)}

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: object) -> SequentialSampler:
            return SequentialSampler(rows)

    cpu = work.device.type == "cpu"
    given: dict[str, Any] = {"lr_scheduler_type": "constant", "disable_tqdm": True}
    given |= {"optim": "sgd", "learning_rate": RATE, "max_grad_norm": 0.0, "num_train_epochs": 1}
    given |= {"save_strategy": "no", "logging_strategy": "no", "report_to": "none"}
    given |= {"use_cpu": cpu, "dataloader_pin_memory": not cpu, "ddp_find_unused_parameters": False}
    arguments = TrainingArguments(
        str(work.folder / "transformers"), per_device_train_batch_size=BATCH, **given
    )
    rows = [
        {"x": image, "labels": label} for image, label in zip(*work.data().tensors, strict=True)
    ]
    InOrder(Model(), arguments, train_dataset=rows).train()


_TRAIN: dict[str, Callable[[Work, Watched], None]] = {
    "hand-written DDP": _loader,
    "hand-written DDP, indexed tensors": _indexed,
    "nb.fit": _fit,
    "accelerate": _accelerate,
    "Lightning": _lightning,
    "Hugging Face Trainer": _transformers,
}


def compare(folder: Path, rounds: int, steps: int, kinds: list[str]) -> dict[str, Any]:
    """Train with all that are installed, in turn; samples per second and the final losses."""
    file = folder / "peers.json"
    arguments = (free_port(), folder, rounds, steps, kinds)
    spawn(_compare, arguments, nprocs=RANKS)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def _compare(rank: int, port: int, folder: Path, rounds: int, steps: int, kinds: list[str]) -> None:
    device = _join(rank, port)
    names = [name for name, package in PEERS.items() if not package or find_spec(package)]
    found: dict[str, Any] = {}
    for kind in kinds:
        rates: dict[str, list[float]] = {name: [] for name in names}
        losses: dict[str, float] = {}
        # The first round imports and warms up.
        for number in range(rounds + 1):
            for name in names if number % 2 else reversed(names):
                work = Work(kind, steps, rank, device, folder)
                model = work.model()
                # Lightning takes WORLD_SIZE away when it is done.
                os.environ.update(_variables(rank, port))
                dist.barrier()
                _TRAIN[name](work, model)
                rates[name].append(model.samples_per_second())
                losses[name] = work.loss(model)
        found[kind] = {name: {"rates": rates[name][1:], "loss": losses[name]} for name in names}
    if rank == 0:
        (folder / "peers.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main(call: str, folder: str, *numbers: str) -> None:
    """Write the answer to a call to ``answer.json`` in a folder."""
    place = Path(folder)
    if call == "launches":
        answer: object = launches(place, int(numbers[0]))
    else:
        answer = compare(place, int(numbers[0]), int(numbers[1]), numbers[2].split(","))
    (place / "answer.json").write_text(json.dumps(answer))
