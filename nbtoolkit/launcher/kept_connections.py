"""Keep the connections of this kernel's runs open, even if the user drops the handles.

An open connection tells the supervisor that this process lives.
"""

from __future__ import annotations

import atexit
import threading
from typing import Protocol


class Connected(Protocol):
    """What has a connection to a supervisor."""

    def done(self) -> bool:
        """Return True if the run has ended."""

    def disconnect(self) -> None:
        """Close the connection."""


_kept: list[Connected] = []
_lock = threading.Lock()


def keep_connected(handle: Connected) -> None:
    """Keep a run's connection open until the run or this process ends."""
    with _lock:
        if not _kept:
            # Registered after the fork server's exit function, and so called before it: that one
            # waits for the supervisors.
            atexit.unregister(_disconnect_all)
            atexit.register(_disconnect_all)
        for other in list(_kept):
            if other.done():
                other.disconnect()
                _kept.remove(other)
        _kept.append(handle)


def _disconnect_all() -> None:
    for handle in _kept:
        handle.disconnect()
