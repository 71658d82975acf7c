"""Make a frozen launch plan from a configuration, a host and its hardware."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from nbtoolkit.config.schema import ConfigLike, as_config
from nbtoolkit.environment.hardware import Device, Hardware
from nbtoolkit.environment.launch_plan import (
    BatchSplit,
    Precision,
    Start,
    Strategy,
    split_batch,
)
from nbtoolkit.environment.launch_plan import LaunchPlan as LaunchPlan
from nbtoolkit.environment.placement import DevicePlacement, MeasuredSpeed, place_processes
from nbtoolkit.errors import GroupStartFailed, PlanError
from nbtoolkit.host import Host

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config, Distributed

_DDP = (
    "find_unused_parameters",
    "broadcast_buffers",
    "gradient_as_bucket_view",
    "bucket_cap_mb",
    "static_graph",
)


AUTO_RESTARTS = 2
"""What ``runtime.restarts: auto`` means where nobody watches."""


@dataclass(frozen=True)
class GroupNotFormed:
    """Evidence that started ranks could not form a process group; ``late``: not in time."""

    reason: str
    late: bool = False


@dataclass(frozen=True)
class PortBusy:
    """Evidence that another program uses the port of the rendezvous."""

    port: int


@dataclass(frozen=True)
class BatchTooLarge:
    """Evidence that a forward pass of so many samples did not fit into a rank's memory."""

    samples: int


Evidence = GroupNotFormed | PortBusy | BatchTooLarge | MeasuredSpeed


def make_plan(
    config: ConfigLike,
    host: Host,
    hardware: Hardware,
    evidence: Sequence[Evidence] = (),
    *,
    start: Start = "forkserver",
) -> LaunchPlan:
    """Decide what a launch does; this starts and changes nothing.

    Args:
        config: a Config, a path to a YAML file, or a dict; None: the defaults.
        host: the host of this process. If torchrun, Slurm or another launcher started this process
            as a rank, the plan runs the training function in this process.
        hardware: the devices, the CPUs and the memory.
        evidence: measured speeds, and what went wrong with earlier plans: the ranks could not form
            a group, a port was busy, or memory ran out.
        start: how the ranks start; ``"inline"`` allows only one rank.

    Raises:
        PlanError: this machine cannot meet the configuration; the message says what is possible.
        GroupStartFailed: the ranks of an earlier plan could not form a group (the argument
            ``evidence`` contains this), and a fallback to one process is not possible:
            ``distributed.fallback`` is false, or this process is a rank itself.
    """
    start = "inline" if host.is_rank else start
    config = as_config(config)
    speed = next((item for item in evidence if isinstance(item, MeasuredSpeed)), None)
    placement = place_processes(config, host, hardware, start, speed)
    batch, lr_factor, batch_notes = _batch(config, placement.processes, placement.replicas)
    placement, batch, fallback_notes = _apply_evidence(config, host, evidence, placement, batch)
    batch, too_large, memory_notes = _fit_memory(config, evidence, batch)
    precision, precision_note = _precision(config.train.precision, placement.devices)
    strategy, fsdp, strategy_notes = _strategy(config.distributed, placement)
    if fsdp.get("offload"):
        precision, precision_note = _without_loss_scale(config, precision, precision_note)
    backend, backend_notes = _backend(config.distributed.backend, placement)
    threads, threads_note = _threads(host, hardware, placement.processes)
    restarts, restart_notes = _restarts(config.runtime.restarts, host, start)
    port, port_notes = _port(config.distributed.port, evidence, placement.processes)
    return LaunchPlan(
        start=start,
        processes=placement.processes,
        device_type="cuda" if placement.devices else "cpu",
        devices=tuple(device.uuid for device in placement.devices),
        device_names=tuple(device.name for device in placement.devices),
        strategy=strategy,
        backend=backend,
        precision=precision,
        global_batch_size=batch.total,
        batch_size_per_device=batch.per_device,
        accumulate=batch.accumulate,
        too_large=too_large,
        lr_factor=lr_factor,
        threads_per_rank=threads,
        fallback=config.distributed.fallback,
        restarts=restarts,
        port=port,
        group_timeout=float(config.distributed.timeout),
        ddp={name: getattr(config.distributed, name) for name in _DDP},
        fsdp=fsdp,
        one_device_speed=None if speed is None else speed.speeds.get("single"),
        reasons=(
            *memory_notes,
            *fallback_notes,
            *placement.reasons,
            *strategy_notes,
            precision_note,
            *backend_notes,
            *port_notes,
            *restart_notes,
            str(batch),
            *batch_notes,
            threads_note,
        ),
    )


