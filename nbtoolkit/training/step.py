"""Perform the optimizer steps of one rank, and translate the errors inside them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

from nbtoolkit.errors import CheckpointError, FitError
from nbtoolkit.run.weights import load_weights
from nbtoolkit.training.loading.sampler import MicroBatch
from nbtoolkit.training.losses import (
    BatchLoss,
    ReducedLoss,
    Reduction,
    all_count,
    check_labels,
    training_pass,
)
from nbtoolkit.training.model import (
    broadcast_buffers,
    half_precision,
    prepare_model,
    to_channels_last,
)
from nbtoolkit.training.optim.averaging import make_averages
from nbtoolkit.training.optim.optimizer import Schedule, set_rate
from nbtoolkit.training.optim.user_optimizer import GivenOptimizer, make_user_optimizer
from nbtoolkit.training.strategy import make_strategy

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nbtoolkit.config.schema import Config
    from nbtoolkit.training.loading.data import Batch
    from nbtoolkit.training.losses import Labels, Loss
    from nbtoolkit.training.train_state import State
    from nbtoolkit.worker.context import RunContext

Forward: TypeAlias = "Callable[[nn.Module, Any], tuple[Any, Any]]"
"""``step(model, batch)`` -> (outputs, targets) of the user, see :func:`nbtoolkit.fit`."""


class TrainStep:
    """A model, its optimizer and its averages, and how they make a step with the other ranks.

    Args:
        ctx: the run's context; its plan has the precision and DDP's options.
        config: its sections ``optim, train, distributed``.
        model: changed in place.
        loss: ``loss(outputs, targets)``, as :func:`nbtoolkit.fit` takes it.
        forward: ``forward(model, batch)`` -> (outputs, targets).
        schedule: the learning rate of every step.
        targets: all targets of the training set as ``forward`` returns them, if known: their labels
            are checked with the first batch (else only the batch's own).
        optimizer: the user's, see :func:`nbtoolkit.fit`; None: the one of ``config.optim``.

    Attributes:
        module: the user's model on this rank's device, unwrapped: for evaluation and checkpoints.
        optimizer: over its trainable parameters.
        optimizers: the same by name, for callbacks.
        averages: of its weights; None without averaging.
        strategy: how the ranks share the training.
        steps_done: optimizer steps done.
        rate: the learning rate of the last step.
        grad_norm: the gradient's norm before clipping when it was last measured, a scalar; None: it
            was not.

    Raises:
        FitError: the model cannot be trained as ``config`` says.
    """

    def __init__(
        self,
        ctx: RunContext,
        config: Config,
        model: nn.Module,
        loss: Loss,
        forward: Forward,
        schedule: Schedule,
        targets: Labels | None = None,
        optimizer: GivenOptimizer | None = None,
    ) -> None:
        self.steps_done, self.rate = 0, 0.0
        self.grad_norm: Tensor | None = None
        self.schedule = schedule
        self.module = prepare_model(ctx, config, model)
        self.module.zero_grad()  # of steps before fit
        self.strategy = make_strategy(ctx, config)
        self._no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
        self._model = self._wrap()
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.optimizer = self._make_optimizer(config, optimizer)
        self.strategy.bind(self.optimizer)
        self._after_step = self.strategy.after_step
        named = self.module.named_parameters()
        self._named = {name: weight for name, weight in named if weight.requires_grad}
        self._parameters = list(self._named.values())
        self._max_norm: float | None = config.train.max_grad_norm
        self._ranks, self._compiled = ctx.world_size, config.train.compile
        distributed = config.distributed
        may_be_unused = distributed.find_unused_parameters or distributed.static_graph
        self._must_be_used = ctx.world_size > 1 and not may_be_unused
        self._autocast, self._scaler = _autocast(ctx), grad_scaler(ctx, config)
        self._forward = forward
        if config.train.channels_last:
            self._forward = lambda model, batch: forward(model, to_channels_last(batch))
        self._loss, self._targets = loss, targets
        self._reduced = ReducedLoss(loss, whole_batches=config.train.loss_reduction == "batch")
        self._detected, self._all_count = False, all_count(targets)
        # Of the micro-batches since the last step: their samples, and the weights of these.
        self._samples = 0
        self._weights: list[Tensor] = []
        self.averages = make_averages(
            config, self.module, steps=schedule.total, factor=ctx.plan.lr_factor
        )

    def _wrap(self) -> nn.Module:
        """The model as the step calls it."""
        model = self.strategy.wrap(self.module, steps=self.schedule.total)
        self._no_sync = self.strategy.no_sync(model)
        return model

    def _make_optimizer(
        self, config: Config, given: GivenOptimizer | None
    ) -> torch.optim.Optimizer:
        """Make :attr:`optimizer` and :attr:`optimizers`."""
        optimizer = make_user_optimizer(config, self.module, given)
        self.optimizers = {"optimizer": optimizer}
        self.schedule.bind(optimizer)
        return optimizer

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
            fault = self.strategy.translated(error) or translate_error(
                error, self._named, steps_done=self.steps_done, compiled=self._compiled
            )
            if fault is None:
                raise
            raise fault from error
        finally:
            training_pass.samples = None
        return loss

    def evaluate(self, batch: Batch, samples: int) -> tuple[Batch, Batch, BatchLoss]:
        """Outputs, targets and mean loss of a batch, without gradients or collectives.

        Of :attr:`evaluated_module`, in the mode (``train`` or ``eval``) that it is in.
        """
        import torch

        with torch.no_grad():
            outputs, targets, returned, weight = self._compute(self.evaluated_module, batch)
            return outputs, targets, self._reduced.reduce(returned, samples, weight)

    @property
    def model(self) -> nn.Module:
        """The model as a step calls it: compiled, and wrapped on several ranks."""
        return self._model

    @property
    def loss(self) -> Loss:
        """The user's, with its tensors on this rank's device."""
        return self._loss

    @property
    def evaluated_module(self) -> nn.Module:
        """The averaged module once there is an average, else the one that is trained."""
        averages = self.averages
        return averages.module if averages is not None and averages.active else self.module

    @property
    def skips_overflows(self) -> bool:
        """Whether a step that overflows is skipped without harm (fp16); waits for the device.

        False once the scale is below 1: from 65536 that takes 17 such steps, almost in a row.
        """
        return self._scaler.is_enabled() and self._scaler.get_scale() >= 1.0

    def broadcast_buffers(self) -> None:
        """Give all ranks rank 0's buffers, of the model and of its averages."""
        broadcast_buffers(self.module, self._ranks)
        if self._ranks > 1 and self.averages is not None:
            broadcast_buffers(self.averages.module, self._ranks)

    def state(self) -> State:
        """What a resumed run needs, as :meth:`Strategy.gathered` takes it."""
        state = {
            "model": self.module.state_dict(),
            "step": self.steps_done,
            "reduction": int(self._reduced.reduction),
            **self._optimizer_state(),
        }
        return state if self.averages is None else {**state, "averages": self.averages.state()}

    def restore(self, state: State, *, source: str) -> None:
        """Continue from a :meth:`state` that was read from ``source``.

        Raises:
            CheckpointError: it is another model's, or not of :meth:`state`.
        """
        needed = {"step", *self._optimizer_state()}
        if missing := (needed if self.averages is None else needed | {"averages"}) - state.keys():
            raise CheckpointError(
                f"the checkpoint {source} was not written by fit: {', '.join(sorted(missing))} is "
                "missing",
                allowed="the run's own checkpoint",
                do="give ctx.save another kind than 'last' in functions that call fit, too",
            )
        load_weights(state, self.module, source=source)
        self._restore_optimizers(state, source)
        if self.averages is not None:
            self.averages.restore(state["averages"], source=source)
        self.steps_done = state["step"]
        self._reduced.reduction = Reduction(state["reduction"])
        self.strategy.restore(state)

    def _optimizer_state(self) -> State:
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "schedule": self.schedule.state(),
        }

    def _restore_optimizers(self, state: State, source: str) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        self.schedule.restore(state["schedule"])

    def observe(self, value: float, better: bool) -> None:
        """Report an epoch's monitored value to the schedule."""
        self.schedule.observe(value, better)

    def take_parts(self) -> dict[str, float]:
        """Losses by name, summed over this rank's samples since the last call."""
        return {}

    def load_on_all_ranks(self, weights: Mapping[str, Tensor] | None) -> None:
        """Load rank 0's ``weights`` into the model on every rank; None there: its present ones."""
        self.strategy.load_on_all_ranks(self.module, weights)

    def _pass(self, batch: Batch, micro_batch: MicroBatch) -> BatchLoss:
        """Forward and backward; under DDP the gradients are then the mean over the ranks."""
        outputs, targets, returned, weight = self._compute(self._model, batch)
        if not self._detected:
            whole = self._reduced.reduce(returned, max(micro_batch.samples, 1), weight)
            with self._autocast:
                self._reduced.detect(outputs, targets, micro_batch.samples, whole, self._ranks)
            self._detected = True
        loss = self._reduced.reduce(returned, max(micro_batch.samples, 1), weight)
        factor = self._factor(loss, micro_batch)
        weighted = loss.mean if factor == 1.0 else loss.mean * factor
        self._scaler.scale(weighted).backward()
        return BatchLoss(loss.mean.detach(), loss.weight)

    def _compute(
        self, model: nn.Module, batch: Batch
    ) -> tuple[Batch, Batch, object, Tensor | None]:
        """Outputs, targets, what the loss returned, and the weight by which torch's own divided."""
        with self._autocast:
            if not self._reduced.needs_weights:
                outputs, targets = self._forward(model, batch)
                return outputs, targets, self._loss(outputs, targets), None
            from nbtoolkit.training.loss_weights import WeightSums

            weights = WeightSums(all_count=self._all_count)
            # A compiler would have to trace what a function mode does.
            with nullcontext() if self._compiled else weights:
                outputs, targets = self._forward(model, batch)
            if not self._detected:
                self._check_labels(outputs, targets)
            with weights:
                returned = self._loss(outputs, targets)
            return outputs, targets, returned, weights.weight

    def _check_labels(self, outputs: Batch, targets: Batch) -> None:
        """Before the very first loss: a label without a score ends a process with a GPU."""
        check_labels(outputs, targets if self._targets is None else self._targets, self._loss)
        self._targets = None

    def _factor(self, loss: BatchLoss, micro_batch: MicroBatch) -> Tensor | float:
        """The factor of a pass in its step; :meth:`_divide_by_weights` completes weighted ones."""
        if self._reduced.reduction is Reduction.SUM:
            return float(self._ranks * micro_batch.samples)
        if self._reduced.reduction is not Reduction.WEIGHTED:
            return micro_batch.weight
        alone = micro_batch.last and self._ranks == 1 and not self._weights
        if alone or not micro_batch.samples:
            return micro_batch.weight
        import torch

        weight = torch.as_tensor(loss.weight, device=loss.mean.device)
        self._samples += micro_batch.samples
        self._weights.append(weight)
        return weight * (micro_batch.weight / micro_batch.samples)

    def _divide_by_weights(self) -> None:
        """Make the gradients those of a mean over the weights of all passes of a step."""
        import torch
        import torch.distributed as dist

        device = self._parameters[0].device
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        if self._weights:
            sums[0] += torch.stack(self._weights).sum()
            sums[1] += self._samples
        if self._ranks > 1:
            dist.all_reduce(sums)
        weight, samples = sums
        factor = torch.where(weight == 0, 0, samples / weight)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad *= factor
        self._samples, self._weights = 0, []

    def _optimize(self, measure_norm: bool) -> None:
        """The optimizer's step, at the schedule's learning rate."""
        if self._must_be_used:
            refuse_unused(self._named)
        if self._reduced.reduction is Reduction.WEIGHTED and (self._ranks > 1 or self._weights):
            self._divide_by_weights()
        self._scaler.unscale_(self.optimizer)
        if self._max_norm is not None:
            self.grad_norm = self.strategy.clip(self._parameters, self._max_norm)
        elif measure_norm:
            self.grad_norm = self.strategy.grad_norm(self._parameters)
        rate = None if self.averages is None else self.averages.rate(self.steps_done)
        if rate is None:
            self.rate = self.schedule.apply(self.optimizer, self.steps_done)
        else:
            self.rate = rate
            set_rate(self.optimizer, rate, self.schedule.momentum(self.steps_done))
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.schedule.advance()
        for parameter in self._parameters:  # what zero_grad does, in 0.3 instead of 6 us
            parameter.grad = None
        self.steps_done += 1
        if self._after_step is not None:
            self._after_step(self.steps_done)
        if self.averages is not None:
            self.averages.update()


