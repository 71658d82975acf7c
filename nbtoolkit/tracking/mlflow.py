"""MLflowTracker: one MLflow run a run folder, written by MlflowClient (there is no active run)."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nbtoolkit.runtime.events import Event, EventReader
from nbtoolkit.runtime.paths import RunPaths
from nbtoolkit.tracking.database import open_database
from nbtoolkit.tracking.tracker import Point

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

T = TypeVar("T")

RUN_TAG = "nbtoolkit.run_id"
"""The tag by which the MLflow run of a folder is found again."""

# How a run ended, in MLflow's words; the exact status is in the tag nbtoolkit.status.
_STATUS = {"completed": "FINISHED", "failed": "FAILED"}  # every other: KILLED (ended early)

# MLflow's own limits, smallest of the versions we run with: 500 characters for a parameter (6000
# since 2.10), 5000 for a tag; 1000 metrics, 100 parameters and 100 tags a call.
_PARAM_LENGTH, _TAG_LENGTH, _METRICS, _VALUES = 500, 5000, 1000, 100
_NAME_LENGTH = 250

_LOG_BYTES = 1_000_000
"""Of each rank's log, that much of its end becomes an artifact."""


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

    def open(self, run: Event) -> bool:
        """Find or create the MLflow run; write parameters and tags.

        Raises:
            MissingExtra: MLflow is not installed.
            TrackingError: the store cannot be used.
        """
        settings = run["config"].get("tracking", {})
        self._client, experiment = open_database(
            self._output_dir, uri=settings.get("uri"), experiment=settings.get("experiment")
        )
        found = self._find(experiment)
        mlflow_run = found or self._create(experiment, run)
        self._run_id = self._state["mlflow_run_id"] = mlflow_run.info.run_id
        self._go_on(mlflow_run, run)
        self._log_params(mlflow_run, run)
        self._set_tags(_run_tags(run, self._paths))
        return found is not None

    def write(self, points: Sequence[Point], events: Sequence[Event]) -> None:
        """Write metrics in batches, checkpoints and stop requests as tags."""
        from mlflow.entities import Metric

        metrics = (Metric(_name(p.name), p.value, _ms(p.time), p.step) for p in points)
        for batch in _batches(metrics, _METRICS):
            self._client.log_batch(self._run_id, metrics=batch)
        self._set_tags(_event_tags(events))

    def close(self, ended: Event) -> None:
        """Write the artifacts and the run's status."""
        self._log_artifacts()
        self._set_tags({"nbtoolkit.status": ended["status"], "nbtoolkit.error": ended.get("error")})
        status = _STATUS.get(ended["status"], "KILLED")
        self._client.set_terminated(self._run_id, status, end_time=_ms(ended["t"]))

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

    def _create(self, experiment: str, run: Event) -> Run:
        name = self._paths.run_id
        tags = {RUN_TAG: name}
        return self._client.create_run(experiment, _ms(run["t"]), tags=tags, run_name=name)

    def _go_on(self, mlflow_run: Run, run: Event) -> None:
        """A new attempt of a run that had ended is running again."""
        ended = mlflow_run.info.end_time
        if ended is not None and _ms(run["t"]) > ended:
            self._client.update_run(self._run_id, status="RUNNING")

    def _log_params(self, mlflow_run: Run, run: Event) -> None:
        """Write config and plan.

        MLflow's parameters are for ever: what a later attempt changed becomes a new one, such as
        ``attempt2.train.epochs``.
        """
        from mlflow.entities import Param

        known, attempt = mlflow_run.data.params, run.get("attempt", 1)
        new = {}
        for key, value in _params(run).items():
            if known.get(key, value) != value:
                key = f"attempt{attempt}.{key}"[:_NAME_LENGTH]
            if key not in known:
                new[key] = value
        for batch in _batches((Param(key, value) for key, value in new.items()), _VALUES):
            self._client.log_batch(self._run_id, params=batch)

    def _set_tags(self, values: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        tags = (
            RunTag(_name(key), _cut(str(value), _TAG_LENGTH))
            for key, value in values.items()
            if value is not None
        )
        for batch in _batches(tags, _VALUES):
            self._client.log_batch(self._run_id, tags=batch)

    def _log_artifacts(self) -> None:
        """Copy the readable part of the folder.

        Not the checkpoints: they are large, lie beside the database already, and their paths are
        tags.
        """
        paths = self._paths
        for file in (paths.config, paths.plan, paths.versions, paths.result, paths.error):
            if file.exists():
                self._client.log_artifact(self._run_id, str(file))
        for file in sorted((paths.folder / "ranks").glob("**/*.txt")):
            name = file.relative_to(paths.folder).as_posix()
            self._client.log_text(self._run_id, _tail(file), name)
        if notes := _notes(paths):
            self._client.log_text(self._run_id, notes, "notes.txt")


def _params(run: Event) -> dict[str, str]:
    """Config and plan as MLflow takes them; the reasons stand in the description instead."""
    plan = {key: value for key, value in run.get("plan", {}).items() if key != "reasons"}
    values = _flatten({**run["config"], "plan": plan})
    return {_name(key): _cut(value, _PARAM_LENGTH) for key, value in values}


def _run_tags(run: Event, paths: RunPaths) -> dict[str, Any]:
    versions = run.get("versions", {})
    tags = {
        "nbtoolkit.folder": paths.folder,
        "nbtoolkit.name": run.get("name"),
        "nbtoolkit.attempt": run.get("attempt", 1),
        "nbtoolkit.status": "running",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": versions.get("function") or run["config"].get("task"),
        "mlflow.user": os.environ.get("USER") or f"uid {os.getuid()}",
        "mlflow.note.content": _description(run),
    }
    return {**tags, **{f"nbtoolkit.{key}": value for key, value in _flatten(versions)}}


def _description(run: Event) -> str | None:
    """The plan's reasons: MLflow's UI shows this text (Markdown) on top of the run."""
    reasons = run.get("plan", {}).get("reasons") or ()
    return "\n".join(["Plan:", "", *(f"- {reason}" for reason in reasons)]) if reasons else None


def _event_tags(events: Iterable[Event]) -> dict[str, Any]:
    tags = {}
    for event in events:
        if event["type"] == "checkpoint":
            tags[f"nbtoolkit.checkpoint.{event.get('kind') or 'last'}"] = event["path"]
        elif event["type"] == "stop":
            tags["nbtoolkit.stop"] = event["reason"]
    return tags


def _notes(paths: RunPaths) -> str:
    """All notes of the run, one a line."""
    notes = (event for event in EventReader(paths.events).read() if event["type"] == "note")
    return "".join(f"{note['level']}: {note['text']}\n" for note in notes)


def _tail(file: Path) -> str:
    """The end of a log, from the first whole line, with a mark where something was left out."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= _LOG_BYTES:
            return opened.read().decode(errors="replace")
        opened.seek(size - _LOG_BYTES)
        opened.readline()
        left_out = opened.tell()
        text = opened.read().decode(errors="replace")
    return f"[the first {left_out} bytes are left out; all of it: {file}]\n{text}"


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and texts of a nested dict: ``{"a": {"b": [1]}}`` gives ``("a.b", "[1]")``."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{key}", text


def _name(name: str) -> str:
    """The nearest name that MLflow accepts: its characters, no empty or dotted parts, 250 long."""
    clean = re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
    parts = [part if part.strip(".") else "_" * len(part) for part in clean.split("/")]
    clean = "/".join(part for part in parts if part) or "_"
    if len(clean) <= _NAME_LENGTH:
        return clean
    mark = hashlib.sha256(name.encode()).hexdigest()[:8]  # two long names stay two
    return f"{clean[: _NAME_LENGTH - 9]}.{mark}"


def _cut(text: str, length: int) -> str:
    """At most ``length`` characters, with a mark where something was left out."""
    if len(text) <= length:
        return text
    mark = f" ... [{len(text)} characters; all of it in the run's folder]"
    return text[: length - len(mark)] + mark


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
