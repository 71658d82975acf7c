"""What has died is noticed soon, whatever else goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kernels import finish, until

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.launcher.supervisor_process import Peer
from nbtoolkit.wire.transport import Connection
from nbtoolkit.worker.context import RunContext

pytestmark = pytest.mark.chaos


def fails_beside_a_sleeper(config: Config, ctx: RunContext) -> None:
    if not ctx.is_main:
        (ctx.paths.folder / "failed").write_text(str(time.time()))
        raise ValueError("wrong on rank 1")
    time.sleep(60)


def test_an_error_is_reported_while_another_rank_sleeps(tmp_path: Path) -> None:
    settings = {"tracking.mlflow": False, "runtime.output_dir": str(tmp_path)}
    options = {"processes": 2, "display": "off", "wait": False}
    handle = nb.launch(fails_beside_a_sleeper, settings, **options)
    with pytest.raises(ValueError, match="wrong on rank 1"):
        finish(handle, 60)
    failed = float((handle.paths.folder / "failed").read_text())
    *_, ended = handle.events()
    # The other rank gets 1 s, for an error of its own. Ranks that have returned get 10.
    assert ended.t - failed < 8


CONNECTS_AND_FORKS = """
import os, socket, sys, time
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
if os.fork() == 0:
    connection.sendall(b"%d" % os.getpid())
time.sleep(60)
"""


def test_a_killed_process_is_gone_before_its_parent_has_waited_for_it(tmp_path: Path) -> None:
    """It is a zombie until then, and its child holds the connection open."""
    address = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        process = subprocess.Popen([sys.executable, "-c", CONNECTS_AND_FORKS, address])
        accepted, _ = server.accept()
    child = int(accepted.recv(16))
    try:
        peer = Peer(Connection(accepted))
        time.sleep(0.6)  # it looks twice a second
        assert not peer.gone()
        process.kill()
        until(peer.gone, "the end of the process")
    finally:
        os.kill(child, signal.SIGKILL)
        process.wait()
        accepted.close()
