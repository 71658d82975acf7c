"""Losses of own loops that depend on the number of ranks are told once, others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from launches import notes, quiet
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.worker.context import RunContext

WEIGHT = torch.tensor([1.0, 2.0, 3.0])
X = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(dim=1)

Loss = Callable[[Tensor, Tensor, nn.Module, RunContext], Tensor]


class WithLoss(nn.Module):
    """As a Hugging Face model, it returns its own loss."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.head, self.reduction = nn.Linear(5, 3), reduction

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        scores = self.head(x)
        holes = torch.where(y == 2, -100, y)
        return {"loss": F.cross_entropy(scores, holes, reduction=self.reduction), "scores": scores}


def squares(model: nn.Module) -> Tensor:
    penalty: Any = sum(one.pow(2).sum() for one in model.parameters())
    return penalty


def vae(x: Tensor, y: Tensor, model: nn.Module, ctx: RunContext) -> Tensor:
    """The loss of pytorch/examples/vae."""
    mu, spread = x[:, :1], x[:, 1:2]
    error = F.binary_cross_entropy(x.sigmoid(), torch.full_like(x, 0.5), reduction="sum")
    return error - 0.5 * torch.sum(1 + spread - mu.pow(2) - spread.exp())


def weighted_over_all_ranks(x: Tensor, y: Tensor, model: nn.Module, ctx: RunContext) -> Tensor:
    """The line that the warning gives."""
    total = F.cross_entropy(x, y, WEIGHT, reduction="sum")
    factor = ctx.world_size / ctx.accelerator.reduce(WEIGHT[y].sum())
    return total * factor


TOLD: dict[str, tuple[str, Loss]] = {
    "weight": ("class weights", lambda x, y, model, ctx: F.cross_entropy(x, y, WEIGHT)),
    "module": ("class weights", lambda x, y, model, ctx: nn.CrossEntropyLoss(WEIGHT)(x, y)),
    "smoothed": (
        "class weights",
        lambda x, y, model, ctx: F.cross_entropy(x, y, WEIGHT, label_smoothing=0.1),
    ),
    "beside a mean": (
        "class weights",
        lambda x, y, model, ctx: 0.5 * F.nll_loss(x.log_softmax(1), y, WEIGHT) + x.mean(),
    ),
    "ignored": (
        r"ignore_index=2\)",
        lambda x, y, model, ctx: F.cross_entropy(x, y, ignore_index=2),
    ),
    "pixels": (
        r"ignore_index=-100\)",
        lambda x, y, model, ctx: F.cross_entropy(x.T[None], torch.where(y == 2, -100, y)[None]),
    ),
    "sum": ("is a sum", lambda x, y, model, ctx: F.cross_entropy(x, y, reduction="sum")),
    "sum by hand": ("is a sum", lambda x, y, model, ctx: (x[:, 0] - y).abs().sum()),
    "half a sum": ("is a sum", lambda x, y, model, ctx: 0.5 * (x[:, 0] - y).pow(2).sum()),
    "of accumulated steps": (
        "is a sum",
        lambda x, y, model, ctx: F.mse_loss(x, x * 0, reduction="sum") / 2,
    ),
    "tasks": (
        "is a sum",
        lambda x, y, model, ctx: torch.stack([x[:, 0].sum(), x[:, 1].mean()]).sum(),
    ),
    "vae": ("is a sum", vae),
    "pairs": (
        r"\(8, 8\) of outputs of shape \(8, 1\)",
        lambda x, y, model, ctx: F.mse_loss(x[:, :1], y.float()),
    ),
    "pairs by hand": (
        r"\(8, 8\) of outputs of shape \(8,\)",
        lambda x, y, model, ctx: (x[:, 0] - y[:, None]).abs().mean(),
    ),
}
NOT_TOLD: dict[str, Loss] = {
    "mean": lambda x, y, model, ctx: F.cross_entropy(x, y),
    "smoothed": lambda x, y, model, ctx: F.cross_entropy(x, y, label_smoothing=0.1),
    "none is ignored": lambda x, y, model, ctx: F.cross_entropy(x, y, ignore_index=255),
    "chances": lambda x, y, model, ctx: F.cross_entropy(x, x.detach().softmax(1), weight=WEIGHT),
    "of each sample": lambda x, y, model, ctx: F.cross_entropy(x, y, reduction="none").mean(),
    "features": lambda x, y, model, ctx: x.pow(2).sum(1).mean(),
    "sum by the samples": lambda x, y, model, ctx: F.cross_entropy(x, y, reduction="sum") / len(y),
    "batchmean": lambda x, y, model, ctx: F.kl_div(
        x.log_softmax(1), x.detach().softmax(1), reduction="batchmean"
    ),
    "masked mean": lambda x, y, model, ctx: (x[:, 0] * (y > 1)).sum() / (y > 1).sum(),
    "corrected sum": lambda x, y, model, ctx: vae(x, y, model, ctx) * ctx.world_size,
    "corrected weights": weighted_over_all_ranks,
    "penalty": lambda x, y, model, ctx: F.cross_entropy(x, y) + 0.5 * squares(model),
    "tasks": lambda x, y, model, ctx: torch.stack([F.cross_entropy(x, y), x.mean()]).sum(),
    "pairs on purpose": lambda x, y, model, ctx: (x[:, :1] - x[:, :1].T).abs().mean(),
    "same shape": lambda x, y, model, ctx: F.mse_loss(x[:, 0], y.float()),
}


