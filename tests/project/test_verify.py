"""nb.verify: its findings in functions that are equal on all devices, and in others."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbtoolkit as nb
from nbtoolkit.errors import CannotPickle, LaunchError, NbtoolkitError

SMALL = {
    "train.epochs": 2,
    "train.batch_size": 12,
    "optim.name": "sgd",
    "tracking.mlflow": False,
}


def config(**more: Any) -> nb.Config:
    return nb.load_config(env=None, overrides={**SMALL, **more})


def train(config: Any, ctx: Any) -> dict[str, float]:
    import torch
    from torch import nn

    inputs = torch.randn(41, 6, generator=torch.Generator().manual_seed(0))
    layers = [nn.Dropout(0.3)] if "dropout" in config.model else []
    model = nn.Sequential(nn.Linear(6, 16), *layers, nn.Tanh(), nn.Linear(16, 3))
    data = (inputs, inputs[:, :3].argmax(dim=1))
    return nb.fit(ctx, config, model, data, data, loss=nn.functional.cross_entropy)


def own_loop(config: Any, ctx: Any) -> None:
    """Without nb.fit: depends on the number of ranks, and cannot be resumed exactly."""
    import torch

    state = ctx.load() or {"weight": torch.zeros(1), "step": 0}
    for step in range(state["step"] + 1, 9):
        state["weight"] += ctx.world_size
        ctx.save({**state, "step": 0 if "forgets" in config.model else step})
        ctx.log({"loss": float(state["weight"])}, step=step)


def test_parity_finds_nothing_in_a_function_that_calls_fit() -> None:
    found = nb.verify.parity(train, SMALL, processes=2)  # a dict of settings is a configuration
    assert found.passed, found
    assert found.steps == 8  # of 12, 12, 12 and 5 samples, twice
    assert found.largest < 1e-5
    returned = {"epoch", "best_epoch", "best_val_loss"}
    assert {*found.metrics} == {"train_loss", "val_loss", *returned}
    assert found.inexact == {}
    assert "equal: 1 process compared with 2" in str(found)
    assert "equal in 8 steps" in found._repr_html_()


class Points:
    """A data set that is fetched sample by sample, so that workers have something to do."""

    def __init__(self, size: int) -> None:
        import torch

        self.inputs = torch.randn(size, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        import torch

        noise = 0.1 * torch.randn(6)  # augmentation
        return self.inputs[index] + noise, self.inputs[index, :3].argmax()


def train_on_points(config: Any, ctx: Any) -> dict[str, float]:
    from torch import nn

    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    points, loss = Points(41), nn.functional.cross_entropy
    return nb.fit(ctx, config, model, points, points, loss=loss, metrics=["accuracy"])


@pytest.mark.parametrize(("processes", "accumulate", "workers"), [(2, 2, 0), (3, 1, 2)])
def test_parity_on_two_and_three_with_accumulation_and_workers(
    processes: int, accumulate: int, workers: int
) -> None:
    """41 samples in batches of 12: the last step is uneven."""
    mine = config(**{"train.gradient_accumulation_steps": accumulate, "train.num_workers": workers})
    found = nb.verify.parity(train_on_points, mine, processes=processes)
    assert found.passed, found
    assert (found.steps, found.first_other_step) == (8, None)
    assert found.largest < 1e-5


@pytest.mark.long
def test_parity_names_the_layers_that_cannot_be_equal() -> None:
    found = nb.verify.parity(train, config(**{"model.dropout": 1}), processes=2)
    assert not found.passed
    assert (found.steps, found.first_other_step) == (8, 1)
    assert found.inexact == {"1 (Dropout)": "draws random numbers, different ones on every rank"}
    assert "DIFFERENT" in found.explain()


def test_parity_of_a_loop_of_ones_own_sees_its_losses() -> None:
    found = nb.verify.parity(own_loop, config(), processes=2)
    assert (found.steps, found.first_other_step) == (8, 1)
    assert (found.loss, found.weights) == (8.0, 8.0)
    assert "loss of each step: differs, first in step 1\n" in str(found)


def augments(config: Any, ctx: Any) -> None:
    """An own loop over a data set that draws in two workers, with dropout."""
    from torch import nn
    from torch.utils.data import DataLoader

    model: Any = nn.Sequential(nn.Linear(6, 3), nn.Dropout())
    loader: Any = DataLoader(Points(24), batch_size=12, num_workers=2)
    model, loader = ctx.prepare(model, loader)
    for step, (inputs, targets) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        ctx.log({"loss": loss.item() + np.random.rand()}, step=step)


def test_parity_names_the_draws_that_differ_between_the_ranks_of_an_own_loop() -> None:
    found = nb.verify.parity(augments, config(), processes=2)
    assert not found.passed
    differ = "drawn from in the loop: different numbers on every rank"
    assert found.inexact == {
        "1 (Dropout)": "draws random numbers, different ones on every rank",
        "NumPy's generator": differ,
        "torch's generator": differ,
    }


def reports_and_returns(config: Any, ctx: Any) -> float:
    """Returns on one rank what it has reported; on two, another number by a rounding error."""
    ctx.report({"value": 0.3}, step=1)
    return 0.3 + 4e-9 * (ctx.world_size - 1)


def test_parity_compares_a_returned_number_that_equals_the_last_report() -> None:
    found = nb.verify.parity(reports_and_returns, config(), processes=2)
    assert found.passed, found
    assert 0 < found.largest < 1e-8


def returns_nothing(config: Any, ctx: Any) -> None:
    pass


def test_parity_says_that_nothing_was_compared() -> None:
    found = nb.verify.parity(returns_nothing, config(), processes=2)
    assert not found.passed
    assert (found.steps, found.first_other_step) == (None, None)
    assert str(found).startswith("nothing was compared")
    assert "loss of each step: not logged\n" in str(found)
    assert "DIFFERENT" not in str(found)


def longer_on_two(config: Any, ctx: Any) -> None:
    for step in range(3 + 2 * (ctx.world_size - 1)):
        ctx.log({"loss": 1.0 + 1e-7 * ctx.world_size}, step=step)


def test_parity_finds_the_first_step_that_only_one_run_logged() -> None:
    found = nb.verify.parity(longer_on_two, config(), processes=2)
    assert not found.passed
    assert (found.steps, found.first_other_step, found.loss) == (5, 3, math.inf)


def test_a_function_that_cannot_be_launched_is_refused_as_in_a_launch() -> None:
    with pytest.raises(LaunchError, match=r"cannot be called as <lambda>\(config, ctx\)"):
        nb.verify.parity(lambda config: None, config())
    lock = threading.Lock()

    def captures(config: Any, ctx: Any) -> None:
        lock.acquire()

    with pytest.raises(CannotPickle, match=r"closure variable `lock`.*captured by captures\(\)"):
        nb.verify.parity(captures, config(), processes=1)


def diverges(config: Any, ctx: Any) -> None:
    for step in range(3):
        ctx.report({"loss": math.nan if step == ctx.world_size else 1.0}, step=step)


def test_parity_sees_a_number_that_is_none_on_one_side() -> None:
    found = nb.verify.parity(diverges, config(), processes=2)
    assert not found.passed
    assert found.metrics == {"loss": math.inf}


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_killed_fit_ends_bit_equal_with_dropout_too(processes: int) -> None:
    found = nb.verify.resume(train, config(**{"model.dropout": 1}), processes=processes)
    assert found.passed, found
    assert (found.largest, found.steps) == (0.0, 8)
    assert "killed at step 4 of 8" in found.what


def test_the_ranks_of_the_killed_run_are_not_restarted() -> None:
    """A run that restarts them would end by itself, and there would be nothing to resume."""
    found = nb.verify.resume(own_loop, config(**{"runtime.restarts": 2}), processes=1)
    assert found.passed, found


def test_a_loop_that_forgets_where_it_was_is_found_out() -> None:
    assert nb.verify.resume(own_loop, config(), processes=1).passed
    found = nb.verify.resume(own_loop, config(**{"model.forgets": 1}), processes=1)
    assert not found.passed
    assert found.loss is not None
    assert found.loss > 0
    assert found.first_other_step == 1


def nothing_saved(config: Any, ctx: Any) -> None:
    for step in range(4):
        ctx.log({"loss": 1.0}, step=step)


def test_a_function_that_saves_nothing_is_told_so() -> None:
    with pytest.raises(NbtoolkitError, match=r"saved nothing between step 2 and its end[\s\S]*ctx"):
        nb.verify.resume(nothing_saved, config(), processes=1)


def nothing_logged(config: Any, ctx: Any) -> int:
    return 1


def test_a_function_that_logs_nothing_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(NbtoolkitError, match=r"logged 0 steps, too few to kill it[\s\S]*nb\.fit"):
        nb.verify.resume(nothing_logged, config(), processes=1)
