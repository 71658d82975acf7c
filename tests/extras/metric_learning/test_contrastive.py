"""The loss of stage 1: one of pytorch-metric-learning, over the rows of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import ConfigError
from nbtoolkit.extras.metric_learning.contrastive import make_loss
from nbtoolkit.worker.context import RunContext

EMBEDDINGS = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12) % 4


def by_definition(temperature: float) -> float:
    """Equation 2 of arXiv:2004.11362, sample by sample, in float64."""
    unit = nn.functional.normalize(EMBEDDINGS.double(), dim=1)
    losses = []
    for i in range(len(unit)):
        others = [a for a in range(len(unit)) if a != i]
        total = torch.stack([(unit[i] @ unit[a] / temperature).exp() for a in others]).sum()
        positives = [p for p in others if LABELS[p] == LABELS[i]]
        terms = [((unit[i] @ unit[p] / temperature).exp() / total).log() for p in positives]
        losses.append(-torch.stack(terms).sum() / len(positives))
    return float(torch.stack(losses).mean())


@pytest.mark.parametrize(
    ("settings", "temperature"),
    [
        ("SupConLoss", 0.1),
        ({"name": "SupConLoss", "temperature": 0.5}, 0.5),
        ({"name": "pytorch_metric_learning.losses.SupConLoss", "temperature": 0.01}, 0.01),
    ],
)
def test_the_supervised_contrastive_loss_is_that_of_the_definition(
    settings: Any, temperature: float
) -> None:
    loss = make_loss(settings)
    assert float(loss(EMBEDDINGS, LABELS)) == pytest.approx(by_definition(temperature), rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("SupCon", r"model\.loss: pytorch_metric_learning\.losses\.SupCon .*no attribute"),
        ({"name": "SupConLoss", "heat": 2}, r"model\.loss: .*unexpected keyword argument 'heat'"),
        ({"temperature": 2}, r"model\.loss: .*None"),
    ],
)
def test_an_unknown_loss_or_argument_is_named(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_loss(settings)


# --- in fit ---


NAMES = ("TripletMarginLoss", "MultiSimilarityLoss", "CircleLoss", "NTXentLoss", "ArcFaceLoss")
CENTRES = {"num_classes": 4, "embedding_size": 5}


def points(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, 6, generator=generator)
    return inputs, torch.randint(4, (size,), generator=generator)


def fitted(config: Config, ctx: RunContext) -> dict[str, Tensor]:
    found = {}
    for name in NAMES:
        torch.manual_seed(0)
        more = CENTRES if name == "ArcFaceLoss" else {}
        loss: Any = make_loss({"name": name, **more})
        model = nn.Linear(6, 5)
        trained = [*model.parameters(), *(loss.args[0].parameters())]
        start = nn.utils.parameters_to_vector(trained).detach().clone()
        nb.fit(ctx, config, model, points(37), None, loss=loss)
        found[name] = nn.utils.parameters_to_vector(trained).detach() - start
    return found


@pytest.mark.long
def test_fit_trains_the_same_with_each_loss_on_two_ranks(tmp_path: Path) -> None:
    settings = {
        "optim.name": "sgd",
        "optim.lr": 0.1,
        "train.epochs": 2,
        "train.batch_size": 12,
        "checkpoint.enabled": False,
        "checkpoint.weights": "last",
        "tracking.mlflow": False,
        "runtime.output_dir": str(tmp_path),
    }
    config = nb.load_config(env=None, overrides=settings)
    one, two = (nb.launch(fitted, config, processes=n, display="off").value for n in (1, 2))
    for name, weights in one.items():
        assert weights.abs().max() > 1e-3, name
        # Two steps of rounding of a float32: some CPUs add up in another order.
        torch.testing.assert_close(two[name], weights, atol=3e-6, rtol=3e-6)
