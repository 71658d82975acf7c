"""Embed images with a trained encoder, keep an index, and search it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.run.paths import atomic_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from nbtoolkit.tasks.images import Images
    from nbtoolkit.tasks.metric_learning import TrainedEncoder

    Vectors = NDArray[np.float32]

_BLOCK = 1024  # queries compared at a time


def embed(model: TrainedEncoder, images: Images, *, batch_size: int = 256) -> Vectors:
    """Embed images on the CPU.

    Args:
        model: from :func:`~nbtoolkit.tasks.metric_learning.load_encoder`.
        images: of the encoder's size and channels. Their transform is not applied.
        batch_size: images in a pass.

    Returns:
        Float32 of shape (n, embedding_size), each row of length 1.
    """
    import torch

    rows = []
    with torch.inference_mode():
        for some in torch.arange(len(images)).split(batch_size):
            batch = torch.stack([images.image(index) for index in some.tolist()])
            rows.append(torch.nn.functional.normalize(model.encoder(batch), dim=1))
    vectors: Vectors = torch.cat(rows).numpy()
    return vectors


def nearest(queries: Vectors, vectors: Vectors, *, k: int = 5) -> tuple[NDArray[np.int64], Vectors]:
    """The rows of ``vectors`` most similar to each query.

    Args:
        queries: float32 of shape (m, d), rows of length 1. A query that is among ``vectors`` finds
            itself first.
        vectors: float32 of shape (n, d), rows of length 1.
        k: neighbours, at most n.

    Returns:
        Indices of shape (m, k), the most similar one first, and their cosine similarities.
    """
    import numpy as np

    found = []
    for start in range(0, len(queries), _BLOCK):
        scores = queries[start : start + _BLOCK] @ vectors.T
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        found.append((order, np.take_along_axis(scores, order, axis=1)))
    indices, similarities = (np.concatenate(part) for part in zip(*found, strict=True))
    return indices, similarities


def save_index(path: str | os.PathLike[str], vectors: Vectors, images: Images) -> Path:
    """Write an index that ``numpy.load`` reads without pickles.

    Its arrays are ``vectors``, ``classes`` (the class of each row) and ``paths`` (its file; "" for
    images in memory).

    Returns:
        The file's absolute path.
    """
    import numpy as np

    file = Path(path).expanduser().absolute()
    classes = np.array([images.classes[label] for label in images.labels.tolist()])
    paths = np.array([item if isinstance(item, str) else "" for item in images.items])
    with atomic_file(file) as place:
        np.savez(place, vectors=vectors, classes=classes, paths=paths)
    return file
