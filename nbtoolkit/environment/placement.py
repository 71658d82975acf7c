"""Decide how many processes a launch gets, and the device of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbtoolkit.environment.hardware import Hardware
from nbtoolkit.environment.launch_plan import Start
from nbtoolkit.environment.nvml import Device
from nbtoolkit.errors import PlanError
from nbtoolkit.host import Host
from nbtoolkit.text_table import gib

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config, Distributed


@dataclass(frozen=True, kw_only=True)
class DevicePlacement:
    """Processes and their devices, rank by rank."""

    processes: int
    devices: tuple[Device, ...] = ()
    """Empty on the CPU."""
    why: str
    """Why so many."""
    notes: tuple[str, ...] = ()
    """What else is to be said: devices left out, memory in use."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Sentences for the plan; the first says who sits where."""
        where = ", ".join(map(str, self.devices)) or "the CPU"
        count = "1 process" if self.processes == 1 else f"{self.processes} processes"
        return (f"{count} on {where}: {self.why}", *self.notes)

    def on_one(self, why: str) -> DevicePlacement:
        """The first seat alone."""
        return replace(self, processes=1, devices=self.devices[:1], why=why)


def place_processes(
    config: Config, host: Host, hardware: Hardware, start: Start
) -> DevicePlacement:
    """Decide how many processes there are and which device each gets.

    Two or more usable, equal GPUs are used together; of unequal ones the best. ``distributed``'s
    ``enabled``, ``strategy``, ``world_size`` and ``device_ids`` say otherwise.

    Raises:
        PlanError: the wish contradicts itself or asks for what is not there; or only a TPU is.
    """
    wish = config.distributed
    allowed = _allowed(wish.device_ids, hardware)
    usable = [device for device in allowed if device.usable]
    if host.is_rank:
        return _in_place(host, usable)
    if host.tpu and not usable and wish.enabled is not False:
        raise _tpu_only(host)
    alone = _why_alone(wish, start)
    placement = _on_gpus(wish, usable, alone) if usable else _on_cpu(wish, hardware, alone)
    unusable = [f"{device} is not used: {device.reason}" for device in allowed if not device.usable]
    return replace(placement, notes=(*placement.notes, *unusable))


def _allowed(device_ids: Sequence[int] | None, hardware: Hardware) -> list[Device]:
    """The devices that ``distributed.device_ids`` leaves; all of them by default."""
    if device_ids is None:
        return list(hardware.devices)
    by_index = {device.index: device for device in hardware.devices}
    unknown = [index for index in device_ids if index not in by_index]
    if unknown:
        raise PlanError(
            f"distributed.device_ids names {unknown}, which this process cannot see "
            f"({hardware.reason})",
            allowed=", ".join(map(str, hardware.devices)) or "null (there is the CPU only)",
            do="name GPUs that are there, or take device_ids out",
        )
    chosen = [by_index[index] for index in device_ids]
    unusable = [device for device in chosen if not device.usable]
    if unusable:
        raise PlanError(
            f"distributed.device_ids names {unusable[0]}, which is not usable: "
            f"{unusable[0].reason}",
            allowed=", ".join(map(str, hardware.usable)) or "null (there is the CPU only)",
            do="take it out of device_ids",
        )
    return chosen


def _why_alone(wish: Distributed, start: Start) -> str:
    """Why there can be one process only; empty when there can be more."""
    alone = ""
    if start == "inline":
        alone = 'start="inline" runs in this process'
    elif wish.enabled is False:
        alone = "distributed.enabled is false"
    elif wish.strategy == "single":
        alone = "distributed.strategy is single"
    elif wish.world_size == 1:
        alone = "distributed.world_size is 1"
    if alone and wish.world_size != "auto" and wish.world_size > 1:
        raise PlanError(
            f"distributed.world_size is {wish.world_size}, but {alone}",
            allowed="one process, or several without that setting",
            do="set distributed.world_size: auto, or take the other setting back",
        )
    return alone


def _on_gpus(wish: Distributed, usable: Sequence[Device], alone: str) -> DevicePlacement:
    best = max(usable, key=lambda device: (device.capability, device.memory_total, -device.index))
    equal = [device for device in usable if device.equals(best)]
    others = [device for device in usable if not device.equals(best)]
    if best.is_slice:  # CUDA shows a process one slice only, and NCCL refuses two on one GPU
        equal, others = [best], []
    if alone:
        count, why = 1, alone
    elif wish.world_size != "auto":
        count, why = wish.world_size, f"distributed.world_size is {wish.world_size}"
        _check_fits(count, [*equal, *others])
    else:
        count, why = len(equal), _how_many(equal, others)
    chosen = (*equal, *others)[:count]
    return DevicePlacement(
        processes=count,
        devices=chosen,
        why=why,
        notes=(*_about_unequal(best, chosen, others, alone), *_about_memory(chosen)),
    )


def _how_many(equal: Sequence[Device], others: Sequence[Device]) -> str:
    if len(equal) > 1:
        return f"{len(equal)} equal, usable GPUs"
    if equal[0].is_slice:
        return "a MIG slice cannot be part of a group"
    return "the best of unequal GPUs" if others else "the only usable GPU"


def _check_fits(count: int, usable: Sequence[Device]) -> None:
    if count > len(usable):
        fits = " or ".join(str(number + 1) for number in range(len(usable)))
        raise PlanError(
            f"{count} processes are asked for (distributed.world_size), but a process needs a GPU "
            f"of its own, and {len(usable)} can be used: {', '.join(map(str, usable))}",
            allowed=f"{fits} on GPUs; any number on the CPU",
            do="set distributed.world_size: auto, or hide the GPUs (CUDA_VISIBLE_DEVICES='')",
        )


def _about_unequal(
    best: Device, chosen: Sequence[Device], others: Sequence[Device], alone: str
) -> list[str]:
    if any(device in chosen for device in others):
        return ["the GPUs are unequal: the slowest sets the pace for all"]
    if alone:
        return []
    do = "distributed.world_size: 2 or more uses it all the same"
    return [f"{device} is not used: it is unlike {best}; {do}" for device in others]


def _about_memory(chosen: Sequence[Device]) -> list[str]:
    """A warning for each device of which another process holds more than half."""
    return [
        f"{device}: only {gib(device.memory_free)} are free, another process holds the rest"
        for device in chosen
        if device.memory_free < device.memory_total / 2
    ]


def _on_cpu(wish: Distributed, hardware: Hardware, alone: str) -> DevicePlacement:
    if alone:
        count, why = 1, alone
    elif wish.world_size != "auto":
        count, why = wish.world_size, f"distributed.world_size is {wish.world_size}"
    elif wish.enabled is True or wish.strategy == "ddp":
        count = min(2, hardware.cpu_count)
        why = f"a group is asked for; on {hardware.cpu_count} CPUs, auto means {count}"
    else:
        count, why = 1, "it uses all CPUs"
    return DevicePlacement(
        processes=count,
        why=why,
        notes=(f"no GPU: {_why_no_gpu(hardware)}",),
    )


def _why_no_gpu(hardware: Hardware) -> str:
    if hardware.devices:
        return f"none of {len(hardware.devices)} is usable"
    return hardware.reason


def _in_place(host: Host, usable: Sequence[Device]) -> DevicePlacement:
    """The ranks that somebody else started: their number is not ours to choose."""
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
