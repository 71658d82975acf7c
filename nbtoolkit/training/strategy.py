"""How the ranks of a fit share the training of one model; the base class is DDP, or one process."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, cast

from nbtoolkit.errors import FitError
from nbtoolkit.training.model import wrap_model
from nbtoolkit.worker.collectives import broadcast

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel

    from nbtoolkit.config.schema import Config
    from nbtoolkit.training.train_state import State
    from nbtoolkit.worker.context import RunContext

# Strategies of a plan that a module of this name in training/strategies/ implements.
_OWN_MODULE = ("fsdp", "local_sgd")


class Strategy:
    """One process, DDP, or DataParallel; subclasses replace what differs in them.

    Every rank has all weights here, so rank 0 alone can validate, save and load.

    Args:
        ctx: the run's context.
        config: ``train`` and ``distributed``.

    Attributes:
        gathers: whether a checkpoint's state comes from all ranks; :meth:`gathered` is then called
            by all of them, at the same steps.
        state_copies: how many times a checkpoint has weights and optimizer.
        after_step: called with the number of optimizer steps done; None: nothing has to be done.
    """

    gathers = False
    state_copies = 1
    after_step: Callable[[int], None] | None = None

    def __init__(self, ctx: RunContext, config: Config) -> None:
        self._ctx, self._config, self._ranks = ctx, config, ctx.world_size

    def wrap(self, module: nn.Module, *, steps: int) -> nn.Module:
        """The model as a training step calls it; called once, before the optimizer is made.

        Args:
            module: what ``prepare_model`` returned; may be changed in place.
            steps: optimizer steps of the whole run.
        """
        return wrap_model(self._ctx, self._config, module, steps=steps)

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer of the wrapped model, before its first step."""

    def no_sync(self, model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Makes the contexts of passes whose gradients stay on this rank: all but a step's last.

        Args:
            model: what :meth:`wrap` returned.
        """
        return nullcontext if self._ranks == 1 else cast("DistributedDataParallel", model).no_sync

    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> Tensor:
        """Scale the gradients down to ``max_norm``; returns their norm before."""
        return clip(parameters, max_norm)

    def grad_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """The norm of the gradients."""
        return grad_norm(parameters)

    def translated(self, error: Exception) -> FitError | None:
        """The error to raise for one of this strategy's in a step; None: it is not."""
        return None

    def end_epoch(self) -> None:
        """Called by all ranks at the end of each epoch, before validation."""

    def evaluating(self) -> AbstractContextManager[None]:
        """A context in which a rank can call the module without the others."""
        return nullcontext()

    def gathered(self, state: State) -> State:
        """A training state as one process would have it; empty on other ranks than 0."""
        return state

    def restore(self, state: State) -> None:
        """Take this rank's own part of a checkpoint, after weights and optimizer were restored."""

    def agreed(self, value: bool) -> bool:
        """Rank 0's ``value`` if :attr:`gathers`, else this rank's."""
        return broadcast(value, self._ranks) if self.gathers else value

    def load_on_all_ranks(self, module: nn.Module, weights: Mapping[str, Tensor] | None) -> None:
        """Load rank 0's ``weights`` into the model on every rank; None there: its present ones."""
        import torch
        import torch.distributed as dist

        if weights is not None:
            module.load_state_dict(weights)
        if self._ranks > 1:
            for value in module.state_dict().values():
                if isinstance(value, torch.Tensor):
                    dist.broadcast(value, src=0)

    def close(self) -> None:
        """Called by all ranks at the end: leave the whole, plain model on each of them."""


def make_strategy(ctx: RunContext, config: Config) -> Strategy:
    """The strategy of the run's plan.

    Raises:
        FitError: this installation does not have it.
    """
    name = ctx.plan.strategy
    if name not in _OWN_MODULE:
        return Strategy(ctx, config)
    try:
        module = importlib.import_module(f"nbtoolkit.training.strategies.{name}")
    except ModuleNotFoundError as error:
        raise FitError(
            f"the plan's strategy is {name}, and this installation is without {error.name}",
            allowed="distributed.strategy: auto, single or ddp",
            do="install nbtoolkit again (pip install --force-reinstall nbtoolkit)",
        ) from error
    strategy: Strategy = module.make(ctx, config)
    return strategy


def clip(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients down to ``max_norm``; returns their norm before."""
    import torch

    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def grad_norm(parameters: list[nn.Parameter]) -> Tensor:
    """The norm of the gradients."""
    import torch  # torch.nn.utils.get_total_norm is public from torch 2.7 on only

    norm = torch.linalg.vector_norm
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total: Tensor = norm(torch.stack([norm(grad, dtype=torch.float32) for grad in gradients]))
    return total
