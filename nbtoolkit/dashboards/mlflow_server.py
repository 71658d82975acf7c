"""Open the MLflow UI on the tracking database of an output folder (``nb.open_mlflow``)."""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from nbtoolkit.dashboards.server import (
    COLAB_HOSTS,
    Dashboard,
    check_available,
    get_or_open,
    unavailable,
)
from nbtoolkit.host import Host, detect_host
from nbtoolkit.tracking.database import database_file, database_uri

# No telemetry over the internet, and no job execution: three more processes, for GenAI.
_ENVIRON = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def open_mlflow(
    output_dir: str | os.PathLike[str] = "outputs",
    *,
    uri: str | None = None,
    wait: bool = True,
    host: Host | None = None,
) -> Dashboard:
    """Open the MLflow UI on the tracked runs of an output folder, on a port of 127.0.0.1.

    It ends with ``close()`` and with the kernel. A second call returns the same dashboard.

    Args:
        output_dir: ``runtime.output_dir`` of the runs.
        uri: ``tracking.uri`` of the runs, where it was set.
        wait: whether to wait until it answers (about 12 s on two cores).
        host: where this process runs; default: detected.

    Raises:
        MissingExtra: MLflow is not installed.
        DashboardError: nothing was tracked there, the store is a server with a UI of its own, no
            browser can reach the port, or the UI does not start.
    """
    host, folder = host or detect_host(), Path(output_dir).expanduser().absolute()
    allowed = "an output folder with tracked runs, where a browser can reach it"
    check_available("mlflow", mlflow_unavailable(folder, uri, host), allowed)
    file = database_file(folder, uri)
    assert file is not None  # else it is unavailable
    dashboard = get_or_open(("mlflow", file), lambda: _open(file, host))
    return dashboard.wait() if wait else dashboard


def mlflow_unavailable(output_dir: Path, uri: str | None, host: Host) -> str:
    """Return why the MLflow UI cannot be opened on a folder; empty: it can.

    Args:
        output_dir: ``runtime.output_dir``.
        uri: ``tracking.uri``; None: the folder's own database.
        host: where this process runs.
    """
    file = database_file(output_dir, uri)
    if file is None:
        return f"runs are tracked at {uri}, which has a page of its own"
    if reason := unavailable("mlflow", host):
        return reason
    return "" if file.is_file() else f"no run was tracked in {file} yet"


def _open(file: Path, host: Host) -> Dashboard:
    name = f"MLflow of {file.parent.name}"
    return Dashboard(
        name, host, lambda port: _command(file, port), "/", _start_page(file), **_environ(host)
    )


def _start_page(file: Path) -> str:
    """Return the experiment of the newest run, since MLflow 3 opens on pages for GenAI."""
    query = "select experiment_id from runs order by start_time desc limit 1"
    try:
        uri = f"{file.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as database:
            row = database.execute(query).fetchone()
    except sqlite3.Error:  # another version's, or busy: MLflow's own first page will do
        return ""
    return f"#/experiments/{row[0]}?workflowType=machine_learning" if row else ""


def _command(file: Path, port: int) -> list[str]:
    command = [sys.executable, "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", str(port)]
    return [*command, "--backend-store-uri", database_uri(file), "--workers", "1"]


def _environ(host: Host) -> dict[str, str]:
    # MLflow 3.5 and newer refuse unknown host names; older versions do not check them.
    names = "localhost:*,127.0.0.1:*"
    if host.kind != "colab":
        return {**_ENVIRON, "MLFLOW_SERVER_ALLOWED_HOSTS": names}
    return {
        **_ENVIRON,
        "MLFLOW_SERVER_ALLOWED_HOSTS": f"{names},{COLAB_HOSTS}",
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": f"https://{COLAB_HOSTS}",
    }
