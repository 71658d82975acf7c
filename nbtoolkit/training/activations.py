"""Activations: computed anew in the backward pass, block by block, instead of being kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


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
