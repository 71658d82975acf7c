"""Write a run to MLflow with MlflowClient; there is no active run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.run.events import Event, EventReader, JobEvent, NoteAdded, RunEnded, RunStarted
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.tracking.database import open_database
from nbtoolkit.tracking.mlflow_values import (
    METRICS,
    RUN_TAG,
    VALUES,
    Curves,
    Nested,
    as_metrics,
    as_params,
    as_tags,
    batches,
    flatten,
    ms,
    tail,
)
from nbtoolkit.tracking.tracker import Point, Tracker, job_folder

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

# How a run ended, in MLflow's words; the exact status is in the tag nbtoolkit.status.
_STATUS = {"completed": "FINISHED", "failed": "FAILED"}  # every other: KILLED (ended early)


class MLflowTracker:
    """Writes one run folder to MLflow.

    Args:
        paths: the run.
        output_dir: where database and artifacts lie.
        state: kept between processes by the caller; the MLflow run's id is put there.
    """

    def __init__(self, paths: RunPaths, output_dir: Path, state: dict[str, Any]) -> None:
        self._paths, self._output_dir, self._state = paths, output_dir, state
        self._client: MlflowClient
        self._run_id = ""
        self._nested: Nested

    def open(self, run: RunStarted) -> bool:
        """Find or create the MLflow run; write parameters and tags.

        Raises:
            MissingExtra: MLflow is not installed.
            TrackingError: the store cannot be used.
        """
        settings = run.config.get("tracking", {})
        self._client, experiment = open_database(
            self._output_dir, uri=settings.get("uri"), experiment=settings.get("experiment")
        )
        found = self._find(experiment)
        mlflow_run = found or self._create(experiment, run)
        self._run_id = self._state["mlflow_run_id"] = mlflow_run.info.run_id
        self._nested = Nested(self._client, experiment, self._paths, self._run_id)
        self._go_on(mlflow_run, run)
        self._log_params(mlflow_run, run)
        self._set_tags(_run_tags(run, self._paths))
        return found is not None

    def write(self, points: Sequence[Point], events: Sequence[Event]) -> None:
        """Write metrics in batches, checkpoints and stop requests as tags; trials and folds."""
        for batch in batches(as_metrics(points), METRICS):
            self._client.log_batch(self._run_id, metrics=batch)
        self._set_tags(_event_tags(events))
        for event in events:
            if isinstance(event, JobEvent) and (folder := job_folder(event)) is not None:
                self._nested.take(folder, event)

    def below(self, paths: RunPaths, fresh: bool, state: dict[str, Any]) -> Tracker:
        """A tracker for the curves of a trial or a fold of this sweep."""
        folder = paths.folder.relative_to(self._paths.folder).as_posix()
        run_id = self._nested.run_of(folder, time.time())
        return Curves(self._client, run_id, paths, state)

    def close(self, ended: RunEnded) -> None:
        """Write the artifacts and the run's status."""
        self._log_artifacts()
        self._nested.end(ended.t)
        self._set_tags({"nbtoolkit.status": ended.status, "nbtoolkit.error": ended.error})
        status = _STATUS.get(ended.status, "KILLED")
        self._client.set_terminated(self._run_id, status, end_time=ms(ended.t))

    def _find(self, experiment: str) -> Run | None:
        """The run written before: by the id we kept, else by its tag (we died before keeping)."""
        from mlflow.exceptions import MlflowException

        if run_id := self._state.get("mlflow_run_id"):
            try:
                run = self._client.get_run(run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
            else:
                return run if run.info.lifecycle_stage == "active" else None
        text = f"tags.`{RUN_TAG}` = '{self._paths.run_id}'"  # a run id has no quotes in it
        found = self._client.search_runs([experiment], text, max_results=1)
        return found[0] if found else None

    def _create(self, experiment: str, run: RunStarted) -> Run:
        name = self._paths.run_id
        tags = {RUN_TAG: name}
        return self._client.create_run(experiment, ms(run.t), tags=tags, run_name=name)

    def _go_on(self, mlflow_run: Run, run: RunStarted) -> None:
        """A new attempt of a run that had ended is running again."""
        ended = mlflow_run.info.end_time
        if ended is not None and ms(run.t) > ended:
            self._client.update_run(self._run_id, status="RUNNING")

    def _log_params(self, mlflow_run: Run, run: RunStarted) -> None:
        """Write config and plan.

        MLflow's parameters are for ever: what a later attempt changed becomes a new one, such as
        ``attempt2.train.epochs``.
        """
        known, new = mlflow_run.data.params, {}
        for param in as_params(_settings(run)):
            changed = known.get(param.key, param.value) != param.value
            key = f"attempt{run.attempt}.{param.key}" if changed else param.key
            if key not in known:
                new[key] = param.value
        for batch in batches(as_params(new), VALUES):
            self._client.log_batch(self._run_id, params=batch)

    def _set_tags(self, values: Mapping[str, Any]) -> None:
        for batch in batches(as_tags(values), VALUES):
            self._client.log_batch(self._run_id, tags=batch)

    def _log_artifacts(self) -> None:
        """Copy the readable part of the folder.

        Not the checkpoints: they are large, lie beside the database already, and their paths are
        tags.
        """
        paths = self._paths
        own = (paths.config, paths.plan, paths.versions, paths.result, paths.error)
        for file in (*own, paths.folder / "sweep.yaml", paths.folder / "folds.json"):
            if file.exists():
                self._client.log_artifact(self._run_id, str(file))
        for file in sorted((paths.folder / "ranks").glob("**/*.txt")):
            name = file.relative_to(paths.folder).as_posix()
            self._client.log_text(self._run_id, tail(file), name)
        if notes := _notes(paths):
            self._client.log_text(self._run_id, notes, "notes.txt")


def _settings(run: RunStarted) -> dict[str, Any]:
    """Config and plan; the plan's reasons stand in the description instead."""
    plan = {key: value for key, value in run.plan.items() if key != "reasons"}
    return {**run.config, "plan": plan}


def _run_tags(run: RunStarted, paths: RunPaths) -> dict[str, Any]:
    tags = {
        "nbtoolkit.folder": paths.folder,
        "nbtoolkit.attempt": run.attempt,
        "nbtoolkit.status": "running",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": run.versions.get("function") or run.config.get("task"),
        "mlflow.user": os.environ.get("USER") or f"uid {os.getuid()}",
        "mlflow.note.content": _description(run),
    }
    return {**tags, **{f"nbtoolkit.{key}": value for key, value in flatten(run.versions)}}


def _description(run: RunStarted) -> str | None:
    """The plan's reasons: MLflow's UI shows this text (Markdown) on top of the run."""
    reasons = run.plan.get("reasons") or ()
    return "\n".join(["Plan:", "", *(f"- {reason}" for reason in reasons)]) if reasons else None


def _event_tags(events: Iterable[Event]) -> dict[str, Any]:
    tags = {}
    for event in events:
        if event.type == "checkpoint":
            tags[f"nbtoolkit.checkpoint.{event.kind}"] = event.path
        elif event.type == "stop":
            tags["nbtoolkit.stop"] = event.reason
    return tags


def _notes(paths: RunPaths) -> str:
    """All notes of the run, one a line."""
    events = EventReader(paths.events).read()
    notes = (event for event in events if isinstance(event, NoteAdded))
    return "".join(f"{note.level}: {note.text}\n" for note in notes)