def _autocast(ctx: RunContext) -> AbstractContextManager[object]:
    """The context of forward pass and loss; one for all steps: making it is slower than using."""
    import torch

    dtype = half_precision(ctx)
    return nullcontext() if dtype is None else torch.autocast(ctx.device.type, dtype)


def grad_scaler(ctx: RunContext, config: Config) -> torch.amp.GradScaler:
    """Keeps the gradients of fp16 from underflow; does nothing in other precisions."""
    import torch

    train = config.train
    return torch.amp.GradScaler(
        ctx.device.type,
        init_scale=train.scaler_init_scale,
        growth_factor=train.scaler_growth_factor,
        backoff_factor=train.scaler_backoff_factor,
        growth_interval=train.scaler_growth_interval,
        enabled=ctx.plan.precision == "fp16",
    )


# --- errors inside a step ---


_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_CHANGED = "Your training graph has changed in this iteration"
_COMPILERS = ("torch._dynamo", "torch._inductor")


def translate_error(
    error: Exception, parameters: Mapping[str, nn.Parameter], *, steps_done: int, compiled: bool
) -> FitError | None:
    """Translate a training step's error if it is DDP's or the compiler's.

    Args:
        error: what the forward pass, the loss or the backward pass raised. Any other error gets a
            note of the step (from Python 3.11 on).
        parameters: those that DDP knows, by name, in its order.
        steps_done: optimizer steps done.
        compiled: whether ``torch.compile`` is used.

    Returns:
        The error to raise from ``error``; None: raise ``error`` itself.
    """
    text = str(error)
    if _UNFINISHED in text or _CHANGED in text:
        names = _names_in(text, list(parameters))
        return _unused_parameters(names, static_graph="static_graph" in text)
    if compiled and any(kind.__module__.startswith(_COMPILERS) for kind in type(error).__mro__):
        lines = (line.strip() for line in text.splitlines())
        reason = next((line for line in lines if line), "no reason")
        return FitError(
            f"torch.compile cannot compile this model here: {type(error).__name__}: {reason}",
            allowed="models that torch.compile can trace, where there is a C++ compiler (on a GPU: "
            "Triton)",
            do="set train.compile: false; an error in the model itself then shows plainly",
        )
    if sys.version_info >= (3, 11):
        error.add_note(f"in optimizer step {steps_done + 1} of nb.fit")
    return None


