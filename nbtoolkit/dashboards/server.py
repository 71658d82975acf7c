"""Open optuna-dashboard or the MLflow UI on loopback; each ends with the kernel.

``nb.open_dashboard`` and ``nb.open_mlflow``. optuna-dashboard's server runs :func:`serve` in a
process of its own, and only reads the study: a study has one writer, its scheduler, and the
dashboard's buttons delete studies and change trials.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from html import escape
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from socket import gethostname
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from urllib.request import ProxyHandler, build_opener
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from nbtoolkit.dashboards import guard
from nbtoolkit.environment.kernel_mlflow import kernel_uri
from nbtoolkit.errors import DashboardError, MissingExtra
from nbtoolkit.host import Host, detect_host
from nbtoolkit.run.paths import find_run
from nbtoolkit.run.transport import free_port
from nbtoolkit.views.markup import paragraph, view

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

COLAB_HOSTS = "*.googleusercontent.com"
"""Host names of Colab's proxy, which a dashboard that checks host names must allow."""

START_SECONDS = 600.0
"""Longest wait for a dashboard to answer; MLflow takes 12 s on two cores, 120 s on slow ones."""

_POLL_SECONDS = 0.1  # between two requests
_ANSWER_SECONDS = 1.0  # for one of them
_LOG_TAIL = 2000  # characters of its log that an error shows

# mlflow-skinny lacks the last three, and then fails with a message that names none of them.
_MLFLOW = ("mlflow", "sqlalchemy", "alembic", "flask")


def open_dashboard(
    sweep: str | os.PathLike[str], *, wait: bool = True, host: Host | None = None
) -> Dashboard:
    """Open optuna-dashboard for a sweep, on a port of 127.0.0.1.

    The dashboard shows new trials as they come, and refuses requests that would change the study.
    It ends when you call ``close()``, and when the kernel ends. A second call returns the same
    dashboard.

    Args:
        sweep: the sweep's folder, or its id in the folder ``outputs``.
        wait: whether to wait until the dashboard answers (about 1 s).
        host: the host of this process; default: detected.

    Raises:
        MissingExtra: optuna-dashboard is not installed.
        DashboardError: the folder is not the folder of a sweep, no browser can reach the port, or
            the dashboard does not start.
        LaunchError: there is no such run.
    """
    from nbtoolkit.search.sweep_result import STUDY_FILE

    host, folder = host or detect_host(), find_run(sweep).folder
    study = folder / STUDY_FILE
    reason = "" if study.is_file() else f"{folder.name} has no study: it is no sweep"
    check_available("optuna-dashboard", ("optuna_dashboard", "optuna"), host, reason)
    home = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.append({home!r}); import {__name__} as m; m.serve(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(study)]
    return _get_or_open(study, f"optuna-dashboard of {folder.name}", host, command, wait=wait)


def open_mlflow(
    output_dir: str | os.PathLike[str] = "outputs",
    *,
    uri: str | None = None,
    wait: bool = True,
    host: Host | None = None,
) -> Dashboard:
    """Open the MLflow UI for the tracked runs of an output folder, on a port of 127.0.0.1.

    The UI ends when you call ``close()``, and when the kernel ends. A second call returns the same
    dashboard.

    Args:
        output_dir: the output folder of the runs, as in ``runtime.output_dir``.
        uri: ``tracking.uri`` of the runs, if it was set; None: the database of ``output_dir``, or
            if there is none, that of this process's MLflow (``MLFLOW_TRACKING_URI``).
        wait: whether to wait until the UI answers (about 12 s on two cores).
        host: the host of this process; default: detected.

    Raises:
        MissingExtra: MLflow is not installed.
        DashboardError: no run was tracked there, the runs are on a tracking server with a UI of its
            own, no browser can reach the port, or the UI does not start.
    """
    from nbtoolkit.tracking.database import database_file, database_path, database_uri

    host, folder = host or detect_host(), Path(output_dir).expanduser().absolute()
    if uri is None and not database_path(folder).is_file():
        uri = kernel_uri()
    file = database_file(folder, uri)
    if file is None:
        reason = f"runs are tracked at {uri}, which has a page of its own"
    else:
        reason = "" if file.is_file() else f"no run was tracked in {file} yet"
    check_available("mlflow", _MLFLOW, host, reason)
    assert file is not None  # else it was refused
    names = "localhost:*,127.0.0.1:*"
    # No telemetry over the internet, and no job execution: three more processes, for GenAI.
    environ = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    if host.kind == "colab":
        names += f",{COLAB_HOSTS}"
        environ["MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"] = f"https://{COLAB_HOSTS}"
    # MLflow 3.5 and newer refuse unknown host names; older versions do not check them.
    environ["MLFLOW_SERVER_ALLOWED_HOSTS"] = names
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", database_uri(file)]
    command += ["--host", "127.0.0.1", "--workers", "1", "--port"]
    name = f"MLflow of {file.parent.name}"
    # MLflow 3 opens on a page for GenAI.
    return _get_or_open(file, name, host, command, "#/experiments", environ, wait=wait)


# --- any dashboard ---


