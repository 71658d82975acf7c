"""Make encoders of images, what is trained on them, and random changes of images.

Unlike other modules of this folder it imports torch: import it inside functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from nbtoolkit.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from torch import Tensor

    from nbtoolkit.tasks.images import Transform


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
    """An encoder: float32 (n, channels, height, width) in 0..1 -> (n, embedding_size).

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
        return nn.Sequential(_Scale(model.pretrained_cfg, spec.channels), model)
    if spec.encoder != "cnn":
        raise ConfigError(
            f"model.encoder is {spec.encoder!r}",
            allowed="cnn, or timm/<model> such as timm/resnet18",
            do="set model.encoder: cnn",
        )
    halvings = max(1, round(math.log2(min(spec.size or (64, 64)) / 4)))
    layers: list[nn.Module] = []
    before = spec.channels
    for number in range(halvings + 1):
        width = min(32 * 2**number, 256)
        convolution = nn.Conv2d(before, width, 3, 1 if number == 0 else 2, padding=1, bias=False)
        layers += [convolution, nn.GroupNorm(8, width), nn.ReLU()]
        before = width
    last = nn.Conv2d(before, before, 3, padding=1, bias=False)
    layers += [last, nn.GroupNorm(8, before), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * before, spec.embedding_size))


class _Scale(nn.Module):
    """Subtract a timm model's mean and divide by its deviation, per channel; grey: 0.5 each."""

    def __init__(self, about: Mapping[str, Any], channels: int) -> None:
        super().__init__()
        for name in ("mean", "std"):
            values = torch.tensor(about[name] if channels == 3 else 0.5).reshape(-1, 1, 1)
            self.register_buffer(name, values, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return (images - self.get_buffer("mean")) / self.get_buffer("std")


class Projector(nn.Module):
    """An encoder with a projection head, as stage 1 trains it: -> (n, projection_size)."""

    def __init__(self, encoder: nn.Module, embedding_size: int, projection_size: int) -> None:
        super().__init__()
        self.encoder = encoder
        layers = (nn.Linear(embedding_size, embedding_size), nn.ReLU())
        self.head = nn.Sequential(*layers, nn.Linear(embedding_size, projection_size))

    def forward(self, images: Tensor) -> Tensor:
        """Embed and project."""
        return self.project(self.encoder(images))

    def project(self, embeddings: Tensor) -> Tensor:
        """Project the encoder's embeddings."""
        projected: Tensor = self.head(functional.relu(embeddings))
        return projected


def make_classifier(embedding_size: int, classes: int) -> nn.Module:
    """A linear classifier of embeddings of any scale: -> (n, classes) scores."""
    scaled = nn.LayerNorm(embedding_size, elementwise_affine=False)
    return nn.Sequential(nn.ReLU(), scaled, nn.Linear(embedding_size, classes))


class Classifier(nn.Module):
    """A linear classifier on an encoder: -> (n, classes) scores.

    Args:
        encoder: frozen, it gets no gradients and stays in evaluation mode.
        embedding_size: of the encoder.
        classes: their number.
        frozen: train the classifier alone.
    """

    def __init__(self, encoder: nn.Module, embedding_size: int, classes: int, *, frozen: bool):
        super().__init__()
        self.encoder = encoder.requires_grad_(not frozen)
        self.classifier = make_classifier(embedding_size, classes)
        self._frozen = frozen

    def train(self, mode: bool = True) -> Classifier:
        """Set the mode; a frozen encoder's batch norms keep their statistics."""
        super().train(mode)
        self.encoder.train(mode and not self._frozen)
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Embed and classify."""
        scores: Tensor = self.classifier(self.encoder(images))
        return scores


# --- augmentation ---


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
        zoom, turn = 1 + larger * self.scale, math.radians(angle * self.rotate)
        cosine, sine = math.cos(turn) / zoom, math.sin(turn) / zoom
        rows = [
            [cosine, -sine * height / width, 2 * right * self.shift],
            [sine * width / height, cosine, 2 * down * self.shift],
        ]
        grid = functional.affine_grid(torch.tensor([rows]), [1, *image.shape], align_corners=False)
        moved: Tensor = functional.grid_sample(
            image[None], grid, padding_mode="border", align_corners=False
        )
        return moved[0]


def make_transform(settings: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None) -> Transform:
    """What ``data.augment`` says.

    Args:
        settings: of :class:`Augment`; or a list of ``{name: package.Class, <its arguments>}``, such
            as torchvision's transforms, applied in turn.

    Raises:
        ConfigError: a name or an argument is unknown.
        MissingExtra: a package is not installed.
    """
    if settings is None or isinstance(settings, Mapping):
        own = {**(settings or {}), "name": f"{__name__}.Augment"}
        transform: Transform = make_named("data.augment", own)
        return transform
    return partial(_in_turn, [make_named("data.augment", step) for step in settings])


def _in_turn(steps: Sequence[Transform], image: Tensor) -> Tensor:
    for step in steps:
        image = step(image)
    return image


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
    except ImportError as error:
        raise MissingExtra(
            f"{setting}: {path} cannot be imported: {error}",
            do="correct the name, or pip install 'nbtoolkit-torch[torchvision]', [timm] or "
            "[metric-learning]",
        ) from error
    # What constructors raise for a wrong argument; timm raises RuntimeError.
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{setting}: {path} with {options} cannot be made: {error}",
            allowed="{name: package.Class, <its arguments>}",
            do=f"correct {setting}",
        ) from error
