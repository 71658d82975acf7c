"""Losses that are not a number: found in a window of steps by all ranks together, and told."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nbtoolkit.errors import LossNotFinite

if TYPE_CHECKING:
    from nbtoolkit.runtime.context import RunContext

_SHOWN = 20  # samples named in the message


class StepLoss(NamedTuple):
    """One rank's loss in one pass (forward and backward) of an optimizer step."""

    step: int
    """Optimizer steps of the run done with it: the number under which it is logged."""
    epoch: int
    """From 1."""
    in_epoch: int
    """The optimizer step within the epoch, from 0."""
    loss: float
    """The mean over the pass's samples; a stand-in's loss is none."""


def raise_if_not_finite(
    ctx: RunContext,
    losses: Sequence[StepLoss],
    sample_ids: Callable[[int, int], Sequence[int]],
    *,
    tolerant: bool,
    rate: float | None = None,
    grad_norm: float | None = None,
) -> None:
    """Raise the same error on all ranks for the first step of a window whose loss is not finite.

    Called by **all** ranks, and only when the window's sum over all ranks is not finite: it is a
    collective.

    Under fp16 one batch may overflow. Its gradients are then not finite either, so the scaler
    leaves out the step, halves its scale, and the weights stay good: such a step is told and no
    more, as long as the scaler is not at its end (``tolerant``).

    Args:
        ctx: the run's context.
        losses: this rank's losses since it last looked.
        sample_ids: ``(epoch, step in it)`` -> the samples of that step's global batch.
        tolerant: :attr:`Stepper.skips_overflows`, equal on all ranks.
        rate: the learning rate now, for the message.
        grad_norm: the gradient's norm when it was last watched, for the message.

    Raises:
        LossNotFinite: names the first step that is not finite, and its samples.
    """
    wrong = not_finite(_gathered(ctx, losses))
    if wrong and not tolerant:
        first = wrong[0]
        raise _broken(first, sample_ids(first.epoch, first.in_epoch), rate, grad_norm)
    for step in dict.fromkeys(one.step for one in wrong):
        ctx.print(f"fit: the loss of optimizer step {step} is not finite; fp16 left out this step")


def not_finite(losses: Iterable[StepLoss]) -> list[StepLoss]:
    """The losses that are infinite or no numbers, by step."""
    return sorted((one for one in losses if not math.isfinite(one.loss)), key=lambda one: one.step)


def _gathered(ctx: RunContext, losses: Sequence[StepLoss]) -> list[StepLoss]:
    """The losses of all ranks."""
    import torch.distributed as dist

    if ctx.world_size == 1:
        return list(losses)
    boxes: list[list[StepLoss]] = [[] for _ in range(ctx.world_size)]
    dist.all_gather_object(boxes, list(losses))
    return [one for box in boxes for one in box]


def _broken(
    first: StepLoss, samples: Sequence[int], rate: float | None, grad_norm: float | None
) -> LossNotFinite:
    more = f" and {len(samples) - _SHOWN} more" if len(samples) > _SHOWN else ""
    known = (("learning rate", rate), ("gradient norm", grad_norm))
    now = ", ".join(f"{name} {one:g}" for name, one in known if one and math.isfinite(one))
    return LossNotFinite(
        f"the loss of optimizer step {first.step} (step {first.in_epoch + 1} of epoch "
        f"{first.epoch}) is {first.loss}{f'; {now}' if now else ''}\n"
        f"  Its batch: samples {', '.join(map(str, samples[:_SHOWN]))}{more}",
        allowed="losses that are finite numbers",
        do="look at these samples (a NaN among the inputs?); lower optim.lr, or set "
        "train.clip_norm: 1.0",
    )
