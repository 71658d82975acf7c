"""Decide the number of a launch's processes and the device of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbtoolkit.environment.hardware import Device, Hardware
from nbtoolkit.environment.launch_plan import Start, Strategy
from nbtoolkit.errors import PlanError
from nbtoolkit.host import Host
from nbtoolkit.text_table import gib, moment

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config, Distributed


_DATA_PARALLEL = "distributed.strategy is dp"

# A strategy replaces the usual one only if it is faster by more than this: two measurements of
# one second differ by a few percent.
_FASTER = 1.05


@dataclass(frozen=True, kw_only=True)
class MeasuredSpeed:
    """Evidence of how fast each strategy trains this model on these devices.

    Attributes:
        speeds: strategy (``single``, ``ddp``, ``dp``) -> samples per second over all processes, at
            the same global batch size. A strategy that failed is missing.
        ranks: processes of ``ddp``.
        date: unix time of the measurement.
    """

    speeds: Mapping[str, float]
    ranks: int
    date: float

    def choose(self, usual: str) -> tuple[str, str]:
        """Return the strategy to use instead of the usual one, and the reason with the numbers."""
        best = max(self.speeds, key=lambda name: self.speeds[name], default=usual)
        usual_speed = self.speeds.get(usual, 0.0)
        chosen = best if self.speeds.get(best, 0.0) > usual_speed * _FASTER else usual
        others = sorted(set(self.speeds) - {chosen})
        numbers = ", ".join(
            self._describe(name) for name in (chosen, *others) if name in self.speeds
        )
        return chosen, f"measured {moment(self.date)}: {numbers} (nb.calibrate)"

    def _describe(self, name: str) -> str:
        return f"{name} does {self.speeds[name]:,.0f} samples/s"


@dataclass(frozen=True, kw_only=True)
class DevicePlacement:
    """Number of processes and their devices, in order of rank."""

    processes: int
    devices: tuple[Device, ...] = ()
    """Empty on the CPU."""
    why: str
    """Reason for the number of processes."""
    notes: tuple[str, ...] = ()
    """Further remarks: unused devices, memory in use."""
    replicas: int = 1
    """Copies of the model in one process: of DataParallel, one per device; else 1."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Sentences for the plan; the first gives processes and devices."""
        where = ", ".join(map(str, self.devices)) or "the CPU"
        count = "1 process" if self.processes == 1 else f"{self.processes} processes"
        return (f"{count} on {where}: {self.why}", *self.notes)

    def on_one_process(self, why: str) -> DevicePlacement:
        """Return the placement of the first process alone."""
        return replace(self, processes=1, devices=self.devices[:1], why=why)

    @property
    def strategy(self) -> Strategy:
        """``single``, ``ddp`` or ``dp``."""
        return "dp" if self.replicas > 1 else "ddp" if self.processes > 1 else "single"


def place_processes(
    config: Config,
    host: Host,
    hardware: Hardware,
    start: Start,
    speed: MeasuredSpeed | None = None,
) -> DevicePlacement:
    """Decide the number of processes and the device of each.

    Usable, equal GPUs are used together; of unequal ones, the best is used. The settings
    ``enabled``, ``strategy``, ``world_size`` and ``device_ids`` of ``distributed`` override this.
    If they leave the choice open, ``speed`` decides: how fast each strategy was on this machine.

    Raises:
        PlanError: the settings conflict or request missing devices, or the machine has only a TPU.
    """
    settings = config.distributed
    allowed = _allowed(settings.device_ids, hardware)
    usable = [device for device in allowed if device.usable]
    if host.is_rank:
        return _in_place(host, usable)
    if host.tpu and not usable and settings.enabled is not False:
        raise _tpu_only(host)

    def place(settings: Distributed) -> DevicePlacement:
        alone = _why_alone(settings, start)
        if usable:
            return _on_gpus(settings, usable, alone)
        return _on_cpu(settings, hardware, alone)

    placement = place(settings)
    if strategy_is_open(settings, start):
        placement = _by_speed(placement, settings, place, speed)
    unusable = [f"{device} is not used: {device.reason}" for device in allowed if not device.usable]
    return replace(placement, notes=(*placement.notes, *unusable))


