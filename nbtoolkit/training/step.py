"""Perform one optimizer step on one rank, and translate the errors inside it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

from nbtoolkit.errors import CheckpointError, FitError
from nbtoolkit.run.weights import load_weights
from nbtoolkit.training.losses import Passed, ReducedLoss, Reduction, agree, all_count, check_labels
from nbtoolkit.training.model import by_pixel, place, wrap
from nbtoolkit.training.optimizer import Schedule, make_optimizer, set_rate
from nbtoolkit.training.sampler import MicroBatch
from nbtoolkit.worker.collectives import gather_on_all

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nbtoolkit.config.schema import Config
    from nbtoolkit.training.averaging import Averages
    from nbtoolkit.worker.context import RunContext


# --- errors inside a step ---
# What goes wrong inside a training step, told in words that say what to set.


if TYPE_CHECKING:
    from torch import nn

    Parameters = Mapping[str, nn.Parameter]

_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_CHANGED = "Your training graph has changed in this iteration"
_COMPILERS = ("torch._dynamo", "torch._inductor")


def explain(
    error: Exception, parameters: Parameters, *, step: int, compiled: bool
) -> FitError | None:
    """What a training step's error means, where it is DDP's or the compiler's.

    Args:
        error: what the forward pass, the loss or the backward pass raised. Another one than these
            gets a note of the step (from Python 3.11 on), and stays what it is.
        parameters: those that DDP knows, by name, in its order.
        step: optimizer steps done.
        compiled: whether ``torch.compile`` had its hand in.

    Returns:
        The error to raise from ``error``; None: ``error`` itself.
    """
    text = str(error)
    if _UNFINISHED in text or _CHANGED in text:
        return unused(_unused_names(text, list(parameters)), static="static_graph" in text)
    if compiled and any(kind.__module__.startswith(_COMPILERS) for kind in type(error).__mro__):
        return _not_compiled(error)
    if sys.version_info >= (3, 11):
        error.add_note(f"in optimizer step {step + 1} of nb.fit")
    return None


def refuse_unused(parameters: Parameters) -> None:
    """Refuse parameters without a gradient after a backward pass under DDP.

    DDP says so one step later only, without names, and by then the ranks may wait for each other.

    Raises:
        FitError: there are any; names them.
    """
    names = [name for name, one in parameters.items() if one.grad is None]
    if names:
        raise unused(names, static=False)


def unused(names: Sequence[str], *, static: bool) -> FitError:
    """The error for parameters that took no part in a step of several ranks.

    Args:
        names: theirs; empty when nobody knows.
        static: whether ``distributed.static_graph`` had promised DDP that this does not change.
    """
    shown = ", ".join(names[:5]) or "(DDP does not say which)"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    promise = "; distributed.static_graph promised the same ones in every step" if static else ""
    before = "static_graph: false and " if static else ""
    return FitError(
        f"parameters took no part in the loss of a training step, and the ranks wait for their "
        f"gradients: {shown}{more}{promise}",
        allowed="models that use every trainable parameter in every step, unless DDP looks for "
        "the others",
        do=f"set distributed.{before}find_unused_parameters: true (slower), or freeze them with "
        "requires_grad_(False)",
    )


def _unused_names(text: str, names: Sequence[str]) -> list[str]:
    """The names behind "Parameter indices which did not receive grad for rank 1: 2 3"."""
    told = re.search(r"Parameter indices which did not receive grad for rank \d+:([ \d]+)", text)
    return [names[int(index)] for index in told[1].split()] if told else []


def _not_compiled(error: Exception) -> FitError:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason")
    return FitError(
        f"torch.compile cannot compile this model here: {type(error).__name__}: {reason}",
        allowed="models that torch.compile can trace, where there is a C++ compiler (on a GPU: "
        "Triton)",
        do="set train.compile: false; should the model itself be wrong, it then says so plainly",
    )


# --- the step ---


Forward: TypeAlias = "Callable[[torch.nn.Module, Any], tuple[Any, Any]]"
Loss: TypeAlias = "Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]]"


class TrainStep:
    """A model, its optimizer, and the way they take a step together with the other ranks.

    Args:
        ctx: the run's context; its plan has the precision and DDP's options.
        config: its sections ``optim, train, distributed``.
        model: changed in place.
        loss: ``loss(outputs, targets)``, as :func:`nbtoolkit.fit` takes it.
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
        self._clip: float | None = config.train.max_grad_norm
        self._ranks, self._compiled = ctx.world_size, config.train.compile
        self._complete = ctx.world_size > 1 and not _may_be_unused(config)
        self._precision, self._scaler = _precision(ctx), _scaler(ctx, config)
        self._forward = _by_pixel(forward) if config.train.channels_last else forward
        self._loss, self._targets = loss, targets
        self._reduced = ReducedLoss(loss, whole_batches=config.train.loss_reduction == "batch")
        self._judged, self._all_count = False, all_count(targets)
        # Of the passes since the last step: their samples, and the weights those had.
        self._samples = 0
        self._weights: list[Tensor] = []

    def take(self, batch: Any, share: MicroBatch, *, watch: bool) -> Passed:
        """One forward and backward pass, and the optimizer's step when it is the step's last.

        Nothing here waits for the device, but for the first batch's labels.

        Args:
            batch: what ``forward`` takes, on the device.
            share: what the pass counts for.
            watch: note the gradient's norm.

        Returns:
            The mean loss of the batch, detached, and what it counts for.

        Raises:
            FitError: a label has no score, the loss cannot be computed in parts, parameters take no
                part in the step of several ranks, or the model cannot be compiled. The user's own
                errors pass, with a note of the step.
        """
        try:
            if share.last:
                loss = self._pass(batch, share)
                self._finish(watch)
            else:
                loss = self._pass_alone(batch, share)
        except Exception as error:
            fault = explain(error, self._named, step=self.step, compiled=self._compiled)
            if fault is None:
                raise
            raise fault from error
        return loss

    def evaluate(self, batch: Any, samples: int) -> tuple[Any, Any, Passed]:
        """Outputs, targets and mean loss of a batch, without gradients or the other ranks.

        Of :attr:`evaluated`; its mode (``train`` or ``eval``) is the caller's.
        """
        import torch

        with torch.no_grad():
            outputs, targets, returned, weight = self._compute(self.evaluated, batch)
            return outputs, targets, self._reduced.reduce(returned, samples, weight)

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
            "reduction": int(self._reduced.reduction),
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
        self._reduced.reduction = Reduction(state["reduction"])

    def put_back(self, weights: Mapping[str, Any] | None) -> None:
        """Give the model of every rank the weights that rank 0 has; None there: they stay."""
        import torch
        import torch.distributed as dist

        if weights is not None:
            self.module.load_state_dict(weights)
        if self._ranks > 1:
            for value in self.module.state_dict().values():
                if isinstance(value, torch.Tensor):
                    dist.broadcast(value, src=0)

    def _pass(self, batch: Any, share: MicroBatch) -> Passed:
        """Forward and backward; under DDP the gradients are then the mean over the ranks."""
        outputs, targets, returned, weight = self._compute(self._model, batch)
        if not self._judged:
            self._judge(outputs, targets, returned, weight, share.samples)
        loss = self._reduced.reduce(returned, max(share.samples, 1), weight)
        factor = self._factor(loss, share)
        weighted = loss.mean if factor == 1.0 else loss.mean * factor
        self._scaler.scale(weighted).backward()
        return Passed(loss.mean.detach(), loss.weight)

    def _pass_alone(self, batch: Any, share: MicroBatch) -> Passed:
        """A pass that is not its step's last: gradients add up here, the other ranks wait."""
        if self._ranks == 1:
            return self._pass(batch, share)
        with self._model.no_sync():
            return self._pass(batch, share)

    def _compute(self, model: torch.nn.Module, batch: Any) -> tuple[Any, Any, Any, Tensor | None]:
        """Outputs, targets, what the loss returned, and by which weights torch's own divided."""
        with self._precision:
            if not self._reduced.weighs:
                outputs, targets = self._forward(model, batch)
                return outputs, targets, self._loss(outputs, targets), None
            from nbtoolkit.training.loss_weights import WeightSums

            weighing = WeightSums(all_count=self._all_count)
            # A compiler would have to trace what a mode does.
            with nullcontext() if self._compiled else weighing:
                outputs, targets = self._forward(model, batch)
            if not self._judged:
                self._check_labels(outputs, targets)
            with weighing:
                returned = self._loss(outputs, targets)
            return outputs, targets, returned, weighing.weight

    def _check_labels(self, outputs: Any, targets: Any) -> None:
        """Before the very first loss: a label without a score ends a process with a GPU."""
        check_labels(outputs, targets if self._targets is None else self._targets, self._loss)
        self._targets = None

    def _judge(
        self, outputs: Any, targets: Any, returned: Any, weight: Tensor | None, samples: int
    ) -> None:
        """All ranks find out together what the loss averages over, in the first pass."""
        whole = self._reduced.reduce(returned, max(samples, 1), weight)
        with self._precision:
            finding = self._reduced.judge(outputs, targets, samples, whole)
        self._reduced.reduction = agree(gather_on_all(finding, self._ranks))
        self._judged = True

    def _factor(self, loss: Passed, share: MicroBatch) -> Tensor | float:
        """What a pass counts for in its step; weights do until :meth:`_divide` knows them all."""
        if self._reduced.reduction is Reduction.SUM:
            return float(self._ranks * share.samples)
        if self._reduced.reduction is not Reduction.WEIGHTED:
            return share.weight
        alone = share.last and self._ranks == 1 and not self._weights
        if alone or not share.samples:
            return share.weight
        import torch

        weight = torch.as_tensor(loss.weight, device=loss.mean.device)
        self._samples += share.samples
        self._weights.append(weight)
        return weight * (share.weight / share.samples)

    def _divide(self) -> None:
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

    def _finish(self, watch: bool) -> None:
        """The optimizer's step, at the schedule's learning rate."""
        if self._complete:
            refuse_unused(self._named)
        if self._reduced.reduction is Reduction.WEIGHTED and (self._ranks > 1 or self._weights):
            self._divide()
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
