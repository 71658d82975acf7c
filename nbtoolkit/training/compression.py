"""Compression: gradients travel between the ranks in fewer bytes: faster on slow links, inexact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import FitError

if TYPE_CHECKING:
    from nbtoolkit.config import Config
    from nbtoolkit.runtime.context import RunContext


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
