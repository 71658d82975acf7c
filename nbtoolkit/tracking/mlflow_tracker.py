"""Write a run, and the trials and folds below it, to MLflow with MlflowClient (no active run)."""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.run.events import (
    CheckpointSaved,
    Event,
    EventReader,
    JobEvent,
    NoteAdded,
    RunEnded,
    RunStarted,
    StopRequested,
    TrialChanged,
)
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.tracking.database import SWEEP_TAG, open_database
from nbtoolkit.tracking.tracker import (
    Point,
    Tracker,
    job_folder,
    job_values,
)

if TYPE_CHECKING:
    from mlflow.entities import Metric, Param, Run, RunTag
    from mlflow.tracking import MlflowClient

_RUN_TAG = "nbtoolkit.run_id"
"""The tag by which the MLflow run of a folder is found again."""

_PARENT_TAG = "mlflow.parentRunId"

# MLflow's own limits, the smallest of all versions: 500 characters for a parameter (6000 since
# 2.10, but a server may be older), 5000 for a tag. MlflowClient.log_batch splits long batches.
_PARAM_LENGTH = 500
_TAG_LENGTH = 5000
_NAME_LENGTH = 250

_LOG_BYTES = 1_000_000
"""A log's last bytes that become an artifact."""

# The status of a run, trial or fold in MLflow's words; the tag nbtoolkit.status has the exact one.
_STATUS = {
    "running": "RUNNING",
    "waiting": "SCHEDULED",
    "complete": "FINISHED",
    "completed": "FINISHED",
    "failed": "FAILED",
    "infeasible": "FAILED",
}
_ENDED_EARLY = "KILLED"  # every other