def browser_address(port: int, host: Host) -> tuple[str, str]:
    """Return how a browser reaches a port that listens on loopback.

    Args:
        port: of this machine.
        host: where this process runs.

    Returns:
        The address (empty: there is none), and what to do first, or instead, in words.
    """
    if host.kind == "colab":  # only Colab's own proxy reaches the port, and only a cell reaches it
        call = f"from google.colab import output; output.serve_kernel_port_as_window({port})"
        return "", f"Run this in a cell: {call}"
    # The kernel cannot know on which machine the browser runs: the text covers both.
    tunnel = f"ssh -N -L {port}:127.0.0.1:{port} {os.environ.get('USER', 'you')}@{gethostname()}"
    how = f"Is the browser on another machine than the notebook? First run there: {tunnel}"
    return f"http://127.0.0.1:{port}/", how


class Dashboard(AbstractContextManager["Dashboard"]):
    """A running dashboard, from :func:`open_dashboard` or :func:`open_mlflow`.

    Args:
        name: the name of the program, and what the dashboard shows.
        host: the host of this process.
        command: the command that starts the dashboard; the port is added as its last argument.
        start_page: the end of the URL of the page that opens first.
        environ: environment variables that are added for the dashboard.

    Attributes:
        name: the name of the program, and what the dashboard shows.
        port: the port. The dashboard listens on 127.0.0.1 only.
        url: the URL for a browser. It is empty on a host where you open the dashboard in another
            way, which :attr:`how` describes.
        how: a text that says what to do before, or instead of, opening the URL.
        log: the file with the output of the dashboard. It is deleted when the dashboard closes.
    """

    def __init__(
        self,
        name: str,
        host: Host,
        command: Sequence[str],
        start_page: str = "",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.port = name, free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="nbtoolkit-dashboard-"))
        self.log = self._folder / "log.txt"
        self._closing = threading.Lock()
        program = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(self._folder)]
        with self.log.open("wb") as log:
            self._guard = subprocess.Popen(
                [*program, *command, str(self.port)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Jupyter interrupts the kernel's whole process group.
                start_new_session=True,
                # It imports nothing of the user's and leaves nothing there.
                cwd=self._folder,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environ or {})},
            )
        address, self.how = browser_address(self.port, host)
        self.url = address and f"{address}{start_page}"

    @property
    def closed(self) -> bool:
        """Whether the dashboard has ended."""
        return self._guard.poll() is not None

    def up(self) -> bool:
        """Return whether the dashboard answers a request within 1 s."""
        try:
            # Without the proxy that the environment may name.
            opener = build_opener(ProxyHandler({}))
            opener.open(f"http://127.0.0.1:{self.port}/", timeout=_ANSWER_SECONDS).close()
            return True
        except (OSError, HTTPException):
            return False  # nobody listens yet

    def wait(self, seconds: float = START_SECONDS) -> Dashboard:
        """Wait until the dashboard answers, and return it.

        Args:
            seconds: seconds to wait at most.

        Raises:
            DashboardError: the dashboard has ended, or it does not answer in time.
        """
        end = time.monotonic() + seconds
        while not self.up():
            if self.closed or time.monotonic() > end:
                problem = "has ended" if self.closed else f"did not answer within {seconds:g} s"
                log = self.log.read_text(errors="replace") if self.log.exists() else ""
                self.close()
                advice = f"read what it wrote:\n{log.strip()[-_LOG_TAIL:]}" if log else "try again"
                raise DashboardError(f"{self.name} {problem}", do=advice)
            time.sleep(_POLL_SECONDS)
        return self

    def close(self) -> None:
        """End the dashboard and all its processes. A second call has no effect."""
        with self._closing:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return f"{self.name}: closed"
        return f"{self.name}: {self.url or f'port {self.port} of 127.0.0.1'}\n{self.how}"

    def _repr_html_(self) -> str:
        url = "" if self.closed else escape(self.url, quote=True)
        link = f'<a href="{url}" target="_blank" rel="noopener">{url}</a>' if url else ""
        return view(paragraph(repr(self)), link)


_OPEN: dict[Path, Dashboard] = {}
_LOCK = threading.Lock()


def _get_or_open(shown: Path, *arguments: Any, wait: bool) -> Dashboard:
    """Return the running dashboard on a file, or open one with a Dashboard's arguments.

    The reference kept here lets a dashboard run that no variable holds.
    """
    with _LOCK:
        if shown not in _OPEN or _OPEN[shown].closed:
            _OPEN[shown] = Dashboard(*arguments)
        dashboard = _OPEN[shown]
    return dashboard.wait() if wait else dashboard


@atexit.register
def _close_all() -> None:
    """Close all at a regular exit; at any other the guards do."""
    for dashboard in _OPEN.values():
        dashboard.close()


def check_available(package: str, modules: Sequence[str], host: Host, reason: str) -> None:
    """Refuse to open a dashboard.

    Args:
        package: the package that it comes with.
        modules: the modules that the package needs.
        host: where this process runs.
        reason: why this one cannot be opened; empty: it can.

    Raises:
        MissingExtra: the package is not installed.
        DashboardError: no browser can reach a port of the host, or there is another reason.
    """
    if not all(map(find_spec, modules)):
        raise MissingExtra(f"{package} is not installed", do=f"pip install {package}")
    if host.kind == "kaggle":
        reason = "Kaggle lets no browser reach a port of its machine: use nb.report, or nb.pack"
    if reason:
        raise DashboardError(reason, allowed="tracked runs, or a sweep, where a browser reaches it")


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

    from nbtoolkit.study.study import ReadOnlyBackend

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
