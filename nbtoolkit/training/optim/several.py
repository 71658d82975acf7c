"""Perform the steps of several optimizers, in a step of the user's own.

There is no DistributedDataParallel: it allows one forward pass per backward pass, over all its
parameters. Instead :meth:`OptimizerHandle.step` averages the gradients of its own parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from nbtoolkit.errors import CheckpointError, FitError
from nbtoolkit.training.loading.sampler import MicroBatch
from nbtoolkit.training.losses import BatchLoss
from nbtoolkit.training.model import broadcast_buffers
from nbtoolkit.training.optim.optimizer import check_all_held, resolve_optimizer
from nbtoolkit.training.optim.schedule import UserSchedule, required_arguments
from nbtoolkit.training.optim.scheduled import ScheduledOptimizer
from nbtoolkit.training.step import Recipe, TrainStep
from nbtoolkit.training.strategy import average_gradients

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nbtoolkit.config.schema import Config
    from nbtoolkit.training.loading.data import Batch
    from nbtoolkit.training.step import StepOfSeveral
    from nbtoolkit.training.train_state import State
    from nbtoolkit.worker.context import RunContext


class OptimizerHandle(ScheduledOptimizer):
    """One of several optimizers, as the user's step gets it.

    Attributes:
        steps: its steps so far, by which its schedule counts.
        weight: of this rank's part of the batch, among the ranks.
        measures: whether a step sets :attr:`norm`.
    """

    steps = 0
    weight = 1.0
    measures = False

    def zero_grad(self) -> None:
        """Clear the gradients of this optimizer's parameters."""
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Add the gradients of ``loss``, the mean over the samples of the batch.

        Args:
            loss: a scalar.
            options: of ``torch.Tensor.backward`` (``retain_graph``, ``create_graph``).
        """
        import torch

        with torch.autocast(self.parameters[0].device.type, enabled=False):
            self.scaler.scale(loss * self.weight).backward(**options)

    def step(self) -> None:
        """Average the gradients over the ranks, clip them, and step; called on all ranks.

        Raises:
            FitError: no parameter has a gradient.
        """
        if self._ranks == 1 and all(one.grad is None for one in self.parameters):
            raise FitError(
                f"the optimizer {self.name!r} makes a step, and none of its parameters has a "
                "gradient",
                allowed="backward(loss) before each step()",
                do=f"call optimizers[{self.name!r}].backward(loss) first",
            )
        average_gradients(self.parameters, self._ranks)
        self.apply(self.steps, measure_norm=self.measures)
        self.steps += 1

    def state(self) -> State:
        """See :meth:`ScheduledOptimizer.state`."""
        return {**super().state(), "steps": self.steps}

    def restore(self, state: State) -> None:
        """See :meth:`ScheduledOptimizer.restore`."""
        super().restore(state)
        self.steps = state["steps"]


class SeveralTrainStep(TrainStep):
    """The steps of a model with several optimizers; see :class:`TrainStep`.

    Raises:
        FitError: the arguments do not fit each other or the model.
    """

    scheduled: Mapping[str, OptimizerHandle]

    def __init__(
        self, ctx: RunContext, config: Config, model: nn.Module, recipe: Recipe, *, steps: int
    ) -> None:
        _check(ctx, config, recipe)
        self._user_step = cast("StepOfSeveral", recipe.step_of_several)
        self._parts: dict[str, Tensor] = {}
        super().__init__(ctx, config, model, recipe, steps=steps)
        self._shares_buffers = ctx.world_size > 1 and config.distributed.broadcast_buffers
        self.load_on_all_ranks(None)  # as DDP does: all start with rank 0's weights

    def _wrap(self) -> nn.Module:
        return self.module

    def _make_optimizers(self, ctx: RunContext, config: Config, recipe: Recipe) -> None:
        scheduled: dict[str, OptimizerHandle] = {}
        schedules = recipe.schedule
        for name, given in cast("Mapping[str, object]", recipe.optimizer).items():
            place = f"optimizer[{name!r}]"
            optimizer = resolve_optimizer(self.module, given, place, self.loss_module)
            own = schedules.get(name) if isinstance(schedules, Mapping) else schedules
            schedule = UserSchedule(own, total=self.steps, place=f"schedule[{name!r}]")
            scheduled[name] = OptimizerHandle(
                name, optimizer, schedule, ctx, config, self.strategy, self._names()
            )
        made = [one.optimizer for one in scheduled.values()]
        check_all_held(self.module, made, self.loss_module)
        self.scheduled = scheduled

    def _pass(self, batch: Batch, micro_batch: MicroBatch) -> BatchLoss:
        """Call the user's step; there is one micro-batch per step."""
        import torch

        if self._shares_buffers:
            broadcast_buffers(self.module, self._ranks)
        for handle in self.scheduled.values():
            handle.weight = micro_batch.weight
        with self._autocast:
            returned = self._user_step(self.module, batch, self.scheduled)
        parts = returned if isinstance(returned, Mapping) else {"": returned}
        for name, loss in parts.items():
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise FitError(
                    f"the step returned {f'{name}: ' if name else ''}a {type(loss).__name__}",
                    allowed="a loss, or a dict of losses by name: scalar tensors, means over the "
                    "batch; they are reported as train_loss (their sum) and train_<name>",
                    do="return {'generator': loss_g, 'discriminator': loss_d}",
                )
            if name:
                total = loss.detach().double() * micro_batch.samples
                self._parts[name] = self._parts[name] + total if name in self._parts else total
        mean = torch.stack([loss.detach().float().reshape(()) for loss in parts.values()]).sum()
        return BatchLoss(mean, float(micro_batch.samples))

    def _optimize(self, measure_norm: bool) -> None:
        """Count the step. A batch's gradients do not reach the next one, so a resume is exact."""
        for handle in self.scheduled.values():
            handle.zero_grad()
            handle.measures = measure_norm
        self.steps_done += 1
        if self.averages is not None:
            self.averages.update()

    def take_parts(self) -> dict[str, float]:
        """See :meth:`TrainStep.take_parts`."""
        import torch

        names, sums = [*self._parts], [*self._parts.values()]
        self._parts = {}
        return dict(zip(names, torch.stack(sums).tolist(), strict=True)) if sums else {}

    def _optimizer_state(self) -> State:
        return {"optimizers": {name: handle.state() for name, handle in self.scheduled.items()}}

    def _restore_optimizers(self, state: State, source: str) -> None:
        saved = state["optimizers"]
        if [*saved] != [*self.scheduled]:
            raise CheckpointError(
                f"the checkpoint {source} has the optimizers {', '.join(saved)}, and fit was given "
                f"{', '.join(self.scheduled)}",
                allowed="the optimizers of the run, by their names and in their order",
                do="launch as before, or with resume='never'",
            )
        for name, handle in self.scheduled.items():
            handle.restore(saved[name])


