"""Horovod's optimizer in an own loop, in scripts that ``horovodrun`` starts.

from nbtoolkit.integrations import horovod as nbh

model, optimizer = nbh.prepare(ctx, model, optimizer)
loss = nbh.metric_average(ctx, loss, "loss")

``horovodrun -np 2 python script.py`` starts the ranks, and ``nb.launch`` runs in place: it starts
no ranks of its own. Horovod's last release is 0.28.1 of June 2023; without Horovod's optimizer the
same script trains with DDP (``ctx.prepare`` or ``nb.fit``).
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch

from nbtoolkit.errors import LaunchError
from nbtoolkit.integrations.support import check_inside_train, check_strategy, requires
from nbtoolkit.worker.context import RunContext

with requires("horovod", "0.28"):
    import horovod.torch as hvd

M = TypeVar("M", bound=torch.nn.Module)


def prepare(
    ctx: RunContext, model: M, optimizer: torch.optim.Optimizer, **options: Any
) -> tuple[M, torch.optim.Optimizer]:
    """Give all ranks the weights of rank 0, and average gradients by Horovod.

    Args:
        ctx: the run's context.
        model: is moved to ``ctx.device``. It is not wrapped: do not pass it to ``ctx.prepare`` too.
        optimizer: of the model's parameters; its state is taken from rank 0.
        options: for ``hvd.DistributedOptimizer``, as ``compression`` or
            ``backward_passes_per_step``.

    Returns:
        The same model, and the optimizer that averages gradients before each step.

    Raises:
        LaunchError: called outside of ``train``, or ``horovodrun`` did not start this process.
        PlanError: the plan has a strategy of ``nb.fit`` alone.
    """
    _join(ctx, "prepare")
    check_strategy(ctx, "Horovod")
    # In place, so that the optimizer's parameters are still the model's.
    model = model.to(ctx.device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), **options
    )
    return model, wrapped


def metric_average(ctx: RunContext, value: float | torch.Tensor, name: str) -> float:
    """Return a metric's mean over all ranks, the same on each.

    Args:
        ctx: the run's context.
        value: this rank's value, a number or a tensor of one element.
        name: by which Horovod finds the value of the other ranks: equal on all ranks.

    Raises:
        LaunchError: called outside of ``train``, or ``horovodrun`` did not start this process.
    """
    _join(ctx, "metric_average")
    mine = torch.as_tensor(value, dtype=torch.float64).detach().cpu().reshape(())
    return float(hvd.allreduce(mine, name=f"nbtoolkit.{name}", op=hvd.Average))


def _join(ctx: RunContext, call: str) -> None:
    """Start Horovod in this rank, once."""
    check_inside_train(ctx, call)
    if "HOROVOD_RANK" not in os.environ:
        raise LaunchError(
            f"{call}(ctx) needs ranks of horovodrun, and this rank ({ctx.rank} of "
            f"{ctx.world_size}) was not started by it",
            allowed="a script under horovodrun",
            do="horovodrun -np 2 python script.py, or use ctx.prepare or nb.fit, which need no "
            "Horovod",
        )
    if not hvd.is_initialized():
        hvd.init()