def _allowed(device_ids: Sequence[int] | None, hardware: Hardware) -> list[Device]:
    """Return the devices that ``distributed.device_ids`` selects; default: all."""
    if device_ids is None:
        return list(hardware.devices)
    by_index = {device.index: device for device in hardware.devices}
    unknown = [index for index in device_ids if index not in by_index]
    if unknown:
        raise PlanError(
            f"distributed.device_ids names {unknown}, which this process cannot see "
            f"({hardware.reason})",
            allowed=", ".join(map(str, hardware.devices)) or "null (CPU only)",
            do="name visible GPUs, or remove device_ids",
        )
    chosen = [by_index[index] for index in device_ids]
    unusable = [device for device in chosen if not device.usable]
    if unusable:
        raise PlanError(
            f"distributed.device_ids names {unusable[0]}, which is not usable: "
            f"{unusable[0].reason}",
            allowed=", ".join(map(str, hardware.usable)) or "null (CPU only)",
            do="remove it from device_ids",
        )
    return chosen


def strategy_is_open(settings: Distributed, start: Start) -> bool:
    """Return True if the settings leave the strategy to nbtoolkit."""
    auto = settings.enabled == settings.world_size == "auto"
    open_strategy = settings.strategy in ("auto", "measured")
    if settings.is_sharded or settings.backend == "tensorflow":
        return False
    return auto and open_strategy and start != "inline"


def _by_speed(
    usual: DevicePlacement,
    settings: Distributed,
    place: Callable[[Distributed], DevicePlacement],
    speed: MeasuredSpeed | None,
) -> DevicePlacement:
    """Return the placement of the strategy that was measured to be clearly faster, or the usual."""
    if speed is None:
        note = "nb.calibrate(train, config) measures which is fastest: ddp, dp or one GPU"
        return replace(usual, notes=(*usual.notes, note)) if len(usual.devices) > 1 else usual
    strategy, why = speed.choose(usual.strategy)
    chosen = place(settings.model_copy(update={"strategy": strategy}))
    if chosen.strategy != strategy or (strategy == "ddp" and chosen.processes != speed.ranks):
        return usual
    return replace(chosen, why=why)


def _why_alone(settings: Distributed, start: Start) -> str:
    """Return why only one process is possible; empty if more are."""
    alone = ""
    if start == "inline":
        alone = 'start="inline" runs in this process'
    elif settings.enabled is False:
        alone = "distributed.enabled is false"
    elif settings.strategy in ("single", "dp"):
        alone = f"distributed.strategy is {settings.strategy}"
    elif settings.world_size == 1:
        alone = "distributed.world_size is 1"
    elif settings.backend == "tensorflow":
        alone = "distributed.backend is tensorflow, whose MirroredStrategy uses all of them"
    if alone and settings.world_size != "auto" and settings.world_size > 1:
        raise PlanError(
            f"distributed.world_size is {settings.world_size}, but {alone}",
            allowed="one process, or several without that setting",
            do="set distributed.world_size: auto, or remove the other setting",
        )
    return alone


def _on_gpus(settings: Distributed, usable: Sequence[Device], alone: str) -> DevicePlacement:
    best = max(usable, key=lambda device: (device.capability, device.memory_total, -device.index))
    equal = [device for device in usable if device.equals(best)]
    others = [device for device in usable if not device.equals(best)]
    if best.is_slice:
        # CUDA shows a process only one slice, and NCCL rejects two on one GPU.
        equal = [best]
        others = []
    if alone:
        count = 1
        why = alone
    elif settings.world_size != "auto":
        count = settings.world_size
        why = f"distributed.world_size is {settings.world_size}"
        _check_fits(count, [*equal, *others])
    else:
        count = len(equal)
        why = _why_auto(equal, others)
    mirrored = settings.backend == "tensorflow"
    parallel = not mirrored and alone == _DATA_PARALLEL
    chosen = tuple(equal) if mirrored or parallel else (*equal, *others)[:count]
    notes = (*_notes_on_unequal(best, chosen, others, alone), *_notes_on_memory(chosen))
    return DevicePlacement(
        processes=count,
        devices=chosen,
        why=why,
        notes=(*notes, *_notes_on_data_parallel(chosen)) if parallel else notes,
        replicas=len(chosen) if parallel else 1,
    )


