"""Ranks that train separate models are detected, and others are not suspected."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import notes, quiet, settings_in
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.run.rank_check import SteppedOptimizers, divergence_warning
from nbtoolkit.worker.context import RunContext

SETTINGS = {"train.epochs": 2, "checkpoint.enabled": False}
TOLD = r"different models: one weight is -?\d\.\d+ on rank 0 and -?\d\.\d+ on rank 1"
DATA = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for (x,) in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def alone(config: Config, ctx: RunContext) -> None:
    """Each rank trains a model of its own on its own samples."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    steps(model, optimizer, [(row[None],) for (row,) in DATA][ctx.rank :: ctx.world_size])
    if config.model.get("reports"):
        for epoch in range(3):
            ctx.report({"loss": 1.0}, step=epoch)


def prepared(config: Config, ctx: RunContext) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(DATA, batch_size=4, shuffle=True)
    steps(*ctx.prepare(model, optimizer, loader))
    ctx.report({"loss": 1.0})


def in_ddp(config: Config, ctx: RunContext) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps(model, optimizer, [(row[None],) for (row,) in DATA][ctx.rank :: ctx.world_size])


def fitted(config: Config, ctx: RunContext) -> None:
    x, y = DATA.tensors[0], torch.arange(16) % 2
    nb.fit(ctx, config, nn.Linear(4, 2), (x, y), None, loss=nn.functional.cross_entropy)


def on_rank_0(config: Config, ctx: RunContext) -> None:
    """A head that is rank 0's alone."""
    model = nn.Linear(4, 2)
    if ctx.is_main:
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1), [(row[None],) for (row,) in DATA])
    ctx.report({"loss": 1.0})


def warnings(tmp_path: Path, train: Any, **overrides: Any) -> list[str]:
    result = quiet(train, settings_in(tmp_path, **SETTINGS, **overrides))
    # The loops here leave train.epochs alone, which is said, too.
    texts = notes(result, "warning")
    return [text for text in texts if not text.startswith("settings without effect: ")]


@pytest.mark.parametrize("reports", [True, pytest.param(False, marks=pytest.mark.long)])
def test_ranks_that_train_apart_are_told_once_with_the_line_to_add(
    tmp_path: Path, reports: bool
) -> None:
    found = warnings(tmp_path, alone, **{"model.reports": reports})
    assert len(found) == 1
    with pytest.raises(RuntimeError, match=TOLD + r"[\s\S]*ctx.prepare[\s\S]*compare_ranks: false"):
        raise RuntimeError(found[0])


def of_a_part(config: Config, ctx: RunContext) -> Any:
    """A validation whose counters are not summed over the ranks."""
    right = [44, 46][ctx.rank]
    if not config.model.get("reports"):
        return {"accuracy": right / 100}
    for epoch in range(3):
        ctx.report({"loss": 1.0, "accuracy": right / 100}, step=epoch)
    return None


def of_the_whole(config: Config, ctx: RunContext) -> float:
    right = torch.tensor(44.0 + 2 * ctx.rank)
    ctx.report({"accuracy": ctx.accelerator.reduce(right).item() / 100, "nan": math.nan})
    ctx.log({"seconds": float(ctx.rank)})
    return float(ctx.rank)  # of each rank, in result.values


@pytest.mark.parametrize("reports", [True, False])
def test_ranks_that_report_parts_as_the_whole_are_told_once_with_the_line_to_write(
    tmp_path: Path, reports: bool
) -> None:
    found = warnings(tmp_path, of_a_part, **{"model.reports": reports})
    assert len(found) == 1
    told = r"accuracy is 0.44 on rank 0 and 0.46 on rank 1[\s\S]*ctx.accelerator.reduce\(right\)"
    with pytest.raises(RuntimeError, match=told):
        raise RuntimeError(found[0])
    off = {"model.reports": reports, "runtime.compare_ranks": False}
    assert not warnings(tmp_path, of_a_part, **off)


@pytest.mark.parametrize(
    ("train", "overrides"),
    [
        (of_the_whole, {}),
        (prepared, {}),
        (alone, {"runtime.compare_ranks": False}),
        pytest.param(in_ddp, {}, marks=pytest.mark.long),
        pytest.param(fitted, {}, marks=pytest.mark.long),
        pytest.param(on_rank_0, {}, marks=pytest.mark.long),
    ],
)
def test_ranks_that_train_one_model_or_are_not_compared_are_not_suspected(
    tmp_path: Path, train: Any, overrides: dict[str, Any]
) -> None:
    assert not warnings(tmp_path, train, **overrides)


def test_weights_come_from_every_optimizer_that_took_a_step() -> None:
    models = [
        nn.Linear(3, 2),
        nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last),
        nn.Linear(1, 1),
    ]
    seen = SteppedOptimizers()
    try:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for model, optimizer in zip(models[:2], optimizers, strict=False):
            sum(one.sum() for one in model.parameters()).backward()
            optimizer.step()
            optimizer.step()
        linear, conv = seen.weights()
    finally:
        seen.close()
    weight, bias = models[0].parameters()
    assert linear == pytest.approx([one.item() for one in (weight[0, 1], weight[1, 2], *bias)])
    assert conv[1] == pytest.approx(models[1].weight[-1, -1, -1, -1].item())
    optimizers[2].step()
    assert len(seen.weights()) == 2


def test_an_optimizer_that_is_gone_leaves_its_last_weights_and_nothing_else() -> None:
    seen = SteppedOptimizers()
    try:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps(model, optimizer, [(torch.ones(1, 3),)])
        expected, gone = seen.weights(), weakref.ref(model.weight)
        del model, optimizer
        gc.collect()
        assert gone() is None
        assert seen.weights() == expected
    finally:
        seen.close()


def test_rounding_and_nan_are_no_difference() -> None:
    nan = float("nan")
    assert divergence_warning([[[1.0, 1e-9, nan]], [[1.000001, 0.0, nan]]]) is None
    assert divergence_warning([[[1.0]], [[1.0, 2.0]]]) is None
    assert divergence_warning([None, [[1.0]]]) is None
    assert "rank 2" in (divergence_warning([[[1.0]], [[1.0]], [[1.01]]]) or "")
