"""Convert a run's values to those that MLflow accepts, and read tracked runs as a table."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.errors import TrackingError
from nbtoolkit.tracking.database import database_path, database_uri, import_client
from nbtoolkit.tracking.tracker import Point

if TYPE_CHECKING:
    from mlflow.entities import Metric, Param, Run, RunTag
    from pandas import DataFrame

RUN_TAG = "nbtoolkit.run_id"
"""The tag by which the MLflow run of a folder is found again."""

SWEEP_TAG = "nbtoolkit.sweep"
"""The tag that all runs below a sweep have, at any depth: the sweep's run id."""

# MLflow's own limits, the smallest of all versions: 500 characters for a parameter (6000 since
# 2.10, but a server may be older), 5000 for a tag. MlflowClient.log_batch splits long batches.
_PARAM_LENGTH, _TAG_LENGTH, _NAME_LENGTH = 500, 5000, 250

_LOG_BYTES = 1_000_000
"""A log's last bytes that become an artifact."""


def as_metrics(points: Iterable[Point]) -> list[Metric]:
    """Points as MLflow's metrics."""
    from mlflow.entities import Metric

    return [Metric(valid_name(p.name), p.value, as_ms(p.time), p.step) for p in points]


def as_params(values: Mapping[str, object]) -> list[Param]:
    """Settings as MLflow's parameters."""
    from mlflow.entities import Param

    return [Param(valid_name(key), cut(value, _PARAM_LENGTH)) for key, value in flatten(values)]


def as_tags(values: Mapping[str, object]) -> list[RunTag]:
    """Texts as MLflow's tags; None is left out."""
    from mlflow.entities import RunTag

    given = ((key, value) for key, value in values.items() if value is not None)
    return [RunTag(valid_name(key), cut(str(value), _TAG_LENGTH)) for key, value in given]


def as_ms(seconds: float) -> int:
    """Seconds as MLflow's milliseconds."""
    return round(seconds * 1000)


def tail(file: Path) -> str:
    """The end of a log, from a whole line on, with a mark if something was left out."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= _LOG_BYTES:
            return opened.read().decode(errors="replace")
        opened.seek(size - _LOG_BYTES)
        opened.readline()
        left_out = opened.tell()
        text = opened.read().decode(errors="replace")
    return f"[the first {left_out} bytes are left out; all of it: {file}]\n{text}"


def flatten(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and texts of a nested dict: ``{"a": {"b": [1]}}`` gives ``("a.b", "[1]")``."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{key}", text


def valid_name(name: str) -> str:
    """The nearest name that MLflow accepts: its characters, no empty or dotted parts, 250 long."""
    clean = re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
    parts = [part if part.strip(".") else "_" * len(part) for part in clean.split("/")]
    clean = "/".join(part for part in parts if part) or "_"
    if len(clean) <= _NAME_LENGTH:
        return clean
    mark = hashlib.sha256(name.encode()).hexdigest()[:8]  # two long names stay two
    return f"{clean[: _NAME_LENGTH - 9]}.{mark}"


def cut(text: str, length: int) -> str:
    """At most ``length`` characters, with a mark if something was left out."""
    if len(text) <= length:
        return text
    mark = f" ... [{len(text)} characters; all of it in the run's folder]"
    return text[: length - len(mark)] + mark


def tracking_table(
    output_dir: str | Path = "outputs", *, experiment: str | None = None
) -> DataFrame:
    """The tracked runs, newest first.

    Args:
        output_dir: the folder that holds ``mlflow.db``.
        experiment: one experiment's name; None: all of them.

    Returns:
        One row per run: ``run``, ``sweep`` (the run id of the sweep that a trial or fold belongs
        to), ``status``, ``started``, each last metric under its name, each parameter under
        ``params.`` and its name.

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


def _row(run: Run) -> dict[str, object]:
    import pandas as pd

    return {
        "run": run.info.run_name,
        "sweep": run.data.tags.get(SWEEP_TAG),
        "status": run.data.tags.get("nbtoolkit.status", run.info.status.lower()),
        "started": pd.to_datetime(run.info.start_time, unit="ms", utc=True),
        **run.data.metrics,
        **{f"params.{key}": value for key, value in run.data.params.items()},
    }