class MLflowTracker:
    """Writes one run folder to MLflow.

    Args:
        paths: the run.
        output_dir: the folder of database and artifacts.
    """

    def __init__(self, paths: RunPaths, output_dir: Path) -> None:
        self._paths = paths
        self._output_dir = output_dir
        self._first: RunStarted | None = None  # it says where the MLflow run is made
        self._client: MlflowClient
        self._run_id = ""
        self._jobs: _JobRuns

    @property
    def place(self) -> str:
        """The MLflow run's id."""
        return self._run_id

    def open(self, run: RunStarted, *, fresh: bool, done: bool) -> bool:
        """Find or create the MLflow run; write parameters and tags.

        Raises:
            MissingExtra: MLflow is not installed.
            TrackingError: the store cannot be used.
        """
        first = self._first = self._first or run
        self._client, experiment = open_database(
            self._output_dir,
            uri=run.config.get("tracking", {}).get("uri"),
            experiment=first.config.get("tracking", {}).get("experiment"),
            parent=first.mlflow_parent,
        )
        existing = _find_run(self._client, experiment, self._paths.run_id)
        mlflow_run = existing or self._create(experiment, run)
        self._run_id = mlflow_run.info.run_id
        self._jobs = _JobRuns(self._client, experiment, self._paths, self._run_id)
        ended = mlflow_run.info.end_time
        if ended is not None and _as_ms(run.t) > ended:  # a new attempt of a run that had ended
            self._client.update_run(self._run_id, status="RUNNING")
        self._log_params(mlflow_run, run)
        self._client.log_batch(self._run_id, tags=_as_tags(_run_tags(run, self._paths)))
        return existing is not None

    def write(self, points: Sequence[Point], events: Sequence[Event]) -> None:
        """Write metrics; checkpoints and stop requests as tags; trials and folds as nested runs."""
        tags = _as_tags(_event_tags(events))
        self._client.log_batch(self._run_id, metrics=_as_metrics(points), tags=tags)
        for event in events:
            if isinstance(event, JobEvent) and (folder := job_folder(event)) is not None:
                self._jobs.write(folder, event)

    def for_job(self, paths: RunPaths) -> Tracker:
        """Return a tracker for the curves of a trial or a fold of this sweep."""
        folder = paths.folder.relative_to(self._paths.folder).as_posix()
        run_id = self._jobs.run_id_of(folder, time.time())
        return _JobTracker(self._client, run_id, paths, new=run_id in self._jobs.created)

    def close(self, ended: RunEnded) -> None:
        """Write the artifacts and the run's status."""
        self._log_artifacts()
        self._jobs.end(ended.t)
        tags = _as_tags({"nbtoolkit.status": ended.status, "nbtoolkit.error": ended.error})
        self._client.log_batch(self._run_id, tags=tags)
        status = _STATUS.get(ended.status, _ENDED_EARLY)
        self._client.set_terminated(self._run_id, status, end_time=_as_ms(ended.t))

    def _create(self, experiment: str, run: RunStarted) -> Run:
        name = self._paths.run_id
        tags = {_RUN_TAG: name}
        if run.mlflow_parent is not None:
            tags[_PARENT_TAG] = run.mlflow_parent
        return self._client.create_run(experiment, _as_ms(run.t), tags=tags, run_name=name)

    def _log_params(self, mlflow_run: Run, run: RunStarted) -> None:
        """Write config and plan.

        MLflow's parameters cannot change: a value that a later attempt changed becomes a new
        parameter, such as ``attempt2.train.epochs``.
        """
        known = mlflow_run.data.params
        new = {}
        # The plan's reasons are in the description.
        plan = {key: value for key, value in run.plan.items() if key != "reasons"}
        for param in _as_params({**run.config, "plan": plan}):
            changed = known.get(param.key, param.value) != param.value
            key = f"attempt{run.attempt}.{param.key}" if changed else param.key
            if key not in known:
                new[key] = param.value
        self._client.log_batch(self._run_id, params=_as_params(new))

    def _log_artifacts(self) -> None:
        """Copy the readable part of the folder.

        Not the checkpoints: they are large, lie beside the database already, and their paths are
        tags.
        """
        paths = self._paths
        for file in (paths.config, paths.folder / "sweep.yaml", paths.folder / "folds.json"):
            if file.exists():
                self._client.log_artifact(self._run_id, str(file))
        _log_rank_logs(self._client, self._run_id, paths)
        events = EventReader(paths.events).read()
        notes = (event for event in events if isinstance(event, NoteAdded))
        if text := "".join(f"{note.level}: {note.text}\n" for note in notes):
            self._client.log_text(self._run_id, text, "notes.txt")