def _batch(
    config: Config, processes: int, replicas: int
) -> tuple[BatchSplit, float, tuple[str, ...]]:
    """Return the split of the batch, the factor of the learning rate, and notes on them."""
    train = config.train
    rule = config.optim.lr_rule
    notes: tuple[str, ...] = ()
    if train.loss_reduction == "batch":
        notes = (
            "the loss is computed over whole batches (train.loss_reduction: batch): it depends on "
            "the number of ranks",
        )
    steps = train.gradient_accumulation_steps
    accumulate = 1 if steps == "auto" else steps
    per_device = train.batch_size_per_device
    if per_device is None:
        split = split_batch(train.batch_size, processes=processes, accumulate=accumulate)
        return split, 1.0, notes
    per_pass = per_device * replicas
    split = BatchSplit(per_device=per_pass, processes=processes, accumulate=accumulate)
    growth = processes * replicas * accumulate
    factor = {"none": 1.0, "linear": float(growth), "sqrt": growth**0.5}[rule]
    why = f"train.batch_size_per_device is set, optim.lr_rule is {rule}"
    return split, factor, (f"learning rate x {factor:g}: {why}", *notes)


def _strategy(
    settings: Distributed, placement: DevicePlacement
) -> tuple[Strategy, dict[str, Any], tuple[str, ...]]:
    """Return the strategy of the placement's processes, how fsdp divides a model, and notes."""
    processes = placement.processes
    if settings.backend == "tensorflow":
        return "tensorflow", {}, ()
    if not settings.is_sharded:
        return placement.strategy, {}, ()
    if processes == 1:
        note = f"{settings.sharded_by} trains as {placement.strategy}: there is one process"
        return placement.strategy, {}, (note,)
    stage = _zero_stage(settings)
    replicas = _replicas(settings, processes)
    shards = processes // replicas
    offload = settings.offload != "none" and bool(placement.devices)
    fsdp = {"reshard_after_forward": stage == 3, "offload": offload, "replicas": replicas}
    notes = [
        f"fsdp: each of {processes} ranks keeps 1/{shards} of weights, gradients and optimizer "
        "state, and gathers the weights for validation",
        *_notes_on_names(settings, processes, stage),
    ]
    if replicas > 1:
        notes.append(f"hybrid: {replicas} groups of {shards} ranks each have the whole model")
    if stage == 2:
        notes.append("zero_stage 2: a rank keeps the gathered weights until its backward pass")
    if offload:
        notes.append("offload: weights, gradients and optimizer state are in CPU memory")
    elif settings.offload != "none":
        notes.append("offload has nothing to do: the ranks are on the CPU")
    return "fsdp", fsdp, tuple(notes)


def _zero_stage(settings: Distributed) -> int:
    """Return the stage of ZeRO that fsdp trains with: 2 or 3."""
    if settings.zero_stage is not None:
        return max(settings.zero_stage, 2)
    return 2 if settings.strategy == "deepspeed" else 3


def _replicas(settings: Distributed, processes: int) -> int:
    """Return the number of groups of ranks that each have the whole model."""
    divisible = processes >= 4 and processes % 2 == 0
    return 2 if settings.strategy == "hybrid" and divisible else 1


def _notes_on_names(settings: Distributed, processes: int, stage: int) -> Iterator[str]:
    """Yield what a name of other tools means here."""
    if settings.strategy != "fsdp":
        yield f"{settings.sharded_by} trains with torch's fsdp, as ZeRO stage {stage} does"
    if settings.zero_stage == 1:
        yield "zero_stage 1 trains as stage 2: fsdp divides the gradients with the optimizer state"
    if settings.strategy == "hybrid" and _replicas(settings, processes) == 1:
        yield f"hybrid needs an even number of ranks from 4 on: {processes} ranks are one group"


def _without_loss_scale(config: Config, precision: Precision, note: str) -> tuple[Precision, str]:
    """Return fp32 in place of fp16, whose loss scale is not made for gradients in CPU memory."""
    if precision != "fp16":
        return precision, note
    offload = f"distributed.offload: {config.distributed.offload}"
    if config.train.precision == "fp16":
        raise PlanError(
            f"train.precision is fp16, and {offload} has no loss scale for gradients in CPU memory",
            allowed="fp32, bf16 or auto",
            do="set train.precision: fp32, or distributed.offload: none",
        )
    return "fp32", f"fp32: {offload}, which has no loss scale for fp16"


def _apply_evidence(
    config: Config,
    host: Host,
    evidence: Sequence[Evidence],
    placement: DevicePlacement,
    batch: BatchSplit,
) -> tuple[DevicePlacement, BatchSplit, tuple[str, ...]]:
    """Fall back to one process if the ranks could not form a group; the batch stays the same."""
    failures = [item for item in evidence if isinstance(item, GroupNotFormed)]
    busy = [f"port {item.port} was busy" for item in evidence if isinstance(item, PortBusy)]
    if placement.processes == 1 or not failures:
        return placement, batch, tuple(busy)
    problem = f"{placement.processes} ranks could not form a process group: {failures[-1].reason}"
    if host.is_rank or not config.distributed.fallback:
        raise GroupStartFailed(
            problem,
            allowed="one process (distributed.world_size: 1), or a machine on which they can",
            do="see the ranks' logs"
            if host.is_rank
            else "set distributed.fallback: true to continue with one process automatically",
        )
    single = batch.on_one_process()
    notes = (
        f"FALLING BACK TO ONE PROCESS: {problem}",
        f"accumulation {batch.accumulate} -> {single.accumulate} on one process: still "
        f"{batch.per_device} samples per forward pass and {batch.total} per step",
    )
    return placement.on_one_process("the group could not be formed"), single, notes


