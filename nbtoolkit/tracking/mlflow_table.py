"""Show the MLflow runs of an output folder as a DataFrame."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import TrackingError
from nbtoolkit.tracking.database import database_path, database_uri, import_client
from nbtoolkit.tracking.mlflow_values import SWEEP_TAG

if TYPE_CHECKING:
    from mlflow.entities import Run
    from pandas import DataFrame


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
