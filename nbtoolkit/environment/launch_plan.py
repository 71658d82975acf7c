"""Define the launch plan, and split a batch over processes and accumulation steps."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

from nbtoolkit.cards import properties_html
from nbtoolkit.errors import PlanError


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

Start = Literal["forkserver", "inline"]
Precision = Literal["fp32", "fp16", "bf16"]
Strategy = Literal["single", "ddp", "fsdp", "dp", "tensorflow"]


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What a launch will do, as ``make_plan`` decides; read-only, and can be pickled."""

    start: Start = "forkserver"
    """How the ranks start; see the argument ``start`` of :func:`nbtoolkit.launch`."""
    processes: int = 1
    """Number of ranks."""
    device_type: Literal["cuda", "cpu"] = "cpu"
    devices: tuple[str, ...] = ()
    """The devices' UUIDs for CUDA_VISIBLE_DEVICES, in order of rank; empty on the CPU."""
    device_names: tuple[str, ...] = ()
    """The names of the devices."""
    strategy: Strategy = "single"
    """How the ranks divide the model and the work. One rank has ``single``, or ``dp``, which is
    DataParallel: one process on several devices. Several ranks have ``ddp`` or ``fsdp``.
    ``tensorflow`` is TensorFlow's own strategy, in one rank on several devices."""
    backend: Literal["nccl", "gloo"] | None = None
    """Communication backend of the ranks; None for one process."""
    precision: Precision = "fp32"
    global_batch_size: int
    """Samples per optimizer step, ``batch_size_per_device * processes * accumulate``."""
    batch_size_per_device: int
    """Samples in one rank's forward pass."""
    accumulate: int = 1
    """Forward passes of each rank per optimizer step."""
    too_large: int | None = None
    """A number of samples that did not fit into the memory of these devices in one forward pass;
    None if no such number is known."""
    lr_factor: float = 1.0
    """The factor that multiplies ``optim.lr``. It is 1 unless ``optim.lr_rule`` and
    ``train.batch_size_per_device`` are set."""
    threads_per_rank: int = 1
    """CPU threads of one rank (OMP_NUM_THREADS)."""
    fallback: bool = True
    """Whether the launch continues with one process if the ranks cannot form a process group."""
    restarts: int = 0
    """How often the supervisor starts the ranks again after a failure."""
    port: int | None = None
    """The port of the rendezvous, or None for a free port."""
    group_timeout: float = 1800.0
    """The timeout of a collective operation, in seconds."""
    ddp: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments for DistributedDataParallel."""
    fsdp: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """How fsdp divides a model: ``reshard_after_forward`` (the weights are divided again between
    the forward and the backward pass), ``offload`` (the parts are in CPU memory), and ``replicas``
    (groups of ranks that each have the whole model)."""
    one_device_speed: float | None = None
    """Samples per second of one process on one device, as an earlier calibration measured them;
    None if there is no such calibration."""
    reasons: tuple[str, ...] = ()
    """The reason for each decision."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ddp", MappingProxyType(dict(self.ddp)))
        object.__setattr__(self, "fsdp", MappingProxyType(dict(self.fsdp)))

    def __reduce__(self) -> tuple[object, ...]:
        # A mapping proxy cannot be pickled; cloudpickle copies the code of a class's method.
        return _rebuild, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values for JSON, which :meth:`from_dict` reads."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: _plain(value) for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LaunchPlan:
        """Make a plan from the values that :meth:`to_dict` returned.

        Raises:
            TypeError: a key is missing or unknown.
        """
        lists = ("devices", "device_names", "reasons")
        read: dict[str, Any] = {k: tuple(v) if k in lists else v for k, v in values.items()}
        return cls(**read)

    def to_env_dict(self) -> dict[str, str]:
        """Return the plan as an environment variable, which :meth:`from_env` reads elsewhere."""
        return {PLAN_VARIABLE: json.dumps(self.to_dict())}

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> LaunchPlan | None:
        """Make a plan from the variable of :meth:`to_env_dict`; None if it is not set.

        Args:
            environ: the environment variables; None: those of this process.

        Raises:
            PlanError: the variable does not contain a plan of this version of nbtoolkit.
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
        return self.strategy if self.backend is None else f"{self.strategy} over {self.backend}"

    def _where(self) -> str:
        names = dict.fromkeys(self.device_names)
        counted = (f"{self.device_names.count(name)} x {name}" for name in names)
        return ", ".join(counted) or "the CPU"

    def _repr_html_(self) -> str:
        batch = f"{self.global_batch_size} = {self.batch_size_per_device} x {self.processes}"
        rows: list[tuple[str, object]] = [
            ("processes", f"{self.processes}, started by: {self.start}"),
            ("devices", self._where()),
            ("strategy", self._group()),
            ("precision", self.precision),
            ("batch", f"{batch} x {self.accumulate} (per rank, ranks, accumulation)"),
            ("learning rate", f"optim.lr x {self.lr_factor:g}"),
            ("CPU threads per rank", self.threads_per_rank),
        ]
        return properties_html("launch plan", rows, self.reasons)


def _plain(value: object) -> object:
    if isinstance(value, MappingProxyType):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def _rebuild(values: Mapping[str, Any]) -> LaunchPlan:
    return LaunchPlan.from_dict(values)
