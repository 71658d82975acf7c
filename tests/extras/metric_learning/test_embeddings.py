"""The use of an encoder: neighbours, an index without pickles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from nbtoolkit.extras.metric_learning import trained_encoder
from nbtoolkit.extras.metric_learning.encoders import EncoderSpec, make_encoder
from nbtoolkit.extras.metric_learning.images import Images
from nbtoolkit.extras.metric_learning.trained_encoder import (
    TrainedEncoder,
    embed,
    nearest,
    save_index,
)


def some_images(count: int = 7) -> Images:
    pixels = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return Images(pixels, torch.arange(count) % 3, ("a", "<b>", "c"), size=(8, 8), channels=1)


def some_encoder() -> TrainedEncoder:
    spec = EncoderSpec("cnn", 16, 1, (8, 8))
    return TrainedEncoder(make_encoder(spec).eval(), None, spec, ("a", "<b>", "c"))


def test_embeddings_do_not_depend_on_the_batches_or_the_form() -> None:
    images, model = some_images(), some_encoder()
    vectors = embed(model, images)
    assert vectors.shape == (7, 16)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    assert embed(model, images, batch_size=3) == pytest.approx(vectors, abs=1e-5)


def test_nearest_is_that_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_encoder, "_BLOCK", 7)
    random = np.random.default_rng(0)
    vectors = random.normal(size=(50, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found, similarities = nearest(vectors[:20], vectors, k=3)
    for query in range(20):
        distances = ((vectors - vectors[query]) ** 2).sum(axis=1)
        assert found[query].tolist() == np.argsort(distances)[:3].tolist()
        assert similarities[query] == pytest.approx(1 - distances[found[query]] / 2, abs=1e-5)


def test_an_index_is_read_by_numpy_without_pickles(tmp_path: Path) -> None:
    images, vectors = some_images(), embed(some_encoder(), some_images())
    file = save_index(tmp_path / "new" / "index.npz", vectors, images)
    with np.load(file, allow_pickle=False) as read:
        assert np.array_equal(read["vectors"], vectors)
        assert read["classes"].tolist() == ["a", "<b>", "c", "a", "<b>", "c", "a"]
        assert read["paths"].tolist() == [""] * 7
