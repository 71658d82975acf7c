"""Follow a run's events, and those of its trials and folds, and write them to trackers."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from nbtoolkit.environment.installed import EXTRAS
from nbtoolkit.environment.resources import try_lock
from nbtoolkit.errors import TrackingError
from nbtoolkit.run.events import Event, EventReader, JobEvent, RunEnded, RunStarted, RunSubmitted
from nbtoolkit.run.paths import RunPaths, read_or_empty, write_json
from nbtoolkit.tracking.tracker import (
    Point,
    Tracker,
    TrackerName,
    choose_tracking,
    job_folder,
    points,
)

Makers = Mapping[str, Callable[[], Tracker]]
"""What makes each tracker, by its name."""

_SHORT = 500  # characters of an error for which a block of 4 KB always has room

_BATCH = 1000  # events; tracking.json is written after each batch


class Follower:
    """Follows one run folder, from its first event.

    ``tracking.json`` there says how much of the events is written. The next follower reads these,
    and writes the others. Trackers that have lost the run get all of them again.

    The run's supervisor must hold its lock before the run is followed: a run whose lock is free has
    ended.

    Args:
        paths: the run.
        output_dir: the folder of the MLflow database; None: the run folder's parent.
        make: the trackers for an attempt; None: as the run's own configuration says.
        owner: the run whose supervisor writes this one too; None: itself.

    Raises:
        TrackingError: the folder does not exist, or another process follows it.
    """

    def __init__(
        self,
        paths: RunPaths,
        *,
        output_dir: Path | None = None,
        make: Callable[[RunStarted], Makers] | None = None,
        owner: RunPaths | None = None,
    ) -> None:
        self._paths = paths
        self._owner = owner or paths
        output_dir = output_dir or paths.folder.absolute().parent
        self._make = make or partial(_trackers_of_config, paths, output_dir)
        self._lock = lock_tracking(paths)
        self._reader = EventReader(paths.events)
        self._written, self._was_done = _saved_position(paths)
        self._trackers: dict[str, Tracker] = {}
        self._last_steps: dict[str, int] = {}
        self._time = 0.0  # of the event last read
        self._ended: RunEnded | None = None
        self._closed = False
        self._jobs = _Jobs(paths.folder, self._follow_job)
        if not self._written:
            self._save()  # so that an error has a place even if the disk becomes full

    def poll(self) -> bool:
        """Write new events.

        Returns:
            Whether the run, with all its jobs, is written to its end. A run whose owner died before
            its last event is closed as killed; a resumed run continues from there.
        """
        # First of all: a supervisor writes its last event before it releases its lock.
        owned = self._owner.owned()
        while batch := self._read():
            self._write(batch)
        if self._ended is None and not owned:
            self._ended = RunEnded(t=self._time, status="killed")
        jobs_done = self._jobs.poll()
        if self._ended is not None and not self._closed:
            self._close(self._ended)
        return self._closed and jobs_done

    def failed(self, error: str) -> None:
        """Write to the run's folder why it is not tracked."""
        saved = {**read_or_empty(self._paths.tracking), "done": False, "error": error}
        try:
            write_json(self._paths.tracking, saved)
        except OSError:
            # The disk is full. A short text has room in the block that the file takes already.
            text = json.dumps({**saved, "error": error[:_SHORT]})
            with contextlib.suppress(OSError), self._paths.tracking.open("r+") as file:
                file.write(text)
                file.truncate()

    def close(self) -> None:
        """Release the folder."""
        self._jobs.close()
        os.close(self._lock)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> list[tuple[int, Event]]:
        """Return new events, each with the offset at which it ends."""
        batch = []
        for event in self._reader.read():
            if type(event) is not RunSubmitted:  # nothing is known yet that trackers show
                batch.append((self._reader.offset, event))
            if len(batch) == _BATCH:
                break
        return batch

    def _write(self, batch: list[tuple[int, Event]]) -> None:
        numbers: list[Point] = []
        others: list[Event] = []
        for end, event in batch:
            self._time = event.t
            if isinstance(event, RunStarted):
                self._write_to_trackers(numbers, others)
                numbers = []
                others = []
                if not self._open(event, end):
                    self._start_over()
                    return
            elif isinstance(event, RunEnded):
                self._ended = event
            else:
                new = points(event, self._last_steps)
                self._jobs.add(event, written=end <= self._written)
                if end > self._written:
                    numbers += new
                    others.append(event)
        self._write_to_trackers(numbers, others)
        if self._reader.offset > self._written:
            self._written = self._reader.offset
            self._save()

    def _write_to_trackers(self, numbers: list[Point], others: list[Event]) -> None:
        if numbers or others:
            for tracker in self._trackers.values():
                tracker.write(numbers, others)

    def _open(self, run: RunStarted, end: int) -> bool:
        """Open the trackers of an attempt.

        Returns:
            Whether each of them has what is counted as written.
        """
        ended = self._ended or RunEnded(t=run.t, status="killed")
        self._ended = None
        self._closed = False
        makers = self._make(run)
        for name in set(self._trackers) - set(makers):  # the settings have changed
            self._trackers.pop(name).close(ended)
        done = self._was_done and end <= self._written
        complete = True
        for name, make in makers.items():
            fresh = name not in self._trackers and not self._written
            if name not in self._trackers:
                self._trackers[name] = make()
            complete &= self._trackers[name].open(run, fresh=fresh, done=done)
        return complete

    def _start_over(self) -> None:
        """Write all events again, from the first."""
        self._written = 0
        self._was_done = False
        self._reader.offset = 0
        self._last_steps.clear()
        self._trackers.clear()
        self._jobs.close()

    def _follow_job(self, paths: RunPaths) -> Follower:
        def make(run: RunStarted) -> Makers:
            return {name: partial(made.for_job, paths) for name, made in self._trackers.items()}

        return Follower(paths, make=make, owner=self._owner)

    def _close(self, ended: RunEnded) -> None:
        """Close the trackers, after those of the jobs."""
        for tracker in self._trackers.values():
            tracker.close(ended)
        self._closed = True
        self._save()

    def _save(self) -> None:
        if not self._paths.folder.is_dir():
            return  # the user deleted the run
        places = {name: tracker.place for name, tracker in self._trackers.items()}
        saved = {"written": self._written, "done": self._closed, "places": places}
        write_json(self._paths.tracking, saved, durable=False)  # an older one serves as well


