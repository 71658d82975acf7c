"""Open optuna-dashboard on a sweep and the MLflow UI on an output folder.

optuna-dashboard's server runs in a process of its own, by :func:`serve`, and only reads the study:
a study has one writer, its scheduler, and the dashboard's buttons delete studies and change trials.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from nbtoolkit.dashboards.server import COLAB_HOSTS, Dashboard, check_available, get_or_open
from nbtoolkit.host import Host, detect_host
from nbtoolkit.run.paths import find_run
from nbtoolkit.tracking.database import database_file, database_uri

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

# mlflow-skinny lacks the last three, and then fails with a message that names none of them.
_MLFLOW_MODULES = ("mlflow", "sqlalchemy", "alembic", "flask")


def open_dashboard(
    sweep: str | os.PathLike[str], *, wait: bool = True, host: Host | None = None
) -> Dashboard:
    """Open optuna-dashboard on a sweep, on a port of 127.0.0.1.

    It follows the sweep, and refuses what would change the study. It ends with ``close()`` and with
    the kernel. A second call returns the same dashboard.

    Args:
        sweep: its folder, or its id under ``outputs``.
        wait: whether to wait until it answers (about 1 s).
        host: where this process runs; default: detected.

    Raises:
        MissingExtra: optuna-dashboard is not installed.
        DashboardError: it is no sweep, no browser can reach the port, or it does not start.
        LaunchError: there is no such run.
    """
    from nbtoolkit.search.sweep_result import STUDY_FILE

    host, folder = host or detect_host(), find_run(sweep).folder
    study = folder / STUDY_FILE
    reason = "" if study.is_file() else f"{folder.name} has no study: it is no sweep"
    check_available("optuna-dashboard", ("optuna_dashboard", "optuna"), host, reason)
    home = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.append({home!r}); import {__name__} as m; m.serve(*sys.argv[1:])"

    def open_new() -> Dashboard:
        program = [sys.executable, "-c", code, str(study)]
        name = f"optuna-dashboard of {folder.name}"
        return Dashboard(name, host, lambda port: [*program, str(port)])

    return get_or_open(("study", folder), open_new, wait=wait)


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
    check_available("mlflow", _MLFLOW_MODULES, host, reason)
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


# --- optuna-dashboard's process ---


def serve(study: str, port: str) -> None:
    """Serve a study until killed, and refuse requests that would change it.

    Requests to a foreign name are refused, too: a foreign page could point its own name to
    127.0.0.1 and read what is shown here (DNS rebinding); its requests carry that name.

    Args:
        study: a sweep's journal.
        port: where to listen, on loopback.
    """
    from optuna.storages import JournalStorage
    from optuna_dashboard import wsgi

    from nbtoolkit.study.storage import ReadOnlyBackend

    app = wsgi(JournalStorage(ReadOnlyBackend(study)))

    def read_only(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST", "")
        name = host.rpartition(":")[0] or host
        json = [("Content-Type", "application/json")]
        if name not in ("127.0.0.1", "localhost") and not name.endswith(COLAB_HOSTS[1:]):
            start("403 Forbidden", json)
            return [b'{"reason": "Open it as 127.0.0.1 or localhost: this name is not ours."}']
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start("405 Method Not Allowed", [*json, ("Allow", "GET")])
            return [b'{"reason": "Only the sweep changes its study: nothing is changed here."}']
        return app(environ, start)

    make_server("127.0.0.1", int(port), read_only, _Server, _QuietHandler).serve_forever()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    """Logs no requests: an open page sends one every few seconds."""

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing."""
