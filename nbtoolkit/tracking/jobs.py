"""Jobs: the trials and folds below a sweep's folder, each followed like a run while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.runtime.events import Event, EventReader
from nbtoolkit.runtime.paths import RunPaths, read_or_empty
from nbtoolkit.tracking.tracker import job_folder

if TYPE_CHECKING:
    from nbtoolkit.tracking.follow import Follower


class Jobs:
    """Followers of the jobs that the sweep's events name.

    Args:
        sweep: the sweep's folder.
        follow: makes the follower of a job.
    """

    def __init__(self, sweep: Path, follow: Callable[[RunPaths], Follower]) -> None:
        self._sweep, self._follow = sweep, follow
        self._waiting: dict[str, None] = {}  # folders that hold no events yet, in order
        self._followers: dict[str, Follower] = {}

    def take(self, event: Event) -> None:
        """Take an event of the sweep: a job that it says is running is followed from now on."""
        job = job_folder(event)
        if job is not None and event["state"] == "running":
            self._waiting[job] = None

    def pick_up(self) -> None:
        """Follow the jobs that an earlier follower of the sweep did not write through."""
        past = EventReader(RunPaths(self._sweep).events).read()
        for job in dict.fromkeys(job for event in past if (job := job_folder(event)) is not None):
            state = read_or_empty(RunPaths(self._sweep / job).tracking)
            if not state.get("done"):
                self._waiting[job] = None

    def poll(self) -> bool:
        """Write what is new of the jobs.

        Returns:
            Whether all that has begun is written through.
        """
        self._begin()
        for job, follower in list(self._followers.items()):
            if follower.poll():
                follower.close()
                del self._followers[job]
        return not self._followers

    def close(self) -> None:
        """Let go of their folders."""
        for follower in self._followers.values():
            follower.close()
        self._followers.clear()

    def _begin(self) -> None:
        """Follow what has a diary by now. A trial of folds never has one: its folds have."""
        for job in list(self._waiting):
            paths = RunPaths(self._sweep / job)
            if paths.events.exists() and job not in self._followers:
                self._followers[job] = self._follow(paths)
            if job in self._followers:
                del self._waiting[job]