def first_event(paths: RunPaths) -> RunStarted | None:
    """Return the first event of a run's first attempt; None: there is none."""
    events = EventReader(paths.events).read()
    event = next((event for event in events if type(event) is not RunSubmitted), None)
    return event if isinstance(event, RunStarted) else None


def _saved_position(paths: RunPaths) -> tuple[int, bool]:
    """How many bytes of the events are written, and whether these were all of a run that ended."""
    saved: dict[str, Any] = read_or_empty(paths.tracking)
    size = paths.events.stat().st_size if paths.events.exists() else 0
    written = saved.get("written", 0)
    if written > size:  # other events than those that were written
        return 0, False
    return written, bool(saved.get("done")) and written == size


def _trackers_of_config(paths: RunPaths, output_dir: Path, run: RunStarted) -> Makers:
    """Return the trackers that a run's configuration asks for, of those that are installed."""
    from nbtoolkit.tracking.mlflow_tracker import MLflowTracker
    from nbtoolkit.tracking.tensorboard import TensorBoardTracker

    makers: dict[TrackerName, Callable[[], Tracker]] = {
        "mlflow": partial(MLflowTracker, paths, output_dir),
        "tensorboard": partial(TensorBoardTracker, paths),
        "wandb": lambda: import_module(f"{EXTRAS['wandb']}.wandb_tracker").WandbTracker(paths),
    }
    choice = choose_tracking(run.config.get("tracking", {}))
    return {name: makers[name] for name in choice.trackers}


def lock_tracking(paths: RunPaths) -> int:
    """Lock a run's folder for tracking; return the descriptor that holds the lock.

    Raises:
        TrackingError: the folder does not exist, or another process tracks it.
    """
    try:
        fd = os.open(paths.tracking_lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise TrackingError(f"there is no run folder {paths.folder}: {error.strerror}") from error
    if not try_lock(fd):
        os.close(fd)
        raise TrackingError(
            f"{paths.folder} is being tracked by another process",
            do="wait until it is done; tracking.json in the folder says how much is written",
        )
    return fd


class _Jobs:
    """Followers of the jobs (trials and folds) that the sweep's events name.

    Args:
        sweep: the sweep's folder.
        follow: makes the follower of a job.
    """

    def __init__(self, sweep: Path, follow: Callable[[RunPaths], Follower]) -> None:
        self._sweep = sweep
        self._follow = follow
        self._waiting: dict[str, None] = {}  # folders without events yet, in order
        self._followers: dict[str, Follower] = {}

    def add(self, event: Event, *, written: bool) -> None:
        """Follow the job that an event of the sweep reports as running.

        Args:
            event: any event of the sweep.
            written: the trackers have it; then they have the jobs that were written to their end.
        """
        running = isinstance(event, JobEvent) and event.state == "running"
        if not running or (job := job_folder(event)) is None:
            return
        _, done = _saved_position(RunPaths(self._sweep / job))
        if not (written and done):
            self._waiting[job] = None

    def poll(self) -> bool:
        """Write the jobs' new events.

        Returns:
            Whether all jobs that have events are written to their end.
        """
        # A trial of folds never has events of its own: its folds have.
        for job in list(self._waiting):
            paths = RunPaths(self._sweep / job)
            if paths.events.exists() and job not in self._followers:
                self._followers[job] = self._follow(paths)
            if job in self._followers:
                del self._waiting[job]
        for job, follower in list(self._followers.items()):
            if follower.poll():
                follower.close()
                del self._followers[job]
        return not self._followers

    def close(self) -> None:
        """Release their folders."""
        for follower in self._followers.values():
            follower.close()
        self._followers.clear()
        self._waiting.clear()
