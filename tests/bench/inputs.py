"""fit's step against the loop that one would write for the same input and loss, on 1 and 2 ranks.

    python -m tests.bench inputs

The loops take turns in the same ranks. A figure fails if fit's step takes more than 1.05 times as
long as that of the loop, and more than 20 us longer.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import nbtoolkit as nb
from tests.bench.figures import Figure, in_fresh_process, median, quiet_config
from tests.bench.training import BATCH, SMALL, digits, mlp

ROUNDS = 5
COPIES = 10  # of the digits: 14,370 samples, 449 steps an epoch
STEPS = {"tensors": 3_000, "TensorDataset": 1_500, "map": 1_200, "workers": 900}
ALLOWED_RATIO, ALLOWED_SECONDS = 1.05, 20e-6


class Digits:
    """A map-style data set over NumPy arrays; nothing in it is random."""

    def __init__(self, images: Any, labels: Any) -> None:
        self.images, self.classes = images.numpy(), labels.numpy()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import torch

        return torch.from_numpy(self.images[index]), int(self.classes[index])


def data_of(kind: str) -> Any:
    """The training set in one form; ``workers`` is a DataLoader with two of them."""
    from torch.utils.data import DataLoader, TensorDataset

    images, labels = (part.repeat(COPIES, *[1] * (part.ndim - 1)) for part in digits()[0])
    if kind == "tensors":
        return images, labels
    if kind == "TensorDataset":
        return TensorDataset(images, labels)
    data: Any = Digits(images, labels)
    if kind == "workers":
        return DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=2)
    return data


def batches_by_hand(ctx: nb.RunContext, data: Any) -> Callable[[int], Iterator[Any]]:
    """The epoch -> its batches, as one would load this rank's part of them."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    mine = BATCH // ctx.world_size
    if isinstance(data, tuple):
        images, labels = data

        def indexed(epoch: int) -> Iterator[Any]:
            torch.manual_seed(epoch)
            for rows in torch.randperm(len(images)).split(BATCH):
                part = rows[ctx.rank * mine : (ctx.rank + 1) * mine]
                yield images[part], labels[part]

        return indexed
    workers = data.num_workers if isinstance(data, DataLoader) else 0
    dataset = data.dataset if isinstance(data, DataLoader) else data
    sampler = DistributedSampler(dataset) if ctx.world_size > 1 else None
    loader = DataLoader(
        dataset, batch_size=mine, shuffle=sampler is None, sampler=sampler,
        num_workers=workers, persistent_workers=workers > 0,
    )  # fmt: skip

    def loaded(epoch: int) -> Iterator[Any]:
        if sampler is not None:
            sampler.set_epoch(epoch)
        return iter(loader)

    return loaded


def losses() -> dict[str, Any]:
    """torch's class loss, as users configure it."""
    import torch

    weight = torch.linspace(0.5, 2.0, 10)
    return {
        "plain": torch.nn.CrossEntropyLoss(),
        "weight": torch.nn.CrossEntropyLoss(weight=weight),
        "ignore_index": torch.nn.CrossEntropyLoss(ignore_index=9),
        "label_smoothing": torch.nn.CrossEntropyLoss(label_smoothing=0.1),
    }


def loss_by_hand(ctx: nb.RunContext, loss: Any) -> Any:
    """The loss of a loop: exact on several ranks, as the documentation writes it."""
    import torch
    import torch.distributed as dist

    if ctx.world_size == 1 or (loss.weight is None and loss.ignore_index < 0):
        return loss
    weight = torch.ones(10) if loss.weight is None else loss.weight
    if loss.ignore_index >= 0:
        weight = weight.index_fill(0, torch.tensor([loss.ignore_index]), 0.0)
    total_of = torch.nn.CrossEntropyLoss(
        weight=loss.weight, ignore_index=loss.ignore_index, reduction="sum"
    )

    def of_whole_batch(outputs: Any, targets: Any) -> Any:
        count = weight[targets].sum()
        dist.all_reduce(count)
        return total_of(outputs, targets) * ctx.world_size / count

    return of_whole_batch


def by_hand(
    ctx: nb.RunContext, batches: Callable[[int], Iterator[Any]], loss: Any, steps: int
) -> float:
    """Seconds a step; the loop keeps and logs nothing."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    plain = mlp()
    model = plain if ctx.world_size == 1 else DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    start = time.perf_counter()
    step = epoch = 0
    while step < steps:
        epoch += 1
        for inputs, targets in batches(epoch):
            value = loss(model(inputs), targets)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            step += 1
            if step == steps:
                break
    value.item()
    return (time.perf_counter() - start) / steps


def by_fit(config: nb.Config, ctx: nb.RunContext, data: Any, loss: Any) -> float:
    """Seconds a step of nb.fit."""
    model = mlp()
    start = time.perf_counter()
    nb.fit(ctx, config, model, data, None, loss=loss)
    return (time.perf_counter() - start) / config.train.max_steps


def compare(config: nb.Config, ctx: nb.RunContext, kind: str, loss: str) -> list[float]:
    """Seconds a step of the loop by hand, and of fit: medians of the rounds."""
    import torch

    torch.set_num_threads(1)
    data, mine, steps = data_of(kind), losses()[loss], config.train.max_steps
    theirs, batches = loss_by_hand(ctx, mine), batches_by_hand(ctx, data)
    seen: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        hand = by_hand(ctx, batches, theirs, steps)
        seen.append((hand, by_fit(config, ctx, data, mine)))
    hands, fits = zip(*seen, strict=True)
    return [median(list(hands)), median([a / b for b, a in seen]), median(list(fits))]


def seconds(processes: int, kind: str, loss: str) -> list[float]:
    """What :func:`compare` returns."""
    steps = STEPS[kind] // processes
    with quiet_config(**{**SMALL, "train.max_steps": steps}) as config:
        job = partial(compare, kind=kind, loss=loss)
        found = nb.launch(job, config, processes=processes, resume="never", display="off").value
    return list(found)


def figure(ranks: int, kind: str, loss: str, name: str) -> Figure:
    """fit's step over that of the loop by hand."""
    hand, ratio, _ = in_fresh_process("tests.bench.inputs", str(ranks), kind, loss)
    gate = max(ALLOWED_RATIO, 1 + ALLOWED_SECONDS / hand)
    where = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return Figure(f"{name}, {where} (by hand {hand * 1e6:.0f} us)", ratio, "x", gate, gate)


def figures() -> list[Figure]:
    inputs = {
        "tensors": "fit's step over a loop by hand: tensors",
        "TensorDataset": "a TensorDataset",
        "map": "a map-style data set",
        "workers": "a DataLoader with two workers",
    }
    options = ("weight", "ignore_index", "label_smoothing")
    return [
        figure(ranks, kind, loss, name)
        for ranks in (1, 2)
        for kind, loss, name in [
            *((kind, "plain", name) for kind, name in inputs.items()),
            *(("TensorDataset", one, f"CrossEntropyLoss({one}=)") for one in options),
        ]
    ]


if __name__ == "__main__":
    print(json.dumps(seconds(int(sys.argv[1]), sys.argv[2], sys.argv[3])))
