"""Metrics equal scikit-learn's on the gathered predictions, on any number of ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import nn

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import FitError
from nbtoolkit.training.losses import BatchLoss
from nbtoolkit.training.metrics import Meter, accuracy, named_metrics
from nbtoolkit.worker.collectives import Rows
from nbtoolkit.worker.context import RunContext

CPU = torch.device("cpu")


def metered(metrics: Any, *batches: tuple[torch.Tensor, Any, Any]) -> dict[str, float]:
    """Metrics of batches (loss, outputs, targets) on one rank."""
    meter = Meter(named_metrics(metrics), CPU)
    for loss, outputs, targets in batches:
        meter.add(BatchLoss(loss, float(len(targets))), outputs, targets, len(targets))
    return meter.result()


# --- one rank ------------------------------------------------------------------------------------


def test_accuracy_of_classes_logits_and_pixels() -> None:
    scores = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.7, 0.3]])
    assert accuracy(scores, torch.tensor([1, 0, 1])) == pytest.approx(2 / 3)
    assert accuracy(torch.tensor([2.0, -1.0, 3.0, 0.5]), torch.tensor([1, 0, 0, 1])) == 0.75
    pixels = torch.stack([torch.zeros(2, 4), torch.ones(2, 4)], dim=1)
    assert accuracy(pixels, torch.ones(2, 4)) == 1.0


X_ENTROPY, BCE = nn.functional.cross_entropy, nn.functional.binary_cross_entropy
SCORES = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.7, 0.3], [0.2, 0.8]])
CLASSES = torch.tensor([1, 0, 1, 1])
BINARY = torch.tensor([1.0, 0.0, 0.0, 1.0])  # half of the scores of 1 are above 0.5


@pytest.mark.parametrize(
    ("outputs", "targets", "loss", "share"),
    [
        (torch.tensor([[2.0], [-1.0], [3.0]]), torch.tensor([1, 0, 0]), None, 2 / 3),
        (SCORES, CLASSES[:, None], None, 3 / 4),
        (SCORES, nn.functional.one_hot(CLASSES).double(), X_ENTROPY, 3 / 4),
        (SCORES, nn.functional.one_hot(CLASSES).double(), nn.CrossEntropyLoss(), 3 / 4),
        (SCORES[:, 1], BINARY, BCE, 1.0),
        (SCORES[:, 1], BINARY, nn.BCELoss(), 1.0),
        (SCORES[:, 1], BINARY, nn.functional.mse_loss, 1.0),
        (SCORES[:, 1:], BINARY[:, None], nn.MSELoss(), 1.0),
        (SCORES[:, 1], BINARY, partial(nn.functional.huber_loss, delta=0.5), 1.0),
        (SCORES, torch.tensor([1, -100, -100, 0]), None, 1 / 2),
        (SCORES, CLASSES, nn.CrossEntropyLoss(ignore_index=0), 2 / 3),
    ],
)
def test_accuracy_reads_outputs_and_targets_as_the_loss_does(
    outputs: torch.Tensor, targets: torch.Tensor, loss: Any, share: float
) -> None:
    assert accuracy(outputs, targets, loss) == pytest.approx(share)


def test_ignored_targets_do_not_weigh_in_the_mean_over_batches() -> None:
    meter = Meter(named_metrics("accuracy"), CPU)
    for targets in (torch.tensor([1, -100, -100, -100]), torch.tensor([1, 0, 1, 0])):
        meter.add(BatchLoss(torch.tensor(0.0), 1.0), SCORES, targets, 4)
    assert meter.result()["accuracy"] == pytest.approx(3 / 5)


@pytest.mark.parametrize(
    ("outputs", "targets", "why"),
    [
        (torch.zeros(3), torch.tensor([0.5, 1.0, 2.0]), "not classes but other numbers"),
        (torch.zeros(3), torch.tensor([-1, 1, 1]), "not classes but other numbers"),
        (torch.zeros(3, 2), torch.zeros(4), r"shapes do not fit \(outputs of shape \(3, 2\)"),
    ],
)
def test_accuracy_refuses_what_is_no_class(
    outputs: torch.Tensor, targets: torch.Tensor, why: str
) -> None:
    with pytest.raises(FitError, match=why + r"[\s\S]*Do now:  for a regression pass metrics="):
        accuracy(outputs, targets)


def test_metrics_name_themselves_or_are_named() -> None:
    def recall(outputs: Any, targets: Any) -> float:
        return 0.0

    assert named_metrics(None) == {}
    assert named_metrics("accuracy") == {"accuracy": accuracy}
    assert named_metrics(["accuracy", recall]) == {"accuracy": accuracy, "recall": recall}
    assert named_metrics({"mine": "accuracy"}) == {"mine": accuracy}
    assert [*named_metrics([nb.epoch_metric(recall)])] == ["recall"]
    with pytest.raises(FitError, match=r"two metrics are called 'recall'[\s\S]*dict"):
        named_metrics([recall, recall])
    with pytest.raises(FitError, match=r"two metrics are called 'loss': the loss is always"):
        named_metrics({"loss": recall})
    with pytest.raises(FitError, match=r"no metric of the name 'dice'[\s\S]*epoch_metric"):
        named_metrics(["dice"])


def test_the_loss_and_functions_are_means_over_the_samples() -> None:
    def largest(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float(outputs.max())

    two = (torch.tensor(1.0), torch.tensor([3.0, 5.0]), torch.zeros(2))
    one = (torch.tensor(4.0), torch.tensor([8.0]), torch.zeros(1))
    assert metered([largest], two, one) == {"loss": 2.0, "largest": 6.0}


def test_over_all_sees_every_sample_at_once_in_order() -> None:
    seen = []

    def several(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        seen.append((outputs, targets))
        return {"max": outputs.max(), "range": float(outputs.max() - outputs.min())}

    half = torch.tensor([8.0], dtype=torch.bfloat16)
    two = (torch.tensor(1.0), torch.tensor([3.0, 5.0]), torch.tensor([0, 1]))
    one = (torch.tensor(1.0), half, torch.tensor([2]))
    values = metered({"s": nb.epoch_metric(several)}, two, one)
    assert values == {"loss": 1.0, "s_max": 8.0, "s_range": 5.0}
    ((outputs, targets),) = seen
    assert outputs.numpy().dtype == np.float32
    assert targets.tolist() == [0, 1, 2]
    assert nb.epoch_metric(accuracy)(torch.ones(3), torch.ones(3)) == 1.0


def test_metrics_get_half_precision_as_float32() -> None:
    def digits(outputs: torch.Tensor, targets: torch.Tensor) -> int:
        return np.asarray(outputs).dtype.itemsize

    outputs = torch.zeros(2, dtype=torch.bfloat16)
    assert metered([digits], (torch.tensor(0.0), outputs, torch.zeros(2)))["digits"] == 4


def test_a_collection_of_torchmetrics_gives_each_its_name() -> None:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

    both = MetricCollection([MulticlassAccuracy(3, average="micro"), MulticlassF1Score(3)])
    first = (torch.tensor(1.0), torch.eye(3)[:2], torch.tensor([0, 1]))
    second = (torch.tensor(4.0), torch.eye(3)[:1], torch.tensor([1]))
    for _ in range(2):  # each pass starts from zero
        values = metered({"m": both}, first, second)
        assert values["loss"] == 2.0
        assert values["m_MulticlassAccuracy"] == pytest.approx(2 / 3)
        assert "m_MulticlassF1Score" in values


def test_a_metric_of_several_numbers_is_refused_with_its_name() -> None:
    from torchmetrics.classification import MulticlassAccuracy

    batch = (torch.tensor(1.0), torch.eye(3), torch.arange(3))
    with pytest.raises(FitError, match=r"'each' is not a number but tensor[\s\S]*Classwise"):
        metered({"each": MulticlassAccuracy(3, average=None)}, batch)


@pytest.mark.parametrize(
    ("outputs", "what"),
    [
        (torch.tensor(3.0), r"of 2 samples hold a tensor of shape \(\)"),
        ({"a": torch.zeros(2), "b": (torch.zeros(3, 2),)}, r"hold a tensor of shape \(3, 2\)"),
        ([torch.zeros(2), "text"], "hold a str"),
    ],
    ids=["scalar", "rows", "text"],
)
def test_outputs_without_a_row_a_sample_are_refused(outputs: Any, what: str) -> None:
    with pytest.raises(FitError, match=what + r"[\s\S]*one row per sample"):
        Rows().add(outputs, 2)


def test_rows_of_two_shapes_are_refused() -> None:
    rows = Rows()
    rows.add(torch.zeros(2, 3), 2)
    rows.add(torch.zeros(2, 4), 2)
    with pytest.raises(FitError, match=r"two batches cannot be concatenated[\s\S]*pad them"):
        rows.part()


# --- several ranks -------------------------------------------------------------------------------

SIZES = {"uneven": 25, "fewer than ranks": 2}
F1 = {"average": "macro"}
OF_MORE = ("auc", "correlation")  # metrics that are not defined where a batch is one sample


def points(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in 6 dimensions, and which of the first three is largest."""
    inputs = torch.randn(size, 6, generator=torch.Generator().manual_seed(7))
    return inputs, inputs[:, :3].argmax(dim=1)


