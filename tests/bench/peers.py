"""The same training by several libraries, in turn in the ranks of one launch.

    python -m tests.bench.peers

All take the same global batches in the same steps, from the same initial weights: the loss at the
end shows it. What is compared is the throughput, over that of DDP by hand.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import nbtoolkit as nb
from nbtoolkit.tasks.digits import load, make_model
from nbtoolkit.training.fit import fit
from tests.bench.figures import Figure, in_fresh_process, quiet_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Key = TypeVar("Key")

BATCH = 32
"""Samples of one rank per step."""
RATE = 0.05
_ROUNDS = 5

PLAIN: dict[str, object] = {
    "checkpoint.enabled": False,
    "optim.name": "sgd",
    "optim.lr": RATE,
    "optim.momentum": 0.0,
    "optim.weight_decay": 0.0,
    "optim.schedule": "constant",
    "optim.warmup_ratio": 0.0,
    "train.precision": "fp32",
}
"""The optimizer of a loop by hand, and no checkpoint."""


def take_turns(
    calls: Mapping[Key, Callable[[], object]], rounds: int = _ROUNDS
) -> dict[Key, float]:
    """Median of what calls return, or of their seconds; a slow moment of the machine hits all.

    The first round imports and warms up.
    """
    seen: dict[Key, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name in [*calls] if turn % 2 else reversed([*calls]):
            begin = time.perf_counter()
            value = calls[name]()
            seconds = time.perf_counter() - begin
            seen[name].append(value if isinstance(value, float) else seconds)
    return {name: statistics.median(values[1:]) for name, values in seen.items()}


def _wait_for(device: torch.device) -> None:
    """Wait until a GPU has done its work; the CPU has."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def compare(config: nb.Config, ctx: nb.RunContext) -> dict[str, dict[str, float]]:
    """Train the digits by each of ``data.peers`` in turn, ``data.rounds`` times.

    All take the same global batches in the same steps from the same initial weights, which the loss
    at the end shows. What is timed is the time between two forward passes, so that the start of a
    library counts for none of them.

    Returns:
        peer -> ``rate``: samples per second over all ranks, and ``loss``: of the trained model.
    """
    import torch

    torch.set_num_threads(1)
    place, losses = dict(os.environ), dict[str, float]()

    def train(name: str) -> float:
        os.environ.update(place)  # Lightning takes WORLD_SIZE away when it is done
        work = Work(config, ctx)
        ctx.accelerator.wait_for_everyone()
        TRAIN[name](work)
        losses[name] = work.loss()
        return work.samples_per_second()

    calls = {name: partial(train, name) for name in config.data.peers}
    rates = take_turns(calls, config.data.rounds)
    return {name: {"rate": rate, "loss": losses[name]} for name, rate in rates.items()}


