"""Define where jobs run side by side, and assign jobs to free slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from nbtoolkit.environment.hardware import Hardware
from nbtoolkit.errors import PlanError
from nbtoolkit.search.algorithm import EventWriter, JobResult, SearchJob
from nbtoolkit.text_table import gib

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config


# --- slots ---


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
    fewer jobs than devices; and the scheduler has all devices work on a job that is the only one
    left, or that did not fit into the memory of one (see slots.py).

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


# --- free slots ---
# Which slots are free, and which job goes where; ``auto`` decides by what was seen.


class SlotAllocator:
    """The free slots of a search.

    With ``auto`` placement on several devices a job that runs out of memory on one of them is run
    again on all (each then holds a part of the batch), and a job that is the only one left gets all
    of them, unless those before it were slower there than others on one device.

    Args:
        slots: what :func:`~nbtoolkit.search.slots.make_slots` decided.
        diary: is told why a job gets all devices.
    """

    def __init__(self, slots: Slots, diary: EventWriter) -> None:
        self._free: list[Slot] = list(slots.slots)
        self._count, self._together, self._diary = len(slots.slots), slots.together, diary
        self._too_large: deque[SearchJob] = deque()
        self._seconds: dict[bool, list[float]] = {False: [], True: []}  # by: on all devices
        self._all_taken = False

    @property
    def free(self) -> int:
        """How many jobs may be asked for now; none while a job waits for all devices."""
        waiting = self._all_taken or self._too_large
        return 0 if waiting else len(self._free)

    def places(self, jobs: list[SearchJob]) -> list[tuple[SearchJob, Slot]]:
        """Where the new jobs go, and jobs that waited for all devices.

        Args:
            jobs: at most :attr:`free`.
        """
        if self._idle and self._together is not None:
            if self._too_large:
                return [(self._too_large.popleft(), self._take_all())]
            if len(jobs) == 1 and self._is_faster:
                self._diary.note(f"{jobs[0].key} is the only one left: on all devices")
                return [(jobs[0], self._take_all())]
        return [(job, self._free.pop(0)) for job in jobs]

    def give_back(self, slot: Slot) -> None:
        """A job's slot is free again."""
        if slot is self._together:
            self._all_taken = False
        else:
            self._free.append(slot)

    def runs_again(self, job: SearchJob, slot: Slot, ending: JobResult) -> bool:
        """Whether a job that has ended is to be run once more, on all devices."""
        on_all = slot is self._together
        if ending.status == "completed":
            self._seconds[on_all].append(ending.seconds)
        if ending.fault != "oom" or on_all or self._together is None:
            return False
        self._diary.note(f"{job.key} ran out of memory: once more, on all devices", level="warning")
        self._too_large.append(job)
        return True

    @property
    def _idle(self) -> bool:
        return not self._all_taken and len(self._free) == self._count

    @property
    def _is_faster(self) -> bool:
        """Whether all devices together were not seen to be slower than one."""
        one, together = self._seconds[False], self._seconds[True]
        return not one or not together or median(together) < median(one)

    def _take_all(self) -> Slot:
        assert self._together is not None
        self._all_taken = True
        return self._together
