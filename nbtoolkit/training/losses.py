"""Determine what a loss averages over, and find losses that are not finite.

An optimizer step takes its samples in parts: one for each rank and each accumulation step. Parts of
a mean over samples are weighed by their samples. A mean over weights (class weights,
``ignore_index``, a mask) needs the sum of the weights of each part, and a sum needs nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from nbtoolkit.errors import FitError, LossNotFinite
from nbtoolkit.training.data import TORCHS_IGNORED
from nbtoolkit.worker.batch_slices import NotRows, rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nbtoolkit.worker.context import RunContext


# --- nonfinite ---
# Losses that are not a number: found in a window of steps by all ranks together, and told.


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
        tolerant: :attr:`TrainStep.skips_overflows`, equal on all ranks.
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
        "train.max_grad_norm: 1.0",
    )


# --- losses ---


# Of a whole against its parts: float32 sums in another order differ by 1e-6, half ones by 1e-2.
_TOLERANCE, _TOLERANCE_OF_HALVES = 1e-4, 2e-2

ALLOWED = (
    "a mean or a sum over the batch's samples, F.cross_entropy with weight and ignore_index, a "
    "tensor with one loss for each sample, or a pair (total, weight) of two sums"
)


class Reduction(IntEnum):
    """What a loss does with the losses of its samples; of two findings the larger one holds."""

    UNKNOWN = 0
    """One sample or none was seen, or a loss that is not a number."""
    MEAN = 1
    """The mean over the samples."""
    BATCH = 2
    """Not made of samples, as ``train.loss_reduction: batch`` says: taken as a mean."""
    SUM = 3
    """The sum over the samples."""
    WEIGHTED = 4
    """The mean over weights."""
    OTHER = 5
    """Something else: it cannot be computed in parts."""


class Passed(NamedTuple):
    """The loss of one pass."""

    mean: Tensor
    """Over the samples, or over the weights; a scalar."""
    weight: Tensor | float
    """What the mean counts for beside those of other passes."""


@dataclass(frozen=True)
class Finding:
    """What one rank found out about the loss; sent to the others."""

    reduction: Reduction
    why: str = ""
    """For :attr:`Reduction.OTHER`."""


class ReducedLoss:
    """A user's loss, and what its values count for.

    Args:
        loss: ``loss(outputs, targets)``.
        whole_batches: ``train.loss_reduction: batch``.

    Attributes:
        reduction: as the first batch showed it; until then :attr:`Reduction.UNKNOWN`.
    """

    def __init__(self, loss: Callable[[Any, Any], Any], *, whole_batches: bool) -> None:
        self._loss = loss
        self.reduction = Reduction.BATCH if whole_batches else Reduction.UNKNOWN

    @property
    def weighs(self) -> bool:
        """Whether calls of torch's losses are to be weighed."""
        return self.reduction in (Reduction.UNKNOWN, Reduction.WEIGHTED)

    def reduce(self, returned: Any, samples: int, weight: Tensor | None) -> Passed:
        """What a pass over ``samples`` samples (at least one) came to.

        Args:
            returned: by the loss.
            samples: how many.
            weight: by which torch's own loss divided; None: by the samples.

        Raises:
            FitError: it is nothing that can be reduced.
        """
        import torch

        if isinstance(returned, tuple) and len(returned) == 2:
            total, count = returned
            counts = isinstance(count, (int, float)) or getattr(count, "ndim", 1) == 0
            if getattr(total, "ndim", 1) == 0 and counts:
                weight = torch.as_tensor(count, device=total.device).detach().to(total.dtype)
                return Passed(total / torch.where(weight == 0, 1, weight), weight)
        if not isinstance(returned, torch.Tensor):
            raise _no_loss(f"a {type(returned).__name__}")
        if returned.ndim:
            if returned.shape[0] != samples:
                raise _no_loss(f"a tensor of shape {tuple(returned.shape)} for {samples} samples")
            return Passed(returned.mean(), float(samples))
        if self.reduction is Reduction.SUM:
            return Passed(returned / samples, float(samples))
        if self.weighs and weight is not None:
            return Passed(returned, weight)
        return Passed(returned, float(samples))

    def judge(self, outputs: Any, targets: Any, samples: int, whole: Passed) -> Finding:
        """Compare the loss of a batch with the losses of its parts.

        Args:
            outputs: of the batch.
            targets: of the batch.
            samples: in the batch.
            whole: its loss.
        """
        if self.reduction is Reduction.BATCH:
            return Finding(Reduction.BATCH)
        weighted = not isinstance(whole.weight, float)
        likely = Reduction.WEIGHTED if weighted else Reduction.MEAN
        value, weight = float(whole.mean.detach()), float(whole.weight)
        if samples < 2 or not math.isfinite(value):
            return Finding(likely if weighted else Reduction.UNKNOWN)
        first = max(1, samples // 3)
        try:
            cuts = ((0, first), (first, samples))
            passed = [self._part(outputs, targets, *cut, samples) for cut in cuts]
        except NotRows:
            return Finding(likely)
        except Exception as error:
            why = f"of {samples} samples it has one, of a part it raises "
            return Finding(Reduction.OTHER, f"{why}{type(error).__name__}: {error}")
        parts = [(float(part.mean), float(part.weight)) for part in passed]
        tolerance = _tolerance(whole.mean)
        if _adds_up(value * weight, [mean * count for mean, count in parts], tolerance):
            return Finding(likely)
        if not weighted and _adds_up(value, [mean for mean, _ in parts], tolerance):
            return Finding(Reduction.SUM)
        average = sum(mean * count for mean, count in parts) / sum(count for _, count in parts)
        return Finding(
            Reduction.OTHER,
            f"of {samples} samples it is {value:.6g}, of {first} and {samples - first} of them "
            f"{average:.6g} on average",
        )

    def _part(self, outputs: Any, targets: Any, low: int, high: int, samples: int) -> Passed:
        import torch

        from nbtoolkit.training.loss_weights import WeightSums

        weighing = WeightSums()
        outputs, targets = rows((outputs, targets), low, high, samples)
        with torch.no_grad(), torch.random.fork_rng(_devices(outputs)), weighing:
            returned = self._loss(outputs, targets)
        return self.reduce(returned, high - low, weighing.weight)


def agree(findings: list[Finding]) -> Reduction:
    """What all ranks take the loss for.

    Raises:
        FitError: it cannot be computed in parts.
    """
    strongest = max(findings, key=lambda one: one.reduction)
    if strongest.reduction is Reduction.OTHER:
        raise FitError(
            "the loss of a batch does not follow from the losses of its parts, so that it would "
            f"depend on the number of devices: {strongest.why}",
            allowed=f"{ALLOWED}; or a loss of whole batches (Dice, contrastive) with "
            "train.loss_reduction: batch, which depends on the number of ranks",
            do="with a mask, return ((losses * mask).sum(), mask.sum()); for a loss of whole "
            "batches set train.loss_reduction: batch",
        )
    return max(strongest.reduction, Reduction.MEAN)


def _tolerance(loss: Tensor) -> float:
    """What counts as equal, as a share of the largest."""
    import torch

    half = loss.dtype in (torch.float16, torch.bfloat16)
    return _TOLERANCE_OF_HALVES if half else _TOLERANCE


def _adds_up(whole: float, parts: list[float], tolerance: float) -> bool:
    return abs(whole - sum(parts)) <= tolerance * max(map(abs, [whole, *parts]))


def on_device(loss: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A loss with its tensors (``weight``, ``pos_weight``) where the model's are.

    Args:
        loss: moved itself where it is a module; of a ``partial`` a new one is made.
        device: of this rank.
    """
    import torch

    if isinstance(loss, torch.nn.Module):
        return loss.to(device)
    if isinstance(loss, functools.partial):
        moved = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in loss.keywords.items()
        }
        return functools.partial(loss.func, *loss.args, **moved)
    return loss


def _devices(outputs: Any) -> list[int]:
    """The GPU whose random stream a loss may move on."""
    from accelerate.utils import find_device

    device = find_device(outputs)
    return [device.index] if device is not None and device.type == "cuda" else []


def _no_loss(what: str) -> FitError:
    return FitError(
        f"the loss returned {what}",
        allowed=ALLOWED,
        do='return a scalar tensor; torch\'s losses do with reduction="mean"',
    )


def check_labels(outputs: Any, targets: Any, loss: Any) -> None:
    """Refuse class labels for which a model has no score.

    On a GPU one such label ends the whole process, some calls later ("device-side assert"). Waits
    for the device: for the first batch, or for all targets at once.

    Args:
        outputs: the model's scores, of shape (n, classes, ...) or (classes,).
        targets: labels of shape (n, ...) or () in whole numbers; any number of samples, a tensor
            or an array.
        loss: ``cross_entropy`` or ``nll_loss`` of torch, as function or module or a ``partial`` of
            one; other losses are not checked, nor targets that are probabilities.

    Raises:
        FitError: a label is not in ``range(classes)`` and not the loss's ``ignore_index``.
    """
    import numpy as np
    import torch

    ignored = _ignore_index(loss)
    pair = isinstance(outputs, torch.Tensor) and isinstance(targets, (torch.Tensor, np.ndarray))
    if ignored is None or not pair or outputs.ndim == 0:
        return
    labels = torch.tensor(targets) if isinstance(targets, np.ndarray) else targets
    if labels.is_floating_point():
        return
    labels = labels[labels != ignored]
    if not labels.numel():
        return
    classes = outputs.shape[min(1, outputs.ndim - 1)]
    low, high = (int(one) for one in torch.aminmax(labels))
    if low < 0 or high >= classes:
        raise _out_of_range(low, high, classes, ignored)


def all_count(targets: Any) -> bool:
    """Whether it is known that no target has torch's own ``ignore_index``.

    Args:
        targets: all targets of a training set, tensor or array; None: they are not at hand.
    """
    return targets is not None and not bool((targets == TORCHS_IGNORED).any())


def _ignore_index(loss: Any) -> int | None:
    """The label that does not count; None: this is not a loss over class labels that we know."""
    from torch import nn
    from torch.nn import functional

    if isinstance(loss, partial):
        inner = _ignore_index(loss.func)
        return inner if inner is None else loss.keywords.get("ignore_index", inner)
    if loss is functional.cross_entropy or loss is functional.nll_loss:
        return TORCHS_IGNORED
    return loss.ignore_index if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) else None


def _out_of_range(low: int, high: int, classes: int, ignored: int) -> FitError:
    shifted = low > 0 and high - low < classes
    do = (
        f"subtract {low} from the labels: classes are numbered from 0"
        if shifted
        else f"give the model's last layer {high + 1} outputs, or number the labels anew"
        if low >= 0
        else f"number the labels from 0; those that are not to count get {ignored}"
    )
    return FitError(
        f"labels go from {low} to {high}, but the model scores {classes} classes",
        allowed=f"labels from 0 to {classes - 1}, and {ignored} (ignore_index) for what is not to "
        "count",
        do=do,
    )
