"""Decide what follows when a rank has run out of memory: more accumulation steps, or an error."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nbtoolkit.environment.plan import OutOfMemory, may_accumulate_more
from nbtoolkit.errors import PlanError
from nbtoolkit.launcher.failures import Failure
from nbtoolkit.run.serialization import one_line, pack_error

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.environment.launch_plan import LaunchPlan


def after_out_of_memory(
    failure: Failure, plan: LaunchPlan, config: Config, *, in_loop: bool, may_restart: bool
) -> Failure | OutOfMemory:
    """Return the evidence for another plan, or the failure with advice.

    Args:
        failure: a rank ran out of memory.
        plan: the plan under which it did.
        config: the run's.
        in_loop: the rank was in a loop that follows ``plan.accumulate``.
        may_restart: the run may start its ranks again.
    """
    failure, train = replace(failure, out_of_memory=True), config.train
    if may_accumulate_more(config):
        if in_loop and plan.batch_size_per_device == 1:
            return _one_sample(failure, plan)
        restarts = in_loop and may_restart
        return OutOfMemory(plan.batch_size_per_device) if restarts else failure
    per_device = train.batch_size_per_device is not None
    fixed = "batch_size_per_device" if per_device else "gradient_accumulation_steps"
    advice = (
        f"train.{fixed} is {getattr(train, fixed)}, which nothing changes: set a smaller batch, or "
        "train.batch_size with gradient_accumulation_steps: auto, which keeps the batch"
    )
    return replace(failure, notes=[*failure.notes, advice])


def _one_sample(failure: Failure, plan: LaunchPlan) -> Failure:
    error = PlanError(
        f"one sample per forward pass ran out of memory on rank {failure.rank} (batch "
        f"{plan.global_batch_size}: {plan.processes} x {plan.accumulate} accumulation steps of 1 "
        "sample); how much memory the model needs is unknown\n  "
        f"{one_line(failure.error.type, failure.error.text)}",
        allowed="a model whose weights, gradients and optimizer state fit into a device's memory, "
        "with the activations of one sample",
        do="use a smaller model or smaller inputs, train.activation_checkpointing: true, or a "
        "train.precision of 16 bits",
    )
    packed = replace(pack_error(error), frames=failure.error.frames, cause=failure.error)
    return replace(failure, error=packed)
