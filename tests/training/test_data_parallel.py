"""DataParallel around a model, as far as the CPU allows: there torch calls the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from fits import Run, configured, model_of, samples
from torch import nn
from torch.nn.functional import cross_entropy

import nbtoolkit as nb
from nbtoolkit.worker.context import RunContext


def context(folder: Path, **overrides: Any) -> RunContext:
    """A context of a run of one process with ``strategy: dp``; its devices are not there."""
    config = configured(overrides=overrides)
    ctx = Run(folder).context(config)
    ctx.plan = replace(ctx.plan, strategy="dp")
    return ctx


def test_fit_calls_the_wrapped_model_and_keeps_plain_names(tmp_path: Path) -> None:
    seen: list[type] = []

    def step(model: nn.Module, batch: Any) -> Any:
        seen.append(type(model))
        return model(batch[0]), batch[1]

    ctx, plain = context(tmp_path / "dp"), Run(tmp_path / "single")
    model, data = model_of(), samples(48)
    values = nb.fit(ctx, ctx.config, model, data, data, loss=cross_entropy, step=step)
    assert set(seen) == {nn.DataParallel, nn.Sequential}  # of the steps, and of the validation
    saved = torch.load(next(ctx.paths.checkpoints.glob("*/model.pt")), weights_only=True)
    names = list(model_of().state_dict())
    assert list(model.state_dict()) == names
    assert not [name for name in str(saved).split("'") if name.startswith("module.")]
    other = model_of()
    assert nb.fit(
        plain.context(configured()), configured(), other, data, data, loss=cross_entropy
    ) == pytest.approx(values)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Forget the precision of an earlier Accelerator in this process, and ours afterwards."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_prepare_wraps_and_unwrap_returns_the_model(tmp_path: Path, precision: str) -> None:
    ctx = context(tmp_path / "run", **{"train.precision": precision})
    model = model_of()
    prepared = ctx.prepare(model)
    assert type(prepared) is nn.DataParallel
    assert ctx.unwrap(prepared) is model
    assert list(ctx.unwrap(prepared).state_dict()) == list(model_of().state_dict())
    # A copy on another device has the model's attributes: a replaced forward would be the model's.
    assert "forward" not in model.__dict__
    assert ("forward" in prepared.__dict__) is (precision == "bf16")
    assert prepared(samples(4)[0]).shape == (4, 3)