class _JobRuns:
    """The MLflow runs below a sweep's or a cross-validation's: one per trial, one per fold.

        sweep                    its own run: every trial's value, the best so far
          trials/0007            a trial: its parameters, its value, its status
            trials/0007/fold-2   a fold of it

    The sweep's events create and end them. Their curves are in the events of their own folders
    (_JobTracker).

    Args:
        client: the store.
        experiment: the experiment's id.
        paths: the sweep's folder.
        run_id: the sweep's own MLflow run.
    """

    def __init__(self, client: MlflowClient, experiment: str, paths: RunPaths, run_id: str) -> None:
        self._client = client
        self._experiment = experiment
        self._paths = paths
        self._run_id = run_id
        self._run_ids: dict[str, str] = {}  # folder below the sweep's -> MLflow run
        self._status: dict[str, str] = {}  # MLflow run -> its status in the store
        self.created: set[str] = set()
        """MLflow runs that were not in the store."""

    def write(self, folder: str, event: JobEvent) -> None:
        """Write an event of a trial or a fold; writing it again changes nothing."""
        new = folder not in self._run_ids
        run_id = self.run_id_of(folder, event.t)
        self._client.log_batch(
            run_id,
            metrics=_as_metrics(_results(event)),
            params=_as_params(event.params) if new and isinstance(event, TrialChanged) else [],
            tags=_as_tags({"nbtoolkit.status": event.state, "nbtoolkit.reason": event.reason}),
        )
        if isinstance(event, TrialChanged) and event.best:
            self._client.set_tag(self._run_id, "nbtoolkit.best", folder)
        self._set_status(run_id, _STATUS.get(event.state, _ENDED_EARLY), event.t)

    def run_id_of(self, folder: str, started: float) -> str:
        """Return the MLflow run of a folder, created with its parents if there is none.

        Args:
            folder: relative to the sweep's; the empty text is the sweep itself.
            started: unix seconds, for a new one.
        """
        if not folder or folder in ("trials", "folds"):
            return self._run_id
        if folder not in self._run_ids:
            run = _find_run(self._client, self._experiment, f"{self._paths.run_id}/{folder}")
            run = run or self._create(folder, started)
            self._run_ids[folder], self._status[run.info.run_id] = run.info.run_id, run.info.status
        return self._run_ids[folder]

    def end(self, ended: float) -> None:
        """Mark the jobs that did not end before the sweep as killed."""
        running = f"tags.`{SWEEP_TAG}` = '{self._paths.run_id}' and attributes.status = 'RUNNING'"
        while runs := self._client.search_runs([self._experiment], running):
            for run in runs:
                self._client.set_tag(run.info.run_id, "nbtoolkit.status", "killed")
                self._set_status(run.info.run_id, _ENDED_EARLY, ended)

    def _create(self, folder: str, started: float) -> Run:
        tags = {
            _RUN_TAG: f"{self._paths.run_id}/{folder}",
            SWEEP_TAG: self._paths.run_id,
            "nbtoolkit.folder": str(self._paths.folder / folder),
            _PARENT_TAG: self.run_id_of(posixpath.dirname(folder), started),
            "mlflow.source.type": "LOCAL",
        }
        run = self._client.create_run(self._experiment, _as_ms(started), tags=tags, run_name=folder)
        self.created.add(run.info.run_id)
        return run

    def _set_status(self, run_id: str, status: str, at: float) -> None:
        if status not in ("RUNNING", "SCHEDULED"):
            self._client.set_terminated(run_id, status, end_time=_as_ms(at))
        elif status != self._status.get(run_id):
            self._client.update_run(run_id, status=status)
        self._status[run_id] = status


def _results(event: JobEvent) -> list[Point]:
    """Return the results of a trial or fold, beside the curves that its own events have."""
    if event.state != "complete":
        return []
    return [Point(name, float(value), 0, event.t) for name, value in job_values(event).items()]


class _JobTracker:
    """Writes the curves of a job (a trial or a fold) into its run of _JobRuns.

    Args:
        client: the store.
        run_id: that run.
        paths: the job's folder.
        new: the run was not in the store.
    """

    def __init__(self, client: MlflowClient, run_id: str, paths: RunPaths, *, new: bool) -> None:
        self._client = client
        self.place = run_id
        self._paths = paths
        self._complete = not new

    def open(self, run: RunStarted, *, fresh: bool, done: bool) -> bool:
        """Whether the store has the run's earlier events."""
        self._complete |= fresh
        return self._complete

    def write(self, points: Sequence[Point], events: Sequence[Event]) -> None:
        """Write metrics."""
        self._client.log_batch(self.place, metrics=_as_metrics(points))

    def close(self, ended: RunEnded) -> None:
        """Write a failed job's logs as artifacts; those of others stay in its folder only."""
        if ended.status == "failed":
            _log_rank_logs(self._client, self.place, self._paths)

    def for_job(self, paths: RunPaths) -> Tracker:
        """Return a job has no jobs of its own."""
        return self


def _find_run(client: MlflowClient, experiment: str, run_id: str) -> Run | None:
    """Return the MLflow run with our run id as its tag."""
    text = f"tags.`{_RUN_TAG}` = '{run_id}'"  # a run id has no quotes in it
    runs = client.search_runs([experiment], text, max_results=1)
    return runs[0] if runs else None


