"""Make a frozen launch plan from a configuration, a host and its hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nbtoolkit.config.schema import ConfigLike, as_config
from nbtoolkit.environment.hardware import Hardware
from nbtoolkit.environment.launch_plan import BatchSplit, Precision, Start, split_batch
from nbtoolkit.environment.launch_plan import LaunchPlan as LaunchPlan
from nbtoolkit.environment.nvml import Device
from nbtoolkit.environment.placement import DevicePlacement, place_processes
from nbtoolkit.errors import GroupStartFailed, PlanError
from nbtoolkit.host import Host

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config

_DDP = (
    "find_unused_parameters",
    "broadcast_buffers",
    "gradient_as_bucket_view",
    "bucket_cap_mb",
    "static_graph",
)


@dataclass(frozen=True)
class GroupFailure:
    """Evidence: the ranks were started, but could not form a process group."""

    reason: str


@dataclass(frozen=True)
class PortBusy:
    """Evidence: another program listens where the ranks were to meet."""

    port: int


Evidence = GroupFailure | PortBusy


def make_plan(
    config: ConfigLike,
    host: Host,
    hardware: Hardware,
    evidence: Sequence[Evidence] = (),
    *,
    start: Start = "forkserver",
) -> LaunchPlan:
    """Decide what a launch does. Pure: equal arguments give equal plans, and nothing is touched.

    Args:
        config: what the user wishes.
        host: where this process runs; in a process that torchrun or Slurm started as a rank the
            plan is to run in place.
        hardware: what can be computed on.
        evidence: what was learnt by trying an earlier plan.
        start: who is to start the processes; ``"inline"`` leaves room for one.

    Raises:
        PlanError: the wish cannot be met on this machine; the message names what can.
        GroupStartFailed: evidence says that the ranks cannot form a group, and
            ``distributed.fallback`` is off.
    """
    start = "inline" if host.is_rank else start
    config = as_config(config)
    placement = place_processes(config, host, hardware, start)
    batch, lr_factor, about_batch = _batch(config, placement.processes)
    placement, batch, learnt = _learn(config, host, evidence, placement, batch)
    precision, about_precision = _precision(config.train.precision, placement.devices)
    backend, about_backend = _backend(config.distributed.backend, placement)
    threads, about_threads = _threads(host, hardware, placement.processes)
    port, about_port = _port(config.distributed.port, evidence, placement.processes)
    return LaunchPlan(
        start=start,
        processes=placement.processes,
        device_type="cuda" if placement.devices else "cpu",
        devices=tuple(device.uuid for device in placement.devices),
        device_names=tuple(device.name for device in placement.devices),
        strategy="ddp" if placement.processes > 1 else "single",
        backend=backend,
        precision=precision,
        global_batch_size=batch.total,
        batch_size_per_device=batch.per_device,
        accumulate=batch.accumulate,
        lr_factor=lr_factor,
        threads_per_rank=threads,
        fallback=config.distributed.fallback,
        port=port,
        group_timeout=float(config.distributed.timeout),
        ddp={name: getattr(config.distributed, name) for name in _DDP},
        reasons=(
            *learnt,
            *placement.reasons,
            about_precision,
            *about_backend,
            *about_port,
            str(batch),
            *about_batch,
            about_threads,
        ),
    )


def _batch(config: Config, processes: int) -> tuple[BatchSplit, float, tuple[str, ...]]:
    """The step's division, the factor for the learning rate, and what is to be said about them."""
    train, rule = config.train, config.optim.lr_rule
    whole = "the loss is one of whole batches (train.loss_reduction: batch): it "
    loss = (f"{whole}depends on the number of ranks",) if train.loss_reduction == "batch" else ()
    accumulate = (
        1 if train.gradient_accumulation_steps == "auto" else train.gradient_accumulation_steps
    )
    if train.batch_size_per_device is None:
        split = split_batch(train.batch_size, processes=processes, accumulate=accumulate)
        return split, 1.0, loss
    split = BatchSplit(
        per_device=train.batch_size_per_device, processes=processes, accumulate=accumulate
    )
    growth = processes * accumulate
    factor = {"none": 1.0, "linear": float(growth), "sqrt": growth**0.5}[rule]
    said = (
        f"learning rate x {factor:g}: train.batch_size_per_device is set, optim.lr_rule is {rule}"
    )
    return split, factor, (said, *loss)


