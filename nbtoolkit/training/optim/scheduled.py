"""Step an optimizer with its learning-rate schedule and its loss scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbtoolkit.training.model import grad_scaler
from nbtoolkit.training.optim.schedule import Schedule, set_rate

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nbtoolkit.config.schema import Config
    from nbtoolkit.training.strategy import Strategy
    from nbtoolkit.training.train_state import State
    from nbtoolkit.worker.context import RunContext


class ScheduledOptimizer:
    """An optimizer with its learning-rate schedule and its loss scale.

    Attributes:
        name: by which ``fit`` was given it, or ``optimizer``.
        optimizer: over :attr:`parameters`.
        schedule: the learning rate of every step.
        parameters: those that it trains.
        scaler: keeps the gradients of fp16 from underflow; does nothing in other precisions.
        rate: the learning rate of the last step.
        norm: the gradient's norm before clipping when it was last measured, a scalar; None: it was
            not.
    """

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        ctx: RunContext,
        config: Config,
        strategy: Strategy,
    ) -> None:
        self.name, self.optimizer, self.schedule = name, optimizer, schedule
        self.parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self.scaler = grad_scaler(ctx, config)
        self.rate = float(optimizer.param_groups[0].get("lr", 0.0))
        self.norm: Tensor | None = None
        self._max_norm: float | None = config.train.max_grad_norm
        self._strategy, self._ranks = strategy, ctx.world_size
        schedule.bind(optimizer)

    def apply(self, step: int, *, measure_norm: bool, rate: float | None = None) -> None:
        """Make optimizer step ``step`` (from 0) with the present gradients, clipped.

        Args:
            step: the number of the step in the schedule.
            measure_norm: set :attr:`norm`, also without clipping.
            rate: the learning rate, in place of the schedule's.
        """
        self.scaler.unscale_(self.optimizer)
        if self._max_norm is not None:
            self.norm = self._strategy.clip(self.parameters, self._max_norm)
        elif measure_norm:
            self.norm = self._strategy.grad_norm(self.parameters)
        if rate is None:
            self.rate = self.schedule.apply(self.optimizer, step)
        else:
            self.rate = rate
            set_rate(self.optimizer, rate, self.schedule.momentum(step))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.advance()

    def state(self) -> State:
        """What a resumed run needs besides the number of steps."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "schedule": self.schedule.state(),
        }

    def restore(self, state: State) -> None:
        """Continue from a :meth:`state`."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.schedule.restore(state["schedule"])
