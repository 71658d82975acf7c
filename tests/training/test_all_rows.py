"""A loss over the rows of all ranks is that of the whole batch on one device."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import FitError
from nbtoolkit.training.losses import on_device
from nbtoolkit.training.samples import permutation
from nbtoolkit.worker.context import RunContext

SETTINGS = {
    "optim": {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "warmup_ratio": 0.0},
    "train": {"epochs": 2, "batch_size": 12},
    "checkpoint": {"enabled": False, "weights": "last"},
    "tracking": {"mlflow": False},
}


def config_of(folder: Path, **overrides: Any) -> Config:
    more = {"optim.schedule": "constant", "runtime.output_dir": str(folder), **overrides}
    return Config.model_validate(SETTINGS).with_overrides(more)


def points(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, 6, generator=generator)
    return inputs, torch.randint(4, (size,), generator=generator)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))


def contrast(embeddings: Tensor, labels: Tensor) -> Tensor:
    """The supervised contrastive loss, equation 2 of arXiv:2004.11362."""
    unit = nn.functional.normalize(embeddings, dim=1)
    others = ~torch.eye(len(unit), dtype=torch.bool)
    positive = (labels[:, None] == labels) & others
    scores = (unit @ unit.T / 0.5).masked_fill(~others, torch.finfo(torch.float32).min)
    to_positives = (scores * positive).sum(1) / positive.sum(1).clamp(min=1)
    return torch.where(positive.any(1), scores.logsumexp(1) - to_positives, 0.0).mean()


def flat(tensors: Any) -> Tensor:
    return torch.cat([one.flatten() for one in tensors])


# --- an own loop ---


CUTS = ((4, 8), (6, 7), (1, 1), (0, 12), (12, 12))  # where the rows of ranks 1 and 2 begin
WIDE = torch.tensor([2**40, -7, 2**40 + 1, 300])  # labels that differ only beyond 32 bits


def gradients(config: Config, ctx: RunContext) -> dict[str, Any]:
    """Return the loss and the gradients that DDP leaves on this rank, for each of CUTS."""
    from torch.nn.parallel import DistributedDataParallel

    inputs, labels = points(12)
    found: dict[str, Any] = {}
    for cut in CUTS:
        begin, end = (0, *cut, 12)[ctx.rank : ctx.rank + 2]
        model = DistributedDataParallel(encoder())
        loss = nb.all_rows(contrast)(model(inputs[begin:end]), WIDE[labels[begin:end]])
        loss.backward()
        found[f"cut {cut}"] = loss.item(), flat(one.grad for one in model.parameters())
    for name, targets in (("floats", labels / 7), ("flags", labels > 1)):
        own = slice(4 * ctx.rank, 4 * ctx.rank + 4)
        found[name] = nb.all_rows(lambda rows, all_targets: rows.sum() * 0 + all_targets.sum())(
            inputs[own].requires_grad_(), targets[own]
        ).item()
    bad = torch.randn(5, 3, requires_grad=True) * (torch.nan if ctx.rank == 1 else 1.0)
    with pytest.raises(FitError) as error:
        nb.all_rows(contrast)(bad, torch.zeros(5).long())
    found["nan"] = error.value.what
    return found


@pytest.fixture(scope="module")
def on_three_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    config = config_of(tmp_path_factory.mktemp("rows"))
    return [*nb.launch(gradients, config, processes=3, display="off").values]


@pytest.mark.parametrize("cut", CUTS)
def test_loss_and_gradients_are_those_of_the_whole_batch(
    on_three_ranks: list[dict[str, Any]], cut: tuple[int, int]
) -> None:
    (inputs, labels), model = points(12), encoder()
    loss = contrast(model(inputs), labels)
    loss.backward()
    expected = flat(one.grad for one in model.parameters())
    assert expected.abs().max() > 1e-3
    for of_rank in on_three_ranks:
        value, grads = of_rank[f"cut {cut}"]
        assert value == pytest.approx(float(loss.detach()), abs=1e-6)
        torch.testing.assert_close(grads, expected, atol=1e-6, rtol=0)


def test_targets_are_of_any_type(on_three_ranks: list[dict[str, Any]]) -> None:
    labels = points(12)[1]
    for of_rank in on_three_ranks:
        assert of_rank["floats"] == pytest.approx(float((labels / 7).sum()))
        assert of_rank["flags"] == int((labels > 1).sum())


def test_all_ranks_name_the_rank_whose_outputs_are_not_finite(
    on_three_ranks: list[dict[str, Any]],
) -> None:
    for of_rank in on_three_ranks:
        assert of_rank["nan"].endswith("are NaN or infinite: 5 of 5 rows on rank 1")


# --- one process ---


@pytest.mark.parametrize(
    ("outputs", "targets", "what"),
    [
        (torch.ones(4, 3), torch.zeros(3), r"shape \(4, 3\) and targets of shape \(3,\)"),
        (torch.tensor(1.0), torch.tensor(1), r"shape \(\) and targets of shape \(\)"),
        ((torch.ones(4, 3),), torch.zeros(4), r"outputs of shape \(\)"),
        (torch.full((4, 3), torch.inf), torch.zeros(4), "4 of 4 rows on rank 0"),
    ],
)
def test_what_has_no_rows_or_is_not_finite_is_refused(
    outputs: Any, targets: Tensor, what: str
) -> None:
    with pytest.raises(FitError, match=what):
        nb.all_rows(contrast)(outputs, targets)


def test_the_loss_gets_float32_under_autocast() -> None:
    def spread(rows: Tensor, labels: Tensor) -> Tensor:
        assert rows.dtype == torch.float32
        return (rows @ rows.T).mean() + 0 * labels.sum()

    outputs = torch.randn(4, 3).half().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = nb.all_rows(spread)(outputs, torch.arange(4))
    assert loss.dtype == torch.float32


# --- in fit ---


SIZES = (37, 39)  # the last step of an epoch has 1 sample, and stand-ins; or 3 samples


def fitted(config: Config, ctx: RunContext) -> dict[int, Tensor]:
    found = {}
    for size in SIZES:
        model = encoder()
        values = nb.fit(ctx, config, model, points(size), None, loss=nb.all_rows(contrast))
        assert values["train_loss"] > 0
        found[size] = nn.utils.parameters_to_vector(model.parameters()).detach()
    return found


def in_plain_torch(size: int, passes: int) -> Tensor:
    """Batches of 12 and a smaller last one. A pass of two ranks has a part of each one's half."""
    model, (inputs, labels) = encoder(), points(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in (1, 2):
        for batch in permutation(size, seed=0, epoch=epoch).split(12):
            optimizer.zero_grad()
            halves = batch.tensor_split([len(batch) // 2])
            pairs = zip_longest(*(half.split(6 // passes) for half in halves), fillvalue=batch[:0])
            for part in [torch.cat(both) for both in pairs] if passes > 1 else [batch]:
                loss = contrast(model(inputs[part]), labels[part])
                (loss * len(part) / len(batch)).backward()
            optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize(
    ("ranks", "passes"),
    [
        (2, 1),
        pytest.param(1, 1, marks=pytest.mark.long),
        pytest.param(3, 1, marks=pytest.mark.long),
        pytest.param(2, 3, marks=pytest.mark.long),
    ],
)
def test_fit_trains_as_on_whole_batches_without_a_setting(
    tmp_path: Path, ranks: int, passes: int
) -> None:
    config = config_of(tmp_path, **{"train.gradient_accumulation_steps": passes})
    found = nb.launch(fitted, config, processes=ranks, display="off").value
    for size, weights in found.items():
        torch.testing.assert_close(weights, in_plain_torch(size, passes), atol=1e-6, rtol=0)


def test_the_validation_takes_each_batch_by_itself(tmp_path: Path) -> None:
    """The ranks have different numbers of batches there: 37 samples, at most 24 of a rank."""

    def train(config: Config, ctx: RunContext) -> dict[str, float]:
        loss = nb.all_rows(contrast)
        return nb.fit(ctx, config, encoder(), points(24), points(37), loss=loss)

    values = nb.launch(train, config_of(tmp_path), processes=2, display="off").value
    assert 0 < values["val_loss"] < 10


def test_without_the_other_ranks_fit_asks_for_a_setting(tmp_path: Path) -> None:
    def train(config: Config, ctx: RunContext) -> dict[str, float]:
        return nb.fit(ctx, config, encoder(), points(24), None, loss=contrast)

    config = config_of(tmp_path).with_overrides({"train.gradient_accumulation_steps": 2})
    with pytest.raises(FitError, match=r"nb\.all_rows"):
        nb.launch(train, config, start="inline", display="off")


def test_the_tensors_of_the_loss_inside_move_to_the_device() -> None:
    """A module with buffers and no parameters; the meta device stands for a GPU."""
    loss = nb.all_rows(nn.CrossEntropyLoss(weight=torch.ones(2)))
    moved: Any = on_device(loss, torch.device("meta"))
    assert moved.args[0].weight.is_meta
