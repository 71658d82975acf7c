"""Room: which slots are free, and which job goes where; ``auto`` decides by what was seen."""

from __future__ import annotations

from collections import deque
from statistics import median

from nbtoolkit.search.program import Diary, Ending, Job
from nbtoolkit.search.slots import Slot, Slots


class Room:
    """The free slots of a search.

    With ``auto`` placement on several devices a job that runs out of memory on one of them is run
    again on all (each then holds a part of the batch), and a job that is the only one left gets all
    of them, unless those before it were slower there than others on one device.

    Args:
        slots: what :func:`~nbtoolkit.search.slots.make_slots` decided.
        diary: is told why a job gets all devices.
    """

    def __init__(self, slots: Slots, diary: Diary) -> None:
        self._free: list[Slot] = list(slots.slots)
        self._count, self._together, self._diary = len(slots.slots), slots.together, diary
        self._too_large: deque[Job] = deque()
        self._seconds: dict[bool, list[float]] = {False: [], True: []}  # by: on all devices
        self._all_taken = False

    @property
    def free(self) -> int:
        """How many jobs may be asked for now; none while a job waits for all devices."""
        waiting = self._all_taken or self._too_large
        return 0 if waiting else len(self._free)

    def places(self, jobs: list[Job]) -> list[tuple[Job, Slot]]:
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

    def runs_again(self, job: Job, slot: Slot, ending: Ending) -> bool:
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
