"""Seats: how many processes a launch gets, and which device each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbtoolkit.errors import PlanError
from nbtoolkit.runtime.device import Device
from nbtoolkit.runtime.hardware import Hardware
from nbtoolkit.runtime.host import Host
from nbtoolkit.runtime.launch_plan import Start
from nbtoolkit.runtime.table import gib

if TYPE_CHECKING:
    from nbtoolkit.config import Config, Distributed


@dataclass(frozen=True, kw_only=True)
class Seats:
    """Processes and their devices, rank by rank."""

    processes: int
    devices: tuple[Device, ...] = ()
    """Empty on the CPU."""
    reasons: tuple[str, ...] = ()

    def on_one(self) -> Seats:
        """The first seat alone."""
        return replace(self, processes=1, devices=self.devices[:1])


def choose_seats(config: Config, host: Host, hardware: Hardware, start: Start) -> Seats:
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
    if host.tpu and not usable and wish.enabled is not False and wish.device_ids != ():
        raise _tpu_only(host)
    alone = _why_alone(wish, start)
    seats = _on_gpus(wish, usable, alone) if usable else _on_cpu(wish, hardware, alone)
    unusable = [f"{device} is not used: {device.reason}" for device in allowed if not device.usable]
    return replace(seats, reasons=(*seats.reasons, *unusable))


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
            allowed=", ".join(map(str, hardware.devices)) or "[] (the CPU), or null",
            do="name GPUs that are there, or take device_ids out",
        )
    chosen = [by_index[index] for index in device_ids]
    unusable = [device for device in chosen if not device.usable]
    if unusable:
        raise PlanError(
            f"distributed.device_ids names {unusable[0]}, which is not usable: "
            f"{unusable[0].reason}",
            allowed=", ".join(map(str, hardware.usable)) or "[] (the CPU), or null",
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


def _on_gpus(wish: Distributed, usable: Sequence[Device], alone: str) -> Seats:
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
        count, why = len(equal), _how_many(equal, best)
    chosen = (*equal, *others)[:count]
    return Seats(
        processes=count,
        devices=chosen,
        reasons=(
            f"{_processes(count)} on {', '.join(map(str, chosen))}: {why}",
            *_about_unequal(best, chosen, others, alone),
            *_about_memory(chosen),
        ),
    )


def _how_many(equal: Sequence[Device], best: Device) -> str:
    if best.is_slice:
        return "a MIG slice cannot be part of a group"
    return f"{len(equal)} equal, usable GPUs" if len(equal) > 1 else "one usable GPU of its kind"


def _check_fits(count: int, usable: Sequence[Device]) -> None:
    if count > len(usable):
        fits = " or ".join(str(number + 1) for number in range(len(usable)))
        raise PlanError(
            f"{count} processes are asked for (distributed.world_size), but a process needs a GPU "
            f"of its own, and {len(usable)} can be used: {', '.join(map(str, usable))}",
            allowed=f"{fits} on GPUs; any number on the CPU",
            do="set distributed.world_size: auto, or distributed.device_ids: [] for the CPU",
        )


def _about_unequal(
    best: Device, chosen: Sequence[Device], others: Sequence[Device], alone: str
) -> list[str]:
    if any(device in chosen for device in others):
        return ["the GPUs are unequal: the slowest sets the pace for all"]
    if alone:
        return []
    do = "distributed.world_size takes it in all the same"
    return [f"{device} is not used: it is unlike {best}; {do}" for device in others]


def _about_memory(chosen: Sequence[Device]) -> list[str]:
    """A warning for each device of which another process holds more than half."""
    return [
        f"{device}: only {gib(device.memory_free)} are free, another process holds the rest"
        for device in chosen
        if device.memory_free < device.memory_total / 2
    ]


def _on_cpu(wish: Distributed, hardware: Hardware, alone: str) -> Seats:
    if alone:
        count, why = 1, alone
    elif wish.world_size != "auto":
        count, why = wish.world_size, f"distributed.world_size is {wish.world_size}"
    elif wish.enabled is True or wish.strategy == "ddp":
        count = min(2, hardware.cpu_count)
        why = f"a group is asked for; on {hardware.cpu_count} CPUs, auto means {count}"
    else:
        count, why = 1, "it uses all CPUs"
    return Seats(
        processes=count,
        reasons=(
            f"{_processes(count)} on the CPU: {why}",
            f"no GPU: {_why_no_gpu(wish, hardware)}",
        ),
    )


def _why_no_gpu(wish: Distributed, hardware: Hardware) -> str:
    if wish.device_ids == ():
        return "distributed.device_ids is []"
    if hardware.devices:
        return f"none of {len(hardware.devices)} is usable"
    return hardware.reason


def _in_place(host: Host, usable: Sequence[Device]) -> Seats:
    """The ranks that somebody else started: their number is not ours to choose."""
    if usable and host.local_world_size > len(usable):
        raise PlanError(
            f"{host.local_world_size} ranks were started on this machine, but {len(usable)} GPUs "
            f"can be used: {', '.join(map(str, usable))}",
            allowed=f"at most {len(usable)}; any number on the CPU (CUDA_VISIBLE_DEVICES='')",
            do=f"start {len(usable)} (torchrun --nproc-per-node {len(usable)})",
        )
    why = f"{_processes(host.world_size)}, in place: {host.rank_reason}"
    return Seats(processes=host.world_size, devices=tuple(usable), reasons=(why,))


def _tpu_only(host: Host) -> PlanError:
    return PlanError(
        f"this machine has a TPU ({host.tpu_reason}) and no usable GPU; nbtoolkit trains on "
        "NVIDIA GPUs and CPUs",
        allowed="a GPU machine, or the CPU of this one",
        do="switch the accelerator (Kaggle: GPU T4 x2; Colab: T4), or set "
        "distributed.enabled: false to train on the CPU",
    )


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