class Work:
    """A training of ``train.max_steps`` global batches of the digits, in their order.

    Attributes:
        model: on the device, with the same weights each time; it notes when its forward passes
            began.
        criterion: the loss.
        data: as many samples as the steps take.
    """

    def __init__(self, config: nb.Config, ctx: nb.RunContext) -> None:
        import torch
        from torch.nn.functional import cross_entropy

        self.config, self.ctx, self.steps = config, ctx, config.train.max_steps or 1
        self.criterion = cross_entropy
        torch.manual_seed(0)
        self.model: nn.Module = make_model(config).to(ctx.device)
        self.model.register_forward_pre_hook(self._watch)
        images, labels = load()
        rows = torch.arange(self.steps * BATCH * ctx.world_size) % len(images)
        self.data: tuple[Tensor, Tensor] = images[rows], labels[rows]
        self._count, self._marks = 0, {self.steps // 4: 0.0, self.steps - 1: 0.0}

    def _watch(self, *_: object) -> None:
        if self._count in self._marks:
            _wait_for(self.ctx.device)
            self._marks[self._count] = time.perf_counter()
        self._count += 1

    def samples_per_second(self) -> float:
        """Throughput of all ranks from a quarter of the steps on."""
        (first, begin), (last, end) = self._marks.items()
        return (last - first) * BATCH * self.ctx.world_size / (end - begin)

    def loss(self) -> float:
        """Loss of the trained model on the first samples: equal trainings have an equal one."""
        import torch

        images, labels = (part[:512].to(self.ctx.device) for part in load())
        with torch.no_grad():
            return float(self.criterion(self.model(images), labels))

    def loader(self, *, whole: bool = False) -> Any:
        """A DataLoader of this rank's samples in their order, or of all."""
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

        data, ranks = TensorDataset(*self.data), self.ctx.world_size
        sampler: Any = DistributedSampler(data, ranks, self.ctx.rank, shuffle=False)
        return DataLoader(data, BATCH, sampler=None if whole else sampler)

    def by_hand(self, batches: Iterable[Any]) -> None:
        """The loop of torch's tutorial, with DDP if there are several ranks."""
        from torch.nn.parallel import DistributedDataParallel

        model = self.model if self.ctx.world_size == 1 else DistributedDataParallel(self.model)
        placed = ([part.to(self.ctx.device) for part in batch] for batch in batches)
        self.loop(model, sgd(self.model), placed, lambda loss: loss.backward())

    def loop(
        self, model: Any, optimizer: Any, batches: Iterable[Any], backward: Callable[[Any], Any]
    ) -> None:
        """Train with batches that are on the device."""
        for images, labels in batches:
            loss = self.criterion(model(images), labels)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all trainings."""
    import torch

    return torch.optim.SGD(model.parameters(), lr=RATE)


def _loader(work: Work) -> None:
    work.by_hand(work.loader())


def _indexed(work: Work) -> None:
    import torch

    images, labels = work.data
    rows = torch.arange(len(images)).view(work.steps, work.ctx.world_size, BATCH)[:, work.ctx.rank]
    work.by_hand([images[chosen], labels[chosen]] for chosen in rows)


def _fit(work: Work) -> None:
    order = range(len(work.data[0]))
    fit(work.ctx, work.config, work.model, work.data, None, loss=work.criterion, sampler=order)


def _accelerate(work: Work) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=work.ctx.device.type == "cpu")
    parts = work.model, sgd(work.model), work.loader(whole=True)
    ddp, optimizer, loader = accelerator.prepare(*parts)
    work.loop(ddp, optimizer, loader, accelerator.backward)


def _lightning(work: Work) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.model

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return work.criterion(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    quiet: dict[str, Any] = dict.fromkeys(
        ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False
    )
    # With a sampler of its own it would shuffle.
    trainer = lightning.Trainer(
        strategy="ddp", max_epochs=1, accelerator=work.ctx.device.type,
        devices=work.ctx.world_size, default_root_dir=work.ctx.paths.folder, **quiet,
    )  # fmt: skip
    trainer.fit(Module(), work.loader())


def _transformers(work: Work) -> None:
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: object) -> SequentialSampler:
            return SequentialSampler(rows)

        def compute_loss(self, model: Any, inputs: Any, *_: object, **__: object) -> Tensor:
            return work.criterion(model(inputs["x"]), inputs["labels"])

    cpu = work.ctx.device.type == "cpu"
    given: dict[str, Any] = {
        "per_device_train_batch_size": BATCH, "num_train_epochs": 1, "max_grad_norm": 0.0,
        "optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant",
        "save_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "use_cpu": cpu, "dataloader_pin_memory": not cpu, "ddp_find_unused_parameters": False,
        "remove_unused_columns": False,
    }  # fmt: skip
    arguments = TrainingArguments(str(work.ctx.paths.folder / "transformers"), **given)
    rows = [{"x": image, "labels": label} for image, label in zip(*work.data, strict=True)]
    InOrder(work.model, arguments, train_dataset=rows).train()


DDP, INDEXED, FIT = "hand-written DDP", "hand-written DDP, indexed tensors", "nb.fit"

TRAIN: dict[str, Callable[[Work], None]] = {
    DDP: _loader,
    INDEXED: _indexed,
    FIT: _fit,
    "accelerate": _accelerate,
    "Lightning": _lightning,
    "Hugging Face Trainer": _transformers,
}
"""Ways to train. ``DDP`` is the loop of torch's tutorial with a DataLoader; ``INDEXED``
takes its batches from the tensors by index, as fit does."""


PACKAGES = {
    "accelerate": "accelerate",
    "Lightning": "lightning",
    "Hugging Face Trainer": "transformers",
}
"""Ways to train -> the package that each needs."""


def measure(kind: str) -> dict[str, dict[str, float]]:
    """Rates and final losses of all installed peers on two ranks.

    Raises:
        RuntimeError: they did not do the same work, or learned nothing.
    """
    absent = {name for name, package in PACKAGES.items() if not find_spec(package)}
    settings = {
        **PLAIN,
        "data.peers": [name for name in TRAIN if name not in absent],
        "data.rounds": 3,
        "model.kind": kind,
        "train.batch_size": 2 * BATCH,
        "train.max_steps": 200,
        "train.epochs": 1,
    }
    with quiet_config(**settings) as config:
        run = nb.launch(compare, config, processes=2, resume="never", display="off")
        found: dict[str, dict[str, float]] = run.value
    losses = [peer["loss"] for peer in found.values()]
    # 200 steps must have trained something: ten classes by chance have a loss of 2.3.
    if max(losses) - min(losses) > 0.01 or max(losses) > 1.5:
        raise RuntimeError(f"the peers did not do the same work: {found}")
    return found


def figures() -> list[Figure]:
    rows = []
    for kind, found in in_fresh_process("tests.bench.peers").items():
        for name, peer in found.items():
            over = peer["rate"] / found[DDP]["rate"]
            rows.append(Figure(f"digits {kind.upper()}, 2 ranks: {name}, over {DDP}", over, "x"))
    return rows


if __name__ == "__main__":
    print(json.dumps({kind: measure(kind) for kind in ("mlp", "cnn")}))
