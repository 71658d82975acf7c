"""Keep a fork server warm for this kernel, replace it by the next one, and shut it down.

A kernel has one fork server, which starts at its first launch, and one tracking service. When ranks
have imported many further modules, the next fork server starts, imports them too, and takes over.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.environment.grace import TRACKING_STALL_SECONDS
from nbtoolkit.launcher.forkserver_client import ForkServerClient, exiting_error
from nbtoolkit.launcher.preload import NOT_FORK_SAFE
from nbtoolkit.launcher.tracking_client import TrackingClient
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.wire import messages
from nbtoolkit.wire.signals import without_interrupts

if TYPE_CHECKING:
    from nbtoolkit.run.resume import RunLock
    from nbtoolkit.wire.transport import Connection

# Further modules that ranks have imported, from which on the next fork server is worth its start,
# which takes 2 s: 100 modules import in 0.2 s to 1 s.
MODULES_WORTH_A_SERVER = 100


@dataclass
class _Servers:
    """What this process has started.

    Attributes:
        current: the fork server that starts runs.
        next: the one that imports more packages and then takes over.
        retired: earlier ones, which end with their last run.
        refused: packages after whose import a fork server could not fork.
        tracking: the tracking service.
        detached: runs that outlive this process.
    """

    kernel: int = field(default_factory=os.getpid)
    current: ForkServerClient | None = None
    next: ForkServerClient | None = None
    retired: list[ForkServerClient] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    tracking: TrackingClient | None = None
    detached: list[RunPaths] = field(default_factory=list)

    def retire(self, server: ForkServerClient) -> None:
        """Keep a fork server that starts no more runs until its last one has ended."""
        if self.tracking is not None and self.tracking.alive():
            self.tracking.pid()  # it may be known from this fork server only
        server.disconnect()
        self.retired.append(server)

    def reap(self) -> None:
        """Forget the retired fork servers that have ended; until then they are zombies."""
        self.retired = [server for server in self.retired if not server.reaped()]


_servers = _Servers()
_lock = threading.RLock()
_exiting = False


def _ours() -> _Servers:
    """Return the servers of this process; a forked child of it has none yet."""
    global _servers
    if _servers.kernel != os.getpid():
        _servers = _Servers()
    return _servers


def fork_server(*, tracking: bool = False, search: bool = False) -> ForkServerClient:
    """Return this kernel's fork server; start one if there is none.

    Args:
        tracking: start the tracking service, too, if it does not run.
        search: it is for a search. A new one imports torch._dynamo first, since the first trials
            would all import it at the same time.
    """
    with _lock:
        if _exiting:
            raise exiting_error()
        take_over()
        servers = _ours()
        server = servers.current
        if server is not None and not server.alive():
            server.kill()
            server = None
        elif server is not None and not server.fits():
            servers.retire(server)
            server = None
        if server is None:
            atexit.unregister(_shut_down_at_exit)
            atexit.register(_shut_down_at_exit)
            server = servers.current = ForkServerClient(late=search)
        if tracking:
            _tracking(server)
        return server


def start_supervisor(main: str, payload: int, request: int, lock: RunLock) -> Connection:
    """Start a supervisor or a scheduler; see :meth:`ForkServerClient.start`.

    The present fork server starts it. One that the caller got before may have been replaced
    meanwhile, by another thread that waits for a run.
    """
    with _lock:
        return fork_server().start(main, payload, request, lock)


def _tracking(server: ForkServerClient) -> TrackingClient:
    servers = _ours()
    if servers.tracking is None or not servers.tracking.alive():
        servers.tracking = TrackingClient(server)
    return servers.tracking


def track(folder: Path) -> int:
    """Track a run's events; return the pid of the tracking service."""
    with _lock:
        request = messages.TrackRun(folder=str(folder), environ=dict(os.environ))
        tracking = _tracking(fork_server())
        tracking.connection.send(request)
        return tracking.pid()


def import_ahead(names: Sequence[str]) -> None:
    """Start the next fork server if it would save ranks the import of many modules.

    Args:
        names: modules of installed packages that a rank has imported.
    """
    with _lock:
        servers = _ours()
        current = servers.current
        if current is None or servers.next is not None or _exiting:
            return
        left_out = NOT_FORK_SAFE | servers.refused
        known = set(current.names)
        new = [
            name for name in names if name not in known and name.partition(".")[0] not in left_out
        ]
        if len(new) >= MODULES_WORTH_A_SERVER:
            servers.next = ForkServerClient([*current.names, *new], late=True)


def take_over() -> None:
    """Let the next fork server take over if it is ready; does not wait for it."""
    if not _lock.acquire(blocking=False):  # another thread starts a run: the next call looks again
        return
    try:
        servers = _ours()
        servers.reap()
        current = servers.current
        successor = servers.next
        if successor is None or current is None:
            return
        if successor.is_ready():
            servers.next = None
            if successor.fits() and current.alive():
                # An interrupt between the two would leave this process without a fork server.
                with without_interrupts():
                    current.hand_over(successor)
                    servers.retire(current)
                    servers.current = successor
            else:
                successor.kill()
        elif not successor.alive():
            servers.next = None
            successor.kill()
            packages = {name.partition(".")[0] for name in {*successor.names} - {*current.names}}
            servers.refused |= {successor.spoiled_by} if successor.spoiled_by else packages
            import_ahead(successor.names)
    finally:
        _lock.release()


def let_outlive(run: RunPaths) -> None:
    """Register a detached run: while it runs, this process's exit does not wait."""
    _ours().detached.append(run)


def _shut_down_at_exit() -> None:
    """Shut down at exit, and keep daemon threads from starting another fork server."""
    global _exiting
    _exiting = True
    shutdown()


def shutdown(stalled: float = TRACKING_STALL_SECONDS) -> None:
    """Shut down this kernel's fork servers and tracking; the next launch starts new ones.

    Waits for their end, but for that of a detached run's.

    Args:
        stalled: seconds without progress after which the wait ends.
    """
    global _servers
    servers = _ours()
    _servers = _Servers()
    if servers.next is not None:
        servers.next.kill()
    waits = not any(run.owned() for run in servers.detached)
    if servers.tracking is not None and waits:
        servers.tracking.close(stalled)  # while its parent lives, which reaps it
    if servers.current is not None:
        servers.retire(servers.current)
    if waits:
        for server in servers.retired:
            server.wait_for_end(stalled)


def pids() -> set[int]:
    """Return the pids of the processes that live between launches."""
    servers = _ours()
    servers.reap()
    warm = {server.pid for server in (servers.current, servers.next) if server is not None}
    if servers.tracking is not None and servers.tracking.alive():
        warm.add(servers.tracking.pid())
    return warm
