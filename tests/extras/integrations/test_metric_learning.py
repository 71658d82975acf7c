"""The two stages of metric learning with encoders of timm and transforms of torchvision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from feeds import contexts
from frameworks import needs
from PIL import Image

import nbtoolkit as nb
from nbtoolkit.errors import ConfigError
from nbtoolkit.extras import metric_learning
from nbtoolkit.extras.metric_learning import embed
from nbtoolkit.extras.metric_learning.encoders import (
    EncoderSpec,
    make_encoder,
    make_transforms,
)
from nbtoolkit.extras.metric_learning.images import Images
from nbtoolkit.training.data import take_apart
from nbtoolkit.training.loader import make_train_loader

FLIPPED = [
    {"name": "torchvision.transforms.v2.RandomResizedCrop", "size": 16, "antialias": True},
    {"name": "torchvision.transforms.v2.RandomHorizontalFlip"},
    {"name": "torchvision.transforms.v2.GaussianBlur", "kernel_size": 3},
]


@needs("torchvision")
def test_transforms_of_torchvision_do_not_depend_on_the_workers(tmp_path: Path) -> None:
    pixels = torch.rand(12, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images = Images(pixels, torch.arange(12) % 3, ("a", "b", "c"), size=(16, 16))
    seen = []
    for workers in (0, 2):
        (ctx,) = contexts(tmp_path / f"run{workers}", train__batch_size=4)
        config = ctx.config.with_overrides({"train.num_workers": workers})
        feed = take_apart(replace(images, transforms=make_transforms(FLIPPED)))
        loader = make_train_loader(ctx, config, feed)
        seen.append(torch.cat([batch[0] for batch, _ in loader.batches(1)]))
    assert seen[0].shape == pixels.shape
    assert torch.equal(*seen)
    assert not any(torch.equal(one, other) for one in seen[0] for other in pixels)
    with pytest.raises(ConfigError, match=r"data\.augment: torchvision\..*'sizes'"):
        make_transforms([{"name": "torchvision.transforms.v2.RandomCrop", "sizes": 16}])


@needs("timm")
def test_timm_encoders_embed_and_an_unknown_one_is_named() -> None:
    for channels in (1, 3):
        encoder = make_encoder(EncoderSpec("timm/test_resnet", 16, channels, (32, 32)))
        assert encoder(torch.rand(2, channels, 32, 32)).shape == (2, 16)
    with pytest.raises(ConfigError, match=r"model\.encoder: timm\.create_model .*resnet19"):
        make_encoder(EncoderSpec("timm/resnet19"))


@needs("timm", "torchvision", "pytorch_metric_learning")
def test_both_stages_with_all_three(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 80, (3, 12, 20, 24, 3), dtype=np.uint8)
    for number in range(36):
        path = tmp_path / f"set/{'abc'[number % 3]}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[number % 3, number // 3] + 70 * (number % 3)).save(path)
    loss = {"name": "MultiSimilarityLoss", "alpha": 2.0}
    stages = {f"model.stage{n}.train.epochs": 2 for n in (1, 2)}
    given = {
        "model.encoder": "timm/test_resnet",
        "model.loss": loss,
        "model.finetune": True,
        "data": {"folder": str(tmp_path / "set"), "size": 16, "augment": FLIPPED},
        "train": {"batch_size": 12, "num_workers": 1},
        "runtime.output_dir": str(tmp_path / "runs"),
        "tracking.mlflow": False,
        **stages,
    }
    file = Path(__file__).resolve().parents[2] / "config/metric_learning.yaml"
    config = nb.load_config(file, env="local", overrides=given)
    result = nb.launch(metric_learning.train, config, processes=2, display="off")
    assert {"val_map", "val_projected_map", "val_accuracy"} <= set(result.value)
    model = metric_learning.load_encoder(result.paths.folder)
    assert model.spec == EncoderSpec("timm/test_resnet", 128, 3, (16, 16))
    vectors = embed(model, metric_learning.load_images(config))
    assert vectors.shape == (36, 128)
    assert np.isfinite(vectors).all()