def _check(ctx: RunContext, config: Config, recipe: Recipe) -> None:
    optimizers = cast("Mapping[str, object]", recipe.optimizer)
    step = recipe.step_of_several
    own = required_arguments(step) if callable(step) else 0
    named = recipe.schedule if isinstance(recipe.schedule, Mapping) else {}
    unknown = [one for one in named if one not in optimizers]
    plan = ctx.plan
    passes = plan.global_batch_size // (plan.batch_size_per_device * ctx.world_size)
    if not optimizers:
        fault, do = "optimizer= is an empty dict", "name one optimizer or more"
    elif own != 3:
        fault = f"several optimizers need a step of your own, and step= takes {own} arguments"
        do = "pass step=f with f(model, batch, optimizers): it calls zero_grad, backward and step"
    elif unknown:
        fault = f"schedule= names {unknown[0]!r}, and there is no optimizer of this name"
        do = f"use the names {', '.join(optimizers)}"
    elif passes > 1:
        fault = f"several optimizers cannot accumulate gradients, and a step takes {passes} passes"
        do = "set train.gradient_accumulation_steps: 1, or a smaller train.batch_size"
    elif plan.strategy not in ("single", "ddp", "tensorflow"):
        fault = f"several optimizers do not go with distributed.strategy: {plan.strategy}"
        do = "set distributed.strategy: ddp or single"
    elif config.train.compile:
        fault = "several optimizers do not go with train.compile"
        do = "set train.compile: false, and compile the parts in your step"
    else:
        return
    raise FitError(
        fault,
        allowed="optimizer={'name': optimizer, ...} with step(model, batch, optimizers), one pass "
        "per step, and schedule={'name': ...}",
        do=do,
    )
