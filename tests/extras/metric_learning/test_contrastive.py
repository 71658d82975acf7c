"""Losses between samples: the same on any number of ranks, in any precision, on any labels."""

from __future__ import annotations

import warnings
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import FitError
from nbtoolkit.extras.metric_learning import contrastive
from nbtoolkit.extras.metric_learning.contrastive import (
    NO_POSITIVES,
    metric_loss,
    supervised_contrastive_loss,
)
from nbtoolkit.training.loading.epoch_order import permutation
from nbtoolkit.worker.context import RunContext

SETTINGS = {
    "optim": {"name": "sgd", "lr": 0.5, "momentum": 0.0, "weight_decay": 0.0, "warmup_ratio": 0.0},
    "train": {"epochs": 2, "batch_size": 12},
    "checkpoint": {"enabled": False, "weights": "last"},
    "tracking": {"mlflow": False},
}


def config_of(folder: Path, **overrides: Any) -> Config:
    more = {"optim.schedule": "constant", "runtime.output_dir": str(folder), **overrides}
    return Config.model_validate(SETTINGS).with_overrides(more)


def points(size: int, classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 6, generator=generator)
    return inputs, torch.randint(classes, (size,), generator=generator)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))


def by_definition(embeddings: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    """Equation 2 of arXiv:2004.11362, sample by sample, in float64."""
    unit = nn.functional.normalize(embeddings.double(), dim=1)
    losses = []
    for i in range(len(unit)):
        others = [a for a in range(len(unit)) if a != i]
        total = torch.stack([(unit[i] @ unit[a] / temperature).exp() for a in others]).sum()
        positives = [p for p in others if labels[p] == labels[i]]
        if positives:
            terms = [((unit[i] @ unit[p] / temperature).exp() / total).log() for p in positives]
            losses.append(-torch.stack(terms).sum() / len(positives))
    return torch.stack(losses).mean()


# --- one process ---


def test_loss_and_gradients_are_those_of_the_definition() -> None:
    (embeddings, labels), found = points(11), []
    for loss in (supervised_contrastive_loss, by_definition):
        leaf = embeddings.clone().requires_grad_()
        value = loss(leaf, labels)
        value.backward()
        found.append((value.double(), leaf.grad))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


def test_views_are_more_samples_of_the_same_class() -> None:
    embeddings, labels = torch.randn(4, 3, 5), torch.tensor([2**40, -7, 2**40 + 1, 300])
    found = supervised_contrastive_loss(embeddings, labels)
    expected = by_definition(embeddings.reshape(12, 5), labels.repeat_interleave(3))
    assert float(found) == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_finite_at_a_low_temperature(dtype: torch.dtype) -> None:
    embeddings = (torch.randn(32, 8) * 1000).to(dtype).requires_grad_()
    labels = torch.arange(32) % 4
    with torch.autocast("cpu", torch.bfloat16):
        loss = supervised_contrastive_loss(embeddings, labels, temperature=0.01)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(
        float(by_definition(embeddings.detach(), labels, 0.01)), rel=1e-4
    )
    assert embeddings.grad is not None
    assert bool(embeddings.grad.isfinite().all())


def test_a_row_of_zeros_has_a_small_gradient() -> None:
    embeddings = torch.randn(4, 5)
    embeddings[0] = 0.0
    leaf = embeddings.requires_grad_()
    supervised_contrastive_loss(leaf, torch.tensor([0, 0, 1, 1])).backward()
    assert leaf.grad is not None
    assert bool((leaf.grad.abs() < 100).all())


@pytest.mark.parametrize("size", [1, 5])
def test_without_positives_the_loss_is_zero_and_says_so(size: int) -> None:
    leaf = torch.randn(size, 3, requires_grad=True)
    with pytest.warns(UserWarning, match=r"no two samples of one class[\s\S]*ClassBalanced"):
        loss = supervised_contrastive_loss(leaf, torch.arange(size))
    loss.backward()
    assert loss.item() == 0
    assert leaf.grad is not None
    assert bool((leaf.grad == 0).all())


@pytest.mark.parametrize(
    ("embeddings", "labels", "options", "what"),
    [
        (torch.ones(4, 3), torch.zeros(3).long(), {}, r"shape \(4, 3\) and labels of shape \(3,\)"),
        (torch.ones(4), torch.zeros(4).long(), {}, r"shape \(4,\)"),
        (torch.ones(4, 3), torch.zeros(4), {}, "float32[\\s\\S]*whole numbers"),
        (torch.ones(4, 3), torch.zeros(4).long(), {"temperature": 0.0}, "temperature .* is 0.0"),
        (torch.full((4, 3), torch.nan), torch.zeros(4).long(), {}, "4 of 4 rows on rank 0"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    embeddings: Tensor, labels: Tensor, options: dict[str, float], what: str
) -> None:
    with pytest.raises(FitError, match=what):
        supervised_contrastive_loss(embeddings, labels, **options)


# --- two ranks ---


CUTS = [6, 7, 1, 0]  # rows of rank 0 of 12
WIDE = torch.tensor([2**40, -7, 2**40 + 1, 300])  # labels that differ only beyond 32 bits


def gradients(config: Config, ctx: RunContext) -> dict[str, Any]:
    """The gradients that DDP leaves on this rank, and what bad embeddings and batches raise."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    found: dict[str, Any] = {}
    inputs, labels = points(12)
    for cut in CUTS:
        part = slice(0, cut) if ctx.rank == 0 else slice(cut, 12)
        model = DistributedDataParallel(encoder())
        loss = supervised_contrastive_loss(model(inputs[part]), WIDE[labels[part]])
        loss.backward()
        grads = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
        found[f"cut {cut}"] = loss.item(), torch.cat(grads)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            leaf = torch.randn(2, 3, requires_grad=True)
            supervised_contrastive_loss(leaf, torch.arange(2) + 2 * ctx.rank).backward()
    found["warned"] = [str(one.message) for one in caught]
    found["zero"] = float(leaf.grad.abs().max()) if leaf.grad is not None else None
    # One positive, and it is on the other rank.
    leaf = torch.randn(2, 3, requires_grad=True)
    supervised_contrastive_loss(leaf, torch.tensor([7, ctx.rank])).backward()
    found["far positive"] = leaf.grad is not None and float(leaf.grad.abs().max())
    bad = torch.randn(5, 3)
    bad[:2] = torch.nan if ctx.rank else 1.0
    try:
        supervised_contrastive_loss(bad.requires_grad_(), torch.zeros(5).long())
    except FitError as error:
        found["nan"] = error.what
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    config = config_of(tmp_path_factory.mktemp("contrastive"))
    result = nb.launch(gradients, config, processes=2, display="off")
    return [*result.values]


@pytest.mark.parametrize("cut", CUTS)
def test_loss_and_gradients_of_two_ranks_are_those_of_the_whole_batch(
    found: list[dict[str, Any]], cut: int
) -> None:
    (inputs, labels), model = points(12), encoder()
    loss = supervised_contrastive_loss(model(inputs), labels)
    loss.backward()
    expected = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
    for of_rank in found:
        value, grads = of_rank[f"cut {cut}"]
        assert value == pytest.approx(float(loss.detach()), abs=1e-5)
        torch.testing.assert_close(grads, expected, atol=1e-5, rtol=0)


def test_positives_may_all_be_on_the_other_rank(found: list[dict[str, Any]]) -> None:
    assert all(of_rank["far positive"] > 0 for of_rank in found)


def test_ranks_without_positives_go_on_with_zero_gradients_and_one_warning(
    found: list[dict[str, Any]],
) -> None:
    for of_rank in found:
        assert of_rank["zero"] == 0
        assert of_rank["warned"] == [NO_POSITIVES]


def test_all_ranks_name_the_rank_with_bad_embeddings(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert of_rank["nan"] == "embeddings are NaN or infinite: 2 of 5 rows on rank 1"


# --- in fit ---


SIZES = (37, 39)  # in the last step of an epoch: 1 sample, and a stand-in; 1 and 2 samples


def two_views() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 10), nn.Unflatten(1, (2, 5)))


def fitted(config: Config, ctx: RunContext) -> dict[int, Tensor]:
    found = {}
    for size in SIZES:
        model = two_views()
        values = nb.fit(ctx, config, model, points(size), None, loss=supervised_contrastive_loss)
        assert values["train_loss"] > 0
        found[size] = nn.utils.parameters_to_vector(model.parameters()).detach()
    return found


def in_plain_torch(size: int, passes: int) -> Tensor:
    """Batches of 12 and a smaller last one. A pass of two ranks has a part of each one's half."""
    model, (inputs, labels) = two_views(), points(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in (1, 2):
        for batch in permutation(size, seed=0, epoch=epoch).split(12):
            optimizer.zero_grad()
            halves = batch.tensor_split([len(batch) // 2])
            pairs = zip_longest(*(half.split(6 // passes) for half in halves), fillvalue=batch[:0])
            for part in [torch.cat(both) for both in pairs] if passes > 1 else [batch]:
                loss = supervised_contrastive_loss(model(inputs[part]), labels[part])
                (loss * len(part) / len(batch)).backward()
            optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize(
    ("ranks", "passes"),
    [
        (2, 1),
        pytest.param(1, 1, marks=pytest.mark.long),
        pytest.param(2, 3, marks=pytest.mark.long),
    ],
)
@pytest.mark.filterwarnings("ignore:a batch has no two samples")
def test_fit_trains_as_on_whole_batches_without_a_setting(
    tmp_path: Path, ranks: int, passes: int
) -> None:
    config = config_of(tmp_path, **{"train.gradient_accumulation_steps": passes})
    found = nb.launch(fitted, config, processes=ranks, display="off").value
    for size, weights in found.items():
        torch.testing.assert_close(weights, in_plain_torch(size, passes), atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:a batch has no two samples")
def test_the_validation_takes_each_batch_by_itself(tmp_path: Path) -> None:
    """The ranks have different numbers of batches there: 37 samples, at most 24 of a rank."""

    def train(config: Config, ctx: RunContext) -> dict[str, float]:
        loss = supervised_contrastive_loss
        return nb.fit(ctx, config, encoder(), points(24), points(37), loss=loss)

    values = nb.launch(train, config_of(tmp_path), processes=2, display="off").value
    assert 0 < values["val_loss"] < 10


def test_without_the_other_ranks_fit_asks_for_a_setting(tmp_path: Path) -> None:
    def train(config: Config, ctx: RunContext) -> dict[str, float]:
        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return contrastive._l_out(outputs, targets, 0.1)

        return nb.fit(ctx, config, encoder(), points(24), None, loss=loss)

    config = config_of(tmp_path).with_overrides({"train.gradient_accumulation_steps": 2})
    with pytest.raises(FitError, match=r"set\s+train\.loss_reduction: batch"):
        nb.launch(train, config, start="inline", display="off")


# --- losses of others ---


def test_metric_loss_takes_a_loss_of_ones_own_in_float32() -> None:
    def spread(rows: Tensor, labels: Tensor) -> Tensor:
        assert rows.dtype == torch.float32
        return (rows @ rows.T).mean() + 0 * labels.sum()

    embeddings = torch.randn(4, 3).half().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = metric_loss(spread)(embeddings, torch.arange(4))
    assert loss.dtype == torch.float32
