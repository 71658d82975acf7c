"""Train the parameters of a loss (class centres, learned weights) together with the model's."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nbtoolkit.errors import FitError, some_names

if TYPE_CHECKING:
    import torch
    from torch import nn

    from nbtoolkit.worker.context import RunContext


def trained_loss(ctx: RunContext, model: nn.Module, loss: object) -> nn.Module | None:
    """The module in ``loss`` whose parameters are to be trained, on the rank's device.

    Args:
        ctx: the run's context.
        model: as it is trained. The loss may hold it, or a part of it.
        loss: a module, a ``partial`` with modules in its arguments, or a function.

    Returns:
        None: the loss has no such parameters.

    Raises:
        FitError: the plan's strategy cannot train them.
    """
    from torch import nn

    modules = [one for one in _modules(loss) if loss_parameters(model, one)]
    if not modules:
        return None
    module = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    named = loss_parameters(model, module)
    shown = some_names([f"{name} {tuple(one.shape)}" for name, one in named.items()])
    if ctx.plan.strategy == "fsdp":
        raise FitError(
            f"the loss has parameters of its own, {shown}, which distributed.strategy: fsdp cannot "
            "train",
            allowed="single, ddp or dp; with fsdp a loss without parameters",
            do="set distributed.strategy: ddp, or make the loss a layer of the model",
        )
    ctx.print(f"fit: the parameters of the loss are trained, too: {shown}")
    return module.to(ctx.device)


def _modules(loss: object) -> Iterator[nn.Module]:
    from torch import nn

    if isinstance(loss, nn.Module):
        yield loss
    elif isinstance(loss, functools.partial):
        for part in (loss.func, *loss.args, *loss.keywords.values()):
            yield from _modules(part)


def loss_parameters(model: nn.Module, loss: nn.Module | None) -> dict[str, nn.Parameter]:
    """The trainable parameters of a loss that the model does not have, as ``loss.<name>``."""
    of_model = set(model.parameters())
    return {
        f"loss.{name}": one
        for name, one in ([] if loss is None else loss.named_parameters())
        if one.requires_grad and one not in of_model
    }


def add_parameters(
    optimizer: torch.optim.Optimizer, model: nn.Module, loss: nn.Module | None
) -> None:
    """Give the user's optimizer the loss's parameters that it lacks, in a group of its defaults."""
    held = {one for group in optimizer.param_groups for one in group["params"]}
    missing = [one for one in loss_parameters(model, loss).values() if one not in held]
    if missing:
        optimizer.add_param_group({"params": missing})
