"""Placement: the user's model as this rank trains it: its weights, its device, its wrappers."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import FitError
from nbtoolkit.runtime.prepare import with_sync_batchnorm
from nbtoolkit.training.activations import recompute_activations
from nbtoolkit.training.compression import compress

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nbtoolkit.config import Config
    from nbtoolkit.runtime.context import RunContext


def place(ctx: RunContext, config: Config, model: nn.Module) -> nn.Module:
    """Make ``model`` what ``config`` wishes to train, on this rank's device; changed in place.

    Its ``state_dict`` keeps its names, whatever is switched on.

    Args:
        ctx: the run's context.
        config: ``train.fp16_weights, channels_last, activation_checkpointing`` and
            ``distributed.sync_batchnorm``.
        model: what the user gave to ``fit``.

    Returns:
        ``model`` itself, or its ``SyncBatchNorm`` where it is a batch norm and nothing else.

    Raises:
        FitError: it is wrapped or compiled already, has nothing to train, or weights in fp16 that
            are to be trained.
    """
    _refuse_wrapped(model)
    _check_weights(ctx, config, model)
    model = with_sync_batchnorm(ctx, config, model.to(ctx.device))
    if config.train.channels_last:
        _store_by_pixel(ctx, model)
    if config.train.activation_checkpointing and not recompute_activations(model):
        ctx.print(
            "fit: activation_checkpointing changes nothing: this model has no layers of one class "
            "that repeat"
        )
    return model


def wrap(ctx: RunContext, config: Config, module: nn.Module, *, steps: int) -> Any:
    """The model as the training step calls it: compiled, and one of several ranks.

    Compiled first and wrapped by DDP then, as torch advises
    (https://docs.pytorch.org/docs/stable/compile/programming_model.where_to_apply_compile.html).
    Not by ``module.compile()``, which compiles nothing where the module is an ``nn.Sequential``
    (torch 2.13).

    Args:
        ctx: the run's context; its plan has DDP's options.
        config: ``train.compile`` and ``distributed.compression``.
        module: what :func:`place` returned.
        steps: optimizer steps of the whole run.

    Raises:
        FitError: the ranks' backend cannot compress gradients so.
    """
    import torch

    model: Any = torch.compile(module) if config.train.compile else module
    if ctx.world_size > 1:
        model = _distributed(ctx, model)
    compress(ctx, config, model, steps=steps)
    return model


def by_pixel(batch: Any) -> Any:
    """A batch whose 4-d tensors (n, channels, height, width) lie in memory by pixel."""
    import torch
    from accelerate.utils import recursively_apply

    def reordered(images: Tensor) -> Tensor:
        return images.contiguous(memory_format=torch.channels_last)

    return recursively_apply(reordered, batch, test_type=_is_image)


def _refuse_wrapped(model: nn.Module) -> None:
    """What is not the model itself: its names are not the model's, and it would be done twice."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    compiled = hasattr(model, "_orig_mod")  # its class is in torch._dynamo: 1.5 s to import
    if compiled or isinstance(model, (DataParallel, DistributedDataParallel)):
        raise FitError(
            f"the model is wrapped already: it is a {type(model).__name__}",
            allowed="the plain model: fit compiles it and wraps it for several ranks by itself",
            do="pass the model as it was before torch.compile, and set train.compile: true"
            if compiled
            else "pass model.module",
        )


def _check_weights(ctx: RunContext, config: Config, model: nn.Module) -> None:
    """Weights that can be trained, and in full precision: the optimizer adds small numbers."""
    import torch

    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    if not trained:
        raise FitError(
            f"this {type(model).__name__} has no parameter that is to be trained",
            allowed="one parameter or more with requires_grad",
            do="call requires_grad_() on the part of the model that is to learn",
        )
    if config.train.fp16_weights == "upcast":
        _upcast(model)
        return
    halves = [name for name, one in trained if one.dtype == torch.float16]
    if halves:
        raise _half_precision(halves)
    if any(one.dtype == torch.bfloat16 for _, one in trained):
        ctx.print(
            "fit: weights in bfloat16 are trained: steps below 1/256 of a weight are lost; "
            "train.fp16_weights: upcast makes them fp32"
        )


def _half_precision(names: list[str]) -> FitError:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return FitError(
        f"weights to be trained are float16: {', '.join(names[:3])}{more}",
        allowed="trained weights in float32; frozen ones may stay float16",
        do="set train.fp16_weights: upcast, or call model.float(); train.precision: fp16 computes "
        "in float16 by itself",
    )


def _upcast(model: nn.Module) -> None:
    """Layers with trained weights in half precision become fp32, with their statistics."""
    import torch

    half = (torch.float16, torch.bfloat16)
    for layer in model.modules():
        own = list(layer.parameters(recurse=False))
        if any(one.requires_grad and one.dtype in half for one in own):
            for value in [*own, *layer.buffers(recurse=False)]:
                if value.dtype in half:
                    value.data = value.data.float()


def _store_by_pixel(ctx: RunContext, model: nn.Module) -> None:
    """One by one: ``model.to(memory_format=...)`` refuses models that also have 5-d weights."""
    import torch

    images = [one for one in model.parameters() if one.ndim == 4]
    for weight in images:
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    if not images:
        ctx.print("fit: channels_last changes nothing: this model has no 2-d convolution")


def _is_image(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.ndim == 4


def _distributed(ctx: RunContext, model: nn.Module) -> torch.nn.parallel.DistributedDataParallel:
    from torch.nn.parallel import DistributedDataParallel

    device_ids = [ctx.device] if ctx.device.type == "cuda" else None
    options = dict(ctx.plan.ddp)
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters:  # since torch 2.13
        options["forward_sync_buffers"] = options.pop("broadcast_buffers")
    return DistributedDataParallel(model, device_ids=device_ids, **options)
