"""Describe the job of a cluster that trains a run, and find it again by the run's folder.

A cluster is a module of an extra, and :data:`CLUSTERS` names the object in it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from nbtoolkit.environment.installed import import_extra
from nbtoolkit.run.attempts import completed
from nbtoolkit.run.paths import RunPaths, read_or_empty, write_json

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config

CLUSTERS = {
    "slurm": ("slurm", "SLURM"),
    "ray": ("ray_jobs", "RAY"),
}
"""The values of ``where`` besides ``"local"``: module and object of the extra ``cluster``."""

JOB_MARK = "NBTOOLKIT_JOB"
"""Set to the run's folder in the processes of its job."""

_STATE_SECONDS = 2.0  # between two questions for a job's state: a command of 20 ms

Phase = Literal["waiting", "running", "ended"]


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a job.

    Attributes:
        phase: ``"waiting"`` also if the cluster will start it again.
        text: the cluster's own words.
    """

    phase: Phase
    text: str


class JobQueue(Protocol):
    """What submits jobs; each is described by plain values, which a run's folder keeps."""

    def check(self, config: Config, *, search: bool) -> int | None:
        """Check what is knowable before the run's folder is made.

        Args:
            config: the resolved configuration.
            search: whether the job is a sweep or a cross-validation.

        Returns:
            The ranks of one machine, if its job calls ``nb.launch`` once on it; None: each rank
            does.

        Raises:
            NbtoolkitError: a package, a program or a setting is missing or wrong.
        """

    def submit(self, paths: RunPaths, config: Config, *, search: bool) -> Mapping[str, object]:
        """Submit the job that makes the call in the run's folder (:data:`CALL_FILE`).

        Raises:
            LaunchError: the cluster refuses it.
        """

    def state(self, job: Mapping[str, object]) -> JobState:
        """Ask the cluster for a job's state."""

    def cancel(self, job: Mapping[str, object]) -> None:
        """End a job at once."""


CALL_FILE = "remote/call.pkl"
"""In the run's folder: the pickled call that the job makes."""


def find_cluster(where: str) -> JobQueue:
    """Return the cluster of a name of :data:`CLUSTERS`.

    Raises:
        MissingExtra: this copy of nbtoolkit is without the extra.
    """
    module, name = CLUSTERS[where]
    cluster: JobQueue = getattr(import_extra("cluster", module), name)
    return cluster


class RemoteJob:
    """The job of a run; it asks the cluster for its state every two seconds at most."""

    def __init__(self, where: str, job: Mapping[str, object]) -> None:
        self._cluster = find_cluster(where)
        self._job = job
        self._state = JobState(phase="waiting", text="submitted")
        self._asked = float("-inf")

    def state(self) -> JobState:
        """Return the state."""
        if self._state.phase != "ended" and time.monotonic() - self._asked >= _STATE_SECONDS:
            self._state = self._cluster.state(self._job)
            self._asked = time.monotonic()
        return self._state

    def active(self) -> bool:
        """Return True if the job waits or runs."""
        return self.state().phase != "ended"

    def cancel(self) -> None:
        """End the job at once."""
        self._cluster.cancel(self._job)
        self._asked = float("-inf")


def remote_job(paths: RunPaths) -> RemoteJob | None:
    """Return the job of a run; None: it was started on its own machine, or this is the job."""
    if os.environ.get(JOB_MARK) == str(paths.folder):
        return None
    match read_or_empty(paths.remote):
        case {"where": str(where), "job": dict(job)} if where in CLUSTERS:
            return RemoteJob(where, job)
    return None


def last_lines(paths: RunPaths) -> str:
    """Return the end of what the job of a run has written itself, outside its ranks."""
    file = paths.remote.with_name("log.txt")
    lines = file.read_text(errors="replace").splitlines()[-5:] if file.exists() else []
    return "".join(f"\n    {line}" for line in lines)


def awaits_job(paths: RunPaths) -> bool:
    """Whether a job of another process waits or runs, which will lock the run."""
    job = remote_job(paths)
    return job is not None and not completed(paths) and job.active()


def write_job(paths: RunPaths, where: str, job: Mapping[str, object], events_size: int) -> None:
    """Record the job of a run.

    Args:
        paths: the run's.
        where: a name of :data:`CLUSTERS`.
        job: what the cluster knows it by.
        events_size: of the run's events before the job was submitted, in bytes.
    """
    write_json(paths.remote, {"where": where, "job": dict(job), "events_size": events_size})


def job_has_started(paths: RunPaths) -> bool:
    """Whether the last job of a run has written an event; true for a run without a job.

    It compares no times: a copy of the folder has others, and so have the clocks of a cluster.
    """
    return read_or_empty(paths.remote).get("events_size") != events_size(paths)


def events_size(paths: RunPaths) -> int:
    """Return the size of a run's events, in bytes."""
    return paths.events.stat().st_size if paths.events.exists() else 0
