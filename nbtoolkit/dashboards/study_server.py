"""Study server: optuna-dashboard over a copy of a sweep's study that follows it; read only.

The study itself has one writer, its conductor. A second connection to it would keep SQLite's log
from being put into the file at the sweep's end, and the dashboard's own buttons delete studies and
change trials. So what is shown is a copy, whole at any moment, made anew when the study has grown.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from nbtoolkit.dashboards.reach import COLAB_HOSTS

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

SECONDS = 2.0
"""Between two looks at the study."""


def main(study: str, copy: str, port: str) -> None:
    """Serve until killed.

    Args:
        study: a sweep's ``study.db``.
        copy: the file to be shown; it is made.
        port: where to listen, on loopback.
    """
    from nbtoolkit.search.study import copy_study

    copy_study(Path(study), Path(copy))
    threading.Thread(target=_follow, args=(Path(study), Path(copy)), daemon=True).start()
    from optuna_dashboard import wsgi

    app = _read_only(wsgi(_storage(copy)))
    make_server("127.0.0.1", int(port), app, _Server, _Quiet).serve_forever()


def _follow(study: Path, copy: Path) -> None:
    from nbtoolkit.search.study import copy_study

    seen = _size(study)
    while True:
        time.sleep(SECONDS)
        if (now := _size(study)) != seen:
            try:
                copy_study(study, copy)
                seen = now
            except (OSError, sqlite3.Error) as error:  # deleted, or the disk is full: said once
                print(f"the study is not followed any more: {error}", flush=True)
                return


def _size(study: Path) -> list[tuple[int, int]]:
    """What another state of the file and its log can be told by."""
    files = (study, study.with_name(f"{study.name}-wal"))
    stats = [file.stat() for file in files if file.exists()]
    return [(one.st_size, one.st_mtime_ns) for one in stats]


def _storage(copy: str) -> RDBStorage:
    """The copy, opened anew for every question: it is replaced while it is asked."""
    from optuna.storages import RDBStorage
    from sqlalchemy.pool import NullPool

    return RDBStorage(f"sqlite:///{copy}", engine_kwargs={"poolclass": NullPool})


def _read_only(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """The same without what would change something, which the next copy would undo."""

    def shown(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if not _is_ours(environ.get("HTTP_HOST", "")):
            start("403 Forbidden", [("Content-Type", "application/json")])
            return [b'{"reason": "Open it as 127.0.0.1 or localhost: this name is not ours."}']
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return app(environ, start)
        start("405 Method Not Allowed", [("Content-Type", "application/json"), ("Allow", "GET")])
        return [b'{"reason": "This is a copy that follows the sweep: nothing is changed here."}']

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
