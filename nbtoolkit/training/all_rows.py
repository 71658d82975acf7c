"""Compute a loss over the rows of all ranks, as on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from nbtoolkit.errors import FitError
from nbtoolkit.training.losses import training_pass

if TYPE_CHECKING:
    from torch import Tensor

RowsLoss: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
"""``loss(outputs, targets)`` -> a scalar, of tensors with one row for each sample."""


def all_rows(loss: RowsLoss) -> RowsLoss:
    """Return a loss that is computed over the rows of all ranks.

    For a loss that compares the samples of a batch, such as a contrastive loss. Its value and its
    gradients are then those of the whole batch on one device, in :func:`nbtoolkit.fit` and in an
    own loop under ``DistributedDataParallel``::

        loss = nb.all_rows(pytorch_metric_learning.losses.SupConLoss())
        nb.fit(ctx, config, encoder, train_data, None, loss=loss)

    With gradient accumulation, these are the rows of one pass of all ranks. Under
    ``torch.no_grad``, as in the validation, they are the rows of this rank only: there, the ranks
    may have different numbers of batches.

    Args:
        loss: ``loss(outputs, targets)`` -> a scalar tensor. It gets the outputs in float32, also
            under autocast, and draws no random numbers. ``fit`` trains its parameters (the class
            centres of ``ArcFaceLoss``), if it is a module.

    Returns:
        ``loss(outputs, targets)`` of this rank's tensors, both of shape (n, ...). Ranks may have
        different n. Each call during training is a collective of all ranks. It waits for the
        device. It raises a FitError for other shapes, and for outputs that are not finite: all
        ranks name the ranks that have them.
    """
    return functools.partial(_of_all_ranks, loss)


def _of_all_ranks(loss: RowsLoss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of the rows of all ranks, which each rank computes as a whole.

    The backward pass has no collective. A rank gets the gradient of its own rows only, times the
    factor that makes the mean over the ranks, which DDP takes, that of the whole batch.
    """
    import torch
    import torch.distributed as dist

    _check_rows(outputs, targets)
    gathers = torch.is_grad_enabled()
    training_pass.whole_batch = gathers
    samples = training_pass.samples
    # The row of a stand-in, which a rank without samples passes, must not count.
    counted = 0 if gathers and samples == 0 else len(outputs)
    ranks = dist.get_world_size() if gathers and dist.is_initialized() else 1
    with torch.autocast(outputs.device.type, enabled=False):
        # A slice is a tensor of its own: the hook below scales no other use of the outputs.
        rows = outputs[:counted].float()
        labels = targets[:counted].to(rows.device)
        sizes = _sizes(rows, ranks)
        if ranks == 1:
            return loss(rows, labels)
        parts = _gather(rows.detach(), sizes)
        parts[dist.get_rank()] = rows
        value = loss(torch.cat(parts), torch.cat(_gather(labels, sizes)))
        # fit weights a pass by its share of the samples; DDP alone takes the mean over the ranks.
        # The parameters of the loss have their whole gradient on each rank.
        factor = ranks if samples is None else sum(sizes) / max(counted, 1)
        if rows.requires_grad:
            rows.register_hook(lambda gradient: gradient * factor)
        if counted == 0:
            # The other ranks wait for the gradients of this rank's model.
            value = value + outputs.float().sum() * 0
        return value


def _check_rows(outputs: Tensor, targets: Tensor) -> None:
    shapes = [tuple(getattr(part, "shape", ())) for part in (outputs, targets)]
    if shapes[0] and shapes[1] and shapes[0][0] == shapes[1][0]:
        return
    raise FitError(
        f"a loss of nb.all_rows got outputs of shape {shapes[0]} and targets of shape {shapes[1]}",
        allowed="two tensors with one row for each sample, of shape (n, ...)",
        do="return both from the step: step=lambda model, batch: (model(batch[0]), batch[1])",
    )


def _sizes(rows: Tensor, ranks: int) -> list[int]:
    """Return the number of rows of each rank.

    Raises:
        FitError: some are not finite; the same on all ranks.
    """
    import torch
    import torch.distributed as dist

    bad = (~rows.detach()[:, None].flatten(1).isfinite().all(1)).sum()
    counts = torch.stack([torch.full_like(bad, len(rows)), bad])
    received = [counts]
    if ranks > 1:
        received = [torch.empty_like(counts) for _ in range(ranks)]
        dist.all_gather(received, counts)
    sizes, faults = torch.stack(received, dim=1).tolist()
    if any(faults):
        named = [f"{faults[n]} of {sizes[n]} rows on rank {n}" for n in range(ranks) if faults[n]]
        raise FitError(
            f"the outputs for a loss of nb.all_rows are NaN or infinite: {', '.join(named)}",
            allowed="outputs that are finite numbers",
            do="look for NaN in the inputs; lower optim.lr; set train.max_grad_norm: 1.0; under "
            "fp16 let the last layer compute in float32",
        )
    return list(sizes)


def _gather(part: Tensor, sizes: list[int]) -> list[Tensor]:
    """Return the parts of all ranks, which have ``sizes`` rows."""
    import torch
    import torch.distributed as dist

    padded = part.new_zeros(max(sizes), *part.shape[1:])
    padded[: len(part)] = part
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded)
    return [rows[:size] for rows, size in zip(received, sizes, strict=True)]
