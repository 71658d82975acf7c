"""Find a free TCP port on loopback."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A TCP port that was free a moment ago; it may be taken again when somebody binds it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