def by_function() -> dict[str, Any]:
    """Metrics by functions, scikit-learn's where they are no means."""

    def f1(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return sk.f1_score(targets, outputs.argmax(1), **F1)

    def auc(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return sk.roc_auc_score(targets, outputs.softmax(1), multi_class="ovr")

    return {"accuracy": "accuracy", "f1": nb.epoch_metric(f1), "auc": nb.epoch_metric(auc)}


def by_torchmetrics() -> dict[str, Any]:
    """Metrics whose states are sums, lists of tensors, stacked (Pearson), and lists unreduced."""
    from torchmetrics import Metric, MetricCollection, PearsonCorrCoef
    from torchmetrics import classification as tm

    class Correlation(PearsonCorrCoef):
        def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
            super().update(outputs[:, 0], targets.float())

    class Median(Metric):
        """As in torchmetrics' retrieval metrics: ranks with unequal numbers of batches hang it."""

        def __init__(self) -> None:
            super().__init__()
            self.add_state("rows", default=[], dist_reduce_fx=None)
            self.add_state("never", default=[], dist_reduce_fx="cat")

        def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
            self.rows.append(outputs[:, 0])

        def compute(self) -> torch.Tensor:
            return torch.cat(self.rows).quantile(0.5)

    classes = MetricCollection(
        {
            "accuracy": tm.MulticlassAccuracy(3, average="micro"),
            "f1": tm.MulticlassF1Score(3, **F1),
            "recall": tm.MulticlassRecall(3, average="macro"),
            "auc": tm.MulticlassAUROC(3),
        }
    )
    return {"tm": classes, "median": Median(), "correlation": Correlation()}


def evaluated(config: Config, ctx: RunContext) -> dict[str, Any]:
    """What fit says of validation sets of two sizes, and the predictions it is said of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    found = {}
    for name, size in SIZES.items():
        loss = nn.functional.cross_entropy
        metrics = by_torchmetrics() | by_function()
        metrics = {key: one for key, one in metrics.items() if size > 2 or key not in OF_MORE}
        values = nb.fit(ctx, config, model, points(36), points(size), loss=loss, metrics=metrics)
        found[name] = values, nb.predict(ctx, model, points(size))
    return found


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)],
)
def launched(request: Any, tmp_path_factory: pytest.TempPathFactory) -> nb.RunResult:
    """``evaluated`` on some ranks; validated in batches of 4, of which rank 0 has one more."""
    config = Config().with_overrides(
        {
            "optim.lr": 0.05,
            "train": {
                "epochs": 2,
                "batch_size": 12,
                "gradient_accumulation_steps": 12 // request.param,
            },
            "checkpoint.enabled": False,
            "tracking.mlflow": False,
            "runtime.output_dir": str(tmp_path_factory.mktemp("metrics")),
        }
    )
    return nb.launch(evaluated, config, processes=request.param, display="off")


def test_metrics_are_scikit_learns_of_the_predictions(launched: nb.RunResult) -> None:
    values, scores = launched.value["uneven"]
    targets, shares = points(25)[1], scores.double().softmax(1)
    right = sk.accuracy_score(targets, scores.argmax(1))
    f1 = sk.f1_score(targets, scores.argmax(1), **F1)
    auc = sk.roc_auc_score(targets, shares, multi_class="ovr")
    recall = sk.recall_score(targets, scores.argmax(1), average="macro")
    correlation = np.corrcoef(scores[:, 0], targets)[0, 1]
    expected = {
        "val_loss": sk.log_loss(targets, shares),
        "val_accuracy": right,
        "val_f1": f1,
        "val_auc": auc,
        "val_tm_accuracy": right,
        "val_tm_f1": f1,
        "val_tm_recall": recall,
        "val_tm_auc": auc,
        "val_correlation": correlation,
        "val_median": np.median(scores[:, 0]),
    }
    assert {0.0, 1.0}.isdisjoint(expected.values())  # it is neither perfect nor useless
    assert {name: values[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_metrics_of_fewer_samples_than_ranks(launched: nb.RunResult) -> None:
    values, scores = launched.value["fewer than ranks"]
    targets = points(2)[1]
    assert len(scores) == 2
    expected = {
        "val_loss": nn.functional.cross_entropy(scores, targets).item(),
        "val_tm_accuracy": sk.accuracy_score(targets, scores.argmax(1)),
        "val_median": np.median(scores[:, 0]),
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_all_ranks_have_the_same_values(launched: nb.RunResult) -> None:
    first, *others = launched.values
    for value in others:
        for name in SIZES:
            assert value[name][0] == first[name][0]
            assert torch.equal(value[name][1], first[name][1])