def _notes_on_data_parallel(chosen: Sequence[Device]) -> tuple[str, ...]:
    if len(chosen) == 1:
        return ("distributed.strategy is dp, and there is one device: it trains as with single",)
    return (
        f"DataParallel: each forward pass copies the model to {len(chosen)} devices and gathers "
        f"the outputs on {chosen[0]}, which needs the most memory; validation runs there alone",
        "batch norms take their statistics from each device's own part of a batch, and keep those "
        "of the first device (distributed.sync_batchnorm is for ddp)",
    )


def _why_auto(equal: Sequence[Device], others: Sequence[Device]) -> str:
    if len(equal) > 1:
        return f"{len(equal)} equal, usable GPUs"
    if equal[0].is_slice:
        return "a MIG slice cannot be part of a group"
    return "the best of unequal GPUs" if others else "the only usable GPU"


def _check_fits(count: int, usable: Sequence[Device]) -> None:
    if count > len(usable):
        fits = " or ".join(str(number + 1) for number in range(len(usable)))
        raise PlanError(
            f"distributed.world_size requests {count} processes, but each needs its own GPU, and "
            f"{len(usable)} can be used: {', '.join(map(str, usable))}",
            allowed=f"{fits} on GPUs; any number on the CPU",
            do="set distributed.world_size: auto, or hide the GPUs (CUDA_VISIBLE_DEVICES='')",
        )


def _notes_on_unequal(
    best: Device, chosen: Sequence[Device], others: Sequence[Device], alone: str
) -> list[str]:
    if any(device in chosen for device in others):
        return ["the GPUs are unequal: the slowest sets the pace for all"]
    if alone:
        return []
    do = "distributed.world_size: 2 or more uses it"
    return [f"{device} is not used: it differs from {best}; {do}" for device in others]


def _notes_on_memory(chosen: Sequence[Device]) -> list[str]:
    """Return a warning for each device with less than half of its memory free."""
    return [
        f"{device}: only {gib(device.memory_free)} are free, another process uses the rest"
        for device in chosen
        if device.memory_free < device.memory_total / 2
    ]


def _on_cpu(settings: Distributed, hardware: Hardware, alone: str) -> DevicePlacement:
    if alone == _DATA_PARALLEL:
        raise PlanError(
            f"distributed.strategy is dp, which needs GPUs, but the run is on the CPU: "
            f"{hardware.reason}",
            allowed="auto, single or ddp on the CPU; dp on several equal GPUs",
            do="set distributed.strategy: auto",
        )
    if alone:
        count = 1
        why = alone
    elif settings.world_size != "auto":
        count = settings.world_size
        why = f"distributed.world_size is {settings.world_size}"
    elif settings.enabled is True or settings.strategy == "ddp" or settings.is_sharded:
        count = min(2, hardware.cpu_count)
        why = f"a group is requested; on {hardware.cpu_count} CPUs, auto means {count}"
    else:
        count = 1
        why = "it uses all CPUs"
    gpus = len(hardware.devices)
    note = f"no GPU: {f'none of {gpus} is usable' if gpus else hardware.reason}"
    return DevicePlacement(processes=count, why=why, notes=(note,))


def _in_place(host: Host, usable: Sequence[Device]) -> DevicePlacement:
    """Return the placement of ranks that another launcher has started."""
    if usable and host.local_world_size > len(usable):
        raise PlanError(
            f"{host.local_world_size} ranks were started on this machine, but {len(usable)} GPUs "
            f"can be used: {', '.join(map(str, usable))}",
            allowed=f"at most {len(usable)}; any number on the CPU (CUDA_VISIBLE_DEVICES='')",
            do=f"start {len(usable)} (torchrun --nproc-per-node {len(usable)})",
        )
    why = f"in place, started by {host.rank_reason}"
    return DevicePlacement(processes=host.world_size, devices=tuple(usable), why=why)


def _tpu_only(host: Host) -> PlanError:
    return PlanError(
        f"this machine has a TPU ({host.tpu_reason}) and no usable GPU; nbtoolkit trains on "
        "NVIDIA GPUs and CPUs",
        allowed="a GPU machine, or the CPU of this one",
        do="switch the accelerator (Kaggle: GPU T4 x2; Colab: T4), or set "
        "distributed.enabled: false to train on the CPU",
    )
