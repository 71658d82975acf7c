"""Stepper: one optimizer step on one rank, together with the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

from nbtoolkit.errors import CheckpointError
from nbtoolkit.training.checkpoint import load_weights
from nbtoolkit.training.faults import explain, refuse_unused
from nbtoolkit.training.labels import check_labels
from nbtoolkit.training.optimizer import make_optimizer, set_rate
from nbtoolkit.training.order import Share
from nbtoolkit.training.placement import by_pixel, place, wrap
from nbtoolkit.training.schedule import Schedule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nbtoolkit.config import Config
    from nbtoolkit.runtime.context import RunContext
    from nbtoolkit.training.averaging import Averages

Forward: TypeAlias = "Callable[[torch.nn.Module, Any], tuple[Any, Any]]"
Loss: TypeAlias = "Callable[[Any, Any], Tensor]"


class Stepper:
    """A model, its optimizer, and the way they take a step together with the other ranks.

    Args:
        ctx: the run's context; its plan has the precision and DDP's options.
        config: its sections ``optim, train, distributed``.
        model: changed in place.
        loss: ``loss(outputs, targets)`` -> mean over the batch's samples.
        forward: ``forward(model, batch)`` -> (outputs, targets).
        schedule: the learning rate of every step.
        averages: of the model's weights; taken after every optimizer step. They can be set later,
            too, made from :attr:`module`.
        targets: all targets of the training set as ``forward`` returns them, if they are at hand:
            their labels are checked with the first batch (else only the batch's own).

    Attributes:
        module: the user's model on this rank's device, unwrapped: for evaluation and checkpoints.
        optimizer: over its trainable parameters.
        averages: the averages of its weights; None: there are none.
        step: optimizer steps done.
        rate: the learning rate of the last step.
        grad_norm: the gradient's norm before clipping, of the last watched step; None: none was.

    Raises:
        FitError: the model cannot be trained as ``config`` says.
    """

    def __init__(
        self,
        ctx: RunContext,
        config: Config,
        model: torch.nn.Module,
        loss: Loss,
        forward: Forward,
        schedule: Schedule,
        averages: Averages | None = None,
        targets: Any = None,
    ) -> None:
        self.step, self.rate = 0, 0.0
        self.grad_norm: Tensor | None = None
        self.schedule, self.averages = schedule, averages
        self.module = place(ctx, config, model)
        self._model = wrap(ctx, config, self.module, steps=schedule.total)
        self.optimizer = make_optimizer(config, self.module)
        named = self.module.named_parameters()
        self._named = {name: one for name, one in named if one.requires_grad}
        self._parameters = list(self._named.values())
        self._clip: float | None = config.train.clip_norm
        self._ranks, self._compiled = ctx.world_size, config.train.compile
        self._complete = ctx.world_size > 1 and not _may_be_unused(config)
        self._precision, self._scaler = _precision(ctx), _scaler(ctx, config)
        self._forward = _by_pixel(forward) if config.train.channels_last else forward
        self._unchecked_loss, self._targets = loss, targets
        self._loss: Loss = self._checked_loss

    def take(self, batch: Any, share: Share, *, watch: bool) -> Tensor:
        """One forward and backward pass, and the optimizer's step when it is the step's last.

        Nothing here waits for the device, but for the first batch's labels.

        Args:
            batch: what ``forward`` takes, on the device.
            share: what the pass counts for.
            watch: note the gradient's norm.

        Returns:
            The mean loss of the batch, detached.

        Raises:
            FitError: a label has no score, parameters take no part in the step of several ranks, or
                the model cannot be compiled. The user's own errors pass, with a note of the step.
        """
        try:
            if share.last:
                loss = self._pass(batch, share.weight)
                self._finish(watch)
            else:
                loss = self._pass_alone(batch, share.weight)
        except Exception as error:
            fault = explain(error, self._named, step=self.step, compiled=self._compiled)
            if fault is None:
                raise
            raise fault from error
        return loss

    def evaluate(self, batch: Any) -> tuple[Any, Any, Tensor]:
        """Outputs, targets and mean loss of a batch, without gradients or the other ranks.

        Of :attr:`evaluated`; its mode (``train`` or ``eval``) is the caller's.
        """
        import torch

        with torch.no_grad():
            return self._compute(self.evaluated, batch)

    @property
    def evaluated(self) -> torch.nn.Module:
        """The averaged module once there is an average, else the one that is trained."""
        averages = self.averages
        return averages.module if averages is not None and averages.active else self.module

    @property
    def skips_overflows(self) -> bool:
        """Whether a step that overflows is left out and harms nothing (fp16); waits for the device.

        No longer when the scale is below 1: of 65536 that is after 17 such steps, all but in a row.
        """
        return self._scaler.is_enabled() and self._scaler.get_scale() >= 1.0

    def share_buffers(self) -> None:
        """Give every rank rank 0's buffers: each rank's batch-norm saw its own batches."""
        import torch.distributed as dist

        if self._ranks > 1:
            averaged = [] if self.averages is None else [self.averages.module]
            for module in (self.module, *averaged):
                for buffer in module.buffers():
                    dist.broadcast(buffer, src=0)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, the same on all ranks."""
        state = {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "schedule": self.schedule.state(),
            "step": self.step,
        }
        return state if self.averages is None else {**state, "averages": self.averages.state()}

    def restore(self, state: Mapping[str, Any], *, source: str) -> None:
        """Go on from a :meth:`state` that was read from ``source``.

        Raises:
            CheckpointError: it is another model's, or not of :meth:`state`.
        """
        needed = {"optimizer", "scaler", "schedule", "step"}
        if missing := (needed if self.averages is None else needed | {"averages"}) - state.keys():
            raise CheckpointError(
                f"the checkpoint {source} was not written by fit: {', '.join(sorted(missing))} is "
                "missing",
                allowed="a run's own checkpoint, to go on from",
                do="give ctx.save another kind than 'last' in functions that call fit, too",
            )
        load_weights(state, self.module, source=source)
        self.optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        self.schedule.restore(state["schedule"])
        if self.averages is not None:
            self.averages.restore(state["averages"], source=source)
        self.step = state["step"]

    def _pass(self, batch: Any, weight: float) -> Tensor:
        """Forward and backward; under DDP the gradients are then the mean over the ranks."""
        loss = self._compute(self._model, batch)[2]
        weighted = loss if weight == 1.0 else loss * weight
        self._scaler.scale(weighted).backward()
        return loss.detach()

    def _pass_alone(self, batch: Any, weight: float) -> Tensor:
        """A pass that is not its step's last: gradients add up here, the other ranks wait."""
        if self._ranks == 1:
            return self._pass(batch, weight)
        with self._model.no_sync():
            return self._pass(batch, weight)

    def _compute(self, model: torch.nn.Module, batch: Any) -> tuple[Any, Any, Tensor]:
        with self._precision:
            outputs, targets = self._forward(model, batch)
            return outputs, targets, self._loss(outputs, targets)

    def _checked_loss(self, outputs: Any, targets: Any) -> Tensor:
        """The loss of the very first batch: the labels are looked at before, then never again."""
        everything = targets if self._targets is None else self._targets
        check_labels(outputs, everything, self._unchecked_loss)
        self._loss, self._targets = self._unchecked_loss, None
        return self._loss(outputs, targets)

    def _finish(self, watch: bool) -> None:
        """The optimizer's step, at the schedule's learning rate."""
        if self._complete:
            refuse_unused(self._named)
        self._scaler.unscale_(self.optimizer)
        if self._clip is not None:
            self.grad_norm = _clip(self._parameters, self._clip)
        elif watch:
            self.grad_norm = _norm(self._parameters)
        self._set_rate()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        for parameter in self._parameters:  # what zero_grad does, in 0.3 instead of 6 us
            parameter.grad = None
        self.step += 1
        if self.averages is not None:
            self.averages.update()

    def _set_rate(self) -> None:
        rate = None if self.averages is None else self.averages.rate(self.step)
        self.rate = self.schedule.rate(self.step) if rate is None else rate
        set_rate(self.optimizer, self.rate, self.schedule.momentum(self.step))


def _may_be_unused(config: Config) -> bool:
    """Whether DDP was told to do with parameters that take no part in a step."""
    return config.distributed.find_unused_parameters or config.distributed.static_graph


def _precision(ctx: RunContext) -> AbstractContextManager[Any]:
    """What forward pass and loss run in; one for all steps: making it takes longer than using."""
    import torch

    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(ctx.plan.precision)
    return nullcontext() if dtype is None else torch.autocast(ctx.device.type, dtype)


def _scaler(ctx: RunContext, config: Config) -> torch.amp.GradScaler:
    """Keeps the gradients of fp16 from vanishing; does nothing for other precisions."""
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


def _by_pixel(forward: Forward) -> Forward:
    return lambda model, batch: forward(model, by_pixel(batch))


def _clip(parameters: list[torch.nn.Parameter], limit: float) -> Tensor:
    import torch

    return torch.nn.utils.clip_grad_norm_(parameters, limit)


def _norm(parameters: list[torch.nn.Parameter]) -> Tensor:
    import torch  # torch.nn.utils.get_total_norm is public from torch 2.7 on only

    norm = torch.linalg.vector_norm
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total: Tensor = norm(torch.stack([norm(one, dtype=torch.float32) for one in gradients]))
    return total
