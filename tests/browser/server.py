"""A Jupyter server on loopback for JupyterLab and Notebook 7, with its own folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from kernels import SECONDS, alive, all_gone, descendants, until

from nbtoolkit.wire.transport import free_port

TOKEN = "a-token-of-this-test"

_FOLDERS = (
    "JUPYTER_CONFIG_DIR",
    "JUPYTER_DATA_DIR",
    "JUPYTER_RUNTIME_DIR",
    "JUPYTERLAB_SETTINGS_DIR",
    "JUPYTERLAB_WORKSPACES_DIR",
    "IPYTHONDIR",
)

# The news toast would cover the panel, and ask the internet.
_NOTIFICATIONS = {"fetchNews": "false", "checkForUpdates": False}


class Server:
    """A running server.

    Attributes:
        root: the folder that it shows; notebooks lie and run here.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, root: Path) -> None:
        self.process, self.port, self.root = process, port, root

    def url(self, path: str) -> str:
        """An address of it, with the token."""
        joint = "&" if "?" in path else "?"
        return f"http://127.0.0.1:{self.port}{path}{joint}token={TOKEN}"

    def ask(self, method: str, path: str, seconds: float = SECONDS) -> Any:
        """Its REST interface's answer."""
        request = urllib.request.Request(self.url(path), method=method)
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            text = answer.read().decode()
        return json.loads(text) if text else None

    def kernels(self) -> list[str]:
        """The ids of the kernels that run."""
        return [one["id"] for one in self.ask("GET", "/api/kernels")]

    def end_kernels(self) -> None:
        """Shut all of them down, with their sessions."""
        for one in self.ask("GET", "/api/sessions"):
            try:
                self.ask("DELETE", f"/api/sessions/{one['id']}")
            except HTTPError as error:
                if error.code != 404:  # gone meanwhile: the server ends those of closed pages too
                    raise
        until(lambda: not self.kernels(), "the kernels' end")


@contextmanager
def server(home: Path) -> Iterator[Server]:
    """A server whose files all lie below ``home``; it and its kernels are gone at the end."""
    root = home / "work"
    root.mkdir(parents=True)
    settings = home / "JUPYTERLAB_SETTINGS_DIR/@jupyterlab/apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(_NOTIFICATIONS))
    running = _begun(home, root)
    try:
        yield running
    finally:
        _end(running)


def _begun(home: Path, root: Path) -> Server:
    """A server that answers; if another process takes its port meanwhile, start another one."""
    for _ in range(3):
        running = _start(home, root)
        try:
            until(lambda running=running: _answers(running) or _has_ended(running), "the server")
        except BaseException:
            _end(running)
            raise
        if not _has_ended(running):
            return running
    raise AssertionError("the Jupyter server ended: see its server.log")


def _has_ended(running: Server) -> bool:
    return running.process.poll() is not None


def _start(home: Path, root: Path) -> Server:
    port = free_port()
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(
            _command(port, root),
            cwd=root,
            env=_environ(home),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(process, port, root)


def _command(port: int, root: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        *("--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"),
        *(f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={root}"),
    ]


def _environ(home: Path) -> dict[str, str]:
    # What makes warnings errors here is not for a server, nor for the kernels of a user.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    return {**kept, **{name: str(home / name) for name in _FOLDERS}}


def _answers(running: Server) -> bool:
    try:
        return bool(running.ask("GET", "/api/status", seconds=5.0))
    except (OSError, HTTPException):  # not yet; or another process, not a server, listens there
        return False


def _end(running: Server) -> None:
    """Kernels first, as the server's own end would leave them a while."""
    family = descendants(running.process.pid) if alive(running.process.pid) else set()
    if running.process.poll() is None:
        running.end_kernels()
        running.process.terminate()
    running.process.wait(SECONDS)
    all_gone(family)
