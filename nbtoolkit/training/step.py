"""Perform the optimizer steps of one rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from nbtoolkit.errors import CheckpointError
from nbtoolkit.run.checkpoints.weights import load_weights
from nbtoolkit.run.serialization import add_note
from nbtoolkit.training.averaging import make_averages
from nbtoolkit.training.batch_norm import single_sample_fault
from nbtoolkit.training.fsdp import Fsdp
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
    prepare_model,
    to_channels_last,
)
from nbtoolkit.training.optimizer import GivenOptimizer, make_user_optimizer
from nbtoolkit.training.samples import MicroBatch
from nbtoolkit.training.schedule import GivenSchedule, Schedule, make_schedule
from nbtoolkit.training.scheduled import ScheduledOptimizer
from nbtoolkit.training.strategy import (
    Strategy,
    average_gradients,
    refuse_unused,
    scale_gradients,
)

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
        self._device, self._ranks = device, ranks
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
        """What makes the gradients of the step those of the mean over its weights.

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
        for one in self._weights:
            one *= factor
        self._samples, self._weights, self._sums, self._work = 0, [], None, None
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
        scheduled: the optimizer with its schedule.
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
        self.steps, self.steps_done = steps, 0
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
        self.scheduled = self._make_optimizer(ctx, config, recipe)
        self.strategy.bind(self.optimizer)
        named = self.module.named_parameters()
        self._named = {name: weight for name, weight in named if weight.requires_grad}
        self._loss_parameters = [*loss_parameters(self.module, self.loss_module).values()]
        self._parameters = [*self._named.values(), *self._loss_parameters]
        self._ranks, self._compiled = ctx.world_size, config.train.compile
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

    def _make_optimizer(
        self, ctx: RunContext, config: Config, recipe: Recipe
    ) -> ScheduledOptimizer:
        """Make :attr:`scheduled`."""
        given = recipe.optimizer
        optimizer = make_user_optimizer(config, self.module, given, self.loss_module)
        schedule = make_schedule(
            config,
            optimizer,
            recipe.schedule,
            steps=self.steps,
            factor=ctx.plan.lr_factor,
            from_config=given is None or isinstance(given, type),
        )
        return ScheduledOptimizer(optimizer, schedule, ctx, config, self.strategy, self._names())

    def _names(self) -> dict[nn.Parameter, str]:
        """Return the name of each parameter of the model, and of a loss that is trained."""
        of_loss = [] if self.loss_module is None else self.loss_module.named_parameters()
        names = {parameter: f"loss:{name}" for name, parameter in of_loss}
        return names | {parameter: name for name, parameter in self.module.named_parameters()}

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return self.scheduled.optimizer

    @property
    def schedule(self) -> Schedule:
        """The optimizer's schedule."""
        return self.scheduled.schedule

    @property
    def rate(self) -> float:
        """The learning rate of the last step."""
        return self.scheduled.rate

    @property
    def grad_norm(self) -> Tensor | None:
        """The gradient's norm before clipping when it was last measured; None: it was not."""
        return self.scheduled.norm

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
        training_pass.samples, training_pass.whole_batch = micro_batch.samples, False
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
                return self._evaluated(self.evaluated_module, batch, samples)
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
        scaler = self.scheduled.scaler
        if scaler.is_enabled():
            return scaler.get_scale() >= 1.0
        return self._ranks == 1 and all(bool(one.isfinite().all()) for one in self._parameters)

    def broadcast_buffers(self) -> None:
        """Give all ranks rank 0's buffers, of the model and of its averages."""
        broadcast_buffers(self.module, self._ranks)
        if self.averages is not None:
            broadcast_buffers(self.averages.module, self._ranks)

    def close(self) -> None:
        """Leave the whole, plain model on each rank; all ranks call it, after the last step."""
        self.strategy.close()

    def state(self) -> State:
        """What a resumed run needs, as :meth:`Strategy.gathered` takes it."""
        state = {
            "model": self.module.state_dict(),
            "step": self.steps_done,
            **self.scheduled.state(),
        }
        if self.loss_module is not None:
            state["loss_parameters"] = self.loss_module.state_dict()
        return state if self.averages is None else {**state, "averages": self.averages.state()}

    def restore(self, state: State, *, source: str) -> None:
        """Continue from a :meth:`state` that was read from ``source``.

        Raises:
            CheckpointError: it is another model's, or not of :meth:`state`.
        """
        needed = {"step", *self.scheduled.state()}
        if self.loss_module is not None:
            needed.add("loss_parameters")
        if missing := (needed if self.averages is None else needed | {"averages"}) - state.keys():
            raise CheckpointError(
                f"the checkpoint {source} was not written by fit: {', '.join(sorted(missing))} is "
                "missing",
                allowed="the run's own checkpoint",
                do="give ctx.save another kind than 'last' in functions that call fit, too",
            )
        load_weights(state, self.module, source=source)
        if self.loss_module is not None:
            load_weights(state["loss_parameters"], self.loss_module, source=source)
        self.scheduled.restore(state)
        if self.averages is not None:
            self.averages.restore(state["averages"], source=source)
        self.steps_done = state["step"]

    def end_epoch(self, value: float) -> None:
        """Report an epoch's monitored value to the schedule."""
        self.schedule.end_epoch(value)

    def weights(self) -> State:
        """The weights that were evaluated, and those of a loss that is trained."""
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
        self.scheduled.scaler.scale(weighted).backward()
        return BatchLoss(loss.mean.detach(), weight)

    def _loss(self, batch: Batch, micro_batch: MicroBatch) -> BatchLoss:
        """The loss of a micro-batch; checked, if it is the first one."""
        reduced_loss = self.reduced_loss
        computed = self._compute(self.model, batch, records=reduced_loss.records)
        if self._first_pass:
            if not reduced_loss.whole_batches:
                check_shapes(computed.outputs, computed.targets, computed.returned)
            with self._autocast:
                reduced_loss.check(computed, micro_batch.samples, self._ranks, self._targets)
            self._first_pass, self._targets = False, None
            if not reduced_loss.records:
                computed = computed._replace(calls=())
        return reduced_loss.reduce(computed, micro_batch.rows)

    def _evaluated(
        self, model: Callable[..., Any], batch: Batch, samples: int
    ) -> tuple[Batch, Batch, BatchLoss]:
        """See :meth:`evaluate`."""
        computed = self._compute(model, batch, records=not self.reduced_loss.whole_batches)
        return computed.outputs, computed.targets, self.reduced_loss.reduce(computed, samples)

    def _compute(self, model: Callable[..., Any], batch: Batch, *, records: bool) -> Computed:
        """A forward pass and its loss.

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

            weights, reduced_loss = WeightSums(), self.reduced_loss
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
        """What a backward pass begins with, and the weight of the loss in reports.

        If the loss is a mean over weights, :meth:`_optimize` divides by the weights of the step.
        """
        samples, factor = micro_batch.samples, micro_batch.weight
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
        """The optimizer's step, at the schedule's learning rate."""
        if self._must_be_used:
            refuse_unused(self._named)
        if self._loss_parameters:
            average_gradients(self._loss_parameters, self._ranks)
        factor = self._weights.factor()
        if factor is not None:
            scale_gradients(self._parameters, factor)
        rate = None if self.averages is None else self.averages.rate(self.steps_done)
        self.scheduled.apply(self.steps_done, measure_norm=measure_norm, rate=rate)
        for parameter in self._parameters:  # what zero_grad does, in 0.3 instead of 6 us
            parameter.grad = None
        self.steps_done += 1
        if self.averages is not None:
            self.averages.update()