def _fit_memory(
    config: Config, evidence: Sequence[Evidence], batch: BatchSplit
) -> tuple[BatchSplit, int | None, tuple[str, ...]]:
    """Take about twice the accumulation steps at which memory ran out, if their number is free.

    Returns:
        The split, the samples of a forward pass that did not fit, and a note.
    """
    failed = [item.samples for item in evidence if isinstance(item, BatchTooLarge)]
    if not failed or not may_accumulate_more(config):
        return batch, None, ()
    whole = batch.per_device * batch.accumulate
    most = max(1, min(failed) // 2)
    size = max(size for size in range(1, most + 1) if whole % size == 0)
    smaller = replace(batch, per_device=size, accumulate=whole // size)
    note = (
        f"{min(failed)} samples in a forward pass ran out of memory: {smaller.accumulate} "
        f"accumulation steps of {size}, still {batch.total} samples per optimizer step"
    )
    return (smaller if size < batch.per_device else batch), min(failed), (note,)


def may_accumulate_more(config: Config) -> bool:
    """Whether the number of accumulation steps may follow the memory; the batch stays the same."""
    train = config.train
    return train.gradient_accumulation_steps == "auto" and train.batch_size_per_device is None


def _precision(
    setting: Literal["auto"] | Precision, devices: Sequence[Device]
) -> tuple[Precision, str]:
    """Choose by compute capability; ``is_bf16_supported()`` includes emulation (as on a T4)."""
    if not devices:
        return _precision_on_cpu(setting)
    weakest = min(devices, key=lambda device: device.capability)
    card = f"{weakest.name} is {weakest.sm}"
    native = weakest.capability >= (8, 0)
    if setting == "bf16":
        note = "computes it natively" if native else "EMULATES it, slower than fp32"
        return "bf16", f"bf16: train.precision is bf16; {card} and {note}"
    if setting != "auto":
        return setting, f"{setting}: train.precision is {setting}"
    if native:
        return "bf16", f"bf16: {card}, which computes it natively (sm_80 and newer)"
    if weakest.capability >= (7, 0):
        return "fp16", f"fp16: {card}, bf16 would be emulated"
    return "fp32", f"fp32: {card}, which has no tensor cores for fp16 (sm_70 and newer have)"


def _precision_on_cpu(setting: Literal["auto"] | Precision) -> tuple[Precision, str]:
    if setting == "fp16":
        raise PlanError(
            "train.precision is fp16, but the run is on the CPU, and fp16 needs a GPU",
            allowed="fp32, bf16 or auto",
            do="set train.precision: auto (fp32 on the CPU, fp16 or bf16 on a GPU)",
        )
    if setting == "auto":
        return "fp32", "fp32: the run is on the CPU"
    return setting, f"{setting}: train.precision is {setting}"


def _backend(
    setting: str, placement: DevicePlacement
) -> tuple[Literal["nccl", "gloo"] | None, tuple[str, ...]]:
    if setting == "nccl" and not placement.devices:
        raise PlanError(
            "distributed.backend is nccl, which needs one GPU per process, but the run is on the "
            "CPU",
            allowed="auto or gloo",
            do="set distributed.backend: auto (nccl on GPUs, gloo on the CPU)",
        )
    if setting == "tensorflow" and placement.processes == 1:
        return None, ("tensorflow: MirroredStrategy, in one process",)
    if placement.processes == 1:
        return None, ()
    if setting == "gloo" and placement.devices:
        return "gloo", ("gloo: distributed.backend is gloo; nccl is faster between GPUs",)
    if placement.devices:
        return "nccl", ("nccl: every process has a GPU",)
    return "gloo", ("gloo: the processes are on the CPU",)


def _threads(host: Host, hardware: Hardware, processes: int) -> tuple[int, str]:
    local = host.local_world_size if host.is_rank else processes
    threads = max(1, hardware.cpu_count // local)
    return threads, f"CPU threads per process: {threads} ({hardware.cpu_count} CPUs for {local})"


def _port(
    setting: int | Literal["auto"], evidence: Sequence[Evidence], processes: int
) -> tuple[int | None, tuple[str, ...]]:
    if processes == 1:
        return None, ()
    busy = any(isinstance(item, PortBusy) for item in evidence)
    if busy or setting == "auto":
        return None, ("port: a free one is chosen",)
    return setting, (f"port {setting}: distributed.port is {setting}",)


def _restarts(
    setting: int | Literal["auto"], host: Host, start: Start
) -> tuple[int, tuple[str, ...]]:
    """Return how often the ranks start again after a failure, and a note on it.

    torchrun and its like restart their ranks themselves, and an inline run has no supervisor.
    """
    if start != "forkserver" or host.is_rank:
        return 0, ()
    if setting != "auto":
        return setting, ((f"restarts: {setting} (runtime.restarts)",) if setting else ())
    if host.watched:
        return 0, ()
    return AUTO_RESTARTS, (f"restarts: {AUTO_RESTARTS} (nobody watches)",)
