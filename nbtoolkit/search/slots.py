"""Divide the hardware into slots and assign jobs to free slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from nbtoolkit.environment.hardware import Hardware
from nbtoolkit.errors import PlanError
from nbtoolkit.text_table import gib

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config


Placement = Literal["auto", "device_per_trial", "all_devices_per_trial"]

ALONE = {
    "distributed.enabled": False,
    "distributed.world_size": 1,
    "distributed.strategy": "single",
}
_CPU_MEMORY = 1_500_000_000  # bytes assumed for a process with torch and a small data set


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A place for one job at a time.

    Attributes:
        name: shown to the user: ``"cpu 0"``, ``"cuda:1"``, ``"all devices"``.
        hardware: the devices and CPUs of its jobs.
        overrides: settings of its jobs, by dotted name.
    """

    name: str
    hardware: Hardware
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Slots:
    """All slots of a search, with the placement and the reason for it."""

    slots: tuple[Slot, ...]
    placement: Literal["device_per_trial", "all_devices_per_trial"]
    why: str
    together: Slot | None = None
    """With ``auto``: all devices at once, for a job that is too large for one device."""

    def explain(self) -> str:
        """Describe the slots in one sentence."""
        names = ", ".join(slot.name for slot in self.slots)
        count = "1 slot" if len(self.slots) == 1 else f"{len(self.slots)} slots"
        return f"{count} ({names}), {self.placement}: {self.why}"


def make_slots(
    config: Config,
    hardware: Hardware,
    placement: Placement = "auto",
    *,
    per_device: int = 1,
    jobs: int | None = None,
) -> Slots:
    """Decide where the jobs of a search run.

    Jobs on one device each never wait for another rank, so two of them on two devices do more
    than one job on both. ``auto`` therefore gives each job one device, unless there are fewer jobs
    than devices. A job that does not fit into the memory of one device runs again on all of them
    (``search.scheduler.LocalPool``).

    Args:
        config: the base configuration.
        hardware: the machine's devices and CPUs.
        placement: the requested placement.
        per_device: jobs per GPU. Without GPUs there is at most one job per CPU.
        jobs: number of jobs; None for many.

    Raises:
        PlanError: ``per_device`` is below 1, or jobs on one device each are to be sharded.
    """
    sharded_by = config.distributed.sharded_by
    if sharded_by and placement == "device_per_trial":
        raise PlanError(
            f"{sharded_by}, and placement gives each trial one device",
            allowed="fsdp with placement: all_devices_per_trial, or trials that fit on one device",
            do="set placement: all_devices_per_trial, or distributed.strategy: ddp",
        )
    if per_device < 1:
        raise PlanError(
            f"trials_per_device is {per_device}",
            allowed="1 and more",
            do="set trials_per_device: 1",
        )
    together = Slots(
        slots=(Slot(name="all devices", hardware=hardware),),
        placement="all_devices_per_trial",
        why="placement says so",
    )
    if placement == "all_devices_per_trial":
        return together
    if sharded_by:
        return replace(together, why=sharded_by)
    single = _on_gpus(hardware, per_device) if hardware.usable else _on_cpus(hardware, per_device)
    if placement == "device_per_trial":
        return replace(single, why=f"placement says so; {single.why}")
    if jobs is not None and jobs < len(hardware.usable):
        return replace(together, why=f"{jobs} to run, and {len(hardware.usable)} devices")
    world_size = config.distributed.world_size
    if not hardware.usable and isinstance(world_size, int) and world_size > 1:
        return replace(together, why=f"distributed.world_size is {world_size}")
    if len(hardware.usable) == 1 or not hardware.usable:
        return single
    return replace(single, together=together.slots[0])


def _on_gpus(hardware: Hardware, per_device: int) -> Slots:
    devices = hardware.usable
    count = len(devices) * per_device
    threads = max(1, hardware.cpu_count // count)
    slots = [
        Slot(
            name=f"cuda:{device.index}" + (f" ({turn + 1})" if per_device > 1 else ""),
            hardware=replace(hardware, devices=(device,), cpu_count=threads),
            overrides=ALONE | {"distributed.device_ids": None},
        )
        for turn in range(per_device)
        for device in devices
    ]
    shared = f", {per_device} trials per device" if per_device > 1 else ""
    why = f"one device per trial{shared}: no trial waits for another rank"
    return Slots(slots=tuple(slots), placement="device_per_trial", why=why)


def _on_cpus(hardware: Hardware, per_device: int) -> Slots:
    room = hardware.memory // _CPU_MEMORY if hardware.memory else hardware.cpu_count
    count = max(1, min(hardware.cpu_count, room))
    threads = max(1, hardware.cpu_count // count)
    share = replace(hardware, devices=(), cpu_count=threads)
    slots = [Slot(name=f"cpu {at}", hardware=share, overrides=ALONE) for at in range(count)]
    why = f"{hardware.cpu_count} CPUs and {gib(hardware.memory)} of memory"
    if per_device > 1:
        why += f" (trials_per_device: {per_device} is for GPUs)"
    return Slots(slots=tuple(slots), placement="device_per_trial", why=why)
