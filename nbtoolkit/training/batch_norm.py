"""Batch norm: statistics for weights that no training step has had, averaged ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def batch_norms(module: nn.Module) -> list[Any]:
    """The batch norms of a module that keep running statistics."""
    from torch import nn

    kind = nn.modules.batchnorm._BatchNorm
    layers = [layer for layer in module.modules() if isinstance(layer, kind)]
    return [layer for layer in layers if layer.running_mean is not None]


def keep_to_itself(module: nn.Module) -> None:
    """Let the ``SyncBatchNorm`` of a copied module meet no other rank; called by all ranks."""
    import torch.distributed as dist
    from torch import nn

    synced = [layer for layer in module.modules() if isinstance(layer, nn.SyncBatchNorm)]
    if synced and dist.is_initialized():
        alone, _ = dist.new_subgroups(group_size=1)
        for layer in synced:
            layer.process_group = alone


def update_norms(
    module: nn.Module,
    batches: Iterable[Any],
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> None:
    """Compute a module's batch-norm statistics anew; called by all ranks.

    By ``torch.optim.swa_utils.update_bn``: the plain mean of the statistics of every batch. Each
    rank walks through batches of its own, as many as it has, and ends with what one rank would
    have of all of them.

    Not exact: the statistics of a batch depend on what is in it. One rank and several agree (up to
    summation order) where they see the same batches; where a batch is cut in parts, one for each
    rank, the means of the first norm still do if the parts are equal, its variances and the norms
    behind it only about.

    Args:
        module: changed in place; left in evaluation mode.
        batches: inputs, or lists or tuples whose first item is the inputs; on the device.
        forward: ``forward(module, batch)`` passes a batch of any form through the module.
    """
    from torch.optim.swa_utils import update_bn

    if forward is None:
        update_bn(batches, module)
    else:
        update_bn(((batch,) for batch in batches), _through(module, forward))
    module.eval()
    _mean_over_ranks(batch_norms(module))


def _through(module: nn.Module, forward: Callable[[nn.Module, Any], Any]) -> nn.Module:
    """A module that passes a batch through ``module`` as ``forward`` does."""
    from torch import nn

    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, batch: Any) -> Any:
            return forward(self.inner, batch)

    return Through()


def _mean_over_ranks(norms: list[Any]) -> None:
    """Average the statistics over the ranks; each counts by the batches that it has seen."""
    import torch
    import torch.distributed as dist

    if not norms or not dist.is_initialized():
        return
    parts = [_weighted(layer) for layer in norms]
    sums = torch.cat(parts)
    dist.all_reduce(sums)
    for layer, part in zip(norms, sums.split([len(one) for one in parts]), strict=True):
        batches = part[-1]
        if batches:  # else it has seen none on any rank, and is as a new layer is
            mean, variance = (part[:-1] / batches).chunk(2)
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(variance)


def _weighted(layer: Any) -> Tensor:
    """A layer's means, variances and the number of its batches, the former times the latter."""
    import torch

    one = torch.ones_like(layer.running_mean[:1])
    row = torch.cat([layer.running_mean, layer.running_var, one]).double()
    counted: Tensor = row * layer.num_batches_tracked
    return counted
