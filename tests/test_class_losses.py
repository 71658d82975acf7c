"""Losses of own loops that are means over weights are refused on several ranks, and only these."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbtoolkit.errors import PlanError
from nbtoolkit.runtime.class_losses import ClassLosses

X = torch.tensor([[0.1, -0.2, 0.3], [0.0, 1.0, -1.0], [0.5, 0.2, 0.1], [0.3, 0.3, 0.9]])
Y, HOLES = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, -100, 2])
WEIGHT = torch.tensor([1.0, 2.0, 3.0])
SOFT = X.softmax(1)


@pytest.fixture
def watched() -> Iterator[None]:
    torchs = torch._C._nn.cross_entropy_loss, torch._C._nn.nll_loss_nd
    losses = ClassLosses()
    yield
    losses.close()
    assert torchs == (torch._C._nn.cross_entropy_loss, torch._C._nn.nll_loss_nd)


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


@pytest.mark.parametrize("name", REFUSED)
def test_a_mean_over_weights_is_refused(watched: None, name: str) -> None:
    with pytest.raises(PlanError, match=r"class weights|ignored"):
        REFUSED[name](X.clone().requires_grad_())


@pytest.mark.parametrize("name", TAKEN)
def test_another_loss_is_torchs(name: str) -> None:
    inputs, plain = X.clone().requires_grad_(), X.clone().requires_grad_()
    expected = TAKEN[name](plain)
    expected.backward()
    losses = ClassLosses()
    try:
        found = TAKEN[name](inputs)
        found.backward()
    finally:
        losses.close()
    assert torch.equal(found, expected)
    assert plain.grad is not None
    assert torch.equal(inputs.grad, plain.grad)


@pytest.mark.parametrize("name", REFUSED)
def test_an_evaluation_may_weigh(watched: None, name: str) -> None:
    assert REFUSED[name](X).isfinite()
    with torch.no_grad():
        assert REFUSED[name](X.clone().requires_grad_()).isfinite()
