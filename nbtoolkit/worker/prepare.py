"""Prepare the model, optimizer and loaders of a user's own loop."""

from __future__ import annotations

from collections.abc import Iterable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import PlanError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, nn

    from nbtoolkit.config.schema import Config
    from nbtoolkit.worker.context import RunContext
    from nbtoolkit.worker.even_steps import EvenSteps


def prepared_inputs(ctx: RunContext, objects: Iterable[object], steps: EvenSteps) -> list[object]:
    """Return the objects for accelerate: models checked, loaders with this rank's slices."""
    from torch import nn
    from torch.utils.data import DataLoader

    from nbtoolkit.worker.sliced_loader import slice_loader

    inputs: list[object] = []
    loaders = 0
    for item in objects:
        if isinstance(item, nn.Module):
            item = _checked_model(ctx, item)
        elif isinstance(item, DataLoader):
            item = slice_loader(ctx, item, loaders, steps)
            loaders += 1
        inputs.append(item)
    if ctx.plan.strategy == "fsdp":
        # By its name: the strategy may import what this module must not.
        resolve_name("nbtoolkit.training.strategy:shard_inputs")(ctx, inputs)
    return inputs


def with_sync_batchnorm(ctx: RunContext, config: Config, model: nn.Module) -> nn.Module:
    """Return the model, with synchronised batch norm if ``distributed.sync_batchnorm`` is on."""
    from torch import nn

    if ctx.world_size == 1 or not config.distributed.sync_batchnorm:
        return model
    if ctx.device.type == "cpu":
        ctx.print("distributed.sync_batchnorm is ignored: torch supports it on GPUs only")
        return model
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


def with_data_parallel(ctx: RunContext, model: nn.Module) -> nn.Module:
    """Return the model; with ``strategy: dp`` in ``DataParallel``, over all devices of the plan.

    Its copies share no instance attributes with the model: what replaces its ``forward`` (autocast
    of ``Accelerator.prepare``) has to be applied to the wrapper.
    """
    from torch import nn

    if ctx.plan.strategy != "dp":
        return model
    return nn.DataParallel(model, device_ids=list(range(len(ctx.plan.devices))))


def make_accelerator(ctx: RunContext) -> Accelerator:
    """Return an ``Accelerator`` set up from the plan.

    :meth:`RunContext.prepare` calls its ``prepare``.
    """
    from datetime import timedelta

    from accelerate import Accelerator
    from accelerate.utils import (
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        InitProcessGroupKwargs,
        gather_object,
        recursively_apply,
    )
    from torch import nn

    from nbtoolkit.worker.even_steps import EvenSteps

    plan = ctx.plan
    even_steps = EvenSteps(ctx.world_size)

    class UnpaddedAccelerator(Accelerator):  # type: ignore[misc]
        """Divides batches without accelerate's padding, so the ranks may have uneven parts.

        Code written for accelerate calls its ``prepare``, so this class checks and slices.
        """

        def prepare(self, *args: Any, **options: Any) -> Any:
            prepared = super().prepare(*prepared_inputs(ctx, args, even_steps), **options)
            ctx.draws.prepared(item for item in args if isinstance(item, nn.Module))
            return prepared

        def prepare_model(
            self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
        ) -> Any:
            # Not wrapped: it is sharded already.
            unwrapped = evaluation_mode or plan.strategy == "fsdp"
            prepared = super().prepare_model(model, device_placement, unwrapped)
            even_steps.watch(prepared)
            ctx.watch_losses(prepared)
            return prepared

        def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: int = 2) -> Any:
            if plan.fsdp.get("offload"):
                raise PlanError(
                    "clip_grad_norm_ was called, and with distributed.offload the gradients are in "
                    "CPU memory, where the ranks cannot sum their norm",
                    allowed="train.max_grad_norm in nb.fit, or own loops without offload",
                    do="set distributed.offload: none, or train with nb.fit",
                )
            return super().clip_grad_norm_(parameters, max_norm, norm_type)

        def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
            if self.num_processes == 1:
                return super().gather_for_metrics(input_data, use_gather_object)
            try:
                recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
            except TypeError:
                use_gather_object = True
            if use_gather_object:
                return gather_object(input_data)
            return recursively_apply(self._gather_uneven, input_data)

        def _gather_uneven(self, tensor: Tensor) -> Tensor:
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

    return UnpaddedAccelerator(
        cpu=plan.device_type == "cpu",
        mixed_precision="no" if plan.precision == "fp32" else plan.precision,
        gradient_accumulation_steps=plan.accumulate,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
        kwargs_handlers=[
            DistributedDataParallelKwargs(**plan.ddp),
            InitProcessGroupKwargs(timeout=timedelta(seconds=plan.group_timeout)),
        ],
    )


def _checked_model(ctx: RunContext, model: nn.Module) -> nn.Module:
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    if isinstance(model, (DataParallel, DistributedDataParallel)):
        raise PlanError(
            f"the model is already wrapped: it is a {type(model).__name__}",
            allowed="the plain model: ctx.prepare wraps it for several ranks",
            do=f"delete the line with {type(model).__name__}(model)",
        )
    return with_data_parallel(ctx, with_sync_batchnorm(ctx, ctx.config, model))
