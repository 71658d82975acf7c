"""Prepare the model, optimizer and loaders of a user's own loop on this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import PlanError
from nbtoolkit.worker.batch_slices import sliced

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, nn

    from nbtoolkit.config.schema import Config
    from nbtoolkit.worker.context import RunContext


def _ready(ctx: RunContext, objects: tuple[Any, ...]) -> list[Any]:
    """What accelerate is to prepare: models checked, loaders that have this rank's slices."""
    from torch import nn
    from torch.utils.data import DataLoader

    ready: list[Any] = []
    number = 0
    for item in objects:
        if isinstance(item, nn.Module):
            item = _module(ctx, item)
        elif isinstance(item, DataLoader):
            item = sliced(ctx, item, number)
            number += 1
        ready.append(item)
    return ready


def with_sync_batchnorm(ctx: RunContext, config: Config, model: nn.Module) -> nn.Module:
    """The model with what ``distributed.sync_batchnorm`` asks for."""
    from torch import nn

    if ctx.world_size == 1 or not config.distributed.sync_batchnorm:
        return model
    if ctx.device.type == "cpu":
        ctx.print("distributed.sync_batchnorm is left out: torch has it for GPUs only")
        return model
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


def make_accelerator(ctx: RunContext) -> Accelerator:
    """An ``Accelerator`` set up from the plan; its ``prepare`` is :meth:`RunContext.prepare`."""
    from datetime import timedelta

    from accelerate import Accelerator
    from accelerate.utils import (
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        InitProcessGroupKwargs,
        gather_object,
        recursively_apply,
    )

    plan = ctx.plan

    class OfUnevenParts(Accelerator):  # type: ignore[misc]
        """Accelerate's own pads the last batch with samples again; here ranks have what there is.

        Code written for accelerate calls its ``prepare``, so that one checks and slices, too.
        """

        def prepare(self, *args: Any, **options: Any) -> Any:
            return super().prepare(*_ready(ctx, args), **options)

        def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
            if self.num_processes == 1:
                return super().gather_for_metrics(input_data, use_gather_object)
            try:
                recursively_apply(lambda one: one, input_data, error_on_other_type=True)
            except TypeError:
                use_gather_object = True
            if use_gather_object:
                return gather_object(input_data)
            return recursively_apply(self._gathered, input_data)

        def _gathered(self, tensor: Tensor) -> Tensor:
            import torch

            rows = torch.tensor([len(tensor) if tensor.ndim else -1], device=tensor.device)
            sizes = self.gather(rows).tolist()
            if len(set(sizes)) > 1:
                missing = tensor.new_zeros(max(sizes) - len(tensor), *tensor.shape[1:])
                parts = self.gather(torch.cat([tensor, missing])).split(max(sizes))
                pairs = zip(parts, sizes, strict=True)
                return torch.cat([part[:size] for part, size in pairs])
            gathered: Tensor = self.gather(tensor)
            return gathered

    return OfUnevenParts(
        cpu=plan.device_type == "cpu",
        mixed_precision="no" if plan.precision == "fp32" else plan.precision,
        gradient_accumulation_steps=plan.accumulate,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
        kwargs_handlers=[
            DistributedDataParallelKwargs(**plan.ddp),
            InitProcessGroupKwargs(timeout=timedelta(seconds=plan.group_timeout)),
        ],
    )


def _module(ctx: RunContext, model: nn.Module) -> nn.Module:
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    if isinstance(model, (DataParallel, DistributedDataParallel)):
        raise PlanError(
            f"the model is wrapped already: it is a {type(model).__name__}",
            allowed="the plain model: ctx.prepare wraps it for several ranks",
            do=f"delete the line with {type(model).__name__}(model)",
        )
    if ctx.world_size > 1 and ctx.config.train.loss_reduction == "auto":
        ctx.refuse_weighted_losses()
    return with_sync_batchnorm(ctx, ctx.config, model)
