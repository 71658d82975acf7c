"""Weight averaging: correct means, evaluation of the means, and matching statistics."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import CheckpointError, FitError
from nbtoolkit.training.averaging import Averages, make_averages
from nbtoolkit.worker.context import RunContext


def averages_of(
    module: nn.Module, average: str, *, steps: int = 100, factor: float = 1.0, **train: Any
) -> Averages:
    config = Config().with_overrides({"train": {"weight_averaging": average, **train}})
    averages = make_averages(config, module, steps=steps, factor=factor)
    assert averages is not None
    return averages


def mlp(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *more, nn.Tanh(), nn.Linear(16, 3))


def inputs(number: int = 0, size: int = 8) -> Tensor:
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(number))


def train_step(module: nn.Module, number: int) -> None:
    """A step of plain descent, on inputs of its own."""
    module.train()
    module.zero_grad()
    module(inputs(number)).square().mean().backward()
    with torch.no_grad():
        for weight in module.parameters():
            if weight.grad is not None:
                weight -= 0.5 * weight.grad


def check_equal(one: nn.Module, other: nn.Module, *, atol: float = 0.0) -> None:
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, atol=atol, rtol=0)


def test_nothing_is_averaged_unless_it_is_asked_for() -> None:
    assert make_averages(Config(), mlp(), steps=3) is None


# --- exponential ---------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.999, 0.5])
def test_the_decay_of_ema_grows_to_what_is_set(decay: float) -> None:
    module = nn.Linear(1, 1, bias=False)
    averages = averages_of(module, "ema", ema_decay=decay)
    assert not averages.active
    mean = 0.0
    for step in range(30):
        module.weight.data.fill_(float(step % 7))
        averages.update()
        keep = min(decay, (1 + step) / (10 + step)) if step else 0.0
        mean = keep * mean + (1 - keep) * (step % 7)
        assert averages.module.weight.item() == pytest.approx(mean, abs=1e-5)
    assert averages.active
    assert averages.n_averaged == 30


def test_ema_is_torchs_once_the_decay_is_reached() -> None:
    module = mlp(nn.BatchNorm1d(16))
    averages = averages_of(module, "ema", ema_decay=0.1)  # reached with the first mean: 2/11
    theirs = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.1), use_buffers=True)
    for number in range(5):
        train_step(module, number)
        averages.update()
        theirs.update_parameters(module)
    counted = averages.module[1].num_batches_tracked
    theirs.module[1].num_batches_tracked.copy_(counted)  # theirs is a mean of counts
    check_equal(theirs.module, averages.module, atol=1e-6)
    assert counted == 5


def test_an_epochs_end_and_the_learning_rate_are_nothing_to_ema() -> None:
    averages = averages_of(mlp(), "ema")
    averages.end_epoch(100)
    assert not averages.active
    assert averages.rate(100) is None
    assert not averages.needs_batch_norm


# --- stochastic weight averaging -----------------------------------------------------------------


def test_swa_is_the_mean_of_the_ends_of_late_epochs() -> None:
    module = mlp()
    averages = averages_of(module, "swa", swa_start=0.5)
    ends = []
    for number in range(10, 101, 10):
        train_step(module, number)
        averages.update()
        averages.end_epoch(number)
        assert averages.active == (number >= 50)
        if number >= 50:
            ends.append([weight.detach().clone() for weight in module.parameters()])
    assert averages.n_averaged == 6
    for mean, *weights in zip(averages.module.parameters(), *ends, strict=True):
        torch.testing.assert_close(mean.data, torch.stack(weights).mean(dim=0))


@pytest.mark.parametrize(("start", "first"), [(0.0, 10), (1.0, 100)])
def test_swa_has_one_average_at_least(start: float, first: int) -> None:
    averages = averages_of(mlp(), "swa", swa_start=start)
    taken = [step for step in range(10, 101, 10) if averages.end_epoch(step) or averages.active]
    assert taken[0] == first


def test_the_learning_rate_of_swa_is_constant_while_it_averages() -> None:
    averages = averages_of(mlp(), "swa", swa_lr=0.02, factor=2.0)
    assert [averages.rate(step) for step in (0, 74, 75, 99)] == [None, None, 0.04, 0.04]
    assert averages_of(mlp(), "swa").rate(99) is None


def test_batch_norm_statistics_of_swa_are_made_anew() -> None:
    module = mlp(nn.BatchNorm1d(16))
    averages = averages_of(module, "swa", swa_start=0.0)
    assert not averages.needs_batch_norm
    for number in range(3):
        train_step(module, number)
        averages.end_epoch(number)
    assert averages.needs_batch_norm
    batches = [inputs(number) for number in range(10, 14)]
    expected = mlp(nn.BatchNorm1d(16))
    expected.load_state_dict(averages.weights())
    update_bn(batches, expected)
    averages.update_batch_norm(batches)
    assert not averages.needs_batch_norm
    assert not averages.module.training
    expected[1].num_batches_tracked.copy_(module[1].num_batches_tracked)
    check_equal(expected, averages.module)
    averages.end_epoch(4)
    assert averages.needs_batch_norm


def test_a_batch_of_any_form_may_be_passed_through() -> None:
    module = mlp(nn.BatchNorm1d(16))
    one, other = (averages_of(module, "swa", swa_start=0.0) for _ in range(2))
    for averages, batch, forward in (
        (one, (inputs(), "targets"), None),
        (other, {"x": inputs()}, lambda model, batch: model(batch["x"])),
    ):
        averages.end_epoch(1)
        averages.update_batch_norm([batch, batch], forward)
    check_equal(one.module, other.module)


def test_a_model_without_batch_norms_needs_no_statistics() -> None:
    averages = averages_of(mlp(nn.LayerNorm(16)), "swa", swa_start=0.0)
    averages.end_epoch(1)
    assert not averages.needs_batch_norm


# --- the averaged module -------------------------------------------------------------------------


class Odd(nn.Module):
    """Tied and frozen weights; buffers that are counters, masks, not kept, and that grow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 6)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("table", torch.zeros(1), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.frozen(rows))
        return outputs


