"""Validation and prediction visit every sample once and in order, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from feeds import Augmented, contexts, listed
from torch import nn
from torch.utils.data import TensorDataset

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import FitError
from nbtoolkit.training.evaluation import make_evaluation_loader
from nbtoolkit.worker.collectives import Rows, in_order
from nbtoolkit.worker.context import RunContext

INPUTS = torch.randn(37, 6, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS[:, :3].argmax(dim=1)


class Stream:
    """Samples without an index."""

    def __init__(self, *columns: torch.Tensor) -> None:
        self.columns = columns

    def __iter__(self) -> Iterator[Any]:
        return zip(*self.columns, strict=True) if len(self.columns) > 1 else iter(self.columns[0])


def model_of(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *more, nn.Tanh(), nn.Linear(16, 3))


# --- the walk ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [lambda x: x, Stream], ids=["tensor", "stream"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 7, 12, 37])
def test_the_ranks_walks_make_the_set(
    tmp_path: Path, form: Callable[..., Any], ranks: int, size: int
) -> None:
    data, parts = form(torch.arange(size)), []
    for ctx in contexts(tmp_path / "run", ranks=ranks):
        walk, rows = make_evaluation_loader(ctx, data, batch_size=2), Rows()
        sizes = [samples for _, samples in walk]
        for batch, samples in walk:  # the second time as the first
            rows.add(batch, samples)
        assert sizes == [2] * (len(sizes) - 1) + sizes[-1:]
        assert 0 not in sizes
        parts.append(rows.part())
    assert in_order(parts).tolist() == list(range(size))


def test_augmentation_does_not_depend_on_the_ranks_or_the_walk(tmp_path: Path) -> None:
    def drawn(ranks: int) -> list[Any]:
        every = contexts(tmp_path / "run", ranks=ranks)
        walks = [
            make_evaluation_loader(ctx, Augmented(7), batch_size=2, collate=listed) for ctx in every
        ]
        return sorted(one for walk in walks for batch, _ in [*walk] for one in batch)

    assert drawn(1) == drawn(1) == drawn(3)


@pytest.mark.parametrize("data", [INPUTS[:0], Stream(INPUTS[:0])], ids=["tensor", "stream"])
def test_an_empty_set_is_refused(tmp_path: Path, data: Any) -> None:
    (ctx,) = contexts(tmp_path / "run")
    with pytest.raises(FitError, match=r"prediction (set is empty|stream gives no sample)"):
        nb.predict(ctx, model_of(), data)


# --- one rank ------------------------------------------------------------------------------------


@pytest.fixture
def ctx(tmp_path: Path) -> RunContext:
    return contexts(tmp_path / "run")[0]


@pytest.mark.parametrize(
    "data",
    [
        INPUTS,
        INPUTS.numpy(),
        (INPUTS, TARGETS),
        TensorDataset(INPUTS),
        [*INPUTS],
        Stream(INPUTS),
        Stream(INPUTS, TARGETS),
    ],
    ids=["tensor", "array", "pair", "TensorDataset", "list", "stream", "stream of pairs"],
)
def test_inputs_come_alone_or_with_targets(ctx: RunContext, data: Any) -> None:
    model = model_of()
    found = nb.predict(ctx, model, data, batch_size=8)
    assert not found.requires_grad
    torch.testing.assert_close(found, model(INPUTS).detach())


def test_outputs_keep_their_form(ctx: RunContext) -> None:
    class Two(nn.Linear):
        def forward(self, rows: torch.Tensor) -> Any:
            return {"all": super().forward(rows), "inner": (rows.argmax(1), [rows > 0])}

    found = nb.predict(ctx, Two(6, 2), INPUTS, batch_size=8)
    assert found["all"].shape == (37, 2)
    assert torch.equal(found["inner"][0], INPUTS.argmax(1))
    assert torch.equal(found["inner"][1][0], INPUTS > 0)


def test_a_step_and_a_collate_of_ones_own(ctx: RunContext) -> None:
    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        return {"rows": torch.stack(samples)}

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[Any, Any]:
        return model(batch["rows"]).argmax(1), None

    model = model_of()
    found = nb.predict(ctx, model, INPUTS, collate=collate, step=step)
    assert torch.equal(found, model(INPUTS).argmax(1))
    with pytest.raises(FitError, match=r"neither inputs nor a pair[\s\S]*but a dict\n[\s\S]*step="):
        nb.predict(ctx, model, INPUTS, collate=collate)


def test_every_layer_is_in_the_mode_it_was_in(ctx: RunContext) -> None:
    model = model_of(nn.BatchNorm1d(16), nn.Dropout(0.5))
    model[1].eval()
    before = [layer.training for layer in model.modules()]
    first, second = nb.predict(ctx, model, INPUTS), nb.predict(ctx, model, INPUTS)
    assert torch.equal(first, second)  # no dropout
    assert [layer.training for layer in model.modules()] == before
    assert sum(before) == len(before) - 1

    def step(model: nn.Module, batch: torch.Tensor) -> tuple[Any, Any]:
        raise KeyError("the user's own")

    with pytest.raises(KeyError):
        nb.predict(ctx, model, INPUTS, step=step)
    assert [layer.training for layer in model.modules()] == before


def test_half_precision_comes_as_float32(tmp_path: Path) -> None:
    (ctx,) = contexts(tmp_path / "run", train__precision="bf16")
    model = model_of()
    found, exact = nb.predict(ctx, model, INPUTS), model(INPUTS)
    assert found.dtype == torch.float32
    assert torch.equal(found, found.bfloat16().float())
    torch.testing.assert_close(found, exact.detach(), atol=0.05, rtol=0.05)


def test_outputs_without_a_row_a_sample_are_refused(ctx: RunContext) -> None:
    def step(model: nn.Module, batch: torch.Tensor) -> tuple[Any, Any]:
        return model(batch).mean(), None

    with pytest.raises(FitError, match=r"outputs of 37 samples hold a tensor of shape \(\)"):
        nb.predict(ctx, model_of(), INPUTS, step=step)


# --- several ranks -------------------------------------------------------------------------------


def on_ranks(config: Config, ctx: RunContext) -> dict[str, Any]:
    """Predictions of a wrapped model whose batch norm saw other samples on every rank."""
    from torch.nn.parallel import DistributedDataParallel

    plain = model_of(nn.BatchNorm1d(16))
    model = DistributedDataParallel(plain) if ctx.world_size > 1 else plain
    plain(INPUTS + ctx.rank)
    found = {
        "uneven": nb.predict(ctx, model, INPUTS, batch_size=4),
        "stream": nb.predict(ctx, model, Stream(INPUTS), batch_size=4),
        "two": nb.predict(ctx, model, INPUTS[:2]),
    }
    assert plain.training
    valid = {"indexed": (INPUTS, TARGETS), "stream": Stream(INPUTS, TARGETS)}
    values = {name: fitted(config, ctx, data) for name, data in valid.items()}
    return {"found": found, "values": values, "direct": plain.eval()(INPUTS).detach()}


def fitted(config: Config, ctx: RunContext, valid: Any) -> dict[str, float]:
    def spread(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float((outputs[1:, 0] - outputs[:-1, 0]).abs().sum())  # of neighbours in the set

    metrics = {"right": "accuracy", "spread": nb.epoch_metric(spread)}
    loss = nn.functional.cross_entropy
    train = INPUTS[:36], TARGETS[:36]
    return nb.fit(ctx, config, model_of(), train, valid, loss=loss, metrics=metrics)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[int, nb.RunResult]:
    """``on_ranks`` by the number of ranks."""
    config = Config().with_overrides(
        {
            "train": {"epochs": 2, "batch_size": 12},
            "checkpoint.enabled": False,
            "tracking.mlflow": False,
            "runtime.output_dir": str(tmp_path_factory.mktemp("validation")),
        }
    )
    return {
        ranks: nb.launch(on_ranks, config, processes=ranks, resume="never", display="off")
        for ranks in (1, 2, 3)
    }


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_predictions_are_those_of_rank_0s_model_in_order(launched: Any, ranks: int) -> None:
    direct = launched[ranks].value["direct"]
    torch.testing.assert_close(direct, launched[1].value["direct"])  # other ranks' norms differ
    for value in launched[ranks].values:
        torch.testing.assert_close(value["found"]["uneven"], direct)
        torch.testing.assert_close(value["found"]["stream"], direct)
        torch.testing.assert_close(value["found"]["two"], direct[:2])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_stream_is_validated_as_a_set_with_an_index(launched: Any, ranks: int) -> None:
    expected = launched[1].value["values"]["indexed"]
    for value in launched[ranks].values:
        assert value["values"]["indexed"] == pytest.approx(expected, abs=1e-5)
        assert value["values"]["stream"] == pytest.approx(expected, abs=1e-5)