def _learn(
    config: Config,
    host: Host,
    evidence: Sequence[Evidence],
    placement: DevicePlacement,
    batch: BatchSplit,
) -> tuple[DevicePlacement, BatchSplit, tuple[str, ...]]:
    """Fall back to one process when the ranks could not form a group; the step stays the same."""
    failures = [item for item in evidence if isinstance(item, GroupFailure)]
    busy = [f"port {item.port} was busy" for item in evidence if isinstance(item, PortBusy)]
    if placement.processes == 1 or not failures:
        return placement, batch, tuple(busy)
    what = f"{placement.processes} ranks could not form a process group: {failures[-1].reason}"
    if host.is_rank or not config.distributed.fallback:
        raise GroupStartFailed(
            what,
            allowed="one process (distributed.world_size: 1), or a machine on which they can",
            do="see the ranks' logs"
            if host.is_rank
            else "set distributed.fallback: true to go on with one process by itself",
        )
    alone = batch.on_one()
    said = (
        f"FALLING BACK TO ONE PROCESS: {what}",
        f"accumulation {batch.accumulate} -> {alone.accumulate} on one process: the same "
        f"{batch.per_device} samples a forward pass, the same {batch.total} a step",
    )
    return placement.on_one("the group could not be formed"), alone, said


def _precision(
    wish: Literal["auto"] | Precision, devices: Sequence[Device]
) -> tuple[Precision, str]:
    """By compute capability, not ``is_bf16_supported()``, which counts emulation (as on a T4)."""
    if not devices:
        return _precision_on_cpu(wish)
    weakest = min(devices, key=lambda device: device.capability)
    card, native = f"{weakest.name} is {weakest.sm}", weakest.capability >= (8, 0)
    if wish == "bf16":
        note = "computes it natively" if native else "EMULATES it, slower than fp32"
        return "bf16", f"bf16: train.precision says so; {card} and {note}"
    if wish != "auto":
        return wish, f"{wish}: train.precision says so"
    if native:
        return "bf16", f"bf16: {card}, which computes it natively (from sm_80 on)"
    if weakest.capability >= (7, 0):
        return "fp16", f"fp16: {card}, bf16 would be emulated"
    return "fp32", f"fp32: {card}, which has no tensor cores for fp16 (they begin with sm_70)"


def _precision_on_cpu(wish: Literal["auto"] | Precision) -> tuple[Precision, str]:
    if wish == "fp16":
        raise PlanError(
            "train.precision is fp16, but the run is on the CPU, and fp16 needs a GPU",
            allowed="fp32, bf16 or auto",
            do="set train.precision: auto (fp32 on the CPU, fp16 or bf16 on a GPU)",
        )
    if wish == "bf16":
        return "bf16", "bf16: train.precision says so"
    return (
        "fp32",
        "fp32: the run is on the CPU" if wish == "auto" else "fp32: train.precision says so",
    )


def _backend(
    wish: str, placement: DevicePlacement
) -> tuple[Literal["nccl", "gloo"] | None, tuple[str, ...]]:
    if wish == "nccl" and not placement.devices:
        raise PlanError(
            "distributed.backend is nccl, which needs a GPU for every process, but the run is on "
            "the CPU",
            allowed="auto or gloo",
            do="set distributed.backend: auto (nccl on GPUs, gloo on the CPU)",
        )
    if placement.processes == 1:
        return None, ()
    if wish == "gloo" and placement.devices:
        return "gloo", ("gloo: distributed.backend says so; nccl is faster between GPUs",)
    if placement.devices:
        return "nccl", ("nccl: every process has a GPU",)
    return "gloo", ("gloo: the processes are on the CPU",)


def _threads(host: Host, hardware: Hardware, processes: int) -> tuple[int, str]:
    here = host.local_world_size if host.is_rank else processes
    threads = max(1, hardware.cpu_count // here)
    return threads, f"CPU threads a process: {threads} ({hardware.cpu_count} CPUs for {here})"


def _port(
    wish: int | Literal["auto"], evidence: Sequence[Evidence], processes: int
) -> tuple[int | None, tuple[str, ...]]:
    if processes == 1:
        return None, ()
    busy = any(isinstance(item, PortBusy) for item in evidence)
    if busy or wish == "auto":
        return None, ("port: a free one is picked",)
    return wish, (f"port {wish}: distributed.port says so",)
