"""Embeddings gathered in order and in little memory, and their scores against brute force."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import FitError
from nbtoolkit.extras.metric_learning import retrieval
from nbtoolkit.extras.metric_learning.retrieval import gather_embeddings, retrieval_scores
from nbtoolkit.worker.context import RunContext

# --- scores ---


def clusters(size: int, classes: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (size,), generator=generator)
    centres = torch.randn(classes, 8, generator=torch.Generator().manual_seed(9))
    return centres[labels] + torch.randn(size, 8, generator=generator), labels


def by_brute_force(vectors: Tensor, labels: Tensor, k: int) -> dict[str, float]:
    """Query by query with scikit-learn; those whose class is not there do not count."""
    rows = []
    for number in range(len(vectors)):
        kept = np.arange(len(vectors)) != number
        others, query = vectors.numpy()[kept], vectors.numpy()[number]
        right = labels.numpy()[kept] == int(labels[number])
        if not right.any():
            continue
        found = []
        for neighbours in (1, k):
            model = KNeighborsClassifier(neighbours, metric="cosine", algorithm="brute")
            model.fit(others, labels.numpy()[kept])
            found.append(model.predict(query[None])[0] == int(labels[number]))
        scores = others @ query / (np.linalg.norm(others, axis=1) * np.linalg.norm(query))
        rows.append([*found, average_precision_score(right, scores)])
    means = np.array(rows, dtype=float).mean(axis=0)
    return dict(zip(("precision_at_1", "knn", "map"), means, strict=True))


@pytest.mark.parametrize("voters", [1, 5])
def test_scores_are_those_of_brute_force(monkeypatch: pytest.MonkeyPatch, voters: int) -> None:
    monkeypatch.setattr(retrieval, "_PAIRS", 1000)  # many blocks
    monkeypatch.setattr(retrieval, "_VOTERS", voters)
    # Two classes: no ties of an odd number of votes.
    given = clusters(120, classes=2) if voters == 5 else clusters(90, classes=12)
    assert retrieval_scores(*given) == pytest.approx(by_brute_force(*given, voters), abs=1e-6)


def test_a_class_that_nobody_else_has_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "_VOTERS", 1)
    vectors, labels = clusters(60, classes=4)
    labels[7] = 2**40
    found = retrieval_scores(vectors, labels)
    assert found == pytest.approx(by_brute_force(vectors, labels, 1), abs=1e-6)


def test_the_nearest_neighbour_decides_between_classes_with_equal_votes() -> None:
    angles = torch.tensor([0.0, 0.1, 0.3, 0.6, 1.0])
    vectors = torch.stack([angles.cos(), angles.sin()], dim=1)
    # The first one asks the other four, of which two have its class. Nobody else counts.
    for labels, right in (([2, 2, 1, 1, 2], 1), ([2, 1, 2, 2, 1], 0)):
        votes = retrieval_scores(vectors, torch.tensor(labels))["knn"]
        alone = by_votes(vectors, labels)
        assert alone[0] == right
        assert votes == pytest.approx(sum(alone) / 5)


def by_votes(vectors: Tensor, labels: list[int]) -> list[bool]:
    """Whether all others, the nearest one first, elect the class of each row."""
    found = []
    for number, label in enumerate(labels):
        order = (vectors @ vectors[number]).argsort(descending=True).tolist()
        near = [labels[other] for other in order if other != number]
        found.append(max(near, key=lambda one: (near.count(one), -near.index(one))) == label)
    return found


def test_equal_embeddings_find_each_other_and_not_themselves() -> None:
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    labels = torch.tensor([0, 1, 0, 1])
    found = retrieval_scores(vectors, labels)
    assert found["precision_at_1"] == 0
    assert found["map"] == pytest.approx(1 / 3)


def test_ties_count_as_in_scikit_learn() -> None:
    vectors, labels = clusters(30, classes=3)
    vectors[10:20] = vectors[:10]
    found = retrieval_scores(vectors, labels)["map"]
    assert found == pytest.approx(by_brute_force(vectors, labels, 1)["map"], abs=1e-4)


@pytest.mark.parametrize(
    ("vectors", "labels", "what"),
    [
        (torch.tensor([[1.0], [torch.nan]]), [0, 0], "1 of 2 embeddings are NaN"),
        (torch.ones(3, 2), [0, 1, 2], "each of 3 embeddings is the only one of its class"),
    ],
)
def test_what_cannot_be_scored_is_refused(vectors: Tensor, labels: list[int], what: str) -> None:
    with pytest.raises(FitError, match=what):
        retrieval_scores(vectors, torch.tensor(labels))


# --- gathering ---


class Wide(nn.Module):
    """A row of 512 floats for each number, beginning with the number."""

    def forward(self, numbers: Tensor) -> Tensor:
        assert not self.training
        return numbers + torch.arange(512.0)


def pairs(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch[0]), batch[1]


def gathered(config: Config, ctx: RunContext) -> dict[str, Any]:
    retrieval._BLOCK = 40  # rows gathered at a time
    numbers = torch.arange(131.0)[:, None]
    sets = {
        "pairs": (numbers, numbers[:, 0].long()),
        "few": (numbers[:1], torch.tensor([0])),
    }
    model, found = Wide().train(), {}
    for name, data in sets.items():
        result = gather_embeddings(ctx, model, TensorDataset(*data), step=pairs)
        assert (result is not None) == ctx.is_main
        if result is not None:
            vectors, labels = result
            found[name] = vectors[:, 0].tolist(), labels.tolist(), vectors.shape
    assert model.training
    with pytest.raises(FitError, match="the prediction set is empty"):
        gather_embeddings(ctx, model, TensorDataset(numbers[:0]), step=pairs)
    return found


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_embeddings_come_in_the_order_of_the_data(tmp_path: Path, ranks: int) -> None:
    settings = {"runtime.output_dir": str(tmp_path), "tracking.mlflow": False}
    config = nb.load_config(env=None, overrides=settings)
    found = nb.launch(gathered, config, processes=ranks, display="off").value
    for name, (numbers, labels, shape) in found.items():
        size = 1 if name == "few" else 131
        assert numbers == list(range(size))
        assert shape == (size, 512)
        assert labels == list(range(size))


def kilobytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{name}:\s+(\d+)", status)[0])


def measured(config: Config, ctx: RunContext) -> float:
    """The peak of this rank's memory while it gathers, less what it had before, in full copies."""
    numbers, labels = torch.arange(100_000.0)[:, None], torch.arange(100_000)
    gather_embeddings(ctx, Wide(), TensorDataset(numbers[:1], labels[:1]), step=pairs)  # imports
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = kilobytes("VmRSS")
    result = gather_embeddings(ctx, Wide(), TensorDataset(numbers, labels), step=pairs)
    assert result is None or result[0].shape == (100_000, 512)
    return (kilobytes("VmHWM") - before) * 1024 / (100_000 * 512 * 4)


@pytest.mark.long
def test_gathering_needs_one_copy_on_the_main_rank_and_little_on_the_other(tmp_path: Path) -> None:
    settings = {"runtime.output_dir": str(tmp_path), "tracking.mlflow": False}
    config = nb.load_config(env=None, overrides=settings)
    main, other = nb.launch(measured, config, processes=2, display="off").values
    assert 1.0 <= main <= 1.3
    assert other <= 0.2
