"""Prediction: a model's outputs for a whole data set, in its order, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import FitError
from nbtoolkit.training.data import Collate
from nbtoolkit.training.gathering import Rows, gather_on_all, in_order
from nbtoolkit.training.walk import make_walk

if TYPE_CHECKING:
    import torch

    from nbtoolkit.runtime.context import RunContext
    from nbtoolkit.training.stepper import Forward


def predict(
    ctx: RunContext,
    model: torch.nn.Module,
    data: Any,
    *,
    step: Forward | None = None,
    collate: Collate | None = None,
    batch_size: int | None = None,
) -> Any:
    """What ``model`` says to every sample of ``data``; called by all ranks, which share the work.

    In evaluation mode, without gradients, in the plan's precision. Afterwards every layer is in the
    mode (training or evaluation) it was in; the model is on ``ctx.device``, with rank 0's buffers.

    Args:
        ctx: the run's context.
        model: equal on all ranks, as ``fit`` leaves it; a ``DistributedDataParallel`` is unwrapped.
        data: as :func:`nbtoolkit.fit` takes it, the same on all ranks. Targets may be missing: a
            batch is a tensor of inputs, or a pair (inputs, targets).
        step: ``step(model, batch)`` -> (outputs, targets), as in ``fit``; the outputs are taken.
        collate: makes a batch from a list of samples; default: torch's.
        batch_size: samples of one forward pass of one rank; default: four times the plan's, since
            nothing is kept for a backward pass.

    Returns:
        The outputs on the CPU, one row a sample, in the data set's order: a tensor, or a tuple,
        list or dict of tensors, as the model gives them. Half precision comes as float32. Every
        rank has all of them, gathered once, at the end.

    Raises:
        FitError: the data cannot be used or are empty, or the outputs are not tensors with one row
            a sample.
    """
    walk = make_walk(
        ctx,
        data,
        batch=batch_size,
        workers=ctx.config.train.workers,
        collate=collate,
        what="prediction",
    )
    module, forward = _unwrapped(model).to(ctx.device), step or _inputs_alone
    _share_buffers(module, ctx.world_size)
    mine = Rows()
    with _evaluating(ctx, module):
        for batch, samples in walk:
            mine.add(forward(module, batch)[0], samples)
    return in_order(gather_on_all(mine.part(), ctx.world_size))


def _inputs_alone(model: torch.nn.Module, batch: Any) -> tuple[Any, Any]:
    """The default step."""
    import torch

    if isinstance(batch, torch.Tensor):
        return model(batch), None
    if isinstance(batch, (tuple, list)) and len(batch) in (1, 2):
        return model(batch[0]), None
    raise FitError(
        f"a batch is neither inputs nor a pair (inputs, targets) but a {type(batch).__name__}",
        allowed="data sets of inputs, or of pairs, or a step of your own",
        do="pass step=lambda model, batch: (model(batch['x']), None) to predict",
    )


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own model: DDP's forward talks to the other ranks, which have other batches."""
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        return model
    module: torch.nn.Module = model.module
    return module


def _share_buffers(module: torch.nn.Module, ranks: int) -> None:
    """Give every rank rank 0's buffers: each rank's batch-norm saw its own batches."""
    import torch.distributed as dist

    if ranks > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)


@contextmanager
def _evaluating(ctx: RunContext, module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, the plan's precision; then each layer's mode as it was."""
    import torch

    modes = [(layer, layer.training) for layer in module.modules()]
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(ctx.plan.precision)
    module.eval()
    try:
        with torch.no_grad(), torch.autocast(ctx.device.type, half, enabled=half is not None):
            yield
    finally:
        for layer, training in modes:
            layer.training = training
