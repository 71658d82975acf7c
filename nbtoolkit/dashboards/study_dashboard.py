"""Open optuna-dashboard on a sweep (``nb.open_dashboard``), while it runs or afterwards.

Its server runs in a process of its own, by :func:`serve`, and only reads the study: a study has one
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

from nbtoolkit.dashboards.server import COLAB_HOSTS, Dashboard, check_available, get_or_open
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


# --- the server process ---


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

    app: WSGIApplication = wsgi(JournalStorage(ReadOnlyBackend(study)))

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
