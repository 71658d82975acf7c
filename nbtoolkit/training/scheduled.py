"""Step an optimizer with its learning-rate schedule and its loss scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nbtoolkit.errors import CheckpointError, some_names
from nbtoolkit.training.model import grad_scaler
from nbtoolkit.training.schedule import Schedule, set_rate

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nbtoolkit.config.schema import Config
    from nbtoolkit.run.checkpoints.checkpoint_store import State
    from nbtoolkit.training.strategy import Strategy
    from nbtoolkit.worker.context import RunContext


def by_name(state: State, names: Sequence[str]) -> State:
    """Return an optimizer's ``state_dict`` with parameters by name in place of their numbers.

    Args:
        state: as the optimizer returns it.
        names: of the parameters, in the order of their numbers.
    """
    named = [
        {**group, "params": [names[n] for n in group["params"]]} for group in state["param_groups"]
    ]
    # An optimizer of the user's may keep more under names of its own.
    values = {
        names[key] if isinstance(key, int) else key: value for key, value in state["state"].items()
    }
    return {**state, "state": values, "param_groups": named}


def by_number(state: State, names: Sequence[str]) -> State:
    """Undo :func:`by_name`, for an optimizer whose parameters have these names.

    Raises:
        CheckpointError: the state is of other parameters.
    """
    numbers = {name: number for number, name in enumerate(names)}
    saved = {name for group in state["param_groups"] for name in group["params"]}
    if different := sorted(saved ^ numbers.keys()):
        raise CheckpointError(
            f"the checkpoint's optimizer trained other parameters: {some_names(different)}",
            allowed="an optimizer over the same parameters, by name",
            do="freeze the same parameters as before, or launch with resume='never'",
        )
    groups = [
        {**group, "params": sorted(numbers[name] for name in group["params"])}
        for group in state["param_groups"]
    ]
    values = {numbers.get(name, name): value for name, value in state["state"].items()}
    return {**state, "state": values, "param_groups": groups}


class ScheduledOptimizer:
    """An optimizer with its learning-rate schedule and its loss scale.

    Attributes:
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
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        ctx: RunContext,
        config: Config,
        strategy: Strategy,
        named: Mapping[nn.Parameter, str],
    ) -> None:
        self.optimizer, self.schedule = optimizer, schedule
        self.parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self._names = [named[parameter] for parameter in self.parameters]
        self.scaler = grad_scaler(ctx, config)
        self.rate = schedule.rate
        self.norm: Tensor | None = None
        self._max_norm: float | None = config.train.max_grad_norm
        self._strategy, self._ranks = strategy, ctx.world_size

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
        self.schedule.begin_step(step)
        if rate is not None:
            set_rate(self.optimizer, rate)
        self.rate = self.schedule.rate
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.end_step()

    def state(self) -> State:
        """What a resumed run needs besides the number of steps."""
        return {
            "optimizer": by_name(self.optimizer.state_dict(), self._names),
            "scaler": self.scaler.state_dict(),
            "schedule": self.schedule.state(),
        }

    def restore(self, state: State) -> None:
        """Continue from a :meth:`state`."""
        self.optimizer.load_state_dict(by_number(state["optimizer"], self._names))
        self.scaler.load_state_dict(state["scaler"])
        self.schedule.restore(state["schedule"])
