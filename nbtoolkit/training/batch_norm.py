"""Keep single samples away from batch norms, which need two values of a channel in training."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from nbtoolkit.errors import FitError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

_MESSAGE = "Expected more than 1 value per channel when training"
_ALLOWED = "two samples or more in every forward pass of a rank, or a model without batch norms"
_DO = "set train.drop_last: true, which leaves out the uneven last step of each epoch"
_DO_LARGER = "set a larger train.batch_size, or fewer ranks or train.gradient_accumulation_steps"


def smallest_share(model: nn.Module) -> int:
    """The samples that a forward pass of ``model`` should have at least: 2 with batch norms."""
    return 2 if _layers(model) else 1


def refuse_single_samples(model: nn.Module, single: str) -> None:
    """Let the first forward pass fail where a single sample would fail in a later one.

    A batch norm of images has many values of a channel in one sample; the first inputs of each
    layer show which have one. Compiled layers call no hook: :func:`single_sample_fault` remains.

    Args:
        model: as it is trained.
        single: where an epoch has a forward pass of one sample; "": nowhere.
    """
    for layer in _layers(model) if single else ():
        handles: list[RemovableHandle] = []
        handles.append(layer.register_forward_pre_hook(partial(_check, handles, single)))


def _layers(model: nn.Module) -> list[nn.Module]:
    """The batch norms of a model, without those that have the samples of all ranks."""
    import torch.distributed as dist
    from torch.nn import SyncBatchNorm
    from torch.nn.modules.batchnorm import _BatchNorm

    alone = not dist.is_initialized() or dist.get_world_size() == 1
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    return [layer for layer in layers if alone or not isinstance(layer, SyncBatchNorm)]


def _check(
    handles: list[RemovableHandle], single: str, layer: nn.Module, inputs: tuple[Tensor, ...]
) -> None:
    handles.pop().remove()
    shape = inputs[0].shape
    if layer.training and shape.numel() == shape[0] * shape[1]:
        raise FitError(
            f"the model has batch norms over the samples ({type(layer).__name__}), and {single}",
            allowed=_ALLOWED,
            do=_DO if "last step" in single else _DO_LARGER,
        )


def single_sample_fault(error: Exception) -> FitError | None:
    """The error to raise where a batch norm got one sample; None: ``error`` is another."""
    if _MESSAGE not in str(error):
        return None
    return FitError(f"a batch norm got a single sample: {error}", allowed=_ALLOWED, do=_DO)
