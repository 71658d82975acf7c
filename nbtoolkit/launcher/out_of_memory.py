"""Decide whether memory ran out, and whether smaller forward passes of the same batch can help."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nbtoolkit.environment.plan import may_accumulate_more
from nbtoolkit.environment.resources import memory_kills
from nbtoolkit.errors import LaunchError, PlanError
from nbtoolkit.launcher.outcome import Failed, OutOfMemory
from nbtoolkit.wire.serialization import PackedError, one_line, pack_error

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.environment.launch_plan import LaunchPlan

_TYPES = ("MemoryError", "OutOfMemoryError")
# In the RuntimeErrors of cuBLAS and of the CPU's allocator.
_TEXTS = ("out of memory", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a run raised because memory ran out, on a device or on the machine.

    Any SIGKILL counts: other senders of that signal are rare, and look the same afterwards.
    """
    if isinstance(error, LaunchError):  # which only guesses at the cause
        return False
    return _ran_out(type(error).__name__, str(error), kills=None)


def as_out_of_memory(
    failed: Failed, plan: LaunchPlan, config: Config, *, in_loop: bool, kills: int | None
) -> Failed:
    """Return an OutOfMemory for a failure because memory ran out, any other failure as it is.

    Args:
        failed: a rank's failure.
        plan: the plan under which it failed.
        config: the run's.
        in_loop: the rank was in a loop that follows ``plan.accumulate``.
        kills: the kernel's count of kills for memory before (:func:`memory_kills`). A SIGKILL is
            one of them if the count has risen, or is unknown.
    """
    error = failed.error
    rank = failed.rank
    cause = failed.cause
    if not _ran_out(error.type.rpartition(".")[2], error.text, kills):
        return failed
    if not may_accumulate_more(config):
        notes = (_advice(config),)
        return OutOfMemory(error=error, rank=rank, cause=cause, notes=notes, can_split=False)
    if in_loop and plan.batch_size_per_device == 1:
        error = _one_sample(failed, plan)
        return OutOfMemory(error=error, rank=rank, cause="final", can_split=False)
    return OutOfMemory(error=error, rank=rank, cause=cause, can_split=in_loop)


def _ran_out(kind: str, text: str, kills: int | None) -> bool:
    if kind == "WorkerDied":  # all that the kernel's killer leaves
        return "signal SIGKILL" in text and (kills is None or memory_kills() != kills)
    return kind in _TYPES or any(words in text.lower() for words in _TEXTS)


def _advice(config: Config) -> str:
    train = config.train
    per_device = train.batch_size_per_device is not None
    fixed = "batch_size_per_device" if per_device else "gradient_accumulation_steps"
    return (
        f"train.{fixed} is {getattr(train, fixed)}, which nothing changes: set a smaller batch, or "
        "train.batch_size with gradient_accumulation_steps: auto, which keeps the batch"
    )


def _one_sample(failed: Failed, plan: LaunchPlan) -> PackedError:
    error = PlanError(
        f"one sample per forward pass ran out of memory on rank {failed.rank} (batch "
        f"{plan.global_batch_size}: {plan.processes} x {plan.accumulate} accumulation steps of 1 "
        "sample); how much memory the model needs is unknown\n  "
        f"{one_line(failed.error.type, failed.error.text)}",
        allowed="a model whose weights, gradients and optimizer state fit into a device's memory, "
        "with the activations of one sample",
        do="use a smaller model or smaller inputs, train.activation_checkpointing: true, or a "
        "train.precision of 16 bits",
    )
    return replace(pack_error(error), stack=failed.error.stack, cause=failed.error)
