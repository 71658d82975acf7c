"""Start a dashboard's server on loopback, which ends with the kernel, and find its address."""

from __future__ import annotations

import atexit
import http.client
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from getpass import getuser
from html import escape
from importlib.util import find_spec
from pathlib import Path

from nbtoolkit.dashboards import guard
from nbtoolkit.errors import DashboardError, MissingExtra
from nbtoolkit.host import Host
from nbtoolkit.run.transport import free_port
from nbtoolkit.views.markup import paragraph, view

# --- addresses ---

COLAB_HOSTS = "*.googleusercontent.com"
"""Host names of Colab's proxy, which a dashboard that checks host names must allow."""

_COLAB_SECONDS = 10.0  # a closed browser tab never answers


@dataclass(frozen=True)
class BrowserAddress:
    """How a browser reaches a port.

    Attributes:
        url: the address; empty: only :attr:`how` helps.
        how: what to do first, or instead, in words.
    """

    url: str
    how: str


def unreachable(host: Host) -> str:
    """Return why no browser can reach any port of a host; empty: it can."""
    if host.kind == "kaggle":
        return "Kaggle lets no browser reach a port of its machine: use nb.report, or nb.pack"
    return ""


def browser_address(
    port: int, host: Host, modules: Mapping[str, object] | None = None
) -> BrowserAddress:
    """Return how a browser reaches a port that listens on loopback.

    Args:
        port: of this machine.
        host: where this process runs.
        modules: the modules imported so far; default: this process's.
    """
    if host.kind == "colab":
        return _colab_address(port, sys.modules if modules is None else modules)
    if reason := unreachable(host):
        return BrowserAddress("", reason)
    # The kernel cannot know on which machine the browser runs: the text covers both.
    tunnel = f"ssh -N -L {port}:127.0.0.1:{port} {_user()}@{socket.gethostname()}"
    return BrowserAddress(
        f"http://127.0.0.1:{port}/",
        f"Is the browser on another machine than the notebook? First run there: {tunnel}",
    )


def _colab_address(port: int, modules: Mapping[str, object]) -> BrowserAddress:
    """Ask Colab's proxy for the address; only a cell can wait for its answer."""
    call = f"from google.colab import output; output.serve_kernel_port_as_window({port})"
    in_cell = BrowserAddress("", f"Run this in a cell: {call}")
    output = getattr(modules.get("google.colab"), "output", None)
    if output is None or threading.current_thread() is not threading.main_thread():
        return in_cell
    try:
        script = f"google.colab.kernel.proxyPort({port})"
        return BrowserAddress(str(output.eval_js(script, timeout_sec=_COLAB_SECONDS)), "")
    except Exception:  # Colab's own types: the tab is closed, the output was cleared
        return in_cell


def _user() -> str:
    try:
        return getuser()
    except (KeyError, OSError):  # a container's user id without a name
        return os.environ.get("USER", "you")


# --- servers ---

START_SECONDS = 600.0
"""Longest wait for a dashboard to answer; MLflow takes 12 s on two cores, 120 s on slow ones."""

_POLL_SECONDS = 0.1  # between two requests
_ANSWER_SECONDS = 1.0  # for one of them
_LOG_TAIL = 2000  # characters of its log that an error shows

_GUARD = (sys.executable, "-I", "-S", guard.__file__)


