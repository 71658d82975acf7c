"""Train an encoder of images with a contrastive loss (stage 1), then a classifier on it (stage 2).

``config/metric_learning.yaml`` has the settings under ``model`` and ``data``, with their defaults.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import CheckpointError, ConfigError, FitError, some_names
from nbtoolkit.extras.metric_learning.images import Images, from_folder, from_table, split
from nbtoolkit.run.checkpoints.checkpoint_store import read_state, write_state
from nbtoolkit.run.checkpoints.weights import load_weights
from nbtoolkit.run.paths import atomic_file
from nbtoolkit.tasks import digits
from nbtoolkit.training.callbacks import Callback, FitState
from nbtoolkit.training.evaluation import predict
from nbtoolkit.training.loop import fit

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from nbtoolkit.config.schema import Config
    from nbtoolkit.extras.metric_learning.contrastive import PairLoss
    from nbtoolkit.extras.metric_learning.encoders import EncoderSpec
    from nbtoolkit.worker.context import RunContext

    Vectors = NDArray[np.float32]

ENCODER = "encoder.pt"  # in a run's folder
_FORMAT = "nbtoolkit encoder 1"
# What a stage may set for itself: the rest decides the plan, before the function runs.
_STAGE_SETTINGS = ("optim", "checkpoint", "train")
_BLOCK = 1024  # queries compared at a time
_PLANNED = ("batch_size", "batch_size_per_device", "precision", "gradient_accumulation_steps")


def train(config: Config, ctx: RunContext) -> dict[str, object]:
    """Train both stages, or those that ``model.stages`` names.

    Args:
        config: ``model`` and ``data`` as in ``config/metric_learning.yaml``.
        ctx: the run context; in a cross-validation, the samples of its fold are used.

    Returns:
        The validation scores of both stages (``val_map``, ``val_accuracy``, ...), and of stage 2
        ``labels`` and ``predictions`` of the validation images, with ``classes``.

    Raises:
        FitError: images are damaged, or stage 2 validates on a class that it does not train.
        CheckpointError: ``model.checkpoint`` is not an encoder like this one.
        ConfigError: a setting is wrong.
    """
    import torch

    from nbtoolkit.extras.metric_learning import encoders

    knobs, stages = config.model, tuple(config.model.get("stages", (1, 2)))
    if stages not in ((1,), (2,), (1, 2)):
        raise ConfigError(
            f"model.stages is {list(stages)}",
            allowed="[1, 2], [1], or [2]: with model.checkpoint, or to train without stage 1",
            do="set model.stages: [1, 2]",
        )
    of_stage_1, of_stage_2 = (stage_config(config, stage) for stage in (1, 2))
    images = load_images(config)
    training, valid = _parts(images, config, ctx)
    _check_classes(training, valid, stages)
    training = replace(training, transforms=encoders.make_transforms(config.data.get("augment")))
    name, width = knobs.get("encoder", "cnn"), knobs.get("embedding_size", 128)
    spec = encoders.EncoderSpec(name, width, images.channels, images.size)
    torch.manual_seed(config.seed)
    scores: dict[str, object] = {"classes": list(images.classes)}
    given = knobs.get("checkpoint")
    encoder = encoders.make_encoder(spec, pretrained=not given and knobs.get("pretrained", False))
    if given:
        load_weights(load_encoder(given).encoder.state_dict(), encoder, source=given)
    if 1 in stages and not given:
        scores |= _stage_1(ctx, of_stage_1, encoder, training, valid)
        _save(ctx, TrainedEncoder(encoder, None, spec, images.classes))
    if 2 not in stages:
        return scores
    frozen = bool(given or 1 in stages) and not knobs.get("finetune", False)
    torch.manual_seed(config.seed)
    classifier = encoders.make_classifier(width, len(images.classes))
    model = torch.nn.Sequential(encoders.Frozen(encoder) if frozen else encoder, classifier)
    loss = torch.nn.functional.cross_entropy
    scores |= fit(ctx, of_stage_2, model, training, valid, loss=loss, metrics=["accuracy"])
    _save(ctx, TrainedEncoder(encoder, classifier, spec, images.classes))
    return {
        **scores,
        "labels": valid.labels.tolist(),
        "predictions": predict(ctx, model, valid).argmax(dim=1).tolist(),
    }


def load_images(config: Config) -> Images:
    """The images that ``data.folder`` or ``data.table`` names; without them the digits.

    Raises:
        FitError: they cannot be used.
    """
    data, side = config.data, config.data.get("size", 64)
    pair = (side, side) if isinstance(side, int) else side and (side[0], side[1])
    options: dict[str, Any] = {"size": pair, "channels": data.get("channels", 3)}
    if "folder" in data:
        return from_folder(data.folder, group_pattern=data.get("group_pattern"), **options)
    if "table" in data:
        return from_table(data.table, root=data.get("root"), **data.get("columns", {}), **options)
    pixels, labels = digits.load()
    return Images(pixels.reshape(-1, 1, 8, 8), labels, tuple("0123456789"), size=(8, 8), channels=1)


def stage_config(config: Config, stage: int) -> Config:
    """The configuration of one stage: ``model.stage1`` or ``model.stage2`` over the run's.

    Raises:
        ConfigError: a stage sets what decides the plan of the whole run.
    """
    given: Mapping[str, Mapping[str, object]] = config.model.get(f"stage{stage}", {})
    wrong = [section for section in given if section not in _STAGE_SETTINGS]
    wrong += [f"train.{key}" for key in given.get("train", {}) if key in _PLANNED]
    if wrong:
        raise ConfigError(
            f"model.stage{stage} sets {wrong[0]}",
            allowed=f"settings of {', '.join(_STAGE_SETTINGS)}; both stages share "
            f"train.{', train.'.join(_PLANNED)}",
            do="set it outside model",
        )
    if stage == 1:  # it validates by scores, of the trained weights
        monitor = {"checkpoint.monitor": "val_map", "checkpoint.mode": "max"}
        config = config.with_overrides({**monitor, "train.weight_averaging": "none"})
    return config.with_overrides(given)


def _parts(images: Images, config: Config, ctx: RunContext) -> tuple[Images, Images]:
    """Training and validation images: of the fold, or of a split that is always the same."""
    data = config.data
    if ctx.fold is not None:
        chosen = [ctx.fold.train_indices.tolist(), ctx.fold.valid_indices.tolist()]
    else:
        share, seed = data.get("valid_share", 0.2), data.get("split_seed", 0)
        chosen = [*split(images.labels, images.groups, valid_share=share, seed=seed)]
    if isinstance(images.items, list):
        # Files that were decoded once are not decoded again for this.
        damaged = ctx.cached(f"damaged images of {images.files_key()}", images.damaged)
        what = f"{len(damaged)} of {len(images)} images are damaged: {'; '.join(damaged.values())}"
        if damaged and not data.get("skip_damaged", False):
            raise FitError(
                what[:2000],
                allowed="images that Pillow can decode",
                do="replace them, or set data.skip_damaged: true",
            )
        if damaged and ctx.is_main:
            ctx.message(f"left out: {what[:2000]}", level="warning")
        chosen = [[index for index in part if index not in damaged] for part in chosen]
    return images.subset(chosen[0]), images.subset(chosen[1])


def _check_classes(training: Images, valid: Images, stages: tuple[int, ...]) -> None:
    unknown = sorted(set(valid.labels.tolist()) - set(training.labels.tolist()))
    if unknown and 2 in stages:
        names = some_names([valid.classes[label] for label in unknown])
        fault = f"stage 2 would validate on {len(unknown)} classes that it does not train: {names}"
    elif 1 in stages and int(valid.labels.bincount(minlength=1).max()) < 2:
        fault = f"each of the {len(valid)} validation images is the only one of its class"
    else:
        return
    raise FitError(
        fault,
        allowed="stage 1: a class with two validation images; stage 2: classes that it trains",
        do="set another data.split_seed or data.valid_share, or train one stage: model.stages: [1]",
    )


# --- stage 1 ---


def _stage_1(
    ctx: RunContext, config: Config, encoder: torch.nn.Module, training: Images, valid: Images
) -> dict[str, float]:
    from nbtoolkit.extras.metric_learning.contrastive import (
        ClassBalanced,
        metric_loss,
        supervised_contrastive_loss,
    )
    from nbtoolkit.extras.metric_learning.encoders import make_named, make_projector

    knobs = config.model
    width, size = knobs.get("embedding_size", 128), knobs.get("projection_size", 64)
    loss: PairLoss = partial(supervised_contrastive_loss, temperature=knobs.get("temperature", 0.1))
    if knobs.get("loss", "supcon") != "supcon":
        loss = metric_loss(make_named("model.loss", knobs["loss"]))
    model, callbacks = make_projector(encoder, width, size), [RetrievalScores(valid)]
    per_class, skip = knobs.get("samples_per_class", 4), knobs.get("skip_single", False)
    sampler = ClassBalanced(training.labels, per_class, skip_single=skip)
    return fit(ctx, config, model, training, None, loss=loss, sampler=sampler, callbacks=callbacks)


class RetrievalScores(Callback):
    """Adds retrieval scores to each epoch of stage 1, of the embeddings and of the projections.

    Both are scores of the same images, embedded once per epoch without augmentation. Their classes
    may be new to the encoder: each image is looked for among the other validation images.

    Args:
        valid: the validation images.
    """

    def __init__(self, valid: Images) -> None:
        self._valid = valid

    def on_validation_end(self, state: FitState) -> dict[str, float]:
        """Embed on all ranks, score on the main one, whose values count."""
        import torch

        from nbtoolkit.extras.metric_learning.retrieval import gather_embeddings, retrieval_scores

        width = int(state.ctx.config.model.get("embedding_size", 128))

        def step(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            encoder, head = model
            embeddings = encoder(batch[0])
            return torch.cat([embeddings, head(embeddings)], dim=1), batch[1]

        found = gather_embeddings(state.ctx, state.model, self._valid, step=step)
        if found is None:
            return {}
        (vectors, labels), k = found, min(5, len(self._valid) - 1)
        parts = {"val": vectors[:, :width], "val_projected": vectors[:, width:]}
        return {
            f"{part}_{name}": value
            for part, columns in parts.items()
            for name, value in retrieval_scores(columns, labels, k=k).items()
        }


# --- the encoder's file ---


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


def _save(ctx: RunContext, trained: TrainedEncoder) -> None:
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
    own = EncoderSpec(**state["spec"])
    encoder, classifier = make_encoder(own), None
    load_weights(state["encoder"], encoder, source=str(file))
    if state["classifier"] is not None:
        classifier = make_classifier(own.embedding_size, len(state["classes"])).eval()
        load_weights(state["classifier"], classifier, source=str(file))
    return TrainedEncoder(encoder.eval(), classifier, own, tuple(state["classes"]))


# --- the encoder in use ---


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
    """The rows of ``vectors`` most similar to each query.

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
    classes = np.array([images.classes[label] for label in images.labels.tolist()])
    files = [one if isinstance(one, (str, os.PathLike)) else "" for one in images.items]
    paths = np.array([os.fspath(one) for one in files])
    with atomic_file(file) as place:
        np.savez(place, vectors=vectors, classes=classes, paths=paths)
    return file
