"""Open optuna-dashboard on a sweep (``nb.open_dashboard``), while it runs or afterwards.

Its server runs in a process of its own, by :func:`main`, and only reads the study: a study has one
writer, its scheduler, and the dashboard's buttons delete studies and change trials.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from nbtoolkit.dashboards.server import (
    COLAB_HOSTS,
    Dashboard,
    check_available,
    get_or_open,
    unavailable,
)
from nbtoolkit.host import Host, detect_host
from nbtoolkit.run.paths import find_run

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment


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
    host = host or detect_host()
    folder = find_run(sweep).folder
    allowed = "the folder of a sweep, where a browser can reach it"
    check_available("optuna_dashboard", dashboard_unavailable(folder, host), allowed)

    def open_new() -> Dashboard:
        study = _study_file(folder)
        name = f"optuna-dashboard of {folder.name}"
        return Dashboard(name, host, lambda port: _command(study, port), "/api/meta")

    dashboard = get_or_open(("study", folder), open_new)
    return dashboard.wait() if wait else dashboard


def dashboard_unavailable(folder: Path | None, host: Host) -> str:
    """Return why optuna-dashboard cannot be opened on a folder; empty: it can.

    Args:
        folder: of a run; None: there is none.
        host: where this process runs.
    """
    if reason := unavailable("optuna_dashboard", host):
        return reason
    if folder is None:
        return "no sweep is watched"
    return "" if _study_file(folder).is_file() else f"{folder.name} has no study"


def _study_file(folder: Path) -> Path:
    # Here, since the import takes 0.2 s, and the server process does not need it.
    from nbtoolkit.search.sweep_result import STUDY_FILE

    return folder / STUDY_FILE


def _command(study: Path, port: int) -> list[str]:
    """Return a command that runs :func:`main`, wherever this package lies."""
    home = str(Path(__file__).resolve().parents[2])
    call = f"from {__name__} import main; main(*sys.argv[1:])"
    code = f"import sys; sys.path.append({home!r}); {call}"
    return [sys.executable, "-c", code, str(study), str(port)]


# --- the server process ---


def main(study: str, port: str) -> None:
    """Serve a study until killed.

    Args:
        study: a sweep's journal.
        port: where to listen, on loopback.
    """
    from optuna.storages import JournalStorage
    from optuna_dashboard import wsgi

    from nbtoolkit.study.storage import ReadOnlyBackend

    app = _read_only(wsgi(JournalStorage(ReadOnlyBackend(study))))
    make_server("127.0.0.1", int(port), app, _Server, _QuietHandler).serve_forever()


def _read_only(app: WSGIApplication) -> WSGIApplication:
    """Refuse requests that would change something, and those to a foreign name."""

    def serve(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if not _is_own_name(environ.get("HTTP_HOST", "")):
            start("403 Forbidden", [("Content-Type", "application/json")])
            return [b'{"reason": "Open it as 127.0.0.1 or localhost: this name is not ours."}']
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return app(environ, start)
        start("405 Method Not Allowed", [("Content-Type", "application/json"), ("Allow", "GET")])
        return [b'{"reason": "Only the sweep changes its study: nothing is changed here."}']

    return serve


def _is_own_name(host: str) -> bool:
    """Whether a request names this machine, or Colab's proxy.

    A foreign page could point its own name to 127.0.0.1 and read what is shown here (DNS
    rebinding); its requests carry that name.
    """
    name = host.rpartition(":")[0] or host
    return name in ("127.0.0.1", "localhost") or name.endswith(COLAB_HOSTS[1:])


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    """Logs no requests: an open page sends one every few seconds."""

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing."""