class Dashboard:
    """A running dashboard; made by ``nb.open_dashboard`` and ``nb.open_mlflow``.

    Args:
        name: the program, and what it shows.
        host: where this process runs.
        command: returns what to run, by port.
        health_path: a path that it answers once it is up.
        start_page: what follows the address of the page that is opened first.
        environ: variables added to its environment.

    Attributes:
        name: the program, and what it shows.
        port: on 127.0.0.1, the only address it listens on.
        log: the file with its output, which is removed when it closes.
    """

    def __init__(
        self,
        name: str,
        host: Host,
        command: Callable[[int], Sequence[str]],
        health_path: str,
        start_page: str = "",
        **environ: str,
    ) -> None:
        self.name, self.port = name, free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="nbtoolkit-dashboard-"))
        self.log = self._folder / "log.txt"
        self._health_path, self._start_page = health_path, start_page
        self._up = False
        self._closing = threading.Lock()
        self._guard = self._start(command(self.port), environ)
        self._address = browser_address(self.port, host)

    @property
    def url(self) -> str:
        """The address for a browser; empty where :attr:`how` describes another way."""
        return self._address.url and f"{self._address.url}{self._start_page}"

    @property
    def how(self) -> str:
        """What to do before the address can be opened, in words; empty: nothing."""
        return self._address.how

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._guard.poll() is not None

    @property
    def starting(self) -> bool:
        """Whether it runs and has not answered yet."""
        return not self._up and not self.closed

    def up(self) -> bool:
        """Whether it answers; sends a request and returns within 1 s.

        Raises:
            DashboardError: it has ended.
        """
        if self.starting:
            self._up = self._answers()
        if self.closed:
            raise DashboardError(f"{self.name} has ended", do=self._log_advice())
        return self._up

    def wait(self, seconds: float = START_SECONDS) -> Dashboard:
        """Wait until it answers.

        Raises:
            DashboardError: it has ended, or does not answer in time.
        """
        end = time.monotonic() + seconds
        while not self.up():
            if time.monotonic() > end:
                advice = self._log_advice()
                self.close()
                raise DashboardError(f"{self.name} did not answer within {seconds:g} s", do=advice)
            time.sleep(_POLL_SECONDS)
        return self

    def close(self) -> None:
        """End it with all its processes; does nothing when called again."""
        with self._closing:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        how = f"\n{self.how}" if self.how and not self.closed else ""
        return f"{self.name}: {self._location(self.url)}{how}"

    def _repr_html_(self) -> str:
        how = paragraph(self.how) if self.how and not self.closed else ""
        url = escape(self.url, quote=True)
        link = f'<a href="{url}" target="_blank" rel="noopener">{url}</a>' if url else ""
        return view(f"<div>{escape(self.name)}: {self._location(link)}</div>{how}")

    def _location(self, address: str) -> str:
        if self.closed:
            return "closed"
        port = f"port {self.port} of 127.0.0.1"
        return f"{address} ({port})" if address else port

    def _start(self, command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [*_GUARD, str(os.getpid()), str(self._folder), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Jupyter interrupts the kernel's whole process group.
                start_new_session=True,
                # It imports nothing of the user's and leaves nothing there.
                cwd=self._folder,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
            )

    def _answers(self) -> bool:
        """Whether it answers a request; urllib would use a proxy that the environment names."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_SECONDS)
        try:
            connection.request("GET", self._health_path)
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False  # nobody listens yet
        finally:
            connection.close()

    def _log_advice(self) -> str:
        try:
            text = self.log.read_text(errors="replace").strip()
        except OSError:
            text = ""
        return f"read what it wrote:\n{text[-_LOG_TAIL:]}" if text else "open it again"


_OPEN: dict[tuple[str, Path], Dashboard] = {}
_LOCK = threading.Lock()


def get_or_open(key: tuple[str, Path], open_new: Callable[[], Dashboard]) -> Dashboard:
    """Return the running dashboard on something, or open one.

    The reference kept here lets a dashboard run that no variable holds.

    Args:
        key: the module that serves it, and what it shows.
        open_new: makes a new one.
    """
    with _LOCK:
        known = _OPEN.get(key)
        if known is None or known.closed:
            known = _OPEN[key] = open_new()
        return known


@atexit.register
def _close_all() -> None:
    """Close all at a regular exit; at any other the guards do."""
    for dashboard in _OPEN.values():
        dashboard.close()


def check_available(module: str, reason: str, allowed: str) -> None:
    """Refuse to open a dashboard.

    Args:
        module: as for :func:`missing_package`.
        reason: why it cannot be opened; empty: it can.
        allowed: what can be opened.

    Raises:
        MissingExtra: its package is not installed.
        DashboardError: there is another reason.
    """
    if package := missing_package(module):
        raise MissingExtra(f"{package} is not installed", do=f"pip install {package}")
    if reason:
        raise DashboardError(reason, allowed=allowed)


def unavailable(module: str, host: Host) -> str:
    """Return why a dashboard cannot be opened on anything; empty: it can."""
    if package := missing_package(module):
        return f"{package} is not installed: pip install {package}"
    return unreachable(host)


# mlflow-skinny lacks these, and then fails with a message that names none of them.
_REQUIRED = {"optuna_dashboard": ("optuna",), "mlflow": ("sqlalchemy", "alembic", "flask")}


def missing_package(module: str, spec: Callable[[str], object] = find_spec) -> str:
    """Return the package that has to be installed for a dashboard; empty: none.

    Args:
        module: ``"optuna_dashboard"`` or ``"mlflow"``.
        spec: finds a module.
    """
    installed = all(map(spec, (module, *_REQUIRED[module])))
    return "" if installed else module.replace("_", "-")
