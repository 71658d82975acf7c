"""Read where the MLflow of this process logs: its tracking URI and its active run.

Nothing here imports MLflow. If the user's code has not imported it, only the environment variable
can name a store.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config

_URI = "MLFLOW_TRACKING_URI"  # mlflow.set_tracking_uri sets it, too

# Stores whose URI has no scheme; any other text without one is a folder.
_NAMED_STORES = ("databricks", "databricks-uc", "uc")


def with_kernel_uri(config: Config) -> Config:
    """Set ``tracking.uri`` to the store of this process's MLflow, unless it is set already."""
    if not config.tracking.mlflow or config.tracking.uri is not None:
        return config
    uri = kernel_uri()
    return config if uri is None else config.with_overrides({"tracking.uri": uri})


def kernel_uri() -> str | None:
    """Return the tracking URI of this process's MLflow, without a password.

    A local path in it is absolute. None: no URI was set and no run is active, so that MLflow would
    use its own default.
    """
    mlflow = _imported_mlflow()
    uri = os.environ.get(_URI) if mlflow is None else _uri_of(mlflow)
    return without_password(_absolute(uri)) if uri else None


def active_run(config: Config) -> str | None:
    """Return the id of this thread's active MLflow run if a run of ``config`` can be nested in it.

    None: no run is active, or it is in another store than ``tracking.uri``.
    """
    mlflow = _imported_mlflow()
    run = None if mlflow is None else mlflow.active_run()
    if run is None or not config.tracking.mlflow or config.tracking.uri != kernel_uri():
        return None
    return str(run.info.run_id)


def tracking_place(config: Config) -> str:
    """Return where MLflow has the runs of ``config``, for the end of a plan's line.

    Empty if this is the database in the output folder.
    """
    if not config.tracking.mlflow or config.tracking.uri is None:
        return ""
    parent = active_run(config)
    below = "" if parent is None else f", below its active run {parent[:8]}"
    return f"; MLflow: {config.tracking.uri}{below}"


def without_password(uri: str) -> str:
    """Return the URI of a store without the password in it, for records and messages."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # no URL: MLflow says what is wrong
        return uri
    if parts.password is None:
        return uri
    return uri.replace(f":{parts.password}@", "@", 1)


def with_password(uri: str) -> str:
    """Return the URI of a record with the password that the environment has for it, if any."""
    kernel = os.environ.get(_URI, "")
    return kernel if without_password(kernel) == uri else uri


def _imported_mlflow() -> Any:
    """Return the module mlflow if this process has imported it completely."""
    mlflow = sys.modules.get("mlflow")
    return mlflow if hasattr(mlflow, "active_run") else None


def _uri_of(mlflow: Any) -> str | None:
    # Without a URI, an active run is in MLflow's default store, a file in the working directory.
    is_used = mlflow.is_tracking_uri_set() or mlflow.active_run() is not None
    return str(mlflow.get_tracking_uri()) if is_used else None


def _absolute(uri: str) -> str:
    """Resolve the path of a local store: the tracking process has another working directory."""
    sqlite = "sqlite:///"
    parts = urlsplit(uri)
    if uri.startswith(sqlite):
        return sqlite + os.path.abspath(uri.removeprefix(sqlite))
    if parts.scheme == "file":
        return "file://" + os.path.abspath(parts.path)
    if not parts.scheme and uri not in _NAMED_STORES:
        return Path(os.path.abspath(uri)).as_uri()
    return uri
