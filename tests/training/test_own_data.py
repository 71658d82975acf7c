"""What a first notebook with its own data meets: a mistake is named, with the line to write."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import nbtoolkit as nb
from nbtoolkit.errors import CheckpointError, ConfigError, FitError

INPUTS = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
LABELS = INPUTS[:, :2].argmax(dim=1)


def configured(folder: Path, **more: Any) -> nb.Config:
    settings = {
        "runtime.output_dir": str(folder),
        "train.epochs": 3,
        "train.batch_size": 8,
        "tracking.mlflow": False,
    }
    return nb.load_config(env=None, overrides={**settings, **more})


def fitted(
    config: nb.Config,
    data: Any = (INPUTS, LABELS),
    valid: Any = (INPUTS, LABELS),
    *,
    outputs: int = 2,
    loss: Any = functional.cross_entropy,
    **more: Any,
) -> nb.RunResult:
    """The result of a fit of a linear model, in this process."""

    def train(config: nb.Config, ctx: nb.RunContext) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(3, outputs)
        return nb.fit(ctx, config, model, data, valid, loss=loss, **more)

    return nb.launch(train, config, start="inline", display="off")


# --- metrics ---


def broken(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    raise ValueError("of the user's")


@pytest.mark.parametrize("metric", [broken, nb.epoch_metric(broken)], ids=["batch", "epoch"])
def test_an_error_in_a_metric_names_the_metric(tmp_path: Path, metric: Any) -> None:
    with pytest.raises(ValueError, match="of the user's") as caught:
        fitted(configured(tmp_path), metrics={"mine": metric})
    assert any("in the metric 'mine'" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("returned", [None, "0.5", torch.ones(8), {"a": 1.0}])
def test_a_metric_that_is_no_number_is_named(tmp_path: Path, returned: Any) -> None:
    with pytest.raises(FitError, match=r"the metric 'mine' is not a number[\s\S]*x\.mean\(\)"):
        fitted(configured(tmp_path), metrics={"mine": lambda outputs, targets: returned})


@pytest.mark.parametrize(
    ("values", "best", "epoch"),
    [
        ([math.nan, 0.5, 0.25], 0.5, 2),
        ([0.5, math.nan, 0.25], 0.5, 1),
        ([0.25, math.nan, 0.5], 0.5, 3),
        ([math.nan, math.nan, math.nan], math.nan, 0),
    ],
)
def test_nan_is_never_the_best_value(
    tmp_path: Path, values: list[float], best: float, epoch: int
) -> None:
    left = iter(values)
    config = configured(tmp_path, **{"checkpoint.monitor": "val_mine", "checkpoint.mode": "max"})
    metric = nb.epoch_metric(lambda outputs, targets: next(left))
    found = fitted(config, metrics={"mine": metric}).value
    assert found["best_epoch"] == epoch
    assert found["best_val_mine"] == pytest.approx(best, nan_ok=True)
    assert found["val_mine"] == pytest.approx(best, nan_ok=True)  # that of the model's weights


def test_epochs_without_a_number_use_up_the_patience(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"checkpoint.monitor": "val_mine", "checkpoint.mode": "max"}
    config = configured(tmp_path, **settings, **{"train.early_stopping_patience": 2})
    found = fitted(config, metrics={"mine": lambda outputs, targets: math.nan}).value
    assert found["epoch"] == 2
    assert "2 epochs without a val_mine that is a number" in capfd.readouterr().out


def test_accuracy_of_a_regression_is_refused_before_the_first_step(tmp_path: Path) -> None:
    def forward(model: nn.Module, batch: Any) -> Any:
        raise AssertionError("a step was made")

    model = nn.Linear(3, 1)
    model.register_forward_pre_hook(lambda *_: forward(model, None))

    def train(config: nb.Config, ctx: nb.RunContext) -> Any:
        data = INPUTS, INPUTS[:, :1]
        return nb.fit(ctx, config, model, data, data, loss=functional.mse_loss, metrics="accuracy")

    with pytest.raises(FitError, match=r'"accuracy" [\s\S]*not classes[\s\S]*rmse'):
        nb.launch(train, configured(tmp_path), start="inline", display="off")


def test_accuracy_does_not_compare_classes_with_other_numbers(tmp_path: Path) -> None:
    samples = [(row, row[0]) for row in INPUTS]  # targets that fit does not know in advance
    with pytest.raises(FitError, match=r"the targets are not classes but other numbers"):
        fitted(
            configured(tmp_path),
            samples,
            samples,
            loss=lambda outputs, targets: functional.mse_loss(outputs[:, 0], targets),
            metrics=["accuracy"],
        )


# --- types of tensors ---


def doubled(values: torch.Tensor) -> np.ndarray[Any, Any]:
    return values.numpy().astype("float64")


class Doubles(Dataset[Any]):
    """Samples of float64: a data set of one's own keeps its types."""

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index].double(), LABELS[index]


