"""Check that the classes a loss is to score exist, before a device's kernel fails on them."""

from __future__ import annotations

from functools import partial
from typing import Any

from nbtoolkit.errors import FitError

TORCHS_IGNORED = -100
"""torch's default ``ignore_index``."""


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
