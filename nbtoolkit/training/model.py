"""Prepare the user's model on this rank: device, precision, memory format, DDP, compression."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from nbtoolkit.errors import FitError, some_names
from nbtoolkit.worker.prepare import with_data_parallel, with_sync_batchnorm

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.hooks import RemovableHandle

    from nbtoolkit.config.schema import Config
    from nbtoolkit.training.data import Batch
    from nbtoolkit.worker.context import RunContext

BatchNorm: TypeAlias = Any
"""A ``torch.nn.modules.batchnorm._BatchNorm`` with running statistics, optional to its types."""


def prepare_model(ctx: RunContext, config: Config, model: nn.Module) -> nn.Module:
    """Prepare ``model`` for training on this rank's device as ``config`` says; changed in place.

    The names in its ``state_dict`` stay the same with every setting.

    Args:
        ctx: the run's context.
        config: ``train.fp16_weights, channels_last, activation_checkpointing`` and
            ``distributed.sync_batchnorm``.
        model: what the user passed to ``fit``.

    Returns:
        ``model`` itself, or its ``SyncBatchNorm`` where it is a single batch norm.

    Raises:
        FitError: it is wrapped or compiled already, has nothing to train, or has trainable weights
            in fp16.
    """
    _refuse_wrapped(model)
    _check_weights(ctx, config, model)
    model = with_sync_batchnorm(ctx, config, model.to(ctx.device))
    if config.train.channels_last:
        _store_channels_last(ctx, model)
    if config.train.activation_checkpointing and not checkpoint_activations(model):
        ctx.print(
            "fit: activation_checkpointing changes nothing: this model has no layers of one class "
            "that repeat"
        )
    return model


def wrap_model(ctx: RunContext, config: Config, module: nn.Module, *, steps: int) -> nn.Module:
    """Return the model as the training step calls it: compiled, wrapped by DDP or DataParallel.

    Compiled before it is wrapped, as torch advises
    (https://docs.pytorch.org/docs/stable/compile/programming_model.where_to_apply_compile.html).
    Not by ``module.compile()``, which compiles nothing where the module is an ``nn.Sequential``
    (torch 2.13).

    Args:
        ctx: the run's context; its plan has DDP's options.
        config: ``train.compile`` and ``distributed.compression``.
        module: what :func:`prepare_model` returned.
        steps: optimizer steps of the whole run.

    Raises:
        FitError: the ranks' backend does not support the gradient compression.
    """
    import torch

    compiled = cast("nn.Module", torch.compile(module)) if config.train.compile else module
    if ctx.world_size == 1:
        if (kind := config.distributed.compression) != "none":
            ctx.print(f"fit: distributed.compression: {kind} has nothing to do: there is one rank")
        return with_data_parallel(ctx, compiled)
    model = _distributed(ctx, compiled)
    register_compression(ctx, config, model, steps=steps)
    return model


def half_precision(ctx: RunContext) -> torch.dtype | None:
    """Return the type in which the plan's precision computes under autocast; None: fp32."""
    import torch

    return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(ctx.plan.precision)


def autocast(ctx: RunContext) -> AbstractContextManager[object]:
    """Return the context of forward pass and loss.

    One for all steps: making it is slower than using.
    """
    import torch

    dtype = half_precision(ctx)
    return nullcontext() if dtype is None else torch.autocast(ctx.device.type, dtype)


def grad_scaler(ctx: RunContext, config: Config) -> torch.amp.GradScaler:
    """Keep the gradients of fp16 from underflow; do nothing in other precisions."""
    import torch

    train = config.train
    return torch.amp.GradScaler(
        ctx.device.type,
        init_scale=train.scaler_init_scale,
        growth_factor=train.scaler_growth_factor,
        backoff_factor=train.scaler_backoff_factor,
        growth_interval=train.scaler_growth_interval,
        enabled=ctx.plan.precision == "fp16",
    )


def broadcast_buffers(module: nn.Module, ranks: int) -> None:
    """Give all ranks rank 0's buffers: each rank's batch norms saw their own batches."""
    import torch.distributed as dist

    if ranks > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)


