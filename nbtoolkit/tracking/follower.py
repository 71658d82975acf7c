"""Follow a run's events, and those of its trials and folds, and write them to trackers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from nbtoolkit.errors import TrackingError
from nbtoolkit.run.events import Event, EventReader, JobEvent, RunEnded, RunStarted
from nbtoolkit.run.paths import RunPaths, read_or_empty, write_json
from nbtoolkit.tracking.tracker import (
    NullTracker,
    Point,
    Tracker,
    Trackers,
    choose_tracking,
    job_folder,
    points,
)

# --- follow ---
# Hands a run's events to its tracker as they come; goes on where another one stopped.


MakeTracker = Callable[[RunStarted, bool, dict[str, Any]], Tracker]
"""(the attempt's first event, whether all events come, the kept state) -> a tracker."""

_BATCH = 1000  # MLflow takes as many metrics at once; tracking.json is written after each batch


class Follower:
    """Follows one run folder; ``tracking.json`` there says how far, and the next follower goes on.

    The run's supervisor must hold its lock before its run is followed: a run that nobody holds is
    over.

    Args:
        paths: the run.
        output_dir: where the MLflow database lies; None: the run folder's parent.
        make: makes the tracker; None: by the run's own configuration.
        owner: the run whose supervisor writes this one too; None: itself.

    Raises:
        TrackingError: the folder is gone, or another process follows it.
    """

    def __init__(
        self,
        paths: RunPaths,
        *,
        output_dir: Path | None = None,
        make: MakeTracker | None = None,
        owner: RunPaths | None = None,
    ) -> None:
        self._paths, self._owner = paths, owner or paths
        self._make = make or _make_by_config(paths, output_dir or paths.folder.absolute().parent)
        self._lock = _lock_folder(paths.folder)
        saved: dict[str, Any] = read_or_empty(paths.tracking)
        self.state: dict[str, Any] = saved.get("state", {})
        """What the trackers keep: ``mlflow_run_id``."""
        self._last_steps: dict[str, int] = saved.get("last_steps", {})
        self._run_at: int = saved.get("run_at", 0)  # where the present attempt's first line begins
        self._reader = EventReader(paths.events, saved.get("offset", 0))
        self._tracker: Tracker = NullTracker()
        self._time: float = saved.get("time", 0.0)  # of the event last read
        self._ended = False
        self._jobs = Jobs(paths.folder, self._follow_job)
        if self._reader.offset:
            self._pick_up()

    def poll(self) -> bool:
        """Write what is new.

        Returns:
            Whether the run, with all its jobs, is written through to its end. A run whose owner
            died before its last event is closed as killed; when it is resumed, it is followed on
            from there.
        """
        owned = self._owner.owned()  # asked first: a supervisor writes its last event, then lets go
        while batch := self._read():
            self._hand_over(batch)
        through = self._jobs.poll()
        if not self._ended and not owned:
            self._close(RunEnded(t=self._time, status="killed"))
        return self._ended and through

    def failed(self, error: str) -> None:
        """Keep with the run why it is not written."""
        with contextlib.suppress(OSError):  # the disk may be what failed
            kept = read_or_empty(self._paths.tracking)
            write_json(self._paths.tracking, {**kept, "done": False, "error": error})

    def close(self) -> None:
        """Let go of the folder."""
        self._jobs.close()
        os.close(self._lock)

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _pick_up(self) -> None:
        """Open the tracker where the last follower stopped, or start over when nothing is there."""
        run = next(EventReader(self._paths.events, self._run_at).read(), None)
        if isinstance(run, RunStarted):
            self._tracker = self._make(run, False, self.state)
            if self._tracker.open(run):
                self._jobs.pick_up()
                return
        self._reader.offset = self._run_at = 0
        self._last_steps.clear()

    def _follow_job(self, paths: RunPaths) -> Follower:
        def make(run: RunStarted, fresh: bool, state: dict[str, Any]) -> Tracker:
            return self._tracker.below(paths, fresh, state)

        return Follower(paths, make=make, owner=self._owner)

    def _read(self) -> list[tuple[int, Event]]:
        """New events, each with the place where it begins."""
        batch, begin = [], self._reader.offset
        for event in self._reader.read():
            batch.append((begin, event))
            begin = self._reader.offset
            if len(batch) == _BATCH:
                break
        return batch

    def _hand_over(self, batch: list[tuple[int, Event]]) -> None:
        numbers: list[Point] = []
        others: list[Event] = []
        for begin, event in batch:
            self._time = event.t
            if isinstance(event, RunStarted | RunEnded):
                self._tracker.write(numbers, others)
                numbers, others = [], []
            if isinstance(event, RunStarted):
                self._open(event, begin)
            elif isinstance(event, RunEnded):
                self._close(event, begin)
            else:
                numbers += points(event, self._last_steps)
                others.append(event)
                self._jobs.take(event)
        self._tracker.write(numbers, others)
        if not self._ended:
            self._save(self._reader.offset)

    def _open(self, run: RunStarted, begin: int) -> None:
        self._run_at, self._ended = begin, False
        self._tracker = self._make(run, begin == 0, self.state)
        self._tracker.open(run)

    def _close(self, ended: RunEnded, begin: int | None = None) -> None:
        """Close the tracker.

        The place kept is before the last event: a replay closes once more, which makes good a close
        that was cut off.
        """
        self._tracker.close(ended)
        self._ended = True
        self._save(self._reader.offset if begin is None else begin)

    def _save(self, offset: int) -> None:
        if not self._paths.folder.is_dir():
            return  # the user deleted the run
        kept = {
            "offset": offset,
            "time": self._time,
            "run_at": self._run_at,
            "last_steps": self._last_steps,
            "state": self.state,
            "done": self._ended,
            "read": self._reader.offset,
        }
        write_json(self._paths.tracking, kept, durable=False)  # an older one is as good


def follow(
    paths: RunPaths,
    *,
    output_dir: Path | None = None,
    make: MakeTracker | None = None,
    stop: Callable[[], bool] = lambda: False,
    every: float = 0.2,
) -> str | None:
    """Follow a run until it is written through to its end.

    Args:
        paths: the run.
        output_dir: where the MLflow database lies; None: the run folder's parent.
        make: makes the tracker; None: by the run's own configuration.
        stop: asked between two looks; True ends it early.
        every: seconds between two looks.

    Returns:
        The id of its MLflow run; None when MLflow is off.

    Raises:
        TrackingError: the folder or the store cannot be used.
    """
    with Follower(paths, output_dir=output_dir, make=make) as follower:
        while not follower.poll() and not stop():
            time.sleep(every)
        return follower.state.get("mlflow_run_id")


def _make_by_config(paths: RunPaths, output_dir: Path) -> MakeTracker:
    """The trackers that a run's configuration asks for, of those that are installed."""

    def make(run: RunStarted, fresh: bool, state: dict[str, Any]) -> Tracker:
        from nbtoolkit.tracking.mlflow_tracker import MLflowTracker
        from nbtoolkit.tracking.tensorboard import TensorBoardTracker

        choice = choose_tracking(run.config.get("tracking", {}))
        trackers: list[Tracker] = []
        if choice.mlflow:
            trackers.append(MLflowTracker(paths, output_dir, state))
        if choice.tensorboard:
            trackers.append(TensorBoardTracker(paths, fresh=fresh))
        return Trackers(trackers) if trackers else NullTracker()

    return make


def _lock_folder(folder: Path) -> int:
    """Lock the folder itself: a file of its own for this would be one more thing to explain."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise TrackingError(f"there is no run folder {folder}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise TrackingError(
            f"{folder} is being tracked by another process",
            do="wait until it is done; tracking.json in the folder says how far it is",
        ) from error
    return fd


# --- jobs ---


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
        running = isinstance(event, JobEvent) and event.state == "running"
        if running and (job := job_folder(event)) is not None:
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
