"""Refuse losses and labels that cannot be used, and losses that are not finite."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from nbtoolkit.errors import FitError, LossNotFinite
from nbtoolkit.training.data import TORCHS_IGNORED
from nbtoolkit.worker.collectives import gather_on_all

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from nbtoolkit.worker.context import RunContext

Loss: TypeAlias = "Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]]"
"""``loss(outputs, targets)`` of the user, see :func:`nbtoolkit.fit`."""

Labels: TypeAlias = "Tensor | NDArray[np.generic]"
"""Targets of a data set, one row per sample."""


ALLOWED = (
    "a mean over the batch's samples, F.cross_entropy with weight and ignore_index, a "
    "tensor with one loss for each sample, or a pair (total, weight) of two sums"
)


class TrainingPass:
    """What ``fit`` and a loss tell each other during a training pass; each rank has one.

    Attributes:
        samples: of this rank in the micro-batch; 0: the rank passes a stand-in, whose row must not
            count. None outside a training pass of ``fit``: in an own loop, and in the validation.
        whole_batch: set by a loss that was computed from the micro-batches of all ranks: it need
            not follow from its parts, and does not depend on the number of ranks.
    """

    samples: int | None = None
    whole_batch: bool = False


training_pass = TrainingPass()


class BatchLoss(NamedTuple):
    """The loss of one micro-batch."""

    mean: Tensor
    """Over the samples, or over the weights; a scalar."""
    weight: Tensor | float
    """The weight of the mean beside those of other micro-batches: samples, or sum of weights."""


def check_loss(loss: object) -> None:
    """Refuse what is no function of outputs and targets.

    Raises:
        FitError: says what to pass.
    """
    if isinstance(loss, type) or not callable(loss):
        raise FitError(
            f"loss={loss!r} is not a function of outputs and targets",
            allowed="a function (outputs, targets), or an object such as nn.CrossEntropyLoss()",
            do="call the class" if isinstance(loss, type) else "pass the function itself",
        )


def on_device(loss: Loss, device: torch.device) -> Loss:
    """A loss with its tensors (``weight``, ``pos_weight``) on the model's device.

    Args:
        loss: a module is moved in place; a ``partial`` is replaced by a new one, whose arguments
            are moved. ``nb.all_rows`` returns such a partial.
        device: this rank's.
    """
    import torch

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, (torch.Tensor, torch.nn.Module)) else value

    if isinstance(loss, functools.partial):
        named = {name: moved(value) for name, value in loss.keywords.items()}
        return functools.partial(moved(loss.func), *map(moved, loss.args), **named)
    return cast("Loss", moved(loss))


def not_a_loss(returned: str) -> FitError:
    """The error for what a loss ``returned``."""
    return FitError(
        f"the loss returned {returned}",
        allowed=ALLOWED,
        do='return a scalar tensor; torch\'s losses do with reduction="mean"',
    )


# --- class labels ---


def check_labels(outputs: object, targets: object, loss: object) -> None:
    """Refuse class labels for which a model has no score.

    On a GPU one such label ends the whole process, some calls later ("device-side assert"). Waits
    for the device: for the first batch, or for all targets at once.

    Args:
        outputs: the model's scores, of shape (n, classes, ...) or (classes,).
        targets: labels of shape (n, ...) or () in whole numbers; any number of samples, a tensor
            or an array.
        loss: ``cross_entropy`` or ``nll_loss`` of torch, as a function, a module or a ``partial``;
            other losses are not checked, nor targets that are probabilities.

    Raises:
        FitError: a label is not in ``range(classes)`` and not the loss's ``ignore_index``.
    """
    import numpy as np
    import torch

    ignored = ignore_index(loss)
    if ignored is None or not isinstance(outputs, torch.Tensor) or outputs.ndim == 0:
        return
    if not isinstance(targets, (torch.Tensor, np.ndarray)):
        return
    labels = torch.tensor(targets) if isinstance(targets, np.ndarray) else targets
    if labels.is_floating_point():
        return
    labels = labels[labels != ignored]
    if not labels.numel():
        return
    classes = outputs.shape[min(1, outputs.ndim - 1)]
    low, high = (int(label) for label in torch.aminmax(labels))
    if low < 0 or high >= classes:
        raise _out_of_range(low, high, classes, ignored)


def ignore_index(loss: object) -> int | None:
    """The label that does not count; None: the loss is not one of torch's class losses."""
    from torch import nn
    from torch.nn import functional

    if isinstance(loss, functools.partial):
        default = ignore_index(loss.func)
        return default if default is None else loss.keywords.get("ignore_index", default)
    if loss is functional.cross_entropy or loss is functional.nll_loss:
        return TORCHS_IGNORED
    return loss.ignore_index if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) else None


