"""Make encoders of images, what is trained on them, and random changes of images.

Unlike other modules of this folder it imports torch: import it inside functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nbtoolkit.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from nbtoolkit.extras.metric_learning.images import Transform


@dataclass(frozen=True)
class EncoderSpec:
    """What is needed to make an encoder; stored with its weights.

    Attributes:
        encoder: ``cnn``, or ``timm/<model>`` of the timm package.
        embedding_size: numbers in an embedding.
        channels: of the images.
        size: height and width of the images; None: they differ.
    """

    encoder: str = "cnn"
    embedding_size: int = 128
    channels: int = 3
    size: tuple[int, int] | None = (64, 64)


def make_encoder(spec: EncoderSpec, *, pretrained: bool = False) -> nn.Module:
    """Return an encoder: float32 (n, channels, height, width) in 0..1 -> (n, embedding_size).

    Args:
        spec: which one. ``cnn`` halves images of up to 16 pixels once and larger ones down to about
            4; its group norms depend on no batch, so any number of ranks gives the same.
        pretrained: with timm's weights, which it downloads.

    Raises:
        ConfigError: there is no such encoder.
        MissingExtra: timm is not installed.
    """
    kind, _, name = spec.encoder.partition("/")
    if kind == "timm" and name:
        sizes = {"in_chans": spec.channels, "num_classes": spec.embedding_size}
        options = {"model_name": name, "pretrained": pretrained, **sizes}
        model = make_named("model.encoder", {"name": "timm.create_model", **options})
        about = model.pretrained_cfg if spec.channels == 3 else {"mean": [0.5], "std": [0.5]}
        # timm needs torchvision itself.
        name = "torchvision.transforms.v2.Normalize"
        scale = {"name": name, "mean": list(about["mean"]), "std": list(about["std"])}
        return nn.Sequential(make_named("model.encoder", scale), model)
    if spec.encoder != "cnn":
        raise ConfigError(
            f"model.encoder is {spec.encoder!r}",
            allowed="cnn, or timm/<model> such as timm/resnet18",
            do="set model.encoder: cnn",
        )
    halvings = max(1, round(math.log2(min(spec.size or (64, 64)) / 4)))
    widths = [min(32 * 2**number, 256) for number in range(halvings + 1)]
    layers = list[nn.Module]()
    before = spec.channels
    for width, stride in zip([*widths, widths[-1]], [1, *[2] * halvings, 1], strict=True):
        convolution = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        layers += [convolution, nn.GroupNorm(8, width), nn.ReLU()]
        before = width
    layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * before, spec.embedding_size))


def make_projector(encoder: nn.Module, embedding_size: int, projection_size: int) -> nn.Sequential:
    """Return an encoder and a projection head, as stage 1 trains them: -> (n, projection_size)."""
    hidden = nn.Linear(embedding_size, embedding_size)
    last = nn.Linear(embedding_size, projection_size)
    return nn.Sequential(encoder, nn.Sequential(nn.ReLU(), hidden, nn.ReLU(), last))


def make_classifier(embedding_size: int, classes: int) -> nn.Module:
    """Return a linear classifier of embeddings of any scale: -> (n, classes) scores."""
    scaled = nn.LayerNorm(embedding_size, elementwise_affine=False)
    return nn.Sequential(nn.ReLU(), scaled, nn.Linear(embedding_size, classes))


class Frozen(nn.Sequential):
    """A model without gradients, always in evaluation mode: batch norms keep their statistics."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.requires_grad_(False))

    def train(self, mode: bool = True) -> Frozen:
        """Stay in evaluation mode."""
        return super().train(False)


@dataclass(frozen=True)
class Augment:
    """Move, turn and scale an image at random, by torch's global generator.

    Attributes:
        rotate: degrees, at most.
        shift: share of the image's size, at most.
        scale: share by which it grows or shrinks, at most.
    """

    rotate: float = 0.0
    shift: float = 0.0
    scale: float = 0.0

    def __call__(self, image: Tensor) -> Tensor:
        """Change an image of shape (channels, height, width)."""
        angle, right, down, larger = (torch.rand(4) * 2 - 1).tolist()
        height, width = image.shape[1:]
        zoom = 1 + larger * self.scale
        turn = math.radians(angle * self.rotate)
        cosine = math.cos(turn) / zoom
        sine = math.sin(turn) / zoom
        rows = [
            [cosine, -sine * height / width, 2 * right * self.shift],
            [sine * width / height, cosine, 2 * down * self.shift],
        ]
        grid = functional.affine_grid(torch.tensor([rows]), [1, *image.shape], align_corners=False)
        moved: Tensor = functional.grid_sample(
            image[None], grid, padding_mode="border", align_corners=False
        )
        return moved[0]


def make_transforms(
    settings: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
) -> list[Transform]:
    """Return what ``data.augment`` says.

    Args:
        settings: None: nothing; a dict: of :class:`Augment`; or a list of ``{name: package.Class,
            <its arguments>}``, such as torchvision's transforms.

    Raises:
        ConfigError: a name or an argument is unknown.
        MissingExtra: a package is not installed.
    """
    if isinstance(settings, Mapping):
        settings = [{**settings, "name": f"{__name__}.Augment"}]
    return [make_named("data.augment", step) for step in settings or ()]


def make_named(setting: str, settings: str | Mapping[str, Any]) -> Any:
    """Make an object of another package: ``{name: package.Class, <its arguments>}``.

    Args:
        setting: its name, for messages.
        settings: its value; text: the name alone.

    Raises:
        ConfigError: the class, an argument or its value is unknown.
        MissingExtra: the package is not installed.
    """
    options = {"name": settings} if isinstance(settings, str) else dict(settings)
    path = str(options.pop("name", ""))
    module, _, attribute = path.rpartition(".")
    try:
        return getattr(import_module(module), attribute)(**options)
    # What constructors raise for a wrong argument; timm raises RuntimeError.
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        kind = MissingExtra if isinstance(error, ImportError) else ConfigError
        raise kind(
            f"{setting}: {path} with {options} cannot be made: {error}",
            allowed="{name: package.Class, <its arguments>}, of a package that is installed",
            do=f"correct {setting}, or pip install torchvision, timm or pytorch-metric-learning",
        ) from error
