"""Perform the optimizer steps of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from nbtoolkit.errors import CheckpointError, some_names
from nbtoolkit.run.checkpoints.weights import load_weights
from nbtoolkit.training.averaging import make_averages
from nbtoolkit.training.losses import (
    BatchLoss,
    Computed,
    ReducedLoss,
    check_labels,
    check_shapes,
    loss_parameters,
    on_device,
    trained_loss,
    training_pass,
)
from nbtoolkit.training.model import (
    autocast,
    broadcast_buffers,
    grad_scaler,
    prepare_model,
    single_sample_fault,
    to_channels_last,
)
from nbtoolkit.training.optim import (
    GivenOptimizer,
    GivenSchedule,
    Schedule,
    make_optimizer,
    make_schedule,
    set_rate,
)
from nbtoolkit.training.samples import MicroBatch
from nbtoolkit.training.strategy import Fsdp, Strategy, refuse_unused
from nbtoolkit.wire.serialization import add_note

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import Work

    from nbtoolkit.config.schema import Config
    from nbtoolkit.run.checkpoints.checkpoint_store import State
    from nbtoolkit.training.data import Batch
    from nbtoolkit.training.losses import Labels, Loss
    from nbtoolkit.worker.context import RunContext

Forward: TypeAlias = "Callable[[nn.Module, Any], tuple[Any, Any]]"
"""``step(model, batch)`` -> (outputs, targets) of the user, see :func:`nbtoolkit.fit`."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the user wants a model to be trained; see :func:`nbtoolkit.fit` for each of them.

    Attributes:
        loss: ``loss(outputs, targets)``.
        forward: ``step(model, batch)`` -> (outputs, targets).
        optimizer: the user's; None: the one of ``config.optim``.
        schedule: the user's; None: that of ``config.optim``.
        targets: all targets of the training set as ``forward`` returns them, if known: their labels
            are checked with the first batch (else only the batch's own).
    """

    loss: Loss
    forward: Forward
    optimizer: GivenOptimizer | None = None
    schedule: GivenSchedule | None = None
    targets: Labels | None = None


class StepWeights:
    """The weights of the micro-batches of a step whose loss is a mean over weights.

    Args:
        device: of the weights.
        ranks: the number of ranks.
    """

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._device = device
        self._ranks = ranks
        self._samples = 0
        self._weights: list[Tensor] = []
        self._sums: Tensor | None = None
        self._work: Work | None = None

    def __bool__(self) -> bool:
        return bool(self._weights)

    def add(self, loss: BatchLoss, samples: int) -> Tensor:
        """Add a micro-batch; returns its weight, a scalar that :meth:`factor` multiplies."""
        import torch

        weight = torch.as_tensor(loss.weight, device=self._device).double()
        self._samples += samples
        self._weights.append(weight)
        return weight

    def begin_sum(self) -> None:
        """Begin to sum the weights over the ranks; all of them call it."""
        import torch
        import torch.distributed as dist

        if self._ranks == 1 and not self._weights:
            return
        self._sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        if self._weights:
            self._sums[0] += torch.stack(self._weights).sum()
            self._sums[1] += self._samples
        if self._ranks > 1:
            self._work = dist.all_reduce(self._sums, async_op=True)

    def factor(self) -> Tensor | None:
        """Return what makes the gradients of the step those of the mean over its weights.

        The weights of the micro-batches are multiplied by it, so that they sum to the samples: all
        samples count equally in reports, as if one device returned the loss of the step. None: the
        step has one part. Called by all ranks.
        """
        import torch

        if self._work is not None:
            self._work.wait()
        if self._sums is None:
            return None
        weight, samples = self._sums
        factor = torch.where(weight == 0, 0, samples / weight)
        for batch_weight in self._weights:
            batch_weight *= factor
        self._samples = 0
        self._weights = []
        self._sums = None
        self._work = None
        return factor


class TrainStep:
    """A model, its optimizer and its averages, and how they make a step with the other ranks.

    Args:
        ctx: the run's context; its plan has the precision and DDP's options.
        config: its sections ``optim, train, distributed``.
        model: changed in place.
        recipe: the user's loss, forward pass, optimizer and schedule.
        steps: optimizer steps of the whole run.

    Attributes:
        module: the user's model on this rank's device, unwrapped: for evaluation and checkpoints.
        model: the model as a step calls it: compiled, and wrapped on several ranks.
        loss: the user's, with its tensors on this rank's device.
        forward: the user's, on images in channels-last format where ``config`` says so.
        optimizer: of the model's parameters, and those of a loss that is trained.
        schedule: the learning rate of every step.
        rate: the learning rate of the last step.
        grad_norm: the gradient's norm before clipping when it was last measured, a scalar; None: it
            was not.
        averages: of its weights; None without averaging.
        strategy: how the ranks share the training.
        steps: optimizer steps of the whole run.
        steps_done: optimizer steps done.

    Raises:
        FitError: the model cannot be trained as ``config`` says.
    """

    def __init__(
        self, ctx: RunContext, config: Config, model: nn.Module, recipe: Recipe, *, steps: int
    ) -> None:
        self.steps = steps
        self.steps_done = 0
        kind = Fsdp if ctx.plan.strategy == "fsdp" else Strategy
        self.strategy = kind(ctx, config)
        self.module = prepare_model(ctx, config, model)
        self.module.zero_grad()  # of steps before fit
        self.model = self.strategy.wrap(self.module, steps=steps)
        self._no_sync = self.strategy.no_sync(self.model)
        self.loss = on_device(recipe.loss, ctx.device)
        self.loss_module = trained_loss(ctx, self.module, self.loss)
        if self.loss_module is not None:  # as DDP does: all start with rank 0's
            self.strategy.load_on_all_ranks(self.loss_module, None)
        self.optimizer = make_optimizer(config, self.module, recipe.optimizer, self.loss_module)
        self.schedule = self._make_schedule(ctx, config, recipe)
        self.strategy.bind(self.optimizer)
        self._scaler = grad_scaler(ctx, config)
        self.rate = self.schedule.rate
        self.grad_norm: Tensor | None = None
        self._max_norm: float | None = config.train.max_grad_norm
        groups = self.optimizer.param_groups
        self._optimized = [parameter for group in groups for parameter in group["params"]]
        self._names = self._names_of(self._optimized)
        named = self.module.named_parameters()
        self._named = {name: weight for name, weight in named if weight.requires_grad}
        self._loss_parameters = [*loss_parameters(self.module, self.loss_module).values()]
        self._parameters = [*self._named.values(), *self._loss_parameters]
        self._ranks = ctx.world_size
        self._compiled = config.train.compile
        self._device = ctx.device
        distributed = config.distributed
        may_be_unused = distributed.find_unused_parameters or distributed.static_graph
        self._must_be_used = ctx.world_size > 1 and not may_be_unused
        self._autocast = autocast(ctx)
        self.forward = recipe.forward
        if config.train.channels_last:
            self.forward = lambda model, batch: recipe.forward(model, to_channels_last(batch))
        self._targets = recipe.targets
        self.reduced_loss = ReducedLoss(
            self.loss,
            whole_batches=config.train.loss_reduction == "batch",
            divided=ctx.plan.global_batch_size > ctx.plan.batch_size_per_device,
        )
        self._first_pass = True
        self._weights = StepWeights(ctx.device, ctx.world_size)
        self.averages = make_averages(config, self.module, steps=steps, factor=ctx.plan.lr_factor)

    def _make_schedule(self, ctx: RunContext, config: Config, recipe: Recipe) -> Schedule:
        given = recipe.optimizer
        return make_schedule(
            config,
            self.optimizer,
            recipe.schedule,
            steps=self.steps,
            factor=ctx.plan.lr_factor,
            from_config=given is None or isinstance(given, type),
        )

    def _names_of(self, parameters: list[nn.Parameter]) -> list[str]:
        """Return the names of parameters of the model, or of a loss that is trained."""
        of_loss = [] if self.loss_module is None else self.loss_module.named_parameters()
        names = {parameter: f"loss:{name}" for name, parameter in of_loss}
        names |= {parameter: name for name, parameter in self.module.named_parameters()}
        return [names[parameter] for parameter in parameters]

    def step(self, batch: Batch, micro_batch: MicroBatch, *, measure_norm: bool) -> BatchLoss:
        """Forward and backward pass of a micro-batch, and the optimizer's step after the last one.

        Does not wait for the device, except for the first batch's labels.

        Args:
            batch: what ``forward`` takes, on the device.
            micro_batch: what the batch counts for.
            measure_norm: set :attr:`grad_norm`.

        Returns:
            The mean loss of the batch, detached, and its weight.

        Raises:
            FitError: a label has no score, the loss cannot be computed in parts, parameters are not
                used in a step of several ranks, or the model cannot be compiled. The user's own
                errors pass, with a note of the step.
        """
        training_pass.samples = micro_batch.samples
        training_pass.whole_batch = False
        try:
            if micro_batch.last:
                loss = self._pass(batch, micro_batch)
                self._optimize(measure_norm)
            elif self._ranks == 1:
                loss = self._pass(batch, micro_batch)
            else:
                with self._no_sync():  # gradients accumulate on this rank only
                    loss = self._pass(batch, micro_batch)
        except Exception as error:
            fault = self.strategy.translated(error, self._named) or single_sample_fault(error)
            if fault is None:
                add_note(error, f"in optimizer step {self.steps_done + 1} of nb.fit")
                raise
            raise fault from error
        finally:
            training_pass.samples = None
        return loss

    def evaluate(self, batch: Batch, samples: int) -> tuple[Batch, Batch, BatchLoss]:
        """Return outputs, targets and mean loss of a batch, without gradients or collectives.

        They are those of :attr:`evaluated_module`, in the mode (``train`` or ``eval``) it is in.
        """
        import torch

        try:
            with torch.no_grad():
                records = not self.reduced_loss.whole_batches
                computed = self._compute(self.evaluated_module, batch, records=records)
                loss = self.reduced_loss.reduce(computed, samples)
                return computed.outputs, computed.targets, loss
        except Exception as error:
            add_note(error, f"in the validation after optimizer step {self.steps_done} of nb.fit")
            raise

    @property
    def evaluated_module(self) -> nn.Module:
        """The averaged module once there is an average, else the one that is trained."""
        averages = self.averages
        return averages.module if averages is not None and averages.active else self.module

    @property
    def keeps_weights(self) -> bool:
        """Whether losses that are not finite have not changed the weights; waits for the device.

        In fp16 a step that overflows is skipped; False once the scale is below 1: from 65536 that
        takes 17 such steps, almost in a row. On one rank torch's loss of a batch whose targets are
        all ignored is NaN, and its gradient 0.
        """
        scaler = self._scaler
        if scaler.is_enabled():
            return scaler.get_scale() >= 1.0
        return self._ranks == 1 and all(
            bool(parameter.isfinite().all()) for parameter in self._parameters
        )

    def broadcast_buffers(self) -> None:
        """Give all ranks rank 0's buffers, of the model and of its averages."""
        broadcast_buffers(self.module, self._ranks)
        if self.averages is not None:
            broadcast_buffers(self.averages.module, self._ranks)

    def state(self) -> State:
        """Return what a resumed run needs, as :meth:`Strategy.gathered` takes it."""
        state = {
            "model": self.module.state_dict(),
            "step": self.steps_done,
            "optimizer": by_name(self.optimizer.state_dict(), self._names),
            "scaler": self._scaler.state_dict(),
            "schedule": self.schedule.state(),
        }
        if self.loss_module is not None:
            state["loss_parameters"] = self.loss_module.state_dict()
        return state if self.averages is None else {**state, "averages": self.averages.state()}

    def restore(self, state: State, *, source: str) -> None:
        """Continue from a :meth:`state` that was read from ``source``.

        Raises:
            CheckpointError: it is another model's, or not of :meth:`state`.
        """
        if missing := self.state().keys() - state.keys():
            raise CheckpointError(
                f"the checkpoint {source} was not written by fit: {', '.join(sorted(missing))} is "
                "missing",
                allowed="the run's own checkpoint",
                do="give ctx.save another kind than 'last' in functions that call fit, too",
            )
        load_weights(state, self.module, source=source)
        if self.loss_module is not None:
            load_weights(state["loss_parameters"], self.loss_module, source=source)
        self.optimizer.load_state_dict(by_number(state["optimizer"], self._names))
        self._scaler.load_state_dict(state["scaler"])
        self.schedule.restore(state["schedule"])
        if self.averages is not None:
            self.averages.restore(state["averages"], source=source)
        self.steps_done = state["step"]

    def weights(self) -> State:
        """Return the weights that were evaluated, and those of a loss that is trained."""
        weights = {"model": self.evaluated_module.state_dict()}
        if self.loss_module is not None:
            weights["loss_parameters"] = self.loss_module.state_dict()
        return weights

    def load_on_all_ranks(self, weights: State | None) -> None:
        """Load rank 0's :meth:`weights` on every rank; None there: its present ones."""
        weights = weights or {}
        self.strategy.load_on_all_ranks(self.module, weights.get("model"))
        if self.loss_module is not None:
            self.strategy.load_on_all_ranks(self.loss_module, weights.get("loss_parameters"))

    def _pass(self, batch: Batch, micro_batch: MicroBatch) -> BatchLoss:
        """Forward and backward; under DDP the gradients are then the mean over the ranks."""
        loss = self._loss(batch, micro_batch)
        weighted, weight = self._weighted(loss, micro_batch)
        if micro_batch.last and self._divides_by_weights(loss):
            self._weights.begin_sum()  # the ranks exchange them during the backward pass
        self._scaler.scale(weighted).backward()
        return BatchLoss(loss.mean.detach(), weight)

    def _loss(self, batch: Batch, micro_batch: MicroBatch) -> BatchLoss:
        """Return the loss of a micro-batch; checked, if it is the first one."""
        reduced_loss = self.reduced_loss
        computed = self._compute(self.model, batch, records=reduced_loss.records)
        if self._first_pass:
            if not reduced_loss.whole_batches:
                check_shapes(computed.outputs, computed.targets, computed.returned)
            with self._autocast:
                reduced_loss.check(computed, micro_batch.samples, self._ranks, self._targets)
            self._first_pass = False
            self._targets = None
            if not reduced_loss.records:
                computed = computed._replace(calls=())
        return reduced_loss.reduce(computed, micro_batch.rows)

    def _compute(self, model: Callable[..., Any], batch: Batch, *, records: bool) -> Computed:
        """Return a forward pass and its loss.

        Args:
            model: the model as it is called.
            batch: what ``forward`` takes.
            records: whether to record the calls of torch's class losses.
        """
        module = cast("nn.Module", model)
        with self._autocast:
            if not records:
                outputs, targets = self.forward(module, batch)
                if self._first_pass:
                    self._check_labels(outputs, targets)
                return Computed(outputs, targets, self.loss(outputs, targets))
            from nbtoolkit.training.loss_weights import WeightSums

            weights = WeightSums()
            reduced_loss = self.reduced_loss
            # A compiler would have to trace what a function mode does.
            in_forward = reduced_loss.in_forward is not False and not self._compiled
            with weights if in_forward else nullcontext():
                outputs, targets = self.forward(module, batch)
            if reduced_loss.in_forward is None:
                reduced_loss.in_forward = bool(weights.calls)
            if self._first_pass:
                self._check_labels(outputs, targets)
            with weights:
                returned = self.loss(outputs, targets)
            return Computed(outputs, targets, returned, weights.calls)

    def _check_labels(self, outputs: Batch, targets: Batch) -> None:
        """Before the very first loss: a label without a score ends a process with a GPU."""
        check_labels(outputs, targets if self._targets is None else self._targets, self.loss)

    def _weighted(self, loss: BatchLoss, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | float]:
        """Return what a backward pass begins with, and the weight of the loss in reports.

        If the loss is a mean over weights, :meth:`_optimize` divides by the weights of the step.
        """
        samples = micro_batch.samples
        factor = micro_batch.weight
        alone = micro_batch.last and self._ranks == 1 and not self._weights
        if self._divides_by_weights(loss) and samples and not alone:
            weight = self._weights.add(loss, samples)
            return loss.mean * (weight * (factor / samples)), weight
        mean = loss.mean if factor == 1.0 else loss.mean * factor
        return mean, loss.weight if self.reduced_loss.all_must_count else float(samples)

    def _divides_by_weights(self, loss: BatchLoss) -> bool:
        """Whether the loss is a mean over weights; so are then those of all passes and ranks."""
        return not isinstance(loss.weight, float) and not self.reduced_loss.all_must_count

    def _optimize(self, measure_norm: bool) -> None:
        """Make the optimizer's step with the present gradients, at the schedule's rate."""
        if self._must_be_used:
            refuse_unused(self._named)
        if self._loss_parameters:
            average_gradients(self._loss_parameters, self._ranks)
        factor = self._weights.factor()
        if factor is not None:
            scale_gradients(self._parameters, factor)
        self._scaler.unscale_(self.optimizer)
        if self._max_norm is not None:
            self.grad_norm = self.strategy.clip(self._optimized, self._max_norm)
        elif measure_norm:
            self.grad_norm = self.strategy.grad_norm(self._optimized)
        self.schedule.begin_step(self.steps_done)
        rate = None if self.averages is None else self.averages.rate(self.steps_done)
        if rate is not None:
            set_rate(self.optimizer, rate)
        self.rate = self.schedule.rate
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.schedule.end_step()
        for parameter in self._parameters:  # what zero_grad does, in 0.3 instead of 6 us
            parameter.grad = None
        self.steps_done += 1
        if self.averages is not None:
            self.averages.update()


def scale_gradients(parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
    """Multiply the gradients by ``factor``, a scalar."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad *= factor.to(parameter.grad.device)


def average_gradients(parameters: Sequence[nn.Parameter], ranks: int) -> None:
    """Replace gradients by their mean over the ranks, in one all-reduce.

    A parameter without a gradient counts as zero; without one on any rank it keeps none.
    """
    if ranks == 1:
        return
    import torch
    import torch.distributed as dist

    grads = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in parameters
    ]
    unused = [parameter.grad is None for parameter in parameters]
    present = torch.tensor([not absent for absent in unused]).to(grads[0])
    flat = torch.cat([present, *(grad.flatten() for grad in grads)])
    dist.all_reduce(flat)
    sizes = [parameter.numel() for parameter in parameters]
    present, *means = flat.split([len(parameters), *sizes])
    torch._foreach_div_(means, ranks)
    used = present.tolist() if any(unused) else None  # waits for the device
    for number, (parameter, grad, mean) in enumerate(zip(parameters, grads, means, strict=True)):
        if used is None or used[number]:
            parameter.grad = grad.copy_(mean.view_as(grad))


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
