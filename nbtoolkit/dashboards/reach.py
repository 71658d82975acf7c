"""Build the address at which a browser reaches a port of this machine's loopback, by host."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from getpass import getuser
from typing import Any

from nbtoolkit.host import Host

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