def refuse_unused(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters without a gradient after a backward pass under DDP.

    DDP reports them one step later, without names; the ranks may wait for each other by then.

    Raises:
        FitError: there are any; names them.
    """
    names = [name for name, parameter in parameters.items() if parameter.grad is None]
    if names:
        raise _unused_parameters(names, static_graph=False)


def _unused_parameters(names: Sequence[str], *, static_graph: bool) -> FitError:
    """The error for parameters not used in a step of several ranks.

    Args:
        names: of the parameters; empty: not known.
        static_graph: whether ``distributed.static_graph`` is set.
    """
    shown = ", ".join(names[:5]) or "(DDP does not say which)"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    promise = "; distributed.static_graph promised the same ones in every step"
    unset = "static_graph: false and " if static_graph else ""
    return FitError(
        f"parameters took no part in the loss of a training step, and the ranks wait for their "
        f"gradients: {shown}{more}{promise if static_graph else ''}",
        allowed="models that use every trainable parameter in every step, unless DDP looks for "
        "the others",
        do=f"set distributed.{unset}find_unused_parameters: true (slower), or freeze them with "
        "requires_grad_(False)",
    )


def _names_in(text: str, names: Sequence[str]) -> list[str]:
    """The names behind "Parameter indices which did not receive grad for rank 1: 2 3"."""
    match = re.search(r"Parameter indices which did not receive grad for rank \d+:([ \d]+)", text)
    return [names[int(index)] for index in match[1].split()] if match else []
