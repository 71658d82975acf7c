"""Random numbers of own loops: every sample has its own, on any number of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.worker.context import RunContext

Numbers = list[tuple[float, float, float]]
NAMES = ("random", "NumPy", "torch")


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


class Augmented(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(drawn(), dtype=torch.float64)


class Shuffled(IterableDataset[torch.Tensor]):
    """A stream that draws its order from the global generator of its process."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randperm(32).float().unsqueeze(1))


def prepared(ctx: RunContext, workers: int) -> tuple[Any, Any, torch.Tensor]:
    model: Any = nn.Sequential(nn.Linear(1, 8), nn.Dropout())
    loader: Any = DataLoader(Augmented(), batch_size=16, num_workers=workers)
    model, loader = ctx.prepare(model, loader)
    return model, loader, torch.cat([part.detach().flatten() for part in model.parameters()])


def augments(config: Config, ctx: RunContext) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for workers in (0, 2):
        _, loader, weights = prepared(ctx, workers)
        epochs = [torch.cat(list(loader)).tolist() for _ in range(2)]
        firsts = [next(iter(loader)).tolist() for _ in range(3)]
        found = {"weights": weights, "epochs": epochs, "firsts": firsts}
        seen[str(workers)] = found
    return seen


def drops(config: Config, ctx: RunContext) -> list[list[bool]]:
    model = prepared(ctx, 0)[0]
    return [(model(torch.ones(1, 1)) == 0).flatten().tolist() for _ in range(20)]


def streams(config: Config, ctx: RunContext) -> list[list[float]]:
    dropout = nn.Dropout()
    loader: Any = ctx.prepare(DataLoader(Shuffled(), batch_size=8))
    epochs = []
    for _ in range(2):
        batches = []
        for batch in loader:
            dropout(torch.ones(3 + ctx.rank))
            batches.append(ctx.accelerator.gather_for_metrics(batch).flatten())
        epochs.append(torch.cat(batches).tolist())
    return epochs


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = str(tmp_path_factory.mktemp("draws"))
    return Config().with_overrides({"tracking.mlflow": False, "runtime.output_dir": folder})


@pytest.fixture(scope="module")
def augmented(config: Config) -> dict[int, list[Any]]:
    launched = {
        ranks: nb.launch(augments, config, processes=ranks, display="off") for ranks in (1, 2)
    }
    return {ranks: result.values for ranks, result in launched.items()}


@pytest.mark.parametrize("workers", ["0", "2"])
def test_each_sample_has_its_own_numbers(augmented: dict[int, list[Any]], workers: str) -> None:
    first, second = (rank[workers] for rank in augmented[2])
    assert torch.equal(first["weights"], second["weights"])
    for index in range(2):
        numbers = first["epochs"][index] + second["epochs"][index]
        for number, name in enumerate(NAMES):
            assert len({sample[number] for sample in numbers}) == 128, name
    firsts = first["firsts"] + second["firsts"]
    assert len({repr(batch) for batch in firsts}) == 6


def test_the_first_rank_draws_what_a_run_on_one_rank_draws(augmented: dict[int, list[Any]]) -> None:
    alone, first = augmented[1][0]["0"], augmented[2][0]["0"]
    assert torch.equal(alone["weights"], first["weights"])
    assert first["epochs"][0] == alone["epochs"][0][:64]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_epoch_of_a_resumed_run_draws_what_it_drew(
    config: Config, augmented: dict[int, list[Any]], workers: str
) -> None:
    again = nb.launch(resumes, config, processes=2, display="off").values[1]
    assert again[workers] == augmented[2][1][workers]["epochs"][1]


def resumes(config: Config, ctx: RunContext) -> dict[str, Any]:
    seen = {}
    for workers in (0, 2):
        loader = prepared(ctx, workers)[1]
        loader.set_epoch(1)
        seen[str(workers)] = torch.cat(list(loader)).tolist()
    return seen


def test_the_ranks_drop_other_units(config: Config) -> None:
    first, second = nb.launch(drops, config, processes=2, display="off").values
    assert first != second
    assert len({repr(mask) for mask in (*first, *second)}) > 20


def test_a_stream_is_read_in_one_order_whatever_the_ranks_draw_beside_it(config: Config) -> None:
    (alone,) = nb.launch(streams, config, processes=1, display="off").values
    first, second = nb.launch(streams, config, processes=2, display="off").values
    assert alone == first == second
    assert [sorted(epoch) for epoch in alone] == [[float(n) for n in range(32)]] * 2
    assert alone[0] != alone[1]