def test_a_tensor_of_another_type_is_an_error_of_torch_with_the_step(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        fitted(configured(tmp_path), Doubles(), None)
    assert "in optimizer step 1 of nb.fit" in caught.value.__notes__
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        fitted(configured(tmp_path), valid=Doubles())
    assert "in the validation after optimizer step 3 of nb.fit" in caught.value.__notes__


def test_other_errors_of_a_step_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fitted(configured(tmp_path), (doubled(INPUTS[:, :2]).astype("float32"), LABELS), None)


# --- tables ---


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_floats_of_arrays_tensors_and_tables_become_those_of_the_model(
    tmp_path: Path, kind: torch.dtype
) -> None:
    pandas = pytest.importorskip("pandas")
    points = torch.rand(24, 3, generator=torch.Generator().manual_seed(3)).to(kind)
    heights = points.sum(1)
    table, column = pandas.DataFrame(points.numpy()), pandas.Series(heights.numpy())
    other = torch.float64 if kind is torch.float32 else torch.float32
    forms = [
        (points, heights),
        (points.to(other), heights.to(other)),
        (points.numpy().astype(str(other)[6:]), heights.numpy().astype("float64")),
        TensorDataset(points.to(other), heights.to(other)),
        DataLoader(TensorDataset(points.to(other), heights.to(other)), shuffle=True),
        (table, column),
    ]

    def train(config: nb.Config, ctx: nb.RunContext) -> Any:
        def step(model: nn.Module, batch: Any) -> Any:
            assert batch[0].dtype == batch[1].dtype == kind
            return model(batch[0])[:, 0], batch[1]

        found = []
        for data in forms:
            torch.manual_seed(0)
            model = nn.Linear(3, 1).to(kind)
            values = nb.fit(ctx, config, model, data, data, loss=functional.mse_loss, step=step)
            predicted = nb.predict(ctx, model, data[0] if isinstance(data, tuple) else data)
            found.append((values["val_loss"], predicted))
        return found

    found = nb.launch(train, configured(tmp_path), start="inline", display="off").value
    for loss, predicted in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-6)
        torch.testing.assert_close(predicted, found[0][1], atol=1e-6, rtol=0)
    assert found[-1][0] == found[0][0]


