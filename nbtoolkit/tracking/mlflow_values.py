"""Limit names and values to what MLflow accepts, and nest the runs of trials and folds."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nbtoolkit.errors import TrackingError
from nbtoolkit.run.events import Event, JobEvent, RunEnded, RunStarted, TrialChanged
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.tracking.database import database_path, database_uri, import_client
from nbtoolkit.tracking.tracker import NullTracker, Point, Tracker, trial_values

if TYPE_CHECKING:
    from mlflow.entities import Metric, Param, Run, RunTag
    from mlflow.tracking import MlflowClient
    from pandas import DataFrame


# --- mlflow values ---


T = TypeVar("T")

# MLflow's own limits, smallest of the versions we run with: 500 characters for a parameter (6000
# since 2.10), 5000 for a tag; 1000 metrics, 100 parameters and 100 tags a call.
METRICS, VALUES = 1000, 100
_PARAM_LENGTH, _TAG_LENGTH, _NAME_LENGTH = 500, 5000, 250

_LOG_BYTES = 1_000_000
"""Of each rank's log, that much of its end becomes an artifact."""


def as_metrics(points: Iterable[Point]) -> Iterator[Metric]:
    """Points as MLflow's metrics."""
    from mlflow.entities import Metric

    return (Metric(name(p.name), p.value, ms(p.time), p.step) for p in points)


def as_params(values: Mapping[str, Any]) -> list[Param]:
    """Settings as MLflow's parameters."""
    from mlflow.entities import Param

    return [Param(name(key), cut(value, _PARAM_LENGTH)) for key, value in flatten(values)]


def as_tags(values: Mapping[str, Any]) -> list[RunTag]:
    """Texts as MLflow's tags; what is None is left out."""
    from mlflow.entities import RunTag

    kept = ((key, value) for key, value in values.items() if value is not None)
    return [RunTag(name(key), cut(str(value), _TAG_LENGTH)) for key, value in kept]


def tail(file: Path) -> str:
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


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and texts of a nested dict: ``{"a": {"b": [1]}}`` gives ``("a.b", "[1]")``."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{key}", text


def name(wished: str) -> str:
    """The nearest name that MLflow accepts: its characters, no empty or dotted parts, 250 long."""
    clean = re.sub(r"[^\w\-. :/]", "_", wished, flags=re.ASCII)
    parts = [part if part.strip(".") else "_" * len(part) for part in clean.split("/")]
    clean = "/".join(part for part in parts if part) or "_"
    if len(clean) <= _NAME_LENGTH:
        return clean
    mark = hashlib.sha256(wished.encode()).hexdigest()[:8]  # two long names stay two
    return f"{clean[: _NAME_LENGTH - 9]}.{mark}"


def cut(text: str, length: int) -> str:
    """At most ``length`` characters, with a mark where something was left out."""
    if len(text) <= length:
        return text
    mark = f" ... [{len(text)} characters; all of it in the run's folder]"
    return text[: length - len(mark)] + mark


def ms(seconds: float) -> int:
    """Seconds as the milliseconds that MLflow counts in."""
    return round(seconds * 1000)


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of at most ``size`` items."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


# --- nested ---
# The MLflow runs below a sweep's or a cross-validation's: one a trial, one a fold.
#
#     sweep                 its own run: every trial's value, the best so far
#       trials/0007         a trial: its parameters, its value, how it ended
#         trials/0007/fold-2   a fold of it
#
# They are made and ended here, by the events of the sweep. Their curves are in the events of their
# own folders, which are followed like any run's (Curves).


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

    def take(self, folder: str, event: JobEvent) -> None:
        """Take an event of a trial or a fold; written twice it changes nothing."""
        new = folder not in self._known
        run_id = self.run_of(folder, event.t)
        tags = as_tags({"nbtoolkit.status": event.state, "nbtoolkit.reason": event.reason})
        params = as_params(event.params) if new and isinstance(event, TrialChanged) else []
        first, rest = params[:VALUES], params[VALUES:]
        metrics = list(as_metrics(_results(event)))
        self._client.log_batch(run_id, metrics=metrics, params=first, tags=tags)
        for batch in batches(rest, VALUES):
            self._client.log_batch(run_id, params=batch)
        if isinstance(event, TrialChanged) and event.best:
            self._client.set_tag(self._run_id, "nbtoolkit.best", folder)
        self._set_status(run_id, _STATUS.get(event.state, "KILLED"), event.t)

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


def _results(event: JobEvent) -> list[Point]:
    """What a trial or fold came to, beside the curves that its own events have."""
    if event.state != "complete":
        return []
    if isinstance(event, TrialChanged):
        values = trial_values(event)
    else:
        values = {f"score/{name}": value for name, value in event.metrics.items()}
    return [Point(name, float(value), 0, event.t) for name, value in values.items()]


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

    def open(self, run: RunStarted) -> bool:
        """Whether what was written before is in this very run (else the store is a new one)."""
        found = self._state.get("mlflow_run_id") == self._run_id
        self._state["mlflow_run_id"] = self._run_id
        return found

    def write(self, points: Sequence[Point], events: Sequence[Event]) -> None:
        """Write metrics in batches."""
        for batch in batches(as_metrics(points), METRICS):
            self._client.log_batch(self._run_id, metrics=batch)

    def close(self, ended: RunEnded) -> None:
        """A failed job's logs become artifacts; those of the others stay in its folder alone."""
        if ended.status == "failed":
            for file in sorted((self._paths.folder / "ranks").glob("**/*.txt")):
                name = file.relative_to(self._paths.folder).as_posix()
                self._client.log_text(self._run_id, tail(file), name)

    def below(self, paths: RunPaths, fresh: bool, state: dict[str, Any]) -> Tracker:
        """A job has no jobs."""
        return NullTracker()


def tracking_table(
    output_dir: str | Path = "outputs", *, experiment: str | None = None
) -> DataFrame:
    """The tracked runs, newest first.

    Args:
        output_dir: the folder that holds ``mlflow.db``.
        experiment: one experiment's name; None: all of them.

    Returns:
        One row a run: ``run``, ``sweep`` (the run id of the sweep that a trial or fold belongs to),
        ``status``, ``started``, each last metric under its name, each parameter under ``params.``
        and its name.

    Raises:
        MissingExtra: MLflow is not installed.
        TrackingError: there is no database, or no such experiment.
    """
    import pandas as pd

    path = database_path(Path(output_dir).expanduser())
    if not path.exists():
        raise TrackingError(
            f"there is no {path}", do="give the folder that runtime.output_dir named in the launch"
        )
    client = import_client()(tracking_uri=database_uri(path))
    experiments = {found.name: found.experiment_id for found in client.search_experiments()}
    if experiment is not None and experiment not in experiments:
        raise TrackingError(
            f"there is no experiment {experiment!r} in {path}",
            allowed=", ".join(map(repr, sorted(experiments))),
        )
    ids = list(experiments.values()) if experiment is None else [experiments[experiment]]
    return pd.DataFrame([_row(run) for run in client.search_runs(ids)])


def _row(run: Run) -> dict[str, Any]:
    import pandas as pd

    return {
        "run": run.info.run_name,
        "sweep": run.data.tags.get(SWEEP_TAG),
        "status": run.data.tags.get("nbtoolkit.status", run.info.status.lower()),
        "started": pd.to_datetime(run.info.start_time, unit="ms", utc=True),
        **run.data.metrics,
        **{f"params.{key}": value for key, value in run.data.params.items()},
    }