def test_it_is_evaluated_where_it_is() -> None:
    module, calls = mlp(), []
    averages = averages_of(module, "ema")
    train_step(module, 0)
    averages.update()
    places = [weight.data_ptr() for weight in (*module.parameters(), *averages.module.parameters())]
    assert len(set(places)) == 8
    averages.module.register_forward_hook(lambda *_: calls.append(1))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    outputs = averages.module(inputs(5))
    train_step(module, 1)
    averages.update()
    assert not torch.equal(averages.module(inputs(5)), outputs)
    assert len(calls) == 2
    after = [weight.data_ptr() for weight in (*module.parameters(), *averages.module.parameters())]
    assert after == places
    assert not torch.equal(before["0.weight"], module[0].weight)
    assert averages.module.training is False
    assert not any(weight.requires_grad for weight in averages.module.parameters())
    assert all(weight.requires_grad for weight in module.parameters())


@pytest.mark.parametrize("average", ["ema", "swa"])
def test_ties_stay_frozen_weights_are_shared_and_buffers_are_copied(average: str) -> None:
    module = Odd()
    averages = averages_of(module, average, swa_start=0.0)
    for number in range(4):
        train_step(module, number)
        module.seen += 1
        module.table = torch.arange(float(number))
        averages.update()
        averages.end_epoch(number)
    twin = averages.module
    assert twin.head.weight is twin.embedding.weight
    assert twin.head.weight is not module.head.weight
    assert twin.frozen.weight is module.frozen.weight
    assert twin.mask.tolist() == [[0.0, float("-inf")], [0.0, 0.0]]
    assert (twin.seen, twin.table.tolist()) == (4, [0.0, 1.0, 2.0])
    module.seen += 1
    assert averages.module.seen == 4
    assert "table" not in averages.weights()
    assert averages.weights().keys() == module.state_dict().keys()


def test_a_layer_whose_forward_was_replaced_is_passed_through_with_the_averaged_weights() -> None:
    module = mlp()
    module[0].forward = partial(nn.Linear.forward, module[0])  # as for recomputed activations
    averages = averages_of(module, "ema")
    expected = averages.module(inputs())
    train_step(module, 0)
    assert torch.equal(averages.module(inputs()), expected)


def test_its_weights_are_those_of_the_model() -> None:
    module = mlp(nn.BatchNorm1d(16))
    averages = averages_of(module, "ema")
    for number in range(3):
        train_step(module, number)
        averages.update()
    fresh = mlp(nn.BatchNorm1d(16))
    fresh.load_state_dict(averages.weights())
    check_equal(fresh, averages.module)
    assert not torch.equal(fresh[0].weight, module[0].weight)


