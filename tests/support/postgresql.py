"""A PostgreSQL server on loopback, from Debian's package: private, and removed when closed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text

PASSWORD = "correct horse"
_USER = "nbtoolkit"


def missing() -> str:
    """What this machine lacks for it; empty: nothing."""
    if find_spec("psycopg") is None:
        return "psycopg is not installed (make test-cluster)"
    return "" if _programs() else "PostgreSQL is not installed (make test-cluster)"


def _programs() -> Path | None:
    """Debian's own folder of the server's programs, which are not on the path."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


class PostgreSQL:
    """A running server.

    Args:
        folder: of its files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])

    def url(self, database: str = "postgres", password: str = PASSWORD) -> str:
        """The SQLAlchemy URL, with the password."""
        quoted = password.replace(" ", "%20")
        return f"postgresql+psycopg://{_USER}:{quoted}@127.0.0.1:{self.port}/{database}"

    def new_database(self, name: str) -> str:
        """Make a database; its URL."""
        engine = create_engine(self.url(), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return self.url(name)

    def create(self) -> None:
        """Make the data folder."""
        password = self._folder / "password"
        password.write_text(PASSWORD)
        options = ["--no-sync", "--encoding=UTF8", "--locale=C", "--auth=scram-sha-256"]
        self._run("initdb", "-U", _USER, f"--pwfile={password}", *options)
        fixed = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self._folder),
            "fsync": "off",
        }
        with (self._folder / "data/postgresql.conf").open("a") as config:
            config.writelines(f"{name} = '{value}'\n" for name, value in fixed.items())

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._run("pg_ctl", "-w", "-l", str(self._folder / "log"), "start")

    def stop(self) -> None:
        """End its connections, and it."""
        self._run("pg_ctl", "-w", "-m", "fast", "stop")

    def _run(self, program: str, *words: str) -> None:
        folder = _programs()
        assert folder is not None
        # The server refuses to run as root.
        nobody = {"user": "nobody", "group": "nogroup", "extra_groups": list[int]()}
        user: dict[str, Any] = nobody if os.geteuid() == 0 else {}
        # Not a pipe: the server keeps it open.
        with (self._folder / "output").open("a") as output:
            done = subprocess.run(
                [folder / program, "-D", self._folder / "data", *words],
                cwd=self._folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
                **user,
            )
        assert done.returncode == 0, (self._folder / "output").read_text()[-2000:]


@contextmanager
def running() -> Iterator[PostgreSQL]:
    """Start a server, and remove it with its files."""
    # nobody must reach the folder, and a socket's path must be short.
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    server = PostgreSQL(folder)
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, "nobody", "nogroup")
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)
