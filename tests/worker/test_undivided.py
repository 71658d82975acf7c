"""A loop on several ranks whose samples nothing divides is told so; others are not."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launches import notes, quiet
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.worker.context import RunContext

DATA = TensorDataset(torch.arange(24.0).reshape(24, 1) / 24)
TOLD = "each of the 2 ranks has trained on all samples"


def train(loader: Any, model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (inputs,) in loader:
        optimizer.zero_grad()
        (model(inputs) - inputs).square().mean().backward()
        optimizer.step()


def forgets_all(config: Config, ctx: RunContext) -> None:
    train(DataLoader(DATA, 4, shuffle=True), nn.Linear(1, 1))
    ctx.print(ctx.is_main, ctx)


def forgets_the_loader(config: Config, ctx: RunContext) -> None:
    train(DataLoader(DATA, 4, shuffle=True), ctx.prepare(nn.Linear(1, 1)))


def forgets_the_sampler(config: Config, ctx: RunContext) -> None:
    train(DataLoader(DATA, 4), DistributedDataParallel(nn.Linear(1, 1)))


def prepares(config: Config, ctx: RunContext) -> None:
    model, loader = ctx.prepare(nn.Linear(1, 1), DataLoader(DATA, 4, shuffle=True))
    train(loader, model)


def prepares_by_accelerate(config: Config, ctx: RunContext) -> None:
    from accelerate import Accelerator

    model, loader = Accelerator().prepare(nn.Linear(1, 1), DataLoader(DATA, 4, shuffle=True))
    train(loader, model)


def samples_apart(config: Config, ctx: RunContext) -> None:
    loader = DataLoader(DATA, 4, sampler=DistributedSampler(DATA))
    train(loader, DistributedDataParallel(nn.Linear(1, 1)))


def divides_by_hand(config: Config, ctx: RunContext) -> None:
    part = DATA.tensors[0][ctx.rank :: ctx.world_size]
    train(DataLoader(TensorDataset(part), 4), ctx.prepare(nn.Linear(1, 1)))


def divides_by_the_group(config: Config, ctx: RunContext) -> None:
    part = DATA.tensors[0][dist.get_rank() :: 2]
    train(DataLoader(TensorDataset(part), 4), ctx.prepare(nn.Linear(1, 1)))


def has_no_loader(config: Config, ctx: RunContext) -> None:
    train([(torch.rand(4, 1),) for _ in range(3)], ctx.prepare(nn.Linear(1, 1)))


def evaluates(config: Config, ctx: RunContext) -> None:
    for _ in DataLoader(DATA, 4):
        pass


def fits(config: Config, ctx: RunContext) -> None:
    inputs = DATA.tensors[0]
    nb.fit(ctx, config, nn.Linear(1, 1), TensorDataset(inputs, inputs), None, loss=nn.MSELoss())


def warnings(train: Callable[..., object], config: Config, processes: int = 2) -> list[str]:
    return notes(quiet(train, config, processes), "warning")


@pytest.mark.parametrize("forgets", [forgets_all, forgets_the_loader, forgets_the_sampler])
def test_a_loop_that_trains_on_all_samples_on_every_rank_is_told_so(
    config: Config, forgets: Any
) -> None:
    (told,) = [text for text in warnings(forgets, config) if TOLD in text]
    assert "loader = ctx.prepare(loader)" in told


@pytest.mark.parametrize(
    "divides",
    [
        prepares,
        prepares_by_accelerate,
        samples_apart,
        divides_by_hand,
        divides_by_the_group,
        has_no_loader,
        evaluates,
        fits,
    ],
)
def test_a_loop_that_divides_its_samples_is_told_nothing(config: Config, divides: Any) -> None:
    assert [text for text in warnings(divides, config) if "samples" in text] == []


def test_one_rank_and_ranks_that_are_not_compared_are_told_nothing(config: Config) -> None:
    assert warnings(forgets_all, config, processes=1) == []
    assert warnings(forgets_all, config.with_overrides({"runtime.compare_ranks": False})) == []


def test_a_search_tells_it_once(config: Config) -> None:
    space = {"optim.lr": {"type": "float", "low": 0.1, "high": 1.0}}
    config = config.with_overrides({"distributed.world_size": 2})
    result = nb.sweep(forgets_and_returns, config, space, n_trials=3, display="off")
    assert len([text for text in notes(result) if TOLD in text]) == 1


def forgets_and_returns(config: Config, ctx: RunContext) -> dict[str, float]:
    forgets_all(config, ctx)
    return {"val_loss": config.optim.lr}


# --- Lightning ---


def lightning_trains(config: Config, ctx: RunContext) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return (self.layer(batch[0]) - batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    arguments: dict[str, Any] = {"accelerator": "cpu", "logger": False}
    if config.model.told:
        from nbtoolkit.integrations import lightning as nbl

        arguments = nbl.trainer_arguments(ctx)
    trainer = lightning.Trainer(**{**arguments, "default_root_dir": ctx.paths.folder}, max_epochs=2)
    trainer.fit(Module(), DataLoader(DATA, 4))


def fabric_trains(config: Config, ctx: RunContext) -> None:
    from lightning.fabric import Fabric

    several = {"devices": ctx.world_size, "strategy": "ddp"}
    fabric = Fabric(accelerator="cpu", **(several if config.model.told else {}))
    fabric.launch()
    model = nn.Linear(1, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for (inputs,) in fabric.setup_dataloaders(DataLoader(DATA, 4)):
        optimizer.zero_grad()
        fabric.backward((model(inputs) - inputs).square().mean())
        optimizer.step()


@pytest.mark.long
@pytest.mark.parametrize(
    ("trains", "do"),
    [
        (lightning_trains, "lightning.Trainer(**nbl.trainer_arguments(ctx, ...))"),
        (
            fabric_trains,
            'Fabric(devices=ctx.world_size, strategy="ddp", ...), then fabric.launch()',
        ),
    ],
)
def test_an_unchanged_trainer_of_lightning_is_told_its_arguments(
    config: Config, trains: Any, do: str
) -> None:
    if find_spec("lightning") is None:
        pytest.skip("NOT TESTED: Lightning is not installed")
    (told,) = warnings(trains, config.with_overrides({"model.told": False}))
    assert do in told
    assert warnings(trains, config.with_overrides({"model.told": True})) == []
