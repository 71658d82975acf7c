"""Nested: the MLflow runs below a sweep's or a cross-validation's: one a trial, one a fold.

    sweep                 its own run: every trial's value, the best so far
      trials/0007         a trial: its parameters, its value, how it ended
        trials/0007/fold-2   a fold of it

They are made and ended here, by the events of the sweep. Their curves are in the events of their
own folders, which are followed like any run's (Curves).
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nbtoolkit.runtime.events import Event
from nbtoolkit.runtime.paths import RunPaths
from nbtoolkit.tracking.mlflow_values import (
    METRICS,
    VALUES,
    as_metrics,
    as_params,
    as_tags,
    batches,
    ms,
    tail,
)
from nbtoolkit.tracking.tracker import NullTracker, Point, Tracker, trial_values

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

RUN_TAG = "nbtoolkit.run_id"
"""The tag by which the MLflow run of a folder is found again."""

SWEEP_TAG = "nbtoolkit.sweep"
"""The tag that all runs below a sweep have, at any depth: the sweep's run id."""

# How a trial or fold ended, in MLflow's words; the exact state is in the tag nbtoolkit.status.
_STATUS = {
    "running": "RUNNING",
    "waiting": "SCHEDULED",
    "complete": "FINISHED",
    "failed": "FAILED",
    "infeasible": "FAILED",
}  # every other: KILLED (ended early)


class Nested:
    """Writes the runs below one run.

    Args:
        client: the store.
        experiment: the experiment's id.
        paths: the sweep's folder.
        run_id: the sweep's own MLflow run.
    """

    def __init__(self, client: MlflowClient, experiment: str, paths: RunPaths, run_id: str) -> None:
        self._client, self._experiment = client, experiment
        self._paths, self._run_id = paths, run_id
        self._known: dict[str, str] = {}  # folder below the sweep's -> MLflow run
        self._status: dict[str, str] = {}  # MLflow run -> what the store has as its status

    def take(self, event: Event) -> None:
        """Take a ``trial`` or ``fold`` event; written twice it changes nothing."""
        folder, state = event["folder"], event["state"]
        new = folder not in self._known
        run_id = self.run_of(folder, event["t"])
        tags = as_tags({"nbtoolkit.status": state, "nbtoolkit.reason": event.get("reason")})
        params = as_params(event.get("params") or {}) if new else []
        first, rest = params[:VALUES], params[VALUES:]
        metrics = list(as_metrics(_results(event)))
        self._client.log_batch(run_id, metrics=metrics, params=first, tags=tags)
        for batch in batches(rest, VALUES):
            self._client.log_batch(run_id, params=batch)
        if event.get("best"):
            self._client.set_tag(self._run_id, "nbtoolkit.best", folder)
        self._set_status(run_id, _STATUS.get(state, "KILLED"), event["t"])

    def run_of(self, folder: str, began: float) -> str:
        """The MLflow run of a folder; made when there is none, with what it is nested in.

        Args:
            folder: relative to the sweep's; the empty text is the sweep itself.
            began: unix seconds, for a new one.
        """
        if not folder or folder in ("trials", "folds"):
            return self._run_id
        if folder not in self._known:
            self._known[folder] = self._find(folder) or self._create(folder, began)
        return self._known[folder]

    def end(self, ended: float) -> None:
        """The sweep has ended: what has not is marked as killed."""
        running = f"tags.`{SWEEP_TAG}` = '{self._paths.run_id}' and attributes.status = 'RUNNING'"
        while left := self._client.search_runs([self._experiment], running):
            for run in left:
                self._client.set_tag(run.info.run_id, "nbtoolkit.status", "killed")
                self._set_status(run.info.run_id, "KILLED", ended)

    def _find(self, folder: str) -> str | None:
        text = f"tags.`{RUN_TAG}` = '{self._paths.run_id}/{folder}'"
        for run in self._client.search_runs([self._experiment], text, max_results=1):
            self._status[run.info.run_id] = run.info.status
            return str(run.info.run_id)
        return None

    def _create(self, folder: str, began: float) -> str:
        tags = {
            RUN_TAG: f"{self._paths.run_id}/{folder}",
            SWEEP_TAG: self._paths.run_id,
            "nbtoolkit.folder": str(self._paths.folder / folder),
            "mlflow.parentRunId": self.run_of(posixpath.dirname(folder), began),
            "mlflow.source.type": "LOCAL",
        }
        run = self._client.create_run(self._experiment, ms(began), tags=tags, run_name=folder)
        self._status[run.info.run_id] = "RUNNING"
        return str(run.info.run_id)

    def _set_status(self, run_id: str, status: str, at: float) -> None:
        if status not in ("RUNNING", "SCHEDULED"):
            self._client.set_terminated(run_id, status, end_time=ms(at))
        elif status != self._status.get(run_id):
            self._client.update_run(run_id, status=status)
        self._status[run_id] = status


def _results(event: Event) -> list[Point]:
    """What a trial or fold came to, beside the curves that its own events have."""
    if event["state"] != "complete":
        return []
    scores = event.get("metrics") or {}
    values = trial_values(event) if event["type"] == "trial" else scores
    prefix = "" if event["type"] == "trial" else "score/"
    return [Point(prefix + name, float(value), 0, event["t"]) for name, value in values.items()]


class Curves:
    """Writes the curves of a job (a trial or a fold) into the run that Nested made for it.

    Args:
        client: the store.
        run_id: that run.
        paths: the job's folder.
        state: kept between processes by the caller.
    """

    def __init__(
        self, client: MlflowClient, run_id: str, paths: RunPaths, state: dict[str, Any]
    ) -> None:
        self._client, self._run_id, self._paths, self._state = client, run_id, paths, state

    def open(self, run: Event) -> bool:
        """Whether what was written before is in this very run (else the store is a new one)."""
        found = self._state.get("mlflow_run_id") == self._run_id
        self._state["mlflow_run_id"] = self._run_id
        return found

    def write(self, points: Sequence[Point], events: Sequence[Event]) -> None:
        """Write metrics in batches."""
        for batch in batches(as_metrics(points), METRICS):
            self._client.log_batch(self._run_id, metrics=batch)

    def close(self, ended: Event) -> None:
        """A failed job's logs become artifacts; those of the others stay in its folder alone."""
        if ended["status"] == "failed":
            for file in sorted((self._paths.folder / "ranks").glob("**/*.txt")):
                name = file.relative_to(self._paths.folder).as_posix()
                self._client.log_text(self._run_id, tail(file), name)

    def below(self, paths: RunPaths, fresh: bool, state: dict[str, Any]) -> Tracker:
        """A job has no jobs."""
        return NullTracker()
