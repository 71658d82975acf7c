"""Perform the steps of several optimizers, in a step of the user's own.

There is no DistributedDataParallel: it allows one forward pass per backward pass, over all its
parameters. Instead :meth:`OptimizerHandle.step` averages the gradients of its own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from nbtoolkit.errors import CheckpointError, FitError
from nbtoolkit.training.loading.sampler import MicroBatch
from nbtoolkit.training.losses import BatchLoss
from nbtoolkit.training.model import broadcast_buffers
from nbtoolkit.training.optim.user_optimizer import (
    GivenSchedule,
    UserSchedule,
    check_all_held,
    required_arguments,
    resolve_optimizer,
)
from nbtoolkit.training.step import Forward, TrainStep, grad_scaler
from nbtoolkit.training.strategy import clip, grad_norm

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nbtoolkit.config.schema import Config
    from nbtoolkit.training.loading.data import Batch
    from nbtoolkit.training.losses import Loss
    from nbtoolkit.training.optim.optimizer import Schedule
    from nbtoolkit.training.train_state import State
    from nbtoolkit.worker.context import RunContext

StepOfSeveral: TypeAlias = "Callable[[nn.Module, Any, Mapping[str, OptimizerHandle]], Any]"
"""``step(model, batch, optimizers)`` of the user -> a loss, or losses by name, to report."""


class OptimizerHandle:
    """One of several optimizers, as the user's step gets it.

    Attributes:
        optimizer: the user's.
        schedule: its learning rates, by its own steps.
        steps: its steps so far.
        rate: the learning rate of the last one.
        norm: the gradient's norm in it, before clipping; None: it was not measured.
    """

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        ctx: RunContext,
        config: Config,
    ) -> None:
        self.optimizer, self.schedule, self._name = optimizer, schedule, name
        self.steps, self.rate = 0, float(optimizer.param_groups[0].get("lr", 0.0))
        self.norm: Tensor | None = None
        self.scaler = grad_scaler(ctx, config)
        self.weight = 1.0  # of this rank's part of the batch
        self.measures = False
        self._max_norm, self._ranks = config.train.max_grad_norm, ctx.world_size
        self._device = ctx.device.type
        self._parameters = [one for group in optimizer.param_groups for one in group["params"]]
        schedule.bind(optimizer)

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

        with torch.autocast(self._device, enabled=False):
            self.scaler.scale(loss * self.weight).backward(**options)

    def step(self) -> None:
        """Average the gradients over the ranks, clip them, and step; called on all ranks.

        Raises:
            FitError: no parameter has a gradient.
        """
        if all(one.grad is None for one in self._parameters) and self._ranks == 1:
            raise FitError(
                f"the optimizer {self._name!r} makes a step, and none of its parameters has a "
                "gradient",
                allowed="backward(loss) before each step()",
                do=f"call optimizers[{self._name!r}].backward(loss) first",
            )
        if self._ranks > 1:
            average_gradients(self._parameters, self._ranks)
        self.scaler.unscale_(self.optimizer)
        if self._max_norm is not None:
            self.norm = clip(self._parameters, self._max_norm)
        elif self.measures:
            self.norm = grad_norm(self._parameters)
        self.rate = self.schedule.apply(self.optimizer, self.steps)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.advance()
        self.steps += 1

    def state(self) -> State:
        """What a resumed run needs."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "schedule": self.schedule.state(),
            "steps": self.steps,
        }

    def restore(self, state: State) -> None:
        """Continue from a :meth:`state`."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.schedule.restore(state["schedule"])
        self.steps = state["steps"]


def average_gradients(parameters: list[nn.Parameter], ranks: int) -> None:
    """Replace gradients by their mean over the ranks, in one all-reduce.

    A parameter without a gradient counts as zero; without one on any rank it keeps none.
    """
    import torch
    import torch.distributed as dist

    grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
    unused = [one.grad is None for one in parameters]
    present = torch.tensor([not one for one in unused]).to(grads[0])
    flat = torch.cat([present, *(grad.flatten() for grad in grads)])
    dist.all_reduce(flat)
    sizes = [one.numel() for one in parameters]
    present, *means = flat.split([len(parameters), *sizes])
    torch._foreach_div_(means, ranks)
    used = present.tolist() if any(unused) else None  # waits for the device
    for number, (one, grad, mean) in enumerate(zip(parameters, grads, means, strict=True)):
        if used is None or used[number]:
            one.grad = grad.copy_(mean.view_as(grad))


class SeveralTrainStep(TrainStep):
    """The steps of a model with several optimizers; see :class:`TrainStep`.

    Args:
        ctx: the run's context.
        config: its sections ``train, distributed``.
        model: changed in place.
        loss: for the validation only.
        forward: the same.
        step: the user's.
        optimizers: by name: optimizers, or functions ``model`` -> optimizer.
        schedules: one for all, or by the optimizers' names.
        steps: optimizer steps of the whole run: batches.

    Raises:
        FitError: the arguments do not fit each other or the model.
    """

    def __init__(
        self,
        ctx: RunContext,
        config: Config,
        model: nn.Module,
        loss: Loss,
        forward: Forward,
        *,
        step: StepOfSeveral,
        optimizers: Mapping[str, object],
        schedules: Mapping[str, GivenSchedule] | GivenSchedule | None,
        steps: int,
    ) -> None:
        _check(ctx, config, step, optimizers, schedules)
        self._user_step, self._given, self._schedules = step, optimizers, schedules
        self._parts: dict[str, Tensor] = {}
        self._ctx = ctx
        super().__init__(ctx, config, model, loss, forward, UserSchedule(None, total=steps))
        self._shares_buffers = ctx.world_size > 1 and config.distributed.broadcast_buffers
        self.load_on_all_ranks(None)  # as DDP does: all start with rank 0's weights

    def _wrap(self) -> nn.Module:
        return self.module

    def _make_optimizer(self, config: Config, given: object) -> torch.optim.Optimizer:
        """Make the handles; returns the first optimizer."""
        self.handles: dict[str, OptimizerHandle] = {}
        for name, one in self._given.items():
            optimizer = resolve_optimizer(self.module, one, f"optimizer[{name!r}]")
            by_name = self._schedules
            own = by_name.get(name) if isinstance(by_name, Mapping) else by_name
            schedule = UserSchedule(own, total=self.schedule.total, place=f"schedule[{name!r}]")
            self.handles[name] = OptimizerHandle(name, optimizer, schedule, self._ctx, config)
        self.optimizers = {name: one.optimizer for name, one in self.handles.items()}
        check_all_held(self.module, self.optimizers.values())
        return next(iter(self.optimizers.values()))

    def _pass(self, batch: Batch, micro_batch: MicroBatch) -> BatchLoss:
        """Call the user's step; there is one micro-batch per step."""
        import torch

        if self._shares_buffers:
            broadcast_buffers(self.module, self._ranks)
        for handle in self.handles.values():
            handle.weight = micro_batch.weight
        with self._autocast:
            returned = self._user_step(self.module, batch, self.handles)
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
                total = loss.detach().float() * micro_batch.samples
                self._parts[name] = self._parts[name] + total if name in self._parts else total
        mean = torch.stack([loss.detach().float().reshape(()) for loss in parts.values()]).sum()
        return BatchLoss(mean, float(micro_batch.samples))

    def _optimize(self, measure_norm: bool) -> None:
        """Count the step. A batch's gradients do not reach the next one, so a resume is exact."""
        first = next(iter(self.handles.values()))
        self.rate, self.grad_norm = first.rate, first.norm
        for handle in self.handles.values():
            handle.zero_grad()
            handle.measures = measure_norm
        self.steps_done += 1
        if self.averages is not None:
            self.averages.update()

    @property
    def skips_overflows(self) -> bool:
        """See :attr:`TrainStep.skips_overflows`."""
        scalers = [handle.scaler for handle in self.handles.values()]
        return all(scaler.is_enabled() and scaler.get_scale() >= 1.0 for scaler in scalers)

    def take_parts(self) -> dict[str, float]:
        """See :meth:`TrainStep.take_parts`."""
        import torch

        names, sums = [*self._parts], [*self._parts.values()]
        self._parts = {}
        return dict(zip(names, torch.stack(sums).tolist(), strict=True)) if sums else {}

    def _optimizer_state(self) -> State:
        return {"optimizers": {name: handle.state() for name, handle in self.handles.items()}}

    def _restore_optimizers(self, state: State, source: str) -> None:
        saved = state["optimizers"]
        if [*saved] != [*self.handles]:
            raise CheckpointError(
                f"the checkpoint {source} has the optimizers {', '.join(saved)}, and fit was given "
                f"{', '.join(self.handles)}",
                allowed="the optimizers of the run, by their names and in their order",
                do="launch as before, or with resume='never'",
            )
        for name, handle in self.handles.items():
            handle.restore(saved[name])

    def observe(self, value: float, better: bool) -> None:
        """See :meth:`TrainStep.observe`."""
        for handle in self.handles.values():
            handle.schedule.observe(value, better)


def _check(
    ctx: RunContext,
    config: Config,
    step: object,
    optimizers: Mapping[str, object],
    schedules: object,
) -> None:
    own = required_arguments(step) if callable(step) else 0
    named = schedules if isinstance(schedules, Mapping) else {}
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
