"""Examples of PyTorch's documentation: equal on one and two processes, or refused."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from foreign_data import FIT, Rows, Value, equal_on_two, images, launched, numbers_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import PlanError
from nbtoolkit.worker.context import RunContext

# --- 1. https://docs.pytorch.org/tutorials/beginner/basics/quickstart_tutorial.html
# (pytorch/tutorials, beginner_source/basics/quickstart_tutorial.py, 07a339e)


class Dense(nn.Module):
    """Three layers with ReLUs over the flattened image."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        layers = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
        self.stack = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(self.flatten(x))  # type: ignore[no-any-return]


def quickstart(config: Config, ctx: RunContext, *, samples: int = 60) -> Value:
    torch.manual_seed(0)
    data = images(samples)
    loader, held_out = DataLoader(data, batch_size=12), DataLoader(images(37, 1), batch_size=12)
    model, criterion = Dense().to(ctx.device), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    start, results = numbers_of(model), []
    prepared = ctx.prepare(model, optimizer, loader, held_out)  # nbtoolkit
    model, optimizer, loader, held_out = prepared
    for _ in range(3):
        for x, y in loader:
            loss = criterion(model(x.to(ctx.device)), y.to(ctx.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        size, total, right = len(held_out.dataset), 0.0, 0.0
        model.eval()
        with torch.no_grad():
            for x, y in held_out:
                outputs = model(x.to(ctx.device))
                outputs, y = ctx.accelerator.gather_for_metrics((outputs, y))  # nbtoolkit
                total += criterion(outputs, y).item() * len(y)  # nbtoolkit (len(y))
                right += (outputs.argmax(1) == y).float().sum().item()
        results.append((total / size, right / size))
    weights = numbers_of(ctx.unwrap(model))
    return {"start": start, "weights": weights, "results": results, "read": data.read}


def quickstart_of_61(config: Config, ctx: RunContext) -> Value:
    return quickstart(config, ctx, samples=61)


@pytest.mark.long
def test_quickstart(tmp_path: Path) -> None:
    (first, _), *_, (last, _) = equal_on_two(quickstart, tmp_path, batch=12)["results"]
    assert last < first - 0.01


@pytest.mark.long
def test_quickstart_with_an_uneven_last_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"last batch[\s\S]*not be the mean over its samples"):
        launched(quickstart_of_61, tmp_path, 2)


# --- 2. pytorch/examples, distributed/ddp-tutorial-series/multigpu_torchrun.py, 77f55b9
# Its own model has one output, whose cross-entropy is always 0; three classes here.


class Trainer:
    """The script's class: a step, an epoch, a snapshot that rank 0 writes now and then."""

    def __init__(self, ctx: RunContext, model: Any, loader: Any, optimizer: Any) -> None:
        self.rank, self.snapshot = ctx.rank, ctx.paths.folder / "snapshot.pt"  # nbtoolkit
        self.model, self.optimizer, self.loader = ctx.prepare(model, optimizer, loader)  # nbtoolkit
        self.plain, self.seen = ctx.unwrap(self.model), list[list[float]]()  # nbtoolkit

    def step(self, source: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(source), targets).backward()
        self.optimizer.step()

    def epoch(self, number: int) -> None:
        # The script looks at the size of a batch here, before it sets the sampler's epoch.
        assert len(next(iter(self.loader))[0]) > 0
        self.loader.sampler.set_epoch(number)
        self.seen.append([])
        for source, targets in self.loader:
            self.seen[-1] += source[:, 0].tolist()
            self.step(source, targets)

    def train(self, epochs: int) -> None:
        for number in range(epochs):
            self.epoch(number)
            if self.rank == 0:
                state = {"model": self.plain.state_dict(), "epochs": number}
                torch.save(state, self.snapshot)


def vectors(size: int, seed: int = 0) -> Rows:
    x = torch.rand(size, 20, generator=torch.Generator().manual_seed(seed)) - 0.5
    return Rows(x, x[:, :3].argmax(dim=1))


def torchrun(config: Config, ctx: RunContext, *, samples: int = 48) -> Value:
    dist.init_process_group("gloo")
    int(os.environ["LOCAL_RANK"])
    torch.manual_seed(0)
    data, model = vectors(samples), nn.Linear(20, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(data, 16 // ctx.world_size, shuffle=False, sampler=DistributedSampler(data))
    start, trainer = numbers_of(model), Trainer(ctx, model, loader, optimizer)
    trainer.train(3)
    if ctx.is_main:
        saved = torch.load(trainer.snapshot, weights_only=True)["model"]
        assert torch.equal(saved["weight"], trainer.plain.weight)
    loss = F.cross_entropy(trainer.plain(data.columns[0]), data.columns[1]).item()
    weights = numbers_of(trainer.plain)
    dist.destroy_process_group()
    return {"start": start, "weights": weights, "results": [loss], "seen": trainer.seen}


def torchrun_of_49(config: Config, ctx: RunContext) -> Value:
    return torchrun(config, ctx, samples=49)


def with_its_wrapper(config: Config, ctx: RunContext) -> None:
    ctx.prepare(DistributedDataParallel(nn.Linear(20, 3)))


@pytest.mark.long
def test_torchrun_script(tmp_path: Path) -> None:
    value = equal_on_two(torchrun, tmp_path)
    assert value["results"][0] < 1.09  # guesses have log(3) = 1.0986
    # set_epoch reached the sampler: its epochs are in different orders.
    first, second, _ = value["seen"]
    assert first != second
    assert sorted(first) == sorted(second)


PASTED = [
    (with_its_wrapper, 1, PlanError, r"delete the line with DistributedDataParallel"),
    (with_its_wrapper, 2, PlanError, r"delete the line with DistributedDataParallel"),
    (torchrun_of_49, 2, PlanError, r"\(49 in batches of 16\)[\s\S]*drop_last=True"),
]


@pytest.mark.long
@pytest.mark.parametrize(("code", "ranks", "error", "told"), PASTED)
def test_torchrun_script_is_told_what_to_change(
    tmp_path: Path, code: Any, ranks: int, error: type[Exception], told: str
) -> None:
    with pytest.raises(error) as caught:
        launched(code, tmp_path, ranks)
    assert re.search(told, "\n".join([str(caught.value), *caught.value.__notes__]))


# --- 3. Imbalanced data: class weights, as the documentation of torch.nn.CrossEntropyLoss has them
# for "an unbalanced training set" (https://docs.pytorch.org/docs/stable/generated/
# torch.nn.CrossEntropyLoss.html), in the loops of
# https://docs.pytorch.org/tutorials/beginner/basics/optimization_tutorial.html
# (pytorch/tutorials, beginner_source/basics/optimization_tutorial.py, 802d686)


def rare(size: int, seed: int = 0) -> Rows:
    """Of four samples three are of the first class."""
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    return Rows(x, (x[:, 0] > 0.7).long())


def balanced(data: Rows) -> Tensor:
    """Each class counts the same, as scikit-learn has it."""
    counts = torch.bincount(data.columns[1])
    return len(data) / (len(counts) * counts)


def imbalanced(config: Config, ctx: RunContext, *, remedy: bool = False) -> Value:
    torch.manual_seed(0)
    data = rare(48)
    loader, model = DataLoader(data, batch_size=12, shuffle=True), nn.Linear(6, 2)
    criterion = nn.CrossEntropyLoss(weight=balanced(data), reduction="sum" if remedy else "mean")
    optimizer, start = torch.optim.SGD(model.parameters(), lr=0.5), numbers_of(model)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)  # nbtoolkit
    for _ in range(2):
        model.train()
        for x, y in loader:
            loss = criterion(model(x), y)
            if remedy:  # nbtoolkit: as the sentence of the warning says
                weight = ctx.accelerator.reduce(criterion.weight[y].sum())
                loss = loss * ctx.world_size / weight
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"start": start, "weights": numbers_of(model), "results": [], "read": data.read}


def imbalanced_with_sums(config: Config, ctx: RunContext) -> Value:
    return imbalanced(config, ctx, remedy=True)


def imbalanced_in_fit(config: Config, ctx: RunContext) -> Value:
    torch.manual_seed(0)
    data, model = rare(53), nn.Linear(6, 2)
    criterion, start = nn.CrossEntropyLoss(weight=balanced(data)), numbers_of(model)
    held_out = rare(21, 1)
    values = nb.fit(ctx, config, model, data, held_out, loss=criterion, metrics=["accuracy"])
    return {"start": start, "weights": numbers_of(model), "results": values}


@pytest.mark.long
def test_class_weights_of_an_own_loop(tmp_path: Path) -> None:
    exact = equal_on_two(imbalanced_with_sums, tmp_path, batch=12)
    (plain,) = launched(imbalanced, tmp_path, 1)
    assert (plain["weights"] - exact["weights"]).abs().max() < 1e-5
    # What nbtoolkit warns of differs indeed: ranks count the same.
    (warned, _) = launched(imbalanced, tmp_path, 2)
    assert (plain["weights"] - warned["weights"]).abs().max() > 1e-3


@pytest.mark.long
def test_class_weights_in_fit(tmp_path: Path) -> None:
    assert equal_on_two(imbalanced_in_fit, tmp_path, **FIT)["results"]["val_loss"] < 0.8


# --- 4. Imbalanced data: WeightedRandomSampler (https://docs.pytorch.org/docs/stable/data.html) in
# the loop of https://docs.pytorch.org/tutorials/beginner/introyt/trainingyt.html
# (pytorch/tutorials, beginner_source/introyt/trainingyt.py, 0ac2837)


class Garments(nn.Module):
    """Two convolutions with pooling, three layers behind them; for 20 pixels instead of 28."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.pool, self.conv2 = (
            nn.Conv2d(1, 4, 5),
            nn.MaxPool2d(2, 2),
            nn.Conv2d(4, 8, 5),
        )
        self.fc1, self.fc2, self.fc3 = nn.Linear(32, 24), nn.Linear(24, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x))).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))  # type: ignore[no-any-return]


def sampled(config: Config, ctx: RunContext) -> Value:
    torch.manual_seed(0)
    data = images(48, side=20)
    of_class = 1.0 / torch.bincount(data.columns[1])
    sampler = WeightedRandomSampler(of_class[data.columns[1]], num_samples=48, replacement=True)
    training_loader = DataLoader(data, batch_size=8, sampler=sampler)
    validation_loader = DataLoader(images(23, 1, side=20), batch_size=8, shuffle=False)
    model, loss_fn = Garments(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start, results, best = numbers_of(model), [], 1e6
    prepared = ctx.prepare(model, optimizer, training_loader, validation_loader)  # nbtoolkit
    model, optimizer, training_loader, validation_loader = prepared
    for _ in range(6):
        model.train(True)
        running = 0.0
        for inputs, labels in training_loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), labels)
            loss.backward()
            optimizer.step()
            running += ctx.accelerator.reduce(loss.detach(), "mean").item()  # nbtoolkit (reduce)
        model.train(False)
        held_out = 0.0
        for inputs, labels in validation_loader:
            scores = model(inputs)
            scores, labels = ctx.accelerator.gather_for_metrics((scores, labels))  # nbtoolkit
            held_out += loss_fn(scores, labels).item() / len(validation_loader)
        results.append((running / len(training_loader), held_out))
        best = min(best, held_out)
        if held_out == best:
            ctx.save({"model": ctx.unwrap(model).state_dict()}, kind="best")  # nbtoolkit (ctx.save)
    saved = ctx.load("best")
    assert saved is not None
    results.append((best, float(saved["model"]["fc3.bias"].sum())))
    return {"start": start, "weights": numbers_of(model), "results": results, "read": data.read}


@pytest.mark.long
def test_weighted_sampler(tmp_path: Path) -> None:
    value = equal_on_two(sampled, tmp_path, batch=8)
    (first, _), *_, (last, _), _ = value["results"]
    assert last < first
    assert len({*value["read"][:48]}) < 48  # drawn with replacement
