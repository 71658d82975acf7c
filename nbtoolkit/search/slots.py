"""Slots: where jobs run side by side, one job a slot; and why so many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from nbtoolkit.errors import PlanError
from nbtoolkit.runtime.hardware import Hardware
from nbtoolkit.runtime.table import gib

if TYPE_CHECKING:
    from nbtoolkit.config import Config

Placement = Literal["auto", "device_per_trial", "all_devices_per_trial"]

_ALONE = {"distributed.enabled": False, "distributed.world_size": 1}
_CPU_MEMORY = 1_500_000_000  # bytes a process with torch and a small data set is reckoned with


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Room for one job at a time.

    Attributes:
        name: for people: ``"cpu 0"``, ``"cuda:1"``, ``"all devices"``.
        hardware: what its jobs may compute on.
        overrides: settings its jobs run with, by dotted name.
    """

    name: str
    hardware: Hardware
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Slots:
    """All slots, the placement they stand for, and why."""

    slots: tuple[Slot, ...]
    placement: Literal["device_per_trial", "all_devices_per_trial"]
    why: str
    together: Slot | None = None
    """``auto``: all devices at once, for a job that is alone, or too large for one of them."""

    def explain(self) -> str:
        """In one sentence."""
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

    A job on one device needs no other rank: two of them on two devices do twice as much as one on
    both, whatever the efficiency of DDP. So ``auto`` gives each job a device, unless there are
    fewer jobs than devices; and the conductor has all devices work on a job that is the only one
    left, or that did not fit into the memory of one (see room.py).

    Args:
        config: the configuration all jobs start from.
        hardware: what there is.
        placement: the wish.
        per_device: jobs that share a GPU; on the CPU they are as many as the CPUs, at most.
        jobs: how many jobs there will be; None: many.

    Raises:
        PlanError: ``per_device`` is below 1.
    """
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
    single = _on_gpus(hardware, per_device) if hardware.usable else _on_cpus(hardware, per_device)
    if placement == "device_per_trial":
        return replace(single, why=f"placement says so; {single.why}")
    if jobs is not None and jobs < len(hardware.usable):
        return replace(together, why=f"{jobs} to run, and {len(hardware.usable)} devices")
    wish = config.distributed.world_size
    if not hardware.usable and isinstance(wish, int) and wish > 1:
        return replace(together, why=f"distributed.world_size is {wish}")
    return replace(single, together=together.slots[0]) if len(hardware.usable) > 1 else single


def _on_gpus(hardware: Hardware, per_device: int) -> Slots:
    devices = hardware.usable
    count = len(devices) * per_device
    threads = max(1, hardware.cpu_count // count)
    slots = [
        Slot(
            name=f"cuda:{device.index}" + (f" ({turn + 1})" if per_device > 1 else ""),
            hardware=replace(hardware, devices=(device,), cpu_count=threads),
            overrides=_ALONE | {"distributed.device_ids": None},
        )
        for turn in range(per_device)
        for device in devices
    ]
    shared = f", {per_device} of them on each" if per_device > 1 else ""
    why = f"each trial alone on a device{shared}, as none has to wait for another rank"
    return Slots(slots=tuple(slots), placement="device_per_trial", why=why)


def _on_cpus(hardware: Hardware, per_device: int) -> Slots:
    room = hardware.memory // _CPU_MEMORY if hardware.memory else hardware.cpu_count
    count = max(1, min(hardware.cpu_count, room))
    threads = max(1, hardware.cpu_count // count)
    one = replace(hardware, devices=(), cpu_count=threads)
    slots = [Slot(name=f"cpu {at}", hardware=one, overrides=_ALONE) for at in range(count)]
    why = f"{hardware.cpu_count} CPUs and {gib(hardware.memory)} of memory"
    if per_device > 1:
        why += f" (trials_per_device: {per_device} is for GPUs)"
    return Slots(slots=tuple(slots), placement="device_per_trial", why=why)
