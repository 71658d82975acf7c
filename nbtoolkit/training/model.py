"""Place the user's model on this rank, with its device, wrappers and compressed gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import FitError
from nbtoolkit.worker.prepare import with_sync_batchnorm

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nbtoolkit.config.schema import Config
    from nbtoolkit.worker.context import RunContext


# --- activations ---
# Computed anew in the backward pass, block by block, instead of being kept.


def recompute_activations(model: nn.Module) -> int:
    """Let each block of ``model`` keep its inputs only, and run again in the backward pass.

    The gradients are those of the plain model: dropout draws the same numbers again, and batch
    norms count a batch once. A model with a ``gradient_checkpointing_enable`` of its own (Hugging
    Face's) does it itself. No name in the ``state_dict`` changes. See
    https://docs.pytorch.org/docs/stable/checkpoint.html.

    Args:
        model: changed in place.

    Returns:
        How many blocks there are (1 for a model that does it itself); 0: nothing was changed.
    """
    own = getattr(model, "gradient_checkpointing_enable", None)
    if own is not None:
        own(gradient_checkpointing_kwargs={"use_reentrant": False})
        return 1
    blocks = find_blocks(model)
    for block in blocks:
        # in the instance: a module around the block would put its name into the state_dict's
        block.__dict__["forward"] = partial(_recomputed, block, _batch_norms(block))
    return len(blocks)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost layers of ``model`` of which there are two or more of one class.

    A layer has parameters, and modules inside. The model itself is none: it would be computed anew
    as a whole, in as much memory. An ``nn.Sequential`` is one if it lies in a list of modules and
    holds no layers.
    """
    pairs = [(parent, child) for parent in model.modules() for child in parent.children()]
    layers = [child for parent, child in pairs if _is_layer(parent, child)]
    count = Counter(type(layer) for layer in layers)
    return list(_outermost(model, {layer for layer in layers if count[type(layer)] > 1}))


def _is_layer(parent: nn.Module, child: nn.Module) -> bool:
    import torch

    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    inside, weights = list(child.children()), list(child.parameters())
    if not inside or not weights or isinstance(child, lists):
        return False
    if type(child) is not torch.nn.Sequential:
        return True
    listed = isinstance(parent, (torch.nn.Sequential, *lists))
    return listed and not any(list(one.children()) for one in inside)


def _outermost(module: nn.Module, wanted: set[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if child in wanted:
            yield child
        else:
            yield from _outermost(child, wanted)


def _batch_norms(block: nn.Module) -> list[Any]:
    """The layers of ``block`` that count batches: when they see one again, they must not."""
    import torch

    kinds = torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm
    return [one for one in block.modules() if isinstance(one, kinds) and one.track_running_stats]


def _recomputed(block: nn.Module, norms: list[Any], *args: Any, **kwargs: Any) -> Any:
    """The ``forward`` of a block: keeps nothing but its inputs where there are gradients."""
    import torch
    from torch.utils.checkpoint import checkpoint

    forward = partial(type(block).forward, block)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # A context of one's own cannot be compiled. Compiled, the statistics are written once anyway,
    # unless a side effect in the user's forward (a counter) keeps this call out of the graph.
    if norms and not torch.compiler.is_compiling():
        kwargs["context_fn"] = partial(_contexts, norms)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _contexts(
    norms: list[Any],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What surrounds the first run and the second one."""
    return nullcontext(), _still(norms)


@contextmanager
def _still(norms: list[Any]) -> Iterator[None]:
    """Batch norms compute as in training, but their statistics stay what they are.

    ``track_running_stats = False`` would do that as well, but they would then save fewer tensors
    for the backward pass than in the first run, which ``checkpoint`` refuses.
    """
    kept = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, batches in kept:
            norm.momentum, norm.num_batches_tracked = momentum, batches


# --- compression ---
# Gradients travel between the ranks in fewer bytes: faster on slow links, inexact.


def compress(ctx: RunContext, config: Config, model: Any, *, steps: int) -> None:
    """Register the hook that ``distributed.compression`` names with ``model``.

    ``fp16`` and ``bf16`` halve what travels. ``powersgd`` sends an approximation of each matrix by
    two thin ones (Vogels et al. 2019, https://arxiv.org/abs/1905.13727), after a tenth of the run,
    as torch advises, or 1000 steps if that is sooner; after a resume this begins anew. See
    https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html.

    Args:
        ctx: the run's context; one rank has nobody to send to, and says so.
        config: ``distributed.compression`` and ``powersgd_rank``.
        model: as DDP wrapped it; before its first backward pass.
        steps: optimizer steps of the whole run.

    Raises:
        FitError: bf16 over gloo, which cannot add such numbers.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    kind = config.distributed.compression
    if kind == "none":
        return
    if ctx.world_size == 1:
        ctx.print(f"fit: distributed.compression: {kind} has nothing to do: there is one rank")
    elif kind == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif kind == "bf16":
        _refuse_gloo(ctx)
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=config.distributed.powersgd_rank,
            start_powerSGD_iter=first_compressed(steps),
            orthogonalization_epsilon=1e-8,  # columns of zeros (dead units) would become NaN
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def first_compressed(steps: int) -> int:
    """The optimizer step (from 0) at which PowerSGD begins; DDP lays its buckets in the first 2."""
    return max(2, min(1000, steps // 10))


def _refuse_gloo(ctx: RunContext) -> None:
    if ctx.plan.backend == "gloo":
        raise FitError(
            "distributed.compression is bf16, but the ranks talk over gloo, which cannot add bf16",
            allowed="none, fp16 or powersgd; bf16 over nccl",
            do="set distributed.compression: fp16",
        )


# --- placement ---


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
