"""Class-weighted mean losses of custom loops are refused on several ranks; others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import PlanError
from nbtoolkit.worker.context import RunContext
from nbtoolkit.worker.prepare import ClassLosses

Y, HOLES = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, -100, 2])
WEIGHT = torch.tensor([1.0, 2.0, 3.0])
SOFT = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [1.0, 0.0, 0.0], [0.0, 0.5, 0.5]])

REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "weight": lambda x: F.cross_entropy(x, Y, weight=WEIGHT),
    "module": lambda x: nn.CrossEntropyLoss(WEIGHT)(x, Y),
    "smoothed": lambda x: F.cross_entropy(x, Y, WEIGHT, label_smoothing=0.1),
    "nll": lambda x: F.nll_loss(x.log_softmax(1), Y, WEIGHT),
    "holes": lambda x: F.cross_entropy(x, HOLES),
    "holes of nll": lambda x: nn.NLLLoss()(x.log_softmax(1), HOLES),
    "ignored": lambda x: F.cross_entropy(x, Y, ignore_index=2),
    "pixels": lambda x: F.cross_entropy(x.T[None], HOLES[None]),
}
TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: F.cross_entropy(x, Y),
    "smoothed": lambda x: F.cross_entropy(x, Y, label_smoothing=0.1),
    "nll": lambda x: F.nll_loss(x.log_softmax(1), Y),
    "none is ignored": lambda x: F.cross_entropy(x, Y, ignore_index=255),
    "chances": lambda x: F.cross_entropy(x, SOFT, weight=WEIGHT),  # a mean over the samples
    "sum": lambda x: F.cross_entropy(x, HOLES, WEIGHT, reduction="sum"),
    "each": lambda x: F.cross_entropy(x, HOLES, WEIGHT, reduction="none").mean(),
}


def with_gradient(loss: Callable[[Tensor], Tensor], numbers: Tensor) -> tuple[Tensor, Tensor]:
    inputs = numbers.clone().requires_grad_()
    value = loss(inputs)
    value.backward()
    assert inputs.grad is not None
    return value.detach(), inputs.grad


def called(config: Config, ctx: RunContext) -> dict[str, Any]:
    """In a process of its own, since one that has computed backwards can no longer be forked."""
    numbers = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    torchs = torch._C._nn.cross_entropy_loss, torch._C._nn.nll_loss_nd
    taken = {name: [with_gradient(loss, numbers)] for name, loss in TAKEN.items()}
    refused, evaluated = {}, {}
    losses = ClassLosses()
    for name, loss in TAKEN.items():
        taken[name].append(with_gradient(loss, numbers))
    for name, loss in REFUSED.items():
        try:
            with_gradient(loss, numbers)
        except PlanError as error:
            refused[name] = str(error)
        with torch.no_grad():
            evaluated[name] = [loss(numbers), loss(numbers.clone().requires_grad_())]
    losses.close()
    for name, loss in REFUSED.items():
        evaluated[name].append(loss(numbers))
    left = torchs == (torch._C._nn.cross_entropy_loss, torch._C._nn.nll_loss_nd)
    return {"taken": taken, "refused": refused, "evaluated": evaluated, "left": left}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("losses"))
    config = Config().with_overrides({"tracking.mlflow": False, "runtime.output_dir": folder})
    value: dict[str, Any] = nb.launch(called, config, processes=1, display="off").value
    return value


@pytest.mark.parametrize("name", REFUSED)
def test_a_mean_over_weights_is_refused(found: dict[str, Any], name: str) -> None:
    with pytest.raises(PlanError, match=r"class weights|targets that are ignored"):
        raise PlanError(found["refused"][name])


@pytest.mark.parametrize("name", TAKEN)
def test_another_loss_is_torchs(found: dict[str, Any], name: str) -> None:
    (value, gradient), (value_here, gradient_here) = found["taken"][name]
    assert torch.equal(value, value_here)
    assert torch.equal(gradient, gradient_here)


@pytest.mark.parametrize("name", REFUSED)
def test_an_evaluation_may_weigh(found: dict[str, Any], name: str) -> None:
    without, with_no_grad, torchs = found["evaluated"][name]
    assert without == with_no_grad == torchs


def test_torchs_functions_are_put_back(found: dict[str, Any]) -> None:
    assert found["left"]
