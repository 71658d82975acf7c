"""Optimizer and learning-rate schedule from the config, counted in optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from nbtoolkit.config import Config


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate of every optimizer step, as a pure function: nothing to save or restore.

    Attributes:
        kind: the way from the peak to 0 (``constant``: stay there).
        peak: the learning rate after the warm-up.
        warmup: steps of the linear way up.
        total: steps of the whole run.
    """

    kind: Literal["cosine", "linear", "constant"]
    peak: float
    warmup: int
    total: int

    def rate(self, step: int) -> float:
        """The learning rate of optimizer step ``step`` (from 0)."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        if self.kind == "cosine":
            return self.peak * 0.5 * (1 + math.cos(math.pi * done))
        return self.peak * (1 - done) if self.kind == "linear" else self.peak


def make_schedule(config: Config, *, steps: int, factor: float) -> Schedule:
    """The schedule that ``config.optim`` asks for.

    Args:
        config: ``optim.lr, schedule, warmup``.
        steps: optimizer steps of the whole run.
        factor: what ``optim.lr`` is multiplied by (the plan's ``lr_factor``).
    """
    optim = config.optim
    warmup = round(optim.warmup * steps)
    return Schedule(kind=optim.schedule, peak=optim.lr * factor, warmup=warmup, total=steps)


def make_optimizer(config: Config, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer that ``config.optim`` names, over the trainable parameters of ``model``.

    Vectors and scalars (biases, the weights of norms) are not decayed.
    """
    import torch

    optim = config.optim
    groups = _groups(model, optim.weight_decay)
    if optim.name == "rmsprop":
        return torch.optim.RMSprop(groups, lr=optim.lr)
    # One fused kernel for all parameters: AdamW's step on a small MLP and a CPU takes 1/3 of the
    # time (35 instead of 140 us).
    fused = _can_fuse(model)
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, fused=fused)
    kind = torch.optim.AdamW if optim.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=optim.lr, fused=fused)


def _groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not weight_decay:
        return [{"params": trainable, "weight_decay": 0.0}]
    decayed = [parameter for parameter in trainable if parameter.ndim > 1]
    plain = [parameter for parameter in trainable if parameter.ndim <= 1]
    groups = [(decayed, weight_decay), (plain, 0.0)]
    return [{"params": some, "weight_decay": decay} for some, decay in groups if some]


def _can_fuse(model: torch.nn.Module) -> bool:
    return all(
        parameter.device.type in ("cpu", "cuda") and parameter.is_floating_point()
        for parameter in model.parameters()
    )
