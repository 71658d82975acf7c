"""Stepper: one optimizer step on one rank, together with the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeAlias

from nbtoolkit.errors import CheckpointError
from nbtoolkit.training.checkpoint import load_weights
from nbtoolkit.training.optimizer import make_optimizer
from nbtoolkit.training.order import Share
from nbtoolkit.training.schedule import Schedule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nbtoolkit.config import Config
    from nbtoolkit.runtime.context import RunContext

Forward: TypeAlias = "Callable[[torch.nn.Module, Any], tuple[Any, Any]]"
Loss: TypeAlias = "Callable[[Any, Any], Tensor]"

_NOTHING: AbstractContextManager[None] = nullcontext()


class Stepper:
    """A model, its optimizer, and the way they take a step together with the other ranks.

    Attributes:
        module: the user's model on this rank's device, unwrapped: for evaluation and checkpoints.
        step: optimizer steps done.
        rate: the learning rate of the last step.
        grad_norm: the gradient's norm before clipping, of the last watched step; None: none was.
    """

    def __init__(
        self,
        ctx: RunContext,
        config: Config,
        model: torch.nn.Module,
        loss: Loss,
        forward: Forward,
        schedule: Schedule,
    ) -> None:
        import torch

        self.step, self.rate = 0, 0.0
        self.grad_norm: Tensor | None = None
        self.module = _place(ctx, config, model)
        self.schedule = schedule
        self._loss, self._forward = loss, forward
        self._clip: float | None = config.train.clip_norm
        self._ranks = ctx.world_size
        self._model = _wrap(ctx, self.module)
        self._optimizer = make_optimizer(config, self.module)
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]
        scaled = ctx.plan.precision == "fp16" and ctx.device.type == "cuda"
        self._scaler = torch.amp.GradScaler(
            "cuda",
            init_scale=config.train.scaler_init_scale,
            growth_interval=config.train.scaler_growth_interval,
            enabled=scaled,
        )
        self._dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(ctx.plan.precision)
        self._device_type = ctx.device.type

    def take(self, batch: Any, share: Share, *, watch: bool) -> Tensor:
        """One forward and backward pass, and the optimizer's step when it is the step's last.

        Args:
            batch: what ``forward`` takes, on the device.
            share: what the pass counts for.
            watch: note the gradient's norm.

        Returns:
            The mean loss of the batch, detached.
        """
        with self._averaged_over_ranks(share.last):
            loss = self._compute(self._model, batch)[2]
            weighted = loss if share.weight == 1.0 else loss * share.weight
            self._scaler.scale(weighted).backward()
        if share.last:
            self._finish(watch)
        return loss.detach()

    def evaluate(self, batch: Any) -> tuple[Any, Any, Tensor]:
        """Outputs, targets and mean loss of a batch, without gradients or the other ranks."""
        import torch

        with torch.no_grad():
            return self._compute(self.module, batch)

    def share_buffers(self) -> None:
        """Give every rank rank 0's buffers: each rank's batch-norm saw its own batches."""
        import torch.distributed as dist

        if self._ranks > 1:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, src=0)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs; the schedule is a function of ``step``."""
        return {
            "model": self.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "step": self.step,
        }

    def restore(self, state: Mapping[str, Any], *, source: str) -> None:
        """Go on from a :meth:`state` that was read from ``source``.

        Raises:
            CheckpointError: it is another model's, or not of :meth:`state`.
        """
        if missing := {"optimizer", "scaler", "step"} - state.keys():
            raise CheckpointError(
                f"the checkpoint {source} was not written by fit: {', '.join(sorted(missing))} is "
                "missing",
                allowed="a run's own checkpoint, to go on from",
                do="give ctx.save another kind than 'last' in functions that call fit, too",
            )
        load_weights(state, self.module, source=source)
        self._optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        self.step = state["step"]

    def _compute(self, model: torch.nn.Module, batch: Any) -> tuple[Any, Any, Tensor]:
        with self._autocast():
            outputs, targets = self._forward(model, batch)
            return outputs, targets, self._loss(outputs, targets)

    def _finish(self, watch: bool) -> None:
        """The optimizer's step, at the schedule's learning rate."""
        self._scaler.unscale_(self._optimizer)
        if self._clip is not None:
            self.grad_norm = _clip(self._parameters, self._clip)
        elif watch:
            self.grad_norm = _norm(self._parameters)
        self.rate = self.schedule.rate(self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        self.step += 1

    def _averaged_over_ranks(self, last: bool) -> AbstractContextManager[Any]:
        """Only a step's last pass talks to the other ranks; gradients add up here until then."""
        if last or self._ranks == 1:
            return _NOTHING
        context: AbstractContextManager[Any] = self._model.no_sync()
        return context

    def _autocast(self) -> AbstractContextManager[Any]:
        import torch

        return _NOTHING if self._dtype is None else torch.autocast(self._device_type, self._dtype)


def _place(ctx: RunContext, config: Config, model: torch.nn.Module) -> torch.nn.Module:
    """The model on this rank's device, with batch-norm over all ranks if the config wants it."""
    import torch

    model = model.to(ctx.device)
    if ctx.world_size == 1 or not config.distributed.sync_batchnorm:
        return model
    if ctx.device.type == "cpu":
        ctx.print("fit: sync_batchnorm is left out: torch has it for GPUs only")
        return model
    converted: torch.nn.Module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


def _wrap(ctx: RunContext, module: torch.nn.Module) -> Any:
    """The model as the training step calls it."""
    from torch.nn.parallel import DistributedDataParallel

    if ctx.world_size == 1:
        return module
    device_ids = [ctx.device] if ctx.device.type == "cuda" else None
    options = dict(ctx.plan.ddp)
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters:  # since torch 2.13
        options["forward_sync_buffers"] = options.pop("broadcast_buffers")
    return DistributedDataParallel(module, device_ids=device_ids, **options)


def _clip(parameters: list[torch.nn.Parameter], limit: float) -> Tensor:
    import torch

    return torch.nn.utils.clip_grad_norm_(parameters, limit)


def _norm(parameters: list[torch.nn.Parameter]) -> Tensor:
    import torch  # torch.nn.utils.get_total_norm is public from torch 2.7 on only

    norm = torch.linalg.vector_norm
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total: Tensor = norm(torch.stack([norm(one, dtype=torch.float32) for one in gradients]))
    return total