def warned(
    ctx: RunContext, model: nn.Module, backward: Callable[[Any, Any, nn.Module], Tensor]
) -> tuple[list[str], int]:
    """What a run of three steps says, and the function modes that are left after the first one."""
    said: list[str] = []
    ctx.message = lambda text, level="info": said.append(text)  # type: ignore[method-assign]
    ctx.close()
    ctx._first_step = None
    ctx.accelerator.free_memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(X, Y), batch_size=16)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    modes = 0
    for _ in range(3):
        for x, y in loader:
            loss = backward(x, y, model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        modes = max(modes, _len_torch_function_stack())
    return said, modes


def told(config: Config, ctx: RunContext) -> dict[str, tuple[list[str], int]]:
    losses = {f"told {name}": loss for name, (_, loss) in TOLD.items()}
    losses |= {f"not told {name}": loss for name, loss in NOT_TOLD.items()}
    found = {}
    for name, loss in losses.items():

        def backward(x: Tensor, y: Tensor, model: nn.Module, loss: Loss = loss) -> Tensor:
            return loss(model(x), y, model, ctx)

        found[name] = warned(ctx, nn.Linear(5, 3), backward)
    for reduction in ("mean", "sum"):
        model = WithLoss(reduction)
        found[f"in the model: {reduction}"] = warned(
            ctx, model, lambda x, y, model: model(x, y)["loss"]
        )
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], int]]:
    folder = str(tmp_path_factory.mktemp("losses"))
    config = Config().with_overrides({"tracking.mlflow": False, "runtime.output_dir": folder})
    value: dict[str, tuple[list[str], int]] = nb.launch(
        told, config, processes=2, display="off"
    ).value
    return value


Found = dict[str, tuple[list[str], int]]


@pytest.mark.parametrize("name", TOLD)
def test_a_loss_that_depends_on_the_number_of_ranks_is_told_once(found: Found, name: str) -> None:
    (text,), _ = found[f"told {name}"]
    with pytest.raises(RuntimeError, match=TOLD[name][0] + r"[\s\S]*Do now:"):
        raise RuntimeError(text)


@pytest.mark.parametrize("name", NOT_TOLD)
def test_another_loss_is_not_mentioned(found: Found, name: str) -> None:
    assert found[f"not told {name}"][0] == []


def test_the_loss_of_a_model_that_computes_it_is_seen_too(found: Found) -> None:
    assert "ignore_index=-100" in found["in the model: mean"][0][0]
    assert "is a sum" in found["in the model: sum"][0][0]


def test_nothing_is_left_of_the_look_after_the_first_step(found: Found) -> None:
    assert {modes for _, modes in found.values()} == {0}


def without_optimizer(config: Config, ctx: RunContext) -> int:
    model = ctx.prepare(nn.Linear(5, 3))
    for _ in range(20):
        model(X).mean().backward()
    return _len_torch_function_stack()


def test_the_look_ends_in_a_loop_without_an_optimizer(config: Config) -> None:
    assert quiet(without_optimizer, config).values == [0, 0]


# --- a run, as the user sees it ---


def weighted(config: Config, ctx: RunContext) -> list[list[float]]:
    """A class-weighted loss in a loop with a user's own function mode, compiled or not."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = ctx.prepare(
        model, optimizer, DataLoader(TensorDataset(X, Y), batch_size=8)
    )
    for _ in range(2):
        for x, y in loader:
            with torch.device(ctx.device):  # a function mode of torch's own
                loss = F.cross_entropy(model(x), y, WEIGHT)
            optimizer.zero_grad()
            ctx.accelerator.backward(loss)
            optimizer.step()
    assert _len_torch_function_stack() == 0
    weights: list[list[float]] = ctx.unwrap(model).weight.tolist()
    return weights


def ddp_by_hand() -> Tensor:
    """What two ranks of DDP do: the mean of the gradients of both halves."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in zip(X.split(8), Y.split(8), strict=True):
            halves = [F.cross_entropy(model(x[i : i + 4]), y[i : i + 4], WEIGHT) for i in (0, 4)]
            optimizer.zero_grad()
            (sum(halves, torch.zeros(())) / 2).backward()
            optimizer.step()
    return model.weight.detach()


@pytest.mark.parametrize("reduction", ["auto", "batch"])
def test_a_class_weighted_loop_trains_as_ddp_does_and_batch_silences_the_warning(
    config: Config, reduction: str
) -> None:
    result = quiet(weighted, config.with_overrides({"train.loss_reduction": reduction}))
    assert len([text for text in notes(result) if "class weights" in text]) == (reduction == "auto")
    assert torch.allclose(torch.tensor(result.value), ddp_by_hand(), atol=1e-6)
