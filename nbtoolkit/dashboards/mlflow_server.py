"""Open the MLflow UI on the database of an output folder (``nb.open_mlflow``)."""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from nbtoolkit.dashboards.server import COLAB_HOSTS, Dashboard, missing, shared, unreachable
from nbtoolkit.errors import DashboardError, MissingExtra
from nbtoolkit.host import Host, detect_host
from nbtoolkit.tracking.database import database_file, database_uri

# Telemetry would ask the internet; jobs would start three processes more for GenAI.
_ENVIRON = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def open_mlflow(
    output_dir: str | os.PathLike[str] = "outputs",
    *,
    uri: str | None = None,
    wait: bool = True,
    host: Host | None = None,
) -> Dashboard:
    """Open the MLflow UI on what an output folder's runs have tracked, on a port of 127.0.0.1.

    It ends with ``close()`` and with the kernel. A second call gives the same one.

    Args:
        output_dir: ``runtime.output_dir`` of the runs.
        uri: ``tracking.uri`` of the runs, where it was set.
        wait: whether to wait until it answers (about 12 s on two cores).
        host: where this process runs; default: detected.

    Raises:
        MissingExtra: MLflow is not installed.
        DashboardError: nothing was tracked there, the store is a server, which has a page of its
            own, no browser can reach it here, or it does not come up.
    """
    host, folder = host or detect_host(), Path(output_dir).expanduser().absolute()
    if package := missing("mlflow"):
        raise MissingExtra(f"{package} is not installed", do=f"pip install {package}")
    if why := no_mlflow(folder, uri, host):
        raise DashboardError(
            why, allowed="an output folder with tracked runs, where a browser can reach it"
        )
    file = database_file(folder, uri)
    assert file is not None  # else it would have been refused
    dashboard = shared(("mlflow", file), lambda: _open(file, host))
    return dashboard.wait() if wait else dashboard


def no_mlflow(output_dir: Path, uri: str | None, host: Host) -> str:
    """Why the MLflow UI cannot be opened on a folder; empty: it can.

    Args:
        output_dir: ``runtime.output_dir``.
        uri: ``tracking.uri``; None: the folder's own database.
        host: where this process runs.
    """
    file = database_file(output_dir, uri)
    if file is None:
        return f"runs are tracked at {uri}, which has a page of its own"
    if package := missing("mlflow"):
        return f"{package} is not installed: pip install {package}"
    if why := unreachable(host):
        return why
    return "" if file.is_file() else f"no run was tracked in {file} yet"


def _open(file: Path, host: Host) -> Dashboard:
    name, environ = f"MLflow of {file.parent.name}", _environ(host)
    return Dashboard(name, host, lambda port, _: _command(file, port), "/", _page(file), **environ)


def _page(file: Path) -> str:
    """The experiment of the newest run; MLflow 3 opens on pages for GenAI else."""
    query = "select experiment_id from runs order by start_time desc limit 1"
    try:
        uri = f"{file.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as database:
            found = database.execute(query).fetchone()
    except sqlite3.Error:  # another version's, or busy: the first page does too
        return ""
    return f"#/experiments/{found[0]}?workflowType=machine_learning" if found else ""


def _command(file: Path, port: int) -> list[str]:
    command = [sys.executable, "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", str(port)]
    return [*command, "--backend-store-uri", database_uri(file), "--workers", "1"]


def _environ(host: Host) -> dict[str, str]:
    # MLflow 3.5 and newer refuse hosts that they do not know; older ones look at no host
    hosts = "localhost:*,127.0.0.1:*"
    if host.kind != "colab":
        return {**_ENVIRON, "MLFLOW_SERVER_ALLOWED_HOSTS": hosts}
    names = {
        "MLFLOW_SERVER_ALLOWED_HOSTS": f"{hosts},{COLAB_HOSTS}",
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": f"https://{COLAB_HOSTS}",
    }
    return {**_ENVIRON, **names}
