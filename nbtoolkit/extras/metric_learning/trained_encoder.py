"""Keep a trained encoder in a file, embed images with it, and find the nearest ones."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.errors import CheckpointError
from nbtoolkit.run.checkpoints.checkpoint_store import read_state, write_state
from nbtoolkit.run.checkpoints.weights import load_weights
from nbtoolkit.run.paths import atomic_file

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from nbtoolkit.extras.metric_learning.encoders import EncoderSpec
    from nbtoolkit.extras.metric_learning.images import Images
    from nbtoolkit.worker.context import RunContext

    Vectors = NDArray[np.float32]

ENCODER = "encoder.pt"
"""Its file in a run's folder."""

_FORMAT = "nbtoolkit encoder 1"
_BLOCK = 1024  # queries compared at a time


@dataclass(frozen=True, eq=False)
class TrainedEncoder:
    """An encoder for inference, on the CPU, in evaluation mode.

    Attributes:
        encoder: float32 (n, channels, height, width) in 0..1 -> (n, embedding_size).
        classifier: (n, embedding_size) -> (n, classes) scores; None: stage 1 only.
        spec: what the encoder is.
        classes: the names of the classes that it was trained on, in the order of the labels.
    """

    encoder: torch.nn.Module
    classifier: torch.nn.Module | None
    spec: EncoderSpec
    classes: tuple[str, ...]


def save_encoder(ctx: RunContext, trained: TrainedEncoder) -> None:
    """Write the encoder into the run's folder, on the main rank."""
    if ctx.is_main:
        state = {
            "format": _FORMAT,
            "spec": asdict(trained.spec),
            "classes": list(trained.classes),
            "encoder": trained.encoder.state_dict(),
            "classifier": trained.classifier and trained.classifier.state_dict(),
        }
        write_state(ctx.paths.folder / ENCODER, state)


def load_encoder(path: str | os.PathLike[str]) -> TrainedEncoder:
    """Load the encoder of a run, with its classifier if stage 2 is done.

    Args:
        path: a run's folder, or an ``encoder.pt``.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    from nbtoolkit.extras.metric_learning.encoders import EncoderSpec, make_classifier, make_encoder

    file = Path(path).expanduser()
    file = file / ENCODER if file.is_dir() else file
    state = read_state(file)
    if state.get("format") != _FORMAT:
        raise CheckpointError(
            f"{file} is no encoder of metric_learning, it has {', '.join(map(str, state))}",
            allowed=f"the folder of a run of nbtoolkit.extras.metric_learning, or its {ENCODER}",
            do="correct model.checkpoint, or train stage 1: model.checkpoint: null",
        )
    spec = EncoderSpec(**state["spec"])
    encoder = make_encoder(spec)
    classifier = None
    load_weights(state["encoder"], encoder, source=str(file))
    if state["classifier"] is not None:
        classifier = make_classifier(spec.embedding_size, len(state["classes"])).eval()
        load_weights(state["classifier"], classifier, source=str(file))
    return TrainedEncoder(encoder.eval(), classifier, spec, tuple(state["classes"]))


def embed(model: TrainedEncoder, images: Images, *, batch_size: int = 256) -> Vectors:
    """Embed images on the CPU.

    Args:
        model: from :func:`load_encoder`.
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
    """Return the rows of ``vectors`` most similar to each query.

    Args:
        queries: float32 of shape (m, d), rows of length 1. A query that is among ``vectors`` finds
            itself first.
        vectors: float32 of shape (n, d), rows of length 1.
        k: neighbours, at most n.

    Returns:
        Indices of shape (m, k), the most similar one first, and their cosine similarities.
    """
    import torch

    columns = torch.from_numpy(vectors).T
    blocks = [(rows @ columns).topk(k) for rows in torch.from_numpy(queries).split(_BLOCK)]
    similarities, indices = (torch.cat(part).numpy() for part in zip(*blocks, strict=True))
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
    classes = [images.classes[label] for label in images.labels.tolist()]
    paths = [str(item) if isinstance(item, (str, os.PathLike)) else "" for item in images.items]
    with atomic_file(file) as place:
        np.savez(place, vectors=vectors, classes=np.array(classes), paths=np.array(paths))
    return file