def _log_rank_logs(client: MlflowClient, run_id: str, paths: RunPaths) -> None:
    for file in sorted((paths.folder / "ranks").glob("**/*.txt")):
        client.log_text(run_id, _tail(file), file.relative_to(paths.folder).as_posix())
    for trace in sorted((paths.folder / "ranks").glob("[!.]*/trace.json.gz")):
        folder = trace.parent.relative_to(paths.folder).as_posix()
        client.log_artifact(run_id, str(trace), folder)


def _run_tags(run: RunStarted, paths: RunPaths) -> dict[str, object]:
    reasons = run.plan.get("reasons") or ()
    tags = {
        "nbtoolkit.folder": paths.folder,
        "nbtoolkit.attempt": run.attempt,
        "nbtoolkit.status": "running",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": run.versions.get("function") or run.config.get("task"),
        "mlflow.user": os.environ.get("USER") or f"uid {os.getuid()}",
        # MLflow's UI shows this text (Markdown) on top of the run.
        "mlflow.note.content": "\n".join(["Plan:", "", *(f"- {reason}" for reason in reasons)])
        if reasons
        else None,
    }
    return {**tags, **{f"nbtoolkit.{key}": value for key, value in _flatten(run.versions)}}


def _event_tags(events: Iterable[Event]) -> dict[str, object]:
    tags: dict[str, object] = {}
    for event in events:
        if isinstance(event, CheckpointSaved):
            tags[f"nbtoolkit.checkpoint.{event.kind}"] = event.path
        elif isinstance(event, StopRequested):
            tags["nbtoolkit.stop"] = event.reason
    return tags


def _as_metrics(points: Iterable[Point]) -> list[Metric]:
    """Points as MLflow's metrics."""
    from mlflow.entities import Metric

    return [Metric(_valid_name(p.name), p.value, _as_ms(p.time), p.step) for p in points]


def _as_params(values: Mapping[str, object]) -> list[Param]:
    """Return settings as MLflow's parameters."""
    from mlflow.entities import Param

    return [Param(_valid_name(key), _cut(value, _PARAM_LENGTH)) for key, value in _flatten(values)]


def _as_tags(values: Mapping[str, object]) -> list[RunTag]:
    """Texts as MLflow's tags; None is left out."""
    from mlflow.entities import RunTag

    given = ((key, value) for key, value in values.items() if value is not None)
    return [RunTag(_valid_name(key), _cut(str(value), _TAG_LENGTH)) for key, value in given]


def _as_ms(seconds: float) -> int:
    """Seconds as MLflow's milliseconds."""
    return round(seconds * 1000)


def _tail(file: Path) -> str:
    """Return the end of a log, from a whole line on, with a mark if something was left out."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= _LOG_BYTES:
            return opened.read().decode(errors="replace")
        opened.seek(size - _LOG_BYTES)
        opened.readline()
        left_out = opened.tell()
        text = opened.read().decode(errors="replace")
    return f"[the first {left_out} bytes are left out; all of it: {file}]\n{text}"


def _flatten(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and texts of a nested dict: ``{"a": {"b": [1]}}`` gives ``("a.b", "[1]")``."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{key}", text


def _valid_name(name: str) -> str:
    """Return the nearest name that MLflow accepts: 250 characters, no empty or dotted part."""
    clean = re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
    parts = [part if part.strip(".") else "_" * len(part) for part in clean.split("/")]
    clean = "/".join(part for part in parts if part) or "_"
    if len(clean) <= _NAME_LENGTH:
        return clean
    mark = hashlib.sha256(name.encode()).hexdigest()[:8]  # two long names stay two
    return f"{clean[: _NAME_LENGTH - 9]}.{mark}"


def _cut(text: str, length: int) -> str:
    """At most ``length`` characters, with a mark if something was left out."""
    if len(text) <= length:
        return text
    mark = f" ... [{len(text)} characters; all of it in the run's folder]"
    return text[: length - len(mark)] + mark
