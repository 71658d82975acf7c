"""Start ranks in advance; they wait for the next run that they fit.

They run in processes of their own, as those of any run do, and have joined their process group, but
no user code has run in them. Each group takes at most one run, which this process supervises.
"""

from __future__ import annotations

import select
import shutil
import socket
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbtoolkit.launcher.event_loop import ForkServerConnection, ForkServerGone, Spawner
from nbtoolkit.launcher.health import START_SECONDS
from nbtoolkit.launcher.supervisor import EXIT_SECONDS, supervise
from nbtoolkit.launcher.worker_group import WorkerGroup
from nbtoolkit.run import messages
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.payload import unpack
from nbtoolkit.run.request import JobSpec
from nbtoolkit.run.transport import free_port


def stand_by(forkserver: socket.socket, request: messages.StartStandby) -> None:
    """Start ranks, wait for a run, and supervise it; the main function of a supervisor process.

    Args:
        forkserver: connection to the fork server.
        request: the request that this process was forked with.
    """
    given, connection = request.descriptors, ForkServerConnection(forkserver)
    folder = Path(tempfile.mkdtemp(prefix="nbtoolkit-"))  # until they have joined their group
    spec = replace(unpack(given.spec, JobSpec), paths=RunPaths(folder))
    group = Spawner(connection, given.payload).start(spec, free_port())
    group.temporary = folder
    try:
        run = _wait_for_run(connection, group, request.seconds)
    except ForkServerGone:  # or it has ended this group
        _wait_for_end(group)
        group.close()
        return
    fits = run is not None and group.all_are("group") and group.alive()
    if not fits:
        connection.dismiss(group)
    if run is not None:
        supervise(forkserver, run, group if fits else None)


def _wait_for_run(
    connection: ForkServerConnection, group: WorkerGroup, seconds: float
) -> messages.ForkSupervisor | None:
    """Return the run that comes within ``seconds``, if any, when the group is formed.

    It returns earlier if a rank ends.

    Raises:
        ForkServerGone: the group was killed.
    """
    run, started_at = None, time.monotonic()
    while group.exited is None and not (run is not None and group.all_are("group")):
        limit = seconds if group.all_are("group") else max(seconds, START_SECONDS)
        if (left := started_at + limit - time.monotonic()) <= 0:
            break
        sources: list[Any] = [connection.socket, *group.lines()]
        ready, _, _ = select.select(sources, [], [], left)
        for rank, message in group.receive():
            if isinstance(message, messages.PhaseReached):
                rank.phase, rank.pid = message.phase, message.pid or rank.pid
                _on_phase(group)
            elif isinstance(message, messages.LastWord):
                return run
        if connection.socket in ready:
            packet = connection.receive()
            run = packet if isinstance(packet, messages.ForkSupervisor) else run
    return run


def _on_phase(group: WorkerGroup) -> None:
    if group.all_are("started") and len(group.ranks) > 1:
        group.go()
    elif group.all_are("group"):
        group.keep_log(RunPaths(group.temporary).agent_log)
        shutil.rmtree(group.temporary, ignore_errors=True)


def _wait_for_end(group: WorkerGroup) -> None:
    """Wait for processes that are being killed: one that starts would make its folder again."""
    limit = time.monotonic() + EXIT_SECONDS
    while (lines := group.lines()) and time.monotonic() < limit:
        select.select(lines, [], [], 0.1)
        group.receive()
