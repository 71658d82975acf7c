"""Train an encoder of images with a contrastive loss (stage 1), then a classifier on it (stage 2).

``config/metric_learning.yaml`` has the settings under ``model`` and ``data``, with their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from nbtoolkit.environment.installed import install_line
from nbtoolkit.errors import ConfigError, FitError, MissingExtra, some_names
from nbtoolkit.extras.metric_learning.images import (
    Images,
    leave_out_damaged,
    load_images,
    split,
)
from nbtoolkit.extras.metric_learning.trained_encoder import (
    TrainedEncoder,
    load_encoder,
    save_encoder,
)
from nbtoolkit.run.checkpoints.weights import load_weights
from nbtoolkit.training.evaluation import predict
from nbtoolkit.training.fit import fit

if TYPE_CHECKING:
    import torch

    from nbtoolkit.config.schema import Config
    from nbtoolkit.worker.context import RunContext

# What a stage may set for itself: the rest decides the plan, before the function runs.
_STAGE_SETTINGS = ("optim", "checkpoint", "train")
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
        MissingExtra: pytorch-metric-learning is not installed, or Pillow for files.
    """
    import torch

    from nbtoolkit.extras.metric_learning import encoders

    settings = config.model
    of_stage_1, of_stage_2 = (stage_config(config, stage) for stage in (1, 2))
    first, second = stages_of(config)
    images = load_images(config)
    training, valid = split_images(images, config, ctx)
    _check_classes(training, valid, first=first, second=second)
    training = replace(training, transforms=encoders.make_transforms(config.data.get("augment")))
    name = settings.get("encoder", "cnn")
    width = settings.get("embedding_size", 128)
    spec = encoders.EncoderSpec(name, width, images.channels, images.size)
    torch.manual_seed(config.seed)
    scores: dict[str, object] = {"classes": list(images.classes)}
    given = settings.get("checkpoint")
    encoder = encoders.make_encoder(
        spec, pretrained=not given and settings.get("pretrained", False)
    )
    if given:
        load_weights(load_encoder(given).encoder.state_dict(), encoder, source=given)
    if first:
        scores |= _train_encoder(ctx, of_stage_1, encoder, training, valid)
        save_encoder(ctx, TrainedEncoder(encoder, None, spec, images.classes))
    if not second:
        return scores
    frozen = bool(given or first) and not settings.get("finetune", False)
    torch.manual_seed(config.seed)
    classifier = encoders.make_classifier(width, len(images.classes))
    model = torch.nn.Sequential(encoders.Frozen(encoder) if frozen else encoder, classifier)
    loss = torch.nn.functional.cross_entropy
    scores |= fit(ctx, of_stage_2, model, training, valid, loss=loss, metrics=["accuracy"])
    save_encoder(ctx, TrainedEncoder(encoder, classifier, spec, images.classes))
    return {
        **scores,
        "labels": valid.labels.tolist(),
        "predictions": predict(ctx, model, valid).argmax(dim=1).tolist(),
    }


def stages_of(config: Config) -> tuple[bool, bool]:
    """Return whether stage 1 and stage 2 are trained.

    Raises:
        ConfigError: ``model.stages`` is wrong.
        MissingExtra: stage 1 needs pytorch-metric-learning, which is not installed.
    """
    stages = list(config.model.get("stages", (1, 2)))
    if stages not in ([1], [2], [1, 2]):
        raise ConfigError(
            f"model.stages is {stages}",
            allowed="[1, 2], [1], or [2]: with model.checkpoint, or to train without stage 1",
            do="set model.stages: [1, 2]",
        )
    first = 1 in stages and not config.model.get("checkpoint")
    if first and find_spec("pytorch_metric_learning") is None:
        raise MissingExtra(
            "stage 1 takes its loss and its batches from pytorch-metric-learning, which is not "
            "installed",
            do=install_line("metric-learning"),
        )
    return first, 2 in stages


def stage_config(config: Config, stage: int) -> Config:
    """Return the configuration of one stage: ``model.stage1`` or ``model.stage2`` over the run's.

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


def split_images(images: Images, config: Config, ctx: RunContext) -> tuple[Images, Images]:
    """Return training and validation images: of the fold, or of a split that is always the same.

    Raises:
        FitError: images are damaged.
    """
    data = config.data
    if ctx.fold is not None:
        parts = [ctx.fold.train_indices.tolist(), ctx.fold.valid_indices.tolist()]
    else:
        share = data.get("valid_share", 0.2)
        seed = data.get("split_seed", 0)
        parts = [*split(images.labels, images.groups, valid_share=share, seed=seed)]
    training, valid = leave_out_damaged(ctx, images, parts, allowed=data.get("skip_damaged", False))
    return images.subset(training), images.subset(valid)


def _check_classes(training: Images, valid: Images, *, first: bool, second: bool) -> None:
    unknown = sorted(set(valid.labels.tolist()) - set(training.labels.tolist()))
    if unknown and second:
        names = some_names([valid.classes[label] for label in unknown])
        fault = f"stage 2 would validate on {len(unknown)} classes that it does not train: {names}"
    elif first and int(valid.labels.bincount(minlength=1).max()) < 2:
        fault = f"each of the {len(valid)} validation images is the only one of its class"
    else:
        return
    raise FitError(
        fault,
        allowed="stage 1: a class with two validation images; stage 2: classes that it trains",
        do="set another data.split_seed or data.valid_share, or train one stage: model.stages: [1]",
    )


def _train_encoder(
    ctx: RunContext, config: Config, encoder: torch.nn.Module, training: Images, valid: Images
) -> dict[str, float]:
    """Train stage 1, and return its scores."""
    from nbtoolkit.extras.metric_learning.contrastive import ClassBalanced, make_loss
    from nbtoolkit.extras.metric_learning.encoders import make_projector
    from nbtoolkit.extras.metric_learning.retrieval import RetrievalScores

    settings = config.model
    width = settings.get("embedding_size", 128)
    size = settings.get("projection_size", 64)
    per_class = settings.get("samples_per_class", 4)
    skip = settings.get("skip_single", False)
    return fit(
        ctx,
        config,
        make_projector(encoder, width, size),
        training,
        None,
        loss=make_loss(settings.get("loss", "SupConLoss")),
        sampler=ClassBalanced(training.labels, per_class, skip_single=skip),
        callbacks=[RetrievalScores(valid)],
    )
