"""What the ranks of a benchmark run."""

from __future__ import annotations

import io
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nbtoolkit.config.schema import Config, load_config
from nbtoolkit.environment.variables import RANK_MARK, without_stale
from nbtoolkit.errors import TuningError
from nbtoolkit.launcher.launch import launch
from nbtoolkit.run.checkpoints.checkpoint_store import has_checkpoint
from nbtoolkit.run.transport import free_port
from nbtoolkit.tasks.digits import load, make_model
from nbtoolkit.training.loop import fit
from nbtoolkit.tuning.probe import QUIET

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nbtoolkit.worker.context import RunContext

Key = TypeVar("Key")

BATCH = 32
"""Samples of one rank per step."""
RATE = 0.05
_ROUNDS = 5
FIRST, LATER = "nb.launch, first in a kernel", "nb.launch, later"
NOTEBOOK_LAUNCHER = "accelerate.notebook_launcher"


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


def empty(config: Config, ctx: RunContext) -> int:
    """Return the rank: a launch that does nothing else."""
    return ctx.rank


# --- launches ---


def launches(config: Config, ctx: RunContext) -> dict[str, float]:
    """Seconds of each kind of launch of :func:`print_launches`, in a process that is no rank.

    It belongs to the group of this rank's processes, which ends with the rank.

    Raises:
        TuningError: the process failed.
    """
    variables = without_stale(os.environ)
    del variables[RANK_MARK], variables["CUDA_VISIBLE_DEVICES"]
    if config.data.visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = config.data.visible
    variables["PYTHONPATH"] = os.pathsep.join(sys.path)
    variables["TMPDIR"] = config.runtime.output_dir
    program = [sys.executable, "-c", f"from {__name__} import print_launches; print_launches()"]
    done = subprocess.run(program, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TuningError(
            f"the program that measures launches failed: {done.stderr.strip()[-300:]}",
            do="run nbtoolkit doctor",
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_launches() -> None:
    """Print seconds of a launch of an empty function on two ranks: ours first and warm, others."""
    from accelerate import PartialState, notebook_launcher

    own = {**QUIET, "runtime.output_dir": tempfile.gettempdir()}
    config = load_config(env=None, overrides=own)
    ours = partial(launch, empty, config, processes=2, resume="never", display="off")

    def others() -> None:
        # It forms the process group, as a training function does first.
        notebook_launcher(PartialState, (), num_processes=2, use_port=str(free_port()))

    with redirect_stdout(io.StringIO()):
        begin = time.perf_counter()
        ours()
        first = {FIRST: time.perf_counter() - begin}
        found = take_turns({LATER: ours, NOTEBOOK_LAUNCHER: others})
    json.dump({**first, **found}, sys.stdout)


# --- the parts of the other sections ---


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done its work; the CPU has."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def all_reduce(config: Config, ctx: RunContext) -> dict[str, list[float]]:
    """Median seconds of an all-reduce by back end, for each of ``data.sizes`` (bytes)."""
    import torch
    import torch.distributed as dist

    found = dict[str, list[float]]()
    for backend in ["gloo", "nccl"] if ctx.device.type == "cuda" else ["gloo"]:
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
                wait_for(ctx.device)
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
    ctx.save(state)
    torch.save(state, file)
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: ctx.save(state),
        "torch.save, not synced": lambda: torch.save(state, file),
        "read": ctx.load,
        "torch.load": lambda: torch.load(file, weights_only=True),
    }
    return take_turns(calls, 3)


def trial(config: Config, ctx: RunContext) -> dict[str, float]:
    """A trial of ``data.seconds``, which writes down when it began and ended."""
    begin = time.time()
    time.sleep(config.data.seconds)
    with open(config.data.file, "a") as file:
        file.write(f"{begin} {time.time()}\n")
    return {"score": config.optim.lr}


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


# --- the same training by several libraries ---


def compare(config: Config, ctx: RunContext) -> dict[str, dict[str, float]]:
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

    def __init__(self, config: Config, ctx: RunContext) -> None:
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
            wait_for(self.ctx.device)
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