@pytest.mark.parametrize("average", ["ema", "swa"])
def test_it_goes_on_where_it_was(average: str) -> None:
    whole, half = mlp(nn.BatchNorm1d(16)), mlp(nn.BatchNorm1d(16))
    mine, other = (averages_of(one, average, swa_start=0.0) for one in (whole, half))
    for number in range(4):
        train_step(whole, number)
        mine.update()
        mine.end_epoch(number)
    file = io.BytesIO()
    torch.save({"averages": mine.state(), "model": whole.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    half.load_state_dict(saved["model"])
    other.restore(saved["averages"], source="last")
    check_equal(mine.module, other.module)
    for module, averages in ((whole, mine), (half, other)):
        train_step(module, 4)
        averages.update()
        averages.end_epoch(5)
    check_equal(mine.module, other.module)
    assert mine.n_averaged == other.n_averaged == 5


# --- what cannot be averaged or restored ---------------------------------------------------------


def test_foreign_averages_are_refused() -> None:
    averages = averages_of(mlp(), "ema")
    with pytest.raises(
        CheckpointError, match=r"averages in last are not fit's: n_averaged, weights"
    ):
        averages.restore({}, source="last")
    state = averages_of(nn.Linear(6, 3), "ema").state()
    with pytest.raises(CheckpointError, match=r"last does not fit this Sequential"):
        averages.restore(state, source="last")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weights_are_refused_if_they_are_trained(dtype: torch.dtype) -> None:
    half = mlp().to(dtype)
    with pytest.raises(FitError, match=rf"in {dtype}, such as 0\.weight[\s\S]*upcast"):
        averages_of(half, "ema")
    averages_of(nn.Sequential(half.requires_grad_(False), nn.Linear(3, 3)), "ema")


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    module = mlp()
    module.cache = module[0].weight * 2  # not a leaf
    with pytest.raises(FitError, match=r"this Sequential cannot be copied[\s\S]*weight_norm"):
        averages_of(module, "ema")


# --- in a run, on several ranks ------------------------------------------------------------------


def statistics(config: Config, ctx: RunContext) -> dict[str, Any]:
    """Batch-norm statistics over 6 batches, dealt to the ranks in turn."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4), nn.BatchNorm1d(4)
    )
    averages = make_averages(config, module, steps=1)
    assert averages is not None
    averages.end_epoch(1)
    averages.update_batch_norm([inputs(number) for number in range(6)][ctx.rank :: ctx.world_size])
    return {name: value.tolist() for name, value in averages.module.named_buffers()}


def synced(config: Config, ctx: RunContext) -> list[int]:
    """How many ranks a ``SyncBatchNorm`` meets: the averaged one, the model's own."""
    module = nn.SyncBatchNorm(3)
    averages = make_averages(config, module, steps=1)
    assert averages is not None
    groups = averages.module.process_group, module.process_group
    return [torch.distributed.get_world_size(group) for group in groups]


def averaged(config: Config, ctx: RunContext) -> dict[str, Any]:
    """A fit with each kind of average: what it gives, and the model's weights at the end."""
    rows = inputs(size=36)
    values, weights = list[Any](), list[float]()
    for more in (
        {"train.weight_averaging": "ema"},
        {"train.weight_averaging": "swa", "train.swa_lr": 0.01},
    ):
        one, model = config.with_overrides(more), mlp()
        data = rows, rows[:, :3].argmax(dim=1)
        values.append(nb.fit(ctx, one, model, data, data, loss=nn.functional.cross_entropy))
        for weight in model.parameters():
            weights += weight.flatten().tolist()
    return {"values": values, "weights": weights}


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., nb.RunResult]:
    def on(train: Any, processes: int, average: str = "swa") -> nb.RunResult:
        settings = {
            "train": {"weight_averaging": average, "swa_start": 0.5, "epochs": 4, "batch_size": 12},
            "optim": {"name": "sgd", "lr": 0.1},
            "tracking.mlflow": False,
            "runtime.output_dir": str(tmp_path),
        }
        config = Config().with_overrides(settings)
        return nb.launch(train, config, processes=processes, resume="never", display="off")

    return on


def test_statistics_do_not_depend_on_the_ranks(launch: Callable[..., nb.RunResult]) -> None:
    expected = launch(statistics, 1).value
    for number in (2, 4):
        for found in launch(statistics, number).values:
            for name, value in expected.items():
                if not name.endswith("num_batches_tracked"):
                    assert found[name] == pytest.approx(value, abs=1e-5), name


def test_averaged_norms_meet_no_other_rank(launch: Callable[..., nb.RunResult]) -> None:
    assert launch(synced, 2).values == [[1, 2], [1, 2]]


@pytest.mark.long
def test_averages_do_not_depend_on_the_ranks(launch: Callable[..., nb.RunResult]) -> None:
    alone, two = launch(averaged, 1).value, launch(averaged, 2)
    assert two.values[0]["weights"] == two.values[1]["weights"]
    assert two.value["weights"] == pytest.approx(alone["weights"], abs=1e-5)
    for one, other in zip(alone["values"], two.value["values"], strict=True):
        assert other == pytest.approx(one, abs=1e-5)
