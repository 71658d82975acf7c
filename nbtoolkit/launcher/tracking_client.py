"""Start the tracking service, and wait for its end: the kernel's side of tracking/service.py."""

from __future__ import annotations

import contextlib
import select
import socket
import sys

from nbtoolkit.environment.resources import Activity, wait_while_active
from nbtoolkit.launcher.forkserver_client import ForkServerClient
from nbtoolkit.wire.transport import Connection

_TRACKING = "nbtoolkit.tracking.service:run_service"


class TrackingClient:
    """The kernel's connection to the tracking service.

    Args:
        server: forks it; it may still be starting.
    """

    def __init__(self, server: ForkServerClient) -> None:
        self._server = server
        self._pid = 0
        self.connection, other_end = Connection.pair()
        self._request = server.fork_soon(_TRACKING, [other_end.fileno()])
        other_end.close()

    def pid(self) -> int:
        """Return its process id; wait until it is forked.

        Raises:
            LaunchError: the fork server did not start, or died.
        """
        if not self._pid:
            self._pid = self._server.pid_of(self._request)
        return self._pid

    def alive(self) -> bool:
        """Return True unless its end of the connection is closed."""
        self.connection.drain()
        return not self.connection.closed

    def close(self, stalled: float) -> None:
        """Let it write what has ended, and wait for its end.

        Args:
            stalled: seconds without progress after which the wait ends.
        """
        if not self.alive():
            return
        pid = self.pid()
        with contextlib.suppress(OSError):  # it has just ended
            self.connection.socket.shutdown(socket.SHUT_WR)
        awaited = f"tracking (process {pid}) to write what has ended"
        if not wait_while_active(self._has_ended, Activity(pid), awaited, stalled=stalled):
            print(
                f"tracking (process {pid}) has not ended: no progress for {stalled:g} s; "
                "nbtoolkit.tracking.replay(folder) writes what it has not written of a run",
                file=sys.stderr,
            )
        self.connection.close()

    def _has_ended(self, seconds: float) -> bool:
        poller = select.poll()
        poller.register(self.connection, select.POLLIN)
        poller.poll(seconds * 1000)
        return not self.alive()