def batch_norms(module: nn.Module) -> list[BatchNorm]:
    """Return the batch norms of a module that keep running statistics."""
    from torch.nn.modules.batchnorm import _BatchNorm

    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    return [layer for layer in layers if layer.running_mean is not None]


def _refuse_wrapped(model: nn.Module) -> None:
    """Refuse a wrapped model: it has other names in its ``state_dict``, and is wrapped twice."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    compiled = hasattr(model, "_orig_mod")  # its class is in torch._dynamo: 1.5 s to import
    if compiled or isinstance(model, (DataParallel, DistributedDataParallel)):
        raise FitError(
            f"the model is wrapped already: it is a {type(model).__name__}",
            allowed="the plain model: fit compiles it and wraps it for several ranks",
            do="pass the model as it was before torch.compile, and set train.compile: true"
            if compiled
            else "pass model.module",
        )


def _check_weights(ctx: RunContext, config: Config, model: nn.Module) -> None:
    """Require trainable weights in full precision: the optimizer adds small numbers to them."""
    import torch

    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    if not trained:
        raise FitError(
            f"this {type(model).__name__} has no parameter that is to be trained",
            allowed="one parameter or more with requires_grad",
            do="call requires_grad_() on the part of the model that is to learn",
        )
    if config.train.fp16_weights == "upcast":
        _upcast(model)
        return
    names = [name for name, weight in trained if weight.dtype == torch.float16]
    if names:
        raise FitError(
            f"weights to be trained are float16: {some_names(names, 3)}",
            allowed="trained weights in float32; frozen ones may stay float16",
            do="set train.fp16_weights: upcast, or call model.float(); train.precision: fp16 "
            "computes in float16 with float32 weights",
        )
    if any(weight.dtype == torch.bfloat16 for _, weight in trained):
        ctx.print(
            "fit: weights in bfloat16 are trained: steps below 1/256 of a weight are lost; "
            "train.fp16_weights: upcast makes them fp32"
        )


def _upcast(model: nn.Module) -> None:
    """Convert layers with trained weights in half precision to fp32, with their statistics."""
    import torch

    half = (torch.float16, torch.bfloat16)
    for layer in model.modules():
        weights = list(layer.parameters(recurse=False))
        if any(weight.requires_grad and weight.dtype in half for weight in weights):
            for value in [*weights, *layer.buffers(recurse=False)]:
                if value.dtype in half:
                    value.data = value.data.float()


def _distributed(ctx: RunContext, model: nn.Module) -> DistributedDataParallel:
    from torch.nn.parallel import DistributedDataParallel

    device_ids = [ctx.device] if ctx.device.type == "cuda" else None
    options = dict(ctx.plan.ddp)
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters:  # since torch 2.13
        options["forward_sync_buffers"] = options.pop("broadcast_buffers")
    return DistributedDataParallel(model, device_ids=device_ids, **options)


_SINGLE_SAMPLE = "Expected more than 1 value per channel when training"
_ALLOWED_SHARES = (
    "two samples or more in every forward pass of a rank, or a model without batch norms"
)
_WITHOUT_REST = "set train.drop_last: true, which leaves out the uneven last step of each epoch"
_LARGER_SHARES = (
    "set a larger train.batch_size, or fewer ranks or train.gradient_accumulation_steps"
)


def smallest_share(model: nn.Module) -> int:
    """Return the fewest samples of a forward pass of ``model``: 2 with batch norms."""
    return 2 if _norms_of_a_rank(model) else 1


def refuse_single_samples(model: nn.Module, single: str) -> None:
    """Let the first forward pass fail where a single sample would fail in a later one.

    A batch norm of images has many values of a channel in one sample; the first inputs of each
    layer show which have one. Compiled layers call no hook: :func:`single_sample_fault` remains.

    Args:
        model: as it is trained.
        single: where an epoch has a forward pass of one sample; "": nowhere.
    """
    for layer in _norms_of_a_rank(model) if single else ():
        handles: list[RemovableHandle] = []
        handles.append(
            layer.register_forward_pre_hook(partial(_check_first_inputs, handles, single))
        )


def _norms_of_a_rank(model: nn.Module) -> list[nn.Module]:
    """Return the batch norms of a model, without those that have the samples of all ranks."""
    import torch.distributed as dist
    from torch.nn import SyncBatchNorm
    from torch.nn.modules.batchnorm import _BatchNorm

    alone = not dist.is_initialized() or dist.get_world_size() == 1
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    return [layer for layer in layers if alone or not isinstance(layer, SyncBatchNorm)]


def _check_first_inputs(
    handles: list[RemovableHandle], single: str, layer: nn.Module, inputs: tuple[Tensor, ...]
) -> None:
    handles.pop().remove()
    shape = inputs[0].shape
    if layer.training and shape.numel() == shape[0] * shape[1]:
        raise FitError(
            f"the model has batch norms over the samples ({type(layer).__name__}), and {single}",
            allowed=_ALLOWED_SHARES,
            do=_WITHOUT_REST if "last step" in single else _LARGER_SHARES,
        )


def single_sample_fault(error: Exception) -> FitError | None:
    """Return the error to raise where a batch norm got one sample; None: ``error`` is another."""
    if _SINGLE_SAMPLE not in str(error):
        return None
    return FitError(
        f"a batch norm got a single sample: {error}", allowed=_ALLOWED_SHARES, do=_WITHOUT_REST
    )


def to_channels_last(batch: Batch) -> Batch:
    """Return a batch with its 4-d tensors (n, channels, height, width) in channels-last format."""
    import torch
    from accelerate.utils import recursively_apply

    def reordered(images: Tensor) -> Tensor:
        return images.contiguous(memory_format=torch.channels_last)

    return recursively_apply(reordered, batch, test_type=_is_image)


def _is_image(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.ndim == 4


def _store_channels_last(ctx: RunContext, model: nn.Module) -> None:
    """One by one: ``model.to(memory_format=...)`` refuses models that also have 5-d weights."""
    import torch

    kernels = [weight for weight in model.parameters() if weight.ndim == 4]
    for weight in kernels:
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    if not kernels:
        ctx.print("fit: channels_last changes nothing: this model has no 2-d convolution")


def checkpoint_activations(model: nn.Module) -> int:
    """Recompute the activations of each block of ``model`` in the backward pass.

    A block keeps its inputs only. The gradients are those of the plain model: dropout draws the
    same numbers again, and batch norms count a batch once. A model with its own
    ``gradient_checkpointing_enable`` (Hugging Face's) uses that. No name in the ``state_dict``
    changes. See https://docs.pytorch.org/docs/stable/checkpoint.html.

    Args:
        model: changed in place.

    Returns:
        The number of blocks (1 for a model with its own method); 0: nothing was changed.
    """
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is not None:
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return 1
    blocks = find_blocks(model)
    for block in blocks:
        # in the instance: a module around the block would put its name into the state_dict's
        block.__dict__["forward"] = partial(_recomputed, block, batch_norms(block))
    return len(blocks)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost layers of ``model`` of which there are two or more of one class.

    A layer has parameters and child modules. The model itself does not count: recomputed as a whole
    it would need as much memory. An ``nn.Sequential`` counts if it is in a list of modules and
    contains no layers.
    """
    pairs = [(parent, child) for parent in model.modules() for child in parent.children()]
    layers = [child for parent, child in pairs if _is_layer(parent, child)]
    count = Counter(type(layer) for layer in layers)
    return list(_outermost(model, {layer for layer in layers if count[type(layer)] > 1}))


def _is_layer(parent: nn.Module, child: nn.Module) -> bool:
    import torch

    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    grandchildren = list(child.children())
    weights = list(child.parameters())
    if not grandchildren or not weights or isinstance(child, lists):
        return False
    if type(child) is not torch.nn.Sequential:
        return True
    listed = isinstance(parent, (torch.nn.Sequential, *lists))
    return listed and not any(list(module.children()) for module in grandchildren)


def _outermost(module: nn.Module, layers: set[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if child in layers:
            yield child
        else:
            yield from _outermost(child, layers)


def _recomputed(block: nn.Module, norms: list[BatchNorm], *args: Any, **kwargs: Any) -> object:
    """Return the ``forward`` of a block that keeps only its inputs for the backward pass."""
    import torch
    from torch.utils.checkpoint import checkpoint

    forward = partial(type(block).forward, block)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # An own context cannot be compiled. Compiled, the statistics are written once anyway, unless a
    # side effect in the user's forward (a counter) keeps this call out of the graph.
    if norms and not torch.compiler.is_compiling():
        kwargs["context_fn"] = lambda: (nullcontext(), _frozen_statistics(norms))
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


@contextmanager
def _frozen_statistics(norms: list[BatchNorm]) -> Iterator[None]:
    """Let batch norms compute as in training, but keep their running statistics as they are.

    ``track_running_stats = False`` would do that as well, but they would then save fewer tensors
    for the backward pass than in the first run, which ``checkpoint`` refuses.
    """
    saved = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, momentum, batches in saved:
            norm.momentum = momentum
            norm.num_batches_tracked = batches


def register_compression(
    ctx: RunContext, config: Config, model: DistributedDataParallel, *, steps: int
) -> None:
    """Register the communication hook that ``distributed.compression`` names.

    The ranks then exchange gradients in fewer bytes: faster over slow links, not exact. ``fp16``
    and ``bf16`` halve them. ``powersgd`` sends an approximation of each matrix by two thin ones
    (Vogels et al. 2019, https://arxiv.org/abs/1905.13727), from a tenth of the run on, as torch
    advises, or from step 1000 on if that is sooner; a resumed run starts this again. See
    https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html.

    Args:
        ctx: the run's context.
        config: ``distributed.compression`` and ``powersgd_rank``.
        model: before its first backward pass.
        steps: optimizer steps of the whole run.

    Raises:
        FitError: bf16 over gloo, which cannot add such numbers.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    kind = config.distributed.compression
    if kind == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif kind == "bf16":
        if ctx.plan.backend == "gloo":
            raise FitError(
                "distributed.compression is bf16, but the ranks talk over gloo, which cannot add "
                "bf16",
                allowed="none, fp16 or powersgd; bf16 over nccl",
                do="set distributed.compression: fp16",
            )
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=config.distributed.powersgd_rank,
            start_powerSGD_iter=first_compressed(steps),
            orthogonalization_epsilon=1e-8,  # columns of zeros (dead units) would become NaN
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def first_compressed(steps: int) -> int:
    """Return the optimizer step (from 0) at which PowerSGD starts.

    DDP lays out buckets in the first 2.
    """
    return max(2, min(1000, steps // 10))


_STATISTICS = "takes its statistics from each rank's own part of a batch"
_RANDOM = "draws random numbers, different ones on every rank"
WHOLE_BATCHES = "of whole batches (train.loss_reduction: batch): depends on the number of ranks"


def inexact_layers(model: nn.Module) -> dict[str, str]:
    """Why one process and several differ by more than the order of sums; empty: they do not.

    Args:
        model: the model as it trains.

    Returns:
        Name and type of the layer -> the reason.
    """
    reasons = {
        f"{name} ({type(layer).__name__})": _why_inexact(layer)
        for name, layer in model.named_modules()
    }
    return {name: reason for name, reason in reasons.items() if reason}


def _why_inexact(layer: nn.Module) -> str:
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.dropout import _DropoutNd

    if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm):
        return _STATISTICS
    dropout = getattr(layer, "dropout", 0.0)  # of attention and recurrent layers
    if isinstance(layer, _DropoutNd):
        return _RANDOM if layer.p else ""
    if isinstance(layer, nn.RReLU) or (isinstance(dropout, float) and dropout > 0):
        return _RANDOM
    return ""
