"""Start a dashboard's server on loopback, which ends with the kernel, and find its address."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from html import escape
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from socket import gethostname
from urllib.request import ProxyHandler, build_opener

from nbtoolkit.dashboards import guard
from nbtoolkit.errors import DashboardError, MissingExtra
from nbtoolkit.host import Host
from nbtoolkit.run.transport import free_port
from nbtoolkit.views.markup import paragraph, view

COLAB_HOSTS = "*.googleusercontent.com"
"""Host names of Colab's proxy, which a dashboard that checks host names must allow."""

START_SECONDS = 600.0
"""Longest wait for a dashboard to answer; MLflow takes 12 s on two cores, 120 s on slow ones."""

_POLL_SECONDS = 0.1  # between two requests
_ANSWER_SECONDS = 1.0  # for one of them
_LOG_TAIL = 2000  # characters of its log that an error shows


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
    """A running dashboard; made by ``nb.open_dashboard`` and ``nb.open_mlflow``.

    Args:
        name: the program, and what it shows.
        host: where this process runs.
        command: returns what to run, by port.
        start_page: what follows the address of the page that is opened first.
        environ: variables added to its environment.

    Attributes:
        name: the program, and what it shows.
        port: on 127.0.0.1, the only address it listens on.
        url: the address for a browser; empty where :attr:`how` describes another way.
        how: what to do before the address can be opened, in words; empty: nothing.
        log: the file with its output, which is removed when it closes.
    """

    def __init__(
        self,
        name: str,
        host: Host,
        command: Callable[[int], Sequence[str]],
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
                [*program, *command(self.port)],
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
        """Whether it has ended."""
        return self._guard.poll() is not None

    def up(self) -> bool:
        """Whether it answers; sends a request and returns within 1 s."""
        try:
            # Without the proxy that the environment may name.
            opener = build_opener(ProxyHandler({}))
            opener.open(f"http://127.0.0.1:{self.port}/", timeout=_ANSWER_SECONDS).close()
            return True
        except (OSError, HTTPException):
            return False  # nobody listens yet

    def wait(self, seconds: float = START_SECONDS) -> Dashboard:
        """Wait until it answers.

        Raises:
            DashboardError: it has ended, or does not answer in time.
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
        """End it with all its processes; does nothing when called again."""
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


_OPEN: dict[tuple[str, Path], Dashboard] = {}
_LOCK = threading.Lock()


def get_or_open(
    key: tuple[str, Path], open_new: Callable[[], Dashboard], *, wait: bool
) -> Dashboard:
    """Return the running dashboard on something, or open one.

    The reference kept here lets a dashboard run that no variable holds.

    Args:
        key: the program, and what it shows.
        open_new: makes a new one.
        wait: whether to wait until it answers.
    """
    with _LOCK:
        if key not in _OPEN or _OPEN[key].closed:
            _OPEN[key] = open_new()
        dashboard = _OPEN[key]
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
