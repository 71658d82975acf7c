"""Open the MLflow UI on the tracking database of an output folder (``nb.open_mlflow``)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from nbtoolkit.dashboards.server import COLAB_HOSTS, Dashboard, check_available, get_or_open
from nbtoolkit.host import Host, detect_host
from nbtoolkit.tracking.database import database_file, database_uri

# mlflow-skinny lacks the last three, and then fails with a message that names none of them.
_MODULES = ("mlflow", "sqlalchemy", "alembic", "flask")


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
    host, file = host or detect_host(), database_file(Path(output_dir).expanduser().absolute(), uri)
    if file is None:
        reason = f"runs are tracked at {uri}, which has a page of its own"
    else:
        reason = "" if file.is_file() else f"no run was tracked in {file} yet"
    check_available("mlflow", _MODULES, host, reason)
    assert file is not None  # else it was refused
    store, names = database_uri(file), "localhost:*,127.0.0.1:*"
    # No telemetry over the internet, and no job execution: three more processes, for GenAI.
    environ = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    if host.kind == "colab":
        names += f",{COLAB_HOSTS}"
        environ["MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"] = f"https://{COLAB_HOSTS}"
    # MLflow 3.5 and newer refuse unknown host names; older versions do not check them.
    environ["MLFLOW_SERVER_ALLOWED_HOSTS"] = names

    def open_new() -> Dashboard:
        program = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store]
        program += ["--host", "127.0.0.1", "--workers", "1", "--port"]
        # MLflow 3 opens on a page for GenAI.
        name, page = f"MLflow of {file.parent.name}", "#/experiments"
        return Dashboard(name, host, lambda port: [*program, str(port)], page, environ)

    return get_or_open(("mlflow", file), open_new, wait=wait)
