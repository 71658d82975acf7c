"""Serve optuna-dashboard on a sweep's study, which is only read.

The study has one writer, its scheduler; the dashboard's own buttons delete studies and change
trials.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from nbtoolkit.dashboards.server import COLAB_HOSTS


def main(study: str, port: str) -> None:
    """Serve until killed.

    Args:
        study: a sweep's journal.
        port: where to listen, on loopback.
    """
    from optuna.storages import JournalStorage
    from optuna_dashboard import wsgi

    from nbtoolkit.study.storage import ReadOnlyBackend

    app = _read_only(wsgi(JournalStorage(ReadOnlyBackend(study))))
    make_server("127.0.0.1", int(port), app, _Server, _Quiet).serve_forever()


def _read_only(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """The same without what would change something."""

    def shown(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if not _is_ours(environ.get("HTTP_HOST", "")):
            start("403 Forbidden", [("Content-Type", "application/json")])
            return [b'{"reason": "Open it as 127.0.0.1 or localhost: this name is not ours."}']
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return app(environ, start)
        start("405 Method Not Allowed", [("Content-Type", "application/json"), ("Allow", "GET")])
        return [b'{"reason": "The sweep writes its study: nothing is changed here."}']

    return shown


def _is_ours(host: str) -> bool:
    """Whether a request names this machine, or Colab's proxy.

    A page of anybody's could let its own name stand for 127.0.0.1 and read what is shown here (DNS
    rebinding): its requests carry that name.
    """
    name = host.rpartition(":")[0] or host
    return name in ("127.0.0.1", "localhost") or name.endswith(COLAB_HOSTS[1:])


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    """Writes no line for each request: a page that is open asks every few seconds."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""
