"""Follow a run's events, and those of its trials and folds, and write them to trackers."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbtoolkit.environment.resources import try_lock
from nbtoolkit.errors import TrackingError
from nbtoolkit.run.events import Event, EventReader, JobEvent, RunEnded, RunStarted, RunSubmitted
from nbtoolkit.run.paths import RunPaths, read_or_empty, write_json
from nbtoolkit.tracking.tracker import (
    Point,
    Tracker,
    TrackerName,
    TrackerState,
    choose_tracking,
    job_folder,
    points,
)

MakeTrackers = Callable[[RunStarted, bool, TrackerState], list[Tracker]]
"""(the attempt's first event, whether all events follow, the kept state) -> the trackers."""

_SHORT = 500  # characters of an error for which a block of 4 KB always has room

_BATCH = 1000  # events; tracking.json is written after each batch


class Follower:
    """Follows one run folder; ``tracking.json`` there has the position, for the next follower.

    The run's supervisor must hold its lock before the run is followed: a run whose lock is free has
    ended.

    Args:
        paths: the run.
        output_dir: the folder of the MLflow database; None: the run folder's parent.
        make: makes the trackers; None: as the run's own configuration says.
        owner: the run whose supervisor writes this one too; None: itself.

    Raises:
        TrackingError: the folder does not exist, or another process follows it.
    """

    def __init__(
        self,
        paths: RunPaths,
        *,
        output_dir: Path | None = None,
        make: MakeTrackers | None = None,
        owner: RunPaths | None = None,
    ) -> None:
        self._paths, self._owner = paths, owner or paths
        self._make = make or _make_by_config(paths, output_dir or paths.folder.absolute().parent)
        self._lock = _lock_tracking(paths)
        saved: dict[str, Any] = read_or_empty(paths.tracking)
        self.state: TrackerState = saved.get("state", {})
        """What the trackers keep."""
        self._last_steps: dict[str, int] = saved.get("last_steps", {})
        self._run_at: int = saved.get("run_at", 0)  # offset of the present attempt's first line
        self._reader = EventReader(paths.events, saved.get("offset", 0))
        self._trackers: list[Tracker] = []
        self._time: float = saved.get("time", 0.0)  # of the event last read
        self._ended = False
        self._jobs = _Jobs(paths.folder, self._follow_job)
        if self._reader.offset:
            self._resume()
        else:
            self._save(0)  # so that an error has a place even if the disk becomes full

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
        jobs_done = self._jobs.poll()
        if not self._ended and not owned:
            self._close(RunEnded(t=self._time, status="killed"))
        return self._ended and jobs_done

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

    def _resume(self) -> None:
        """Open the trackers where the last follower stopped, or start over if their run is gone."""
        run = first_event(self._paths, self._run_at)
        if run is not None and self._open(run, fresh=False):
            self._jobs.resume()
        else:
            self._start_over()

    def _open(self, run: RunStarted, *, fresh: bool) -> bool:
        """Open the trackers of an attempt; return whether each of them had written this run."""
        self._trackers = self._make(run, fresh, self.state)
        opened = [tracker.open(run) for tracker in self._trackers]
        return all(opened)

    def _start_over(self) -> None:
        self._reader.offset = self._run_at = 0
        self._last_steps.clear()

    def _follow_job(self, paths: RunPaths) -> Follower:
        def make(run: RunStarted, fresh: bool, state: TrackerState) -> list[Tracker]:
            return [tracker.for_job(paths, fresh, state) for tracker in self._trackers]

        return Follower(paths, make=make, owner=self._owner)

    def _read(self) -> list[tuple[int, Event]]:
        """New events, each with the offset at which it begins."""
        batch, begin = [], self._reader.offset
        for event in self._reader.read():
            if type(event) is RunSubmitted:  # nothing is known yet that trackers show
                continue
            batch.append((begin, event))
            begin = self._reader.offset
            if len(batch) == _BATCH:
                break
        return batch

    def _write(self, batch: list[tuple[int, Event]]) -> None:
        numbers: list[Point] = []
        others: list[Event] = []
        for begin, event in batch:
            self._time = event.t
            if isinstance(event, RunStarted | RunEnded):
                self._write_to_trackers(numbers, others)
                numbers, others = [], []
            if isinstance(event, RunStarted):
                self._run_at, self._ended = begin, False
                if not self._open(event, fresh=begin == 0) and begin:
                    self._start_over()
                    return
            elif isinstance(event, RunEnded):
                self._close(event, begin)
            else:
                numbers += points(event, self._last_steps)
                others.append(event)
                self._jobs.add(event)
        self._write_to_trackers(numbers, others)
        if not self._ended:
            self._save(self._reader.offset)

    def _write_to_trackers(self, numbers: list[Point], others: list[Event]) -> None:
        for tracker in self._trackers:
            tracker.write(numbers, others)

    def _close(self, ended: RunEnded, begin: int | None = None) -> None:
        """Close the trackers, after those of the jobs.

        The saved offset is before the last event: a replay closes again, in case this close is
        interrupted.
        """
        self._jobs.poll()
        for tracker in self._trackers:
            tracker.close(ended)
        self._ended = True
        self._save(self._reader.offset if begin is None else begin)

    def _save(self, offset: int) -> None:
        if not self._paths.folder.is_dir():
            return  # the user deleted the run
        saved = {
            "offset": offset,
            "time": self._time,
            "run_at": self._run_at,
            "last_steps": self._last_steps,
            "state": self.state,
            "done": self._ended,
            "read": self._reader.offset,
        }
        write_json(self._paths.tracking, saved, durable=False)  # an older one serves as well


def first_event(paths: RunPaths, offset: int = 0) -> RunStarted | None:
    """The first event of an attempt, at ``offset`` in the run's events; None: there is none."""
    events = EventReader(paths.events, offset).read()
    event = next((event for event in events if type(event) is not RunSubmitted), None)
    return event if isinstance(event, RunStarted) else None


def _make_by_config(paths: RunPaths, output_dir: Path) -> MakeTrackers:
    """The trackers that a run's configuration asks for, of those that are installed."""

    def make(run: RunStarted, fresh: bool, state: TrackerState) -> list[Tracker]:
        from nbtoolkit.tracking.mlflow_tracker import MLflowTracker
        from nbtoolkit.tracking.tensorboard import TensorBoardTracker
        from nbtoolkit.tracking.wandb_tracker import WandbTracker

        makers: dict[TrackerName, Callable[[], Tracker]] = {
            "mlflow": lambda: MLflowTracker(paths, output_dir, state),
            "tensorboard": lambda: TensorBoardTracker(paths, fresh=fresh),
            "wandb": lambda: WandbTracker(paths, state, fresh),
        }
        choice = choose_tracking(run.config.get("tracking", {}))
        return [makers[name]() for name in choice.trackers]

    return make


def _lock_tracking(paths: RunPaths) -> int:
    try:
        fd = os.open(paths.tracking_lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise TrackingError(f"there is no run folder {paths.folder}: {error.strerror}") from error
    if not try_lock(fd):
        os.close(fd)
        raise TrackingError(
            f"{paths.folder} is being tracked by another process",
            do="wait until it is done; tracking.json in the folder has its position",
        )
    return fd


class _Jobs:
    """Followers of the jobs (trials and folds) that the sweep's events name.

    Args:
        sweep: the sweep's folder.
        follow: makes the follower of a job.
    """

    def __init__(self, sweep: Path, follow: Callable[[RunPaths], Follower]) -> None:
        self._sweep, self._follow = sweep, follow
        self._waiting: dict[str, None] = {}  # folders without events yet, in order
        self._followers: dict[str, Follower] = {}

    def add(self, event: Event) -> None:
        """Follow the job that an event of the sweep reports as running."""
        running = isinstance(event, JobEvent) and event.state == "running"
        if running and (job := job_folder(event)) is not None:
            self._waiting[job] = None

    def resume(self) -> None:
        """Follow the jobs that an earlier follower of the sweep did not write to their end."""
        past = EventReader(RunPaths(self._sweep).events).read()
        for job in dict.fromkeys(job for event in past if (job := job_folder(event)) is not None):
            if not read_or_empty(RunPaths(self._sweep / job).tracking).get("done"):
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
