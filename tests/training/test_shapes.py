"""A loss that compares each output with all targets is refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import FitError
from nbtoolkit.worker.context import RunContext

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = 4200 + 800 * X[:, 0]  # of a raw scale: a comparison of numbers to 1e-4 sees no difference

Loss = Callable[[Tensor, Tensor], Tensor]

REFUSED: dict[str, Loss] = {
    "mse": F.mse_loss,
    "module": nn.SmoothL1Loss(),
    "l1": F.l1_loss,
    "huber": lambda outputs, y: F.huber_loss(outputs, y, delta=100.0),
    "by hand": lambda outputs, y: (outputs - y).pow(2).mean().sqrt(),
    "of each sample": lambda outputs, y: (y - outputs).abs().mean(1),
}
ACCEPTED: dict[str, Loss] = {
    "squeezes": lambda outputs, y: F.mse_loss(outputs.squeeze(1), y),
    "flattens": lambda outputs, y: F.l1_loss(outputs.view(-1), y.view(-1)),
    "of a column": lambda outputs, y: (outputs - y[:, None]).pow(2).mean(),
}


class Flat(nn.Module):
    """Outputs of shape (n,)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x).squeeze(1)
        return outputs


def fitted(ctx: RunContext, config: Config, model: nn.Module, y: Tensor, loss: Loss) -> str:
    try:
        nb.fit(ctx, config, model, (X, y), None, loss=loss)
    except FitError as error:
        return str(error)
    return ""


def told(config: Config, ctx: RunContext) -> dict[str, str]:
    losses = {**REFUSED, **ACCEPTED}
    found = {name: fitted(ctx, config, nn.Linear(3, 1), Y, loss) for name, loss in losses.items()}
    found["columns of targets"] = fitted(ctx, config, Flat(), Y[:, None], F.mse_loss)
    pairs = config.with_overrides({"train.loss_reduction": "batch"})
    found["on purpose"] = fitted(ctx, pairs, nn.Linear(3, 1), Y, F.mse_loss)
    return found


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)])
def found(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    settings = {
        "tracking.mlflow": False,
        "runtime.output_dir": str(tmp_path_factory.mktemp("shapes")),
        "train.epochs": 1,
        "train.batch_size": 8,
        "optim.lr": 1e-4,
        "checkpoint.enabled": False,
    }
    value: dict[str, str] = nb.launch(told, settings, processes=request.param, display="off").value
    return value


@pytest.mark.parametrize("name", [*REFUSED, "columns of targets"])
def test_a_loss_that_broadcasts_is_refused_whatever_the_scale(
    found: dict[str, str], name: str
) -> None:
    with pytest.raises(FitError, match=r"all samples: torch makes \(\d, \d\)[\s\S]*squeeze\(1\)"):
        raise FitError(found[name])


@pytest.mark.parametrize("name", [*ACCEPTED, "on purpose"])
def test_other_losses_of_these_shapes_are_accepted(found: dict[str, str], name: str) -> None:
    assert found[name] == ""
