"""Reserve: lone ranks forked ahead of need, so that a job starts the moment a slot is free.

A fork and what a rank does before the user's code take some 40 ms, in which a device would wait;
a rank in reserve did them while the job before was computing. It has not loaded the function yet,
and takes one job only: it is as fresh as any other.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nbtoolkit.runtime.ahead import environment_key
from nbtoolkit.runtime.desk import Tower
from nbtoolkit.runtime.flight import Flight
from nbtoolkit.runtime.launch_plan import LaunchPlan, same_ranks
from nbtoolkit.runtime.payload import pack_content
from nbtoolkit.runtime.ports import free_port

LIMIT = 8  # ranks: each holds some 20 MB of its own
CALM = 0.3  # seconds without a new branch: while a job imports, one follows another

FOLDER = "reserve"
"""Where, in a search's folder, ranks in reserve write before they have a job."""


class Reserve:
    """Ranks that wait for a job.

    Args:
        base: what all jobs have in common (see conductor.py).
        payload_fd: the packed function.
        tower: the launchpad.
    """

    def __init__(self, base: Mapping[str, Any], payload_fd: int, tower: Tower) -> None:
        self._payload_fd, self._tower = payload_fd, tower
        self._environment = environment_key(base["around"]["environ"])
        self._folder = Path(base["folder"]) / FOLDER
        self._waiting: list[tuple[Flight, int]] = []  # with the branch they came from
        # Once one has died: where memory or the disk is full another would die too, 20 a second.
        self._given_up = False

    def take(self, plan: LaunchPlan) -> Flight | None:
        """A rank for a plan, if one is there."""
        self._drop_stale()
        for at, (flight, _) in enumerate(self._waiting):
            if _ready(flight) and same_ranks(flight.plan, plan):
                del self._waiting[at]
                return flight
        return None

    def fill(self, plans: Iterable[LaunchPlan]) -> None:
        """Have one rank wait for each plan that is at work; none any more once one has died."""
        self._drop_stale()
        if self._given_up or time.monotonic() - self._tower.branched_at < CALM:
            return
        waiting = [flight.plan for flight, _ in self._waiting]
        for plan in [plan for plan in plans if plan.processes == 1][:LIMIT]:
            fitting = next((one for one in waiting if same_ranks(one, plan)), None)
            if fitting is not None:
                waiting.remove(fitting)
            else:
                self._fork(plan)

    def close(self) -> None:
        """End all."""
        for flight, _ in self._waiting:
            self._tower.dismiss(flight)
        self._waiting.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _fork(self, plan: LaunchPlan) -> None:
        def clear(flight: Flight, port: int, fds: list[int]) -> None:
            self._tower.clear(flight, port, fds, self._environment)

        own = pack_content({"folder": str(self._folder), "plan": plan, "waits": True})
        try:
            flight = Flight.start(plan, free_port(), clear, [self._payload_fd, own])
        finally:
            os.close(own)
        self._waiting.append((flight, self._tower.branches))

    def _drop_stale(self) -> None:
        """End those that died, and those without what the launchpad has imported since."""
        for one in list(self._waiting):
            flight, branch = one
            listen(flight)
            self._given_up |= flight.exited is not None
            if branch != self._tower.branches or flight.exited is not None:
                self._tower.dismiss(flight)
                self._waiting.remove(one)


def listen(flight: Flight) -> None:
    """Take what a rank says before it has a job."""
    for rank, message in flight.hear():
        if message["type"] == "phase":
            rank.phase, rank.pid = message["phase"], message.get("pid", rank.pid)


def _ready(flight: Flight) -> bool:
    return flight.all_are("group") and flight.alive()