def test_tables_of_pandas_train_as_their_arrays_do(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    inputs = pandas.DataFrame(doubled(INPUTS), columns=["a", "b", "c"], index=range(50, 74))
    labels = pandas.Series(LABELS.numpy(), index=range(50, 74))
    arrays = fitted(configured(tmp_path), metrics="accuracy").value
    assert (
        fitted(configured(tmp_path), (inputs, labels), (inputs, labels), metrics="accuracy").value
        == arrays
    )

    def train(config: nb.Config, ctx: nb.RunContext) -> Any:
        model = nn.Linear(3, 2)
        return [nb.predict(ctx, model, data) for data in (INPUTS, inputs)]

    one, other = nb.launch(train, configured(tmp_path), start="inline", display="off").value
    assert torch.equal(one, other)


def test_columns_that_are_not_numbers_are_named(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    inputs = pandas.DataFrame({"a": np.ones(4), "town": list("abcd"), "b": [True] * 4})
    labels = pandas.Series(list("xyxy"), name="kind")
    with pytest.raises(FitError, match=r"DataFrame are not numbers: 'town'.*\n.*\n.*get_dummies"):
        fitted(configured(tmp_path), (inputs, LABELS[:4]), None)
    with pytest.raises(FitError, match=r"Series are not numbers: 'kind'.*\n.*\n.*factorize"):
        fitted(configured(tmp_path), (INPUTS[:4], labels), None)


def padded(samples: list[Any]) -> Any:
    rows, labels = zip(*samples, strict=True)
    return torch.stack(rows), torch.full((len(rows),), 3), torch.stack(labels)


@pytest.mark.parametrize(
    ("data", "collate"),
    [
        ((INPUTS, LABELS, LABELS), None),
        (TensorDataset(INPUTS, LABELS, LABELS), None),
        ((INPUTS, LABELS), padded),
    ],
)
def test_a_batch_of_three_tensors_gets_the_form_that_a_collate_function_returns(
    tmp_path: Path, data: Any, collate: Any
) -> None:
    what = (
        r"not a pair \(inputs, targets\) but a (tuple|list) of 3 parts[\s\S]*collate function"
        r"[\s\S]*return \(\(x, lengths\), y\)[\s\S]*model\(\*batch\[:-1\]\), batch\[-1\]"
    )
    with pytest.raises(FitError, match=what):
        fitted(configured(tmp_path), data, None, collate=collate)


def test_the_form_and_the_step_of_this_error_train(tmp_path: Path) -> None:
    class Cut(nn.Linear):
        def forward(self, batch: Any, lengths: Any = None) -> torch.Tensor:
            x, lengths = batch if lengths is None else (batch, lengths)
            return super().forward(x * (torch.arange(3) < lengths[:, None]))

    def pairs(samples: list[Any]) -> Any:
        x, lengths, y = padded(samples)
        return (x, lengths), y

    def train(config: nb.Config, ctx: nb.RunContext) -> Any:
        losses = []
        for more in (
            {"collate": pairs},
            {"collate": padded, "step": lambda model, batch: (model(*batch[:-1]), batch[-1])},
        ):
            torch.manual_seed(0)
            data, loss = (INPUTS, LABELS), functional.cross_entropy
            losses.append(nb.fit(ctx, config, Cut(3, 2), data, data, loss=loss, **more)["val_loss"])
        return losses

    one, other = nb.launch(train, configured(tmp_path), start="inline", display="off").value
    assert one == other


# --- results, contexts and configurations ---


def test_a_result_names_its_weights(tmp_path: Path) -> None:
    result = fitted(configured(tmp_path))
    model = nb.load_model(result, nn.Linear(3, 2))
    assert not model.training
    assert torch.equal(model.weight, result.load_into(nn.Linear(3, 2)).weight)
    with pytest.raises(CheckpointError, match=r"load_model got a dict[\s\S]*result\.paths\.folder"):
        nb.load_model({}, nn.Linear(3, 2))  # type: ignore[type-var]
    with pytest.raises(FitError, match=r"nb\.predict got a RunResult[\s\S]*nb\.load_model\(result"):
        nb.predict(result, nn.Linear(3, 2), INPUTS)  # type: ignore[arg-type]
    config = configured(tmp_path)
    with pytest.raises(FitError, match=r"nb\.fit got a Config in place of ctx[\s\S]*config, ctx"):
        nb.fit(config, result, nn.Linear(3, 2), INPUTS, None, loss=functional.mse_loss)  # type: ignore[arg-type]


def test_a_wrapped_model_is_returned_without_its_wrapper(tmp_path: Path) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> Any:
        model = ctx.prepare(nn.Linear(3, 2))
        return {"model": model, "wrapped": type(model).__name__}

    value = nb.launch(train, configured(tmp_path), processes=2, display="off").value
    assert value["wrapped"] == "DistributedDataParallel"
    assert type(value["model"]) is nn.Linear
    assert value["model"](INPUTS).shape == (24, 2)


def test_a_setting_is_not_assigned(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with pytest.raises(ConfigError, match=r"with_overrides\(\{'train\.epochs': 5\}\)"):
        config.train.epochs = 5
    with pytest.raises(ConfigError, match=r"with_overrides\(\{'seed': 5\}\)"):
        config.seed = 5
    assert (config.train.epochs, config.seed) == (3, 0)
