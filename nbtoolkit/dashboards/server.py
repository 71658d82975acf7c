"""Start a dashboard's server on loopback; it ends with the kernel."""

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
from types import TracebackType
from typing import Any

from nbtoolkit.dashboards import guard
from nbtoolkit.errors import DashboardError
from nbtoolkit.host import Host
from nbtoolkit.run.transport import free_port
from nbtoolkit.views.markup import boxed, said

COLAB_HOSTS = "*.googleusercontent.com"
"""Where Colab's proxy shows a port: what a dashboard that looks at hosts must allow there."""

_ASK_COLAB = 10.0  # seconds; a tab that was closed answers never


@dataclass(frozen=True)
class Reach:
    """How a browser comes to a port.

    Attributes:
        url: what it opens; empty: only :attr:`how` tells.
        how: what is to be done before, or instead, in words.
    """

    url: str
    how: str


def unreachable(host: Host) -> str:
    """Why no browser can come to any port of a host; empty: it can."""
    if host.kind == "kaggle":
        return "Kaggle lets no browser reach a port of its machine: nb.report, or nb.pack and home"
    return ""


def reach(port: int, host: Host, modules: Mapping[str, Any] | None = None) -> Reach:
    """How a browser comes to a port that listens on loopback.

    Args:
        port: of this machine.
        host: where this process runs.
        modules: the modules imported so far; default: this process's.
    """
    if host.kind == "colab":
        return _through_colab(port, sys.modules if modules is None else modules)
    if why := unreachable(host):
        return Reach("", why)
    # Who shows the notebook is not told to its kernel: both ways are named.
    tunnel = f"ssh -N -L {port}:127.0.0.1:{port} {_user()}@{socket.gethostname()}"
    return Reach(
        f"http://127.0.0.1:{port}/",
        f"Is the browser on another machine than the notebook? First run there: {tunnel}",
    )


def _through_colab(port: int, modules: Mapping[str, Any]) -> Reach:
    """By Colab's own proxy, which is asked for the address; only a cell can wait for the answer."""
    call = f"from google.colab import output; output.serve_kernel_port_as_window({port})"
    by_cell = Reach("", f"Run this in a cell: {call}")
    output = getattr(modules.get("google.colab"), "output", None)
    if output is None or threading.current_thread() is not threading.main_thread():
        return by_cell
    try:
        ask = f"google.colab.kernel.proxyPort({port})"
        return Reach(str(output.eval_js(ask, timeout_sec=_ASK_COLAB)), "")
    except Exception:  # of Colab's own kinds: a tab that is closed, an output that was cleared
        return by_cell


def _user() -> str:
    try:
        return getuser()
    except (KeyError, OSError):  # a container's user id without a name
        return os.environ.get("USER", "you")


START_SECONDS = 600.0
"""Longest wait for a dashboard that runs; MLflow's takes 12 s on two cores, 120 s on slow ones."""

_LOOK, _ANSWER = 0.1, 1.0  # seconds between two requests, and for one
_LAST_WORDS = 2000  # characters of its log that an error shows

_GUARD = (sys.executable, "-I", "-S", guard.__file__)

Command = Callable[[int, Path], Sequence[str]]
"""Port and an empty folder -> what to run."""


