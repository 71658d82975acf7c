"""Define the launch plan, and split a batch over processes and accumulation steps."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

from nbtoolkit.errors import PlanError
from nbtoolkit.text_table import html_table


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """Split of an optimizer step's batch: ``total = per_device x processes x accumulate``."""

    per_device: int
    """Samples in one process's forward pass, which must fit into a device's memory."""
    processes: int
    accumulate: int
    """Forward passes of each process before an optimizer step."""

    @property
    def total(self) -> int:
        """Samples per optimizer step."""
        return self.per_device * self.processes * self.accumulate

    def on_one_process(self) -> BatchSplit:
        """Return the same batch on one process, with more forward passes of the same size."""
        return replace(self, processes=1, accumulate=self.accumulate * self.processes)

    def __str__(self) -> str:
        steps = "step" if self.accumulate == 1 else "steps"
        processes = "process" if self.processes == 1 else "processes"
        return (
            f"batch {self.total} = {self.per_device} x {self.processes} {processes} "
            f"x {self.accumulate} accumulation {steps}"
        )


def split_batch(batch_size: int, *, processes: int, accumulate: int) -> BatchSplit:
    """Split a global batch.

    Args:
        batch_size: samples per optimizer step, over all processes and accumulation steps.
        processes: number of processes.
        accumulate: forward passes of each process per optimizer step.

    Raises:
        PlanError: the batch cannot be split evenly; names the nearest sizes that can.
    """
    step = processes * accumulate
    if batch_size % step:
        below = batch_size - batch_size % step
        nearest = [str(size) for size in (below, below + step) if size]
        raise PlanError(
            f"train.batch_size {batch_size} cannot be split evenly over {processes} processes "
            f"x {accumulate} accumulation steps",
            allowed=f"multiples of {step}, such as {' or '.join(nearest)}",
            do=f"set train.batch_size: {nearest[-1]}, or another distributed.world_size",
        )
    return BatchSplit(per_device=batch_size // step, processes=processes, accumulate=accumulate)


PLAN_VARIABLE = "NBTOOLKIT_PLAN"
"""See :meth:`LaunchPlan.to_env_dict`."""

Start = Literal["forkserver", "fork", "inline"]
Precision = Literal["fp32", "fp16", "bf16"]
Strategy = Literal[
    "single", "ddp", "fsdp", "deepspeed", "local_sgd", "pipeline", "dp", "tensorflow"
]


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What a launch will do; a frozen, picklable value made by ``make_plan``."""

    start: Start = "forkserver"
    """How processes start: by the fork server, by a fork of this process, or not (in place)."""
    processes: int = 1
    """Number of ranks."""
    device_type: Literal["cuda", "cpu"] = "cpu"
    devices: tuple[str, ...] = ()
    """UUIDs for CUDA_VISIBLE_DEVICES, in order of rank; empty on the CPU."""
    device_names: tuple[str, ...] = ()
    """Names of the devices."""
    strategy: Strategy = "single"
    """With more than one process ``ddp``, ``fsdp``, ``deepspeed``, ``local_sgd`` or ``pipeline``;
    ``dp``: DataParallel, one process on several devices; ``tensorflow``: its own, of one process or
    several."""
    backend: Literal["nccl", "gloo"] | None = None
    """Communication backend of the ranks; None for one process."""
    precision: Precision = "fp32"
    global_batch_size: int
    """Samples per optimizer step: ``batch_size_per_device * data_ranks * accumulate``."""
    batch_size_per_device: int
    """Samples in one rank's forward pass."""
    accumulate: int = 1
    """Forward passes of each rank per optimizer step."""
    too_large: int | None = None
    """Samples of a forward pass that did not fit into these devices' memory; None: unknown."""
    lr_factor: float = 1.0
    """Factor of ``optim.lr`` (``optim.lr_rule``, with ``batch_size_per_device``)."""
    threads_per_rank: int = 1
    """CPU threads of one rank (OMP_NUM_THREADS)."""
    fallback: bool = True
    """Whether one process replaces ranks that cannot form a group."""
    port: int | None = None
    """Port of the rendezvous; None: a free port."""
    group_timeout: float = 1800.0
    """Timeout of a collective in seconds."""
    ddp: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments for DistributedDataParallel."""
    one_device_speed: float | None = None
    """Samples per second of one process on one device, from a kept calibration; None: unknown."""
    predicted_speed: float | None = None
    """Samples per second of this plan's strategy, from a kept calibration; None: unknown."""
    reasons: tuple[str, ...] = ()
    """The reason for each decision."""

    @property
    def data_ranks(self) -> int:
        """The number of ranks that have samples of their own; in a pipeline all have the same."""
        return 1 if self.strategy == "pipeline" else self.processes

    def __post_init__(self) -> None:
        object.__setattr__(self, "ddp", MappingProxyType(dict(self.ddp)))

    def __reduce__(self) -> tuple[object, ...]:
        # A mapping proxy cannot be pickled; cloudpickle copies the code of a class's method.
        return _rebuild, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """Convert the plan to JSON data, for :meth:`from_dict`."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: _plain(value) for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LaunchPlan:
        """Rebuild a plan from the data of :meth:`to_dict`.

        Raises:
            TypeError: a key is missing or unknown.
        """
        lists = ("devices", "device_names", "reasons")
        read: dict[str, Any] = {k: tuple(v) if k in lists else v for k, v in values.items()}
        return cls(**read)

    def to_env_dict(self) -> dict[str, str]:
        """Return the plan as an environment variable, for :meth:`from_env` in another process."""
        return {PLAN_VARIABLE: json.dumps(self.to_dict())}

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> LaunchPlan | None:
        """Rebuild the plan of :meth:`to_env_dict`; None: there is none.

        Args:
            environ: the variables; None for those of this process.

        Raises:
            PlanError: the variable holds something else, or the plan of another version.
        """
        text = (os.environ if environ is None else environ).get(PLAN_VARIABLE)
        if text is None:
            return None
        try:
            return cls.from_dict(json.loads(text))
        except (ValueError, TypeError, AttributeError) as error:
            raise PlanError(
                f"{PLAN_VARIABLE} holds no plan of this version: {error}",
                allowed="what plan.to_env_dict() returns, with the same version of nbtoolkit",
                do=f"unset {PLAN_VARIABLE}, or write it again",
            ) from error

    def explain(self) -> str:
        """Describe the plan in one line, followed by one line per reason."""
        return "\n".join([self._headline(), *(f"  - {reason}" for reason in self.reasons)])

    def _headline(self) -> str:
        group = f" ({self._group()})" if self.strategy != "single" else ""
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes"
        return (
            f"plan: {processes} on {self._where()}{group}, {self.precision}, "
            f"batch {self.global_batch_size}, start: {self.start}"
        )

    def _group(self) -> str:
        # TensorFlow has connections of its own; gloo carries ctx.save and the like.
        plain = self.backend is None or self.strategy == "tensorflow"
        return self.strategy if plain else f"{self.strategy} over {self.backend}"

    def _where(self) -> str:
        names = dict.fromkeys(self.device_names)
        counted = (f"{self.device_names.count(name)} x {name}" for name in names)
        return ", ".join(counted) or "the CPU"

    def _repr_html_(self) -> str:
        batch = f"{self.global_batch_size} = {self.batch_size_per_device} x {self.data_ranks}"
        rows: list[tuple[str, object]] = [
            ("processes", f"{self.processes}, started by: {self.start}"),
            ("devices", self._where()),
            ("strategy", self._group()),
            ("precision", self.precision),
            ("batch", f"{batch} x {self.accumulate} (per rank, ranks, accumulation)"),
            ("learning rate", f"optim.lr x {self.lr_factor:g}"),
            ("CPU threads per rank", self.threads_per_rank),
        ]
        return html_table("launch plan", rows, self.reasons)


def same_ranks(plan: LaunchPlan, other: LaunchPlan) -> bool:
    """Return whether ranks that were started for one plan can run the other."""
    return fixed_by_ranks(plan) == fixed_by_ranks(other)


def fixed_by_ranks(plan: LaunchPlan) -> tuple[object, ...]:
    """Return what ranks take from a plan when they start, and cannot change later."""
    names = ("processes", "devices", "device_type", "backend", "precision", "threads_per_rank")
    return tuple(getattr(plan, name) for name in names)


def _plain(value: object) -> object:
    if isinstance(value, MappingProxyType):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def _rebuild(values: Mapping[str, Any]) -> LaunchPlan:
    return LaunchPlan.from_dict(values)
