"""Train an encoder of images with a contrastive loss (stage 1), then a classifier on it (stage 2).

The free sections of the config, with their defaults, are in ``config/metric_learning.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import CheckpointError, ConfigError, FitError
from nbtoolkit.run.checkpoint_store import read_state, write_state
from nbtoolkit.run.weights import load_weights
from nbtoolkit.tasks import datasets
from nbtoolkit.tasks.images import Images, from_folder, from_table, split
from nbtoolkit.training.callbacks import Callback, FitState
from nbtoolkit.training.evaluation import predict
from nbtoolkit.training.loop import fit
from nbtoolkit.worker.collectives import broadcast

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nbtoolkit.config.schema import Config
    from nbtoolkit.tasks.contrastive import PairLoss
    from nbtoolkit.tasks.encoders import EncoderSpec
    from nbtoolkit.worker.context import RunContext

ENCODER = "encoder.pt"  # in a run's folder
_FORMAT = "nbtoolkit encoder 1"
# What a stage may set for itself: the rest decides the plan, before the function runs.
_STAGE_SETTINGS = ("optim", "checkpoint", "train")
_PLANNED = ("batch_size", "batch_size_per_device", "precision", "gradient_accumulation_steps")


def train(config: Config, ctx: RunContext) -> dict[str, object]:
    """Train both stages, or those that ``model.stages`` names.

    Args:
        config: ``model`` and ``data`` as in ``config/metric_learning.yaml``.
        ctx: inside a fold, its samples replace the split.

    Returns:
        The validation scores of both stages (``val_map``, ``val_accuracy``, ...), and of stage 2
        ``labels`` and ``predictions`` of the validation images, with ``classes``.

    Raises:
        FitError: images are damaged, or stage 2 validates on a class that it does not train.
        CheckpointError: ``model.checkpoint`` is not an encoder like this one.
        ConfigError: a setting is wrong.
    """
    import torch

    from nbtoolkit.tasks.encoders import Classifier, EncoderSpec, make_encoder, make_transform

    knobs, stages = config.model, tuple(config.model.get("stages", (1, 2)))
    if stages not in ((1,), (2,), (1, 2)):
        raise ConfigError(
            f"model.stages is {list(stages)}",
            allowed="[1, 2], [1], or [2]: with model.checkpoint, or to train without stage 1",
            do="set model.stages: [1, 2]",
        )
    images = load_images(config)
    training, valid = _parts(images, config, ctx)
    _check_classes(training, valid, stages)
    training = replace(training, transform=make_transform(config.data.get("augment")))
    name, width = knobs.get("encoder", "cnn"), knobs.get("embedding_size", 128)
    spec = EncoderSpec(name, width, images.channels, images.size)
    torch.manual_seed(config.seed)
    scores: dict[str, object] = {}
    if given := knobs.get("checkpoint"):
        encoder = load_encoder(given, spec).encoder.train()
    else:
        encoder = make_encoder(spec, pretrained=knobs.get("pretrained", False))
    if 1 in stages and not given:
        scores |= _stage_1(ctx, config, encoder, training, valid)
        _save(ctx, TrainedEncoder(encoder, None, spec, images.classes))
    if 2 not in stages:
        return {**scores, "classes": list(images.classes)}
    frozen = bool(given or 1 in stages) and not knobs.get("finetune", False)
    torch.manual_seed(config.seed)
    model = Classifier(encoder, width, len(images.classes), frozen=frozen)
    scores |= fit(
        ctx,
        stage_config(config, 2),
        model,
        training,
        valid,
        loss=torch.nn.functional.cross_entropy,
        metrics=["accuracy"],
    )
    _save(ctx, TrainedEncoder(encoder, model.classifier, spec, images.classes))
    return {
        **scores,
        "labels": valid.labels.tolist(),
        "predictions": predict(ctx, model, valid).argmax(dim=1).tolist(),
        "classes": list(images.classes),
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
    pixels, labels = datasets.load("digits")
    digits = pixels.reshape(-1, 1, 8, 8) / 16
    return Images(digits, labels, tuple("0123456789"), size=(8, 8), channels=1)


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
        with ctx.pause_hang_detection("decoding all images"):
            damaged = broadcast(images.damaged() if ctx.is_main else {}, ctx.world_size)
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
        names = ", ".join(valid.classes[label] for label in unknown[:5])
        raise FitError(
            f"stage 2 would validate on {len(unknown)} classes that it does not train: {names}",
            allowed="classes with images on both sides (stage 1 alone may validate on others)",
            do="move a group or some images of these classes, set another data.split_seed, or "
            "train stage 1 alone: model.stages: [1]",
        )
    if 1 in stages and int(valid.labels.bincount(minlength=1).max()) < 2:
        raise FitError(
            f"each of the {len(valid)} validation images is the only one of its class: none has "
            "another one to find",
            allowed="two validation images or more of a class",
            do="set a larger data.valid_share, add images, or leave out stage 1",
        )


# --- stage 1 ---


def _stage_1(
    ctx: RunContext, config: Config, encoder: torch.nn.Module, training: Images, valid: Images
) -> dict[str, float]:
    from nbtoolkit.tasks.contrastive import ClassBalanced, metric_loss, supervised_contrastive_loss
    from nbtoolkit.tasks.encoders import Projector, make_named

    knobs = config.model
    model = Projector(encoder, knobs.get("embedding_size", 128), knobs.get("projection_size", 64))
    loss: PairLoss = partial(supervised_contrastive_loss, temperature=knobs.get("temperature", 0.1))
    if knobs.get("loss", "supcon") != "supcon":
        loss = metric_loss(make_named("model.loss", knobs["loss"]))
    per_class, skip = knobs.get("samples_per_class", 4), knobs.get("skip_single", False)
    found = fit(
        ctx,
        stage_config(config, 1),
        model,
        training,
        None,
        loss=loss,
        sampler=ClassBalanced(training.labels, per_class, skip_single=skip),
        callbacks=[RetrievalScores(valid)],
    )
    return {name: value for name, value in found.items() if "val_" in name}


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

        from nbtoolkit.tasks.retrieval import gather_embeddings, retrieval_scores

        width = int(state.ctx.config.model.get("embedding_size", 128))

        def step(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
            embeddings = model.encoder(batch[0])
            return torch.cat([embeddings, model.project(embeddings)], dim=1), batch[1]

        found = gather_embeddings(state.ctx, state.model, self._valid, step=step)
        if found is None:
            return {}
        (vectors, labels), k, scores = found, min(5, len(self._valid) - 1), dict[str, float]()
        parts = {"val": vectors[:, :width], "val_projected": vectors[:, width:]}
        for before, part in parts.items():
            values = retrieval_scores(part, labels, k=k)
            scores |= {f"{before}_{name}": value for name, value in values.items()}
        return scores


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


def load_encoder(path: str | Path, spec: EncoderSpec | None = None) -> TrainedEncoder:
    """Load the encoder of a run, with its classifier if stage 2 is done.

    Args:
        path: a run's folder, or an ``encoder.pt``.
        spec: what the encoder has to be; None: any.

    Raises:
        CheckpointError: there is none, it is damaged, or another one than ``spec``.
    """
    from nbtoolkit.tasks.encoders import EncoderSpec, make_classifier, make_encoder

    file = Path(path).expanduser()
    file = file / ENCODER if file.is_dir() else file
    state = read_state(file)
    if state.get("format") != _FORMAT:
        raise CheckpointError(
            f"{file} is no encoder of metric_learning, it has {', '.join(map(str, state))}",
            allowed=f"the folder of a run of nbtoolkit.tasks.metric_learning, or its {ENCODER}",
            do="correct model.checkpoint, or train stage 1: model.checkpoint: null",
        )
    own = EncoderSpec(**state["spec"])
    if spec is not None and own != spec:
        raise CheckpointError(
            f"the encoder {file} is {own}, and the config's is {spec}",
            allowed="the model.encoder, model.embedding_size, data.size and data.channels of the "
            "config",
            do="set them as in the config.yaml beside it",
        )
    encoder, classifier = make_encoder(own), None
    load_weights(state["encoder"], encoder, source=str(file))
    if state["classifier"] is not None:
        classifier = make_classifier(own.embedding_size, len(state["classes"])).eval()
        load_weights(state["classifier"], classifier, source=str(file))
    return TrainedEncoder(encoder.eval(), classifier, own, tuple(state["classes"]))
