"""Layers whose results depend on how a batch is divided, or on random numbers: named, with why."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_STATISTICS = "takes its statistics from each rank's own part of a batch"
WHOLE_BATCHES = "of whole batches (train.loss_reduction: batch): depends on the number of ranks"
_RANDOM = "draws random numbers, on every rank other ones"


def inexact_layers(model: torch.nn.Module) -> dict[str, str]:
    """Why one process and several differ by more than the order of sums; empty: they do not.

    Args:
        model: the model as it trains.

    Returns:
        Name and type of the layer -> the reason.
    """
    reasons = {f"{name} ({type(one).__name__})": _why(one) for name, one in model.named_modules()}
    return {name: reason for name, reason in reasons.items() if reason}


def _why(module: torch.nn.Module) -> str:
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.dropout import _DropoutNd

    if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
        return _STATISTICS
    dropped = getattr(module, "dropout", 0.0)  # of attention and recurrent layers
    if isinstance(module, _DropoutNd):
        return _RANDOM if module.p else ""
    if isinstance(module, nn.RReLU) or (isinstance(dropped, float) and dropped > 0):
        return _RANDOM
    return ""
