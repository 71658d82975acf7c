"""Define the launch plan, and divide a batch over processes and accumulation steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

from nbtoolkit.errors import PlanError
from nbtoolkit.text_table import html_table

# --- the batch ---
# One optimizer step's batch, divided over processes and accumulation steps.


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """``total = per_device x processes x accumulate``, in samples."""

    per_device: int
    """Samples in one process's forward pass: what has to fit in a device's memory."""
    processes: int
    accumulate: int
    """Forward passes of each process before an optimizer step."""

    @property
    def total(self) -> int:
        """Samples behind one optimizer step."""
        return self.per_device * self.processes * self.accumulate

    def on_one(self) -> BatchSplit:
        """The same step on one process: as many forward passes more, of the same size."""
        return replace(self, processes=1, accumulate=self.accumulate * self.processes)

    def __str__(self) -> str:
        steps = "step" if self.accumulate == 1 else "steps"
        who = "process" if self.processes == 1 else "processes"
        return (
            f"batch {self.total} = {self.per_device} x {self.processes} {who} "
            f"x {self.accumulate} accumulation {steps}"
        )


def split_batch(batch_size: int, *, processes: int, accumulate: int) -> BatchSplit:
    """Divide a global batch.

    Args:
        batch_size: samples behind one optimizer step, over all processes and accumulation steps.
        processes: how many processes share it.
        accumulate: forward passes of each process before an optimizer step.

    Raises:
        PlanError: it cannot be divided evenly; names the nearest sizes that can.
    """
    step = processes * accumulate
    if batch_size % step:
        below = batch_size - batch_size % step
        near = [str(size) for size in (below, below + step) if size]
        raise PlanError(
            f"train.batch_size {batch_size} cannot be split evenly over {processes} processes "
            f"x {accumulate} accumulation steps",
            allowed=f"multiples of {step}, such as {' or '.join(near)}",
            do=f"set train.batch_size: {near[-1]}, or another distributed.world_size",
        )
    return BatchSplit(per_device=batch_size // step, processes=processes, accumulate=accumulate)


# --- the plan ---


Start = Literal["forkserver", "fork", "inline"]
Precision = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What a launch will do. Made by ``make_plan``; frozen, picklable, plain data inside."""

    start: Start = "forkserver"
    """Who starts the processes: the fork server, a fork of this process, or nobody (in place)."""
    processes: int = 1
    """How many ranks."""
    device_type: Literal["cuda", "cpu"] = "cpu"
    devices: tuple[str, ...] = ()
    """What CUDA_VISIBLE_DEVICES is given: UUIDs, rank by rank; empty on the CPU."""
    device_names: tuple[str, ...] = ()
    """The devices' names, for people."""
    strategy: Literal["single", "ddp"] = "single"
    """``ddp`` where there is more than one process."""
    backend: Literal["nccl", "gloo"] | None = None
    """How the ranks talk; None for one process."""
    precision: Precision = "fp32"
    global_batch_size: int
    """Samples behind one optimizer step: ``batch_size_per_device * processes * accumulate``."""
    batch_size_per_device: int
    """Samples in one rank's forward pass."""
    accumulate: int = 1
    """Forward passes of each rank before an optimizer step."""
    lr_factor: float = 1.0
    """What ``optim.lr`` is multiplied with (``optim.lr_rule``, with ``batch_size_per_device``)."""
    threads_per_rank: int = 1
    """CPU threads of one rank (OMP_NUM_THREADS)."""
    fallback: bool = True
    """Whether one process may take over when the ranks cannot form a group."""
    port: int | None = None
    """Where the ranks meet; None: a free port is picked."""
    group_timeout: float = 1800.0
    """Seconds a collective may wait before the group gives up."""
    ddp: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments for DistributedDataParallel."""
    reasons: tuple[str, ...] = ()
    """Why, one sentence a decision."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ddp", MappingProxyType(dict(self.ddp)))

    def __reduce__(self) -> tuple[Any, ...]:
        return LaunchPlan.from_dict, (self.to_dict(),)  # a mapping proxy cannot be pickled

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-able data; :meth:`from_dict` makes an equal plan of it."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: _plain(value) for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LaunchPlan:
        """Rebuild a plan from :meth:`to_dict`'s data, also after a trip through JSON.

        Raises:
            TypeError: a key is missing or unknown.
        """
        lists = ("devices", "device_names", "reasons")
        read: dict[str, Any] = {k: tuple(v) if k in lists else v for k, v in values.items()}
        return cls(**read)

    def explain(self) -> str:
        """One line of what will happen, then the reasons, one a line."""
        return "\n".join([self._headline(), *(f"  - {reason}" for reason in self.reasons)])

    def _headline(self) -> str:
        talk = f" ({self.strategy} over {self.backend})" if self.backend else ""
        who = "1 process" if self.processes == 1 else f"{self.processes} processes"
        return (
            f"plan: {who} on {self._where()}{talk}, {self.precision}, "
            f"batch {self.global_batch_size}, start: {self.start}"
        )

    def _where(self) -> str:
        names = dict.fromkeys(self.device_names)
        counted = (f"{self.device_names.count(name)} x {name}" for name in names)
        return ", ".join(counted) or "the CPU"

    def _repr_html_(self) -> str:
        batch = f"{self.global_batch_size} = {self.batch_size_per_device} x {self.processes}"
        rows: list[tuple[str, object]] = [
            ("processes", f"{self.processes}, started by: {self.start}"),
            ("devices", self._where()),
            ("strategy", f"{self.strategy} over {self.backend}" if self.backend else self.strategy),
            ("precision", self.precision),
            ("batch", f"{batch} x {self.accumulate} (a rank, ranks, accumulation)"),
            ("learning rate", f"optim.lr x {self.lr_factor:g}"),
            ("CPU threads a rank", self.threads_per_rank),
        ]
        return html_table("launch plan", rows, self.reasons)


def same_ranks(one: LaunchPlan, other: LaunchPlan) -> bool:
    """Whether ranks that were started for one plan can work by the other."""
    names = ("processes", "devices", "device_type", "backend", "precision", "threads_per_rank")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value