class Dashboard:
    """A dashboard that runs, or is about to; made by ``nb.open_dashboard`` and ``nb.open_mlflow``.

    Args:
        name: whose it is, and what it shows.
        host: where this process runs.
        command: what to run.
        asked: a path that it answers once it is up.
        page: what follows the address: the page that is opened first.
        environ: variables of its environment.

    Attributes:
        name: whose it is, and what it shows.
        port: on 127.0.0.1, the only address it listens on.
        log: the file with what it wrote; it is removed with it.
    """

    def __init__(
        self,
        name: str,
        host: Host,
        command: Command,
        asked: str,
        page: str = "",
        **environ: str,
    ) -> None:
        self.name, self.port = name, free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="nbtoolkit-dashboard-"))
        self.log = self._folder / "log.txt"
        self._asked, self._page, self._up = asked, page, False
        self._closing = threading.Lock()
        self._guard = self._start(command(self.port, self._folder), environ)
        self._reach = reach(self.port, host)

    @property
    def url(self) -> str:
        """What a browser opens; empty where it takes another way (:attr:`how` says which)."""
        return self._reach.url and f"{self._reach.url}{self._page}"

    @property
    def how(self) -> str:
        """What is to be done before the address can be opened, in words; or empty."""
        return self._reach.how

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._guard.poll() is not None

    @property
    def starting(self) -> bool:
        """Whether it runs and was not seen to answer yet."""
        return not self._up and not self.closed

    def up(self) -> bool:
        """Whether it answers; asks it, and returns within 1 s.

        Raises:
            DashboardError: it has ended.
        """
        if self.starting:
            self._up = self._answers()
        if self.closed:
            raise DashboardError(f"{self.name} has ended", do=self._last_words())
        return self._up

    def wait(self, seconds: float = START_SECONDS) -> Dashboard:
        """Wait until it answers.

        Raises:
            DashboardError: it has ended, or does not answer in time.
        """
        end = time.monotonic() + seconds
        while not self.up():
            if time.monotonic() > end:
                words = self._last_words()
                self.close()
                raise DashboardError(f"{self.name} did not answer within {seconds:g} s", do=words)
            time.sleep(_LOOK)
        return self

    def close(self) -> None:
        """End it, with all its processes; a second time does nothing."""
        with self._closing:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        how = f"\n{self.how}" if self.how and not self.closed else ""
        return f"{self.name}: {self._sentence()}{how}"

    def _repr_html_(self) -> str:
        how = said(self.how) if self.how and not self.closed else ""
        return boxed(f"<div>{escape(self.name)}: {self._sentence(link=True)}</div>{how}")

    def _sentence(self, *, link: bool = False) -> str:
        if self.closed:
            return "closed"
        where = f"port {self.port} of 127.0.0.1"
        if not self.url:
            return where  # :attr:`how` tells the way
        url = escape(self.url, quote=True)
        address = f'<a href="{url}" target="_blank" rel="noopener">{url}</a>' if link else self.url
        return f"{address} ({where})"

    def _start(self, command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [*_GUARD, str(os.getpid()), str(self._folder), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Jupyter interrupts the kernel's whole process group
                cwd=self._folder,  # nothing of the user's is imported, nothing is left there
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
            )

    def _answers(self) -> bool:
        """Whether a request is answered; urllib would ask a proxy that the environment names."""
        asked = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER)
        try:
            asked.request("GET", self._asked)
            return asked.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False  # nobody listens yet
        finally:
            asked.close()

    def _last_words(self) -> str:
        try:
            text = self.log.read_text(errors="replace").strip()
        except OSError:
            text = ""
        return f"read what it wrote:\n{text[-_LAST_WORDS:]}" if text else "open it again"


def shared(key: tuple[str, Path], open_one: Callable[[], Dashboard]) -> Dashboard:
    """The dashboard that shows something already, or a new one.

    Kept here too: one that no variable holds must not end before it is looked at.

    Args:
        key: what kind it is, and what it shows.
        open_one: makes a new one.
    """
    with _LOCK:
        if (known := _OPEN.get(key)) is None or known.closed:
            _OPEN[key] = open_one()
        return _OPEN[key]


_OPEN: dict[tuple[str, Path], Dashboard] = {}
_LOCK = threading.Lock()


@atexit.register
def _close_all() -> None:
    """At a good end of this process; at any other the guards see to it."""
    for one in _OPEN.values():
        one.close()


def python(module: str, *arguments: str) -> list[str]:
    """A command that runs ``main`` of a module of ours, wherever this package lies.

    Args:
        module: its dotted name.
        arguments: what ``main`` is given.
    """
    home = str(Path(__file__).resolve().parents[2])
    boot = f"import sys; sys.path.append({home!r}); from {module} import main; main(*sys.argv[1:])"
    return [sys.executable, "-c", boot, *arguments]


def missing(module: str, spec: Callable[[str], object] = find_spec) -> str:
    """The package that has to be installed for a dashboard; empty: it is there.

    Args:
        module: ``"optuna_dashboard"`` or ``"mlflow"``.
        spec: looks for a module.
    """
    there = all(map(spec, (module, *_NEEDS[module])))
    return "" if there else module.replace("_", "-")


_NEEDS = {"optuna_dashboard": ("optuna",), "mlflow": ("sqlalchemy", "alembic", "flask")}
"""mlflow-skinny comes without these, and then fails with a message that names none of them."""