def is_loss(loss: object, name: str) -> bool:
    """Whether a loss is torch's function ``name``, its module, or a partial of it."""
    from torch import nn
    from torch.nn import functional

    modules: dict[str, type[nn.Module]] = {
        "cross_entropy": nn.CrossEntropyLoss,
        "binary_cross_entropy": nn.BCELoss,
        "mse_loss": nn.MSELoss,
        "l1_loss": nn.L1Loss,
        "smooth_l1_loss": nn.SmoothL1Loss,
        "huber_loss": nn.HuberLoss,
    }
    if isinstance(loss, functools.partial):
        return is_loss(loss.func, name)
    return loss is getattr(functional, name) or isinstance(loss, modules[name])


def _out_of_range(low: int, high: int, classes: int, ignored: int) -> FitError:
    if low > 0 and high - low < classes:
        do = f"subtract {low} from the labels: classes are numbered from 0"
    elif low >= 0:
        do = f"give the model's last layer {high + 1} outputs, or renumber the labels"
    else:
        do = f"number the labels from 0; those that are not to count get {ignored}"
    return FitError(
        f"labels go from {low} to {high}, but the model scores {classes} classes",
        allowed=f"labels from 0 to {classes - 1}, and {ignored} (ignore_index) for labels that do "
        "not count",
        do=do,
    )


# --- losses that are not finite ---


_SHOWN = 20  # samples named in the message


class StepLoss(NamedTuple):
    """One rank's loss of one micro-batch of an optimizer step."""

    step: int
    """Optimizer steps of the run done with it: the number under which it is logged."""
    epoch: int
    """From 1."""
    in_epoch: int
    """The optimizer step within the epoch, from 0."""
    loss: float
    """The mean over the micro-batch's samples."""


def raise_if_not_finite(
    ctx: RunContext,
    losses: Sequence[StepLoss],
    sample_ids: Callable[[int, int], Sequence[int]],
    *,
    tolerant: bool,
    rate: float | None = None,
    grad_norm: float | None = None,
) -> None:
    """Raise the same error on all ranks for the first step whose loss is not finite.

    A collective: called by **all** ranks, and only when the sum of the losses over all ranks is not
    finite.

    Under fp16 one batch may overflow. Its gradients are then not finite either, so the scaler skips
    the step and halves its scale, and the weights stay good: such a step is only printed, as long
    as the scale can still fall (``tolerant``). So is a step whose targets are all ignored.

    Args:
        ctx: the run's context.
        losses: this rank's losses since the last synchronisation.
        sample_ids: ``(epoch, step in it)`` -> the samples of that step's global batch.
        tolerant: :attr:`TrainStep.keeps_weights`, equal on all ranks.
        rate: the present learning rate, for the message.
        grad_norm: the gradient's norm when it was last measured, for the message.

    Raises:
        LossNotFinite: names the first step that is not finite, and its samples.
    """
    wrong = not_finite(loss for part in gather_on_all(losses, ctx.world_size) for loss in part)
    if wrong and not tolerant:
        first = wrong[0]
        raise _not_finite_error(first, sample_ids(first.epoch, first.in_epoch), rate, grad_norm)
    for step in dict.fromkeys(loss.step for loss in wrong):
        ctx.print(
            f"fit: the loss of optimizer step {step} is not finite, and did not change the weights"
        )


def not_finite(losses: Iterable[StepLoss]) -> list[StepLoss]:
    """The losses that are infinite or NaN, sorted by step."""
    wrong = [loss for loss in losses if not math.isfinite(loss.loss)]
    return sorted(wrong, key=lambda loss: loss.step)


def _not_finite_error(
    first: StepLoss, samples: Sequence[int], rate: float | None, grad_norm: float | None
) -> LossNotFinite:
    more = f" and {len(samples) - _SHOWN} more" if len(samples) > _SHOWN else ""
    known = (("learning rate", rate), ("gradient norm", grad_norm))
    now = ", ".join(f"{name} {value:g}" for name, value in known if value and math.isfinite(value))
    return LossNotFinite(
        f"the loss of optimizer step {first.step} (step {first.in_epoch + 1} of epoch "
        f"{first.epoch}) is {first.loss}{f'; {now}' if now else ''}\n"
        f"  Its batch: samples {', '.join(map(str, samples[:_SHOWN]))}{more}",
        allowed="losses that are finite numbers",
        do="look at these samples (a NaN among the inputs?); lower optim.lr, or set "
        "train.max_grad_norm: 1.0",
    )
