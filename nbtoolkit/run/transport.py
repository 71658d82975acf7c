"""Send messages between nbtoolkit's processes over inherited socket pairs.

A :class:`Connection` carries JSON lines in both directions (rank and supervisor, kernel and
supervisor). A packet carries one small JSON message and open file descriptors (kernel or supervisor
to the fork server). messages.py defines the messages.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
from dataclasses import dataclass

from nbtoolkit.run import messages
from nbtoolkit.run.messages import Message, decode, encode

_MAX_FDS = 250  # the kernel refuses more than 253 (SCM_MAX_FD) in one message
_MAX_PACKET = 64 * 1024


class Connection:
    """JSON lines over a stream socket. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        """For select, and for the credentials of the other end."""
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self._at_end = False
        self.closed = False
        """True once the other end is gone; messages that it sent before may still be unread."""

    @classmethod
    def pair(cls) -> tuple[Connection, Connection]:
        """Two connected ends."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(left), cls(right)

    def fileno(self) -> int:
        """The descriptor, for select."""
        return self.socket.fileno()

    def send(self, message: Message) -> bool:
        """Send one message; False when the other end is gone."""
        data = encode(message) + b"\n"
        try:
            with self._lock:
                self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError, OSError):
            self.closed = True
            return False
        return True

    def send_nowait(self, message: Message) -> None:
        """Send one short message if the socket's buffer has room for it, else drop it."""
        data = encode(message) + b"\n"
        with self._lock, contextlib.suppress(OSError):
            self.socket.send(data, socket.MSG_DONTWAIT)

    def receive(self, timeout: float | None = None) -> Message | None:
        """Wait for one message; None if the other end is gone.

        Raises:
            TimeoutError: no message came within ``timeout`` seconds.
        """
        while (message := self._pop()) is None:
            self.socket.settimeout(timeout)
            try:
                if not self._fill():
                    return None
            finally:
                if self.socket.fileno() >= 0:
                    self.socket.settimeout(None)
        return message

    def drain(self) -> list[Message]:
        """All messages that have arrived, without waiting."""
        # Not ``while not self.closed``: after a failed send, messages from there may be unread.
        while not self._at_end:
            try:
                if not self._fill(socket.MSG_DONTWAIT):
                    break
            except BlockingIOError:
                break
        received = []
        while (message := self._pop()) is not None:
            received.append(message)
        return received

    def close(self) -> None:
        """Close this end."""
        self.closed = self._at_end = True
        self.socket.close()

    def _fill(self, flags: int = 0) -> bool:
        try:
            chunk = self.socket.recv(1 << 16, flags)
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            self.closed = self._at_end = True
            return False
        self._buffer += chunk
        return True

    def _pop(self) -> Message | None:
        end = self._buffer.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return decode(line)


@dataclass(frozen=True, kw_only=True)
class GroupConnections:
    """One end of every connection of an agent and its ranks: the supervisor's ends or theirs."""

    agent: Connection
    connections: list[Connection]
    telemetry: list[Connection]

    @classmethod
    def pair(cls, ranks: int) -> tuple[GroupConnections, GroupConnections]:
        """All connections of a group of ``ranks``: the supervisor's ends, and theirs."""
        ends = zip(*(Connection.pair() for _ in range(1 + 2 * ranks)), strict=True)
        ours, theirs = (
            cls(agent=agent, connections=others[:ranks], telemetry=others[ranks:])
            for agent, *others in ends
        )
        return ours, theirs

    @property
    def descriptors(self) -> messages.GroupDescriptors:
        """Their descriptors."""
        return messages.GroupDescriptors(
            agent=self.agent.fileno(),
            connections=[connection.fileno() for connection in self.connections],
            telemetry=[connection.fileno() for connection in self.telemetry],
        )

    def close(self) -> None:
        """Close these ends."""
        for connection in [self.agent, *self.connections, *self.telemetry]:
            connection.close()


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends for packets (SOCK_SEQPACKET keeps message boundaries)."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_packet(sock: socket.socket, message: Message) -> bool:
    """Send one message and its descriptors, which stay open; False: the other end is gone."""
    fds: list[int] = []
    data = encode(message, fds)
    assert len(fds) <= _MAX_FDS
    try:
        socket.send_fds(sock, [data], fds)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def receive_packet(sock: socket.socket) -> Message | None:
    """Wait for one message and its descriptors; None if the other end is gone."""
    fds = array.array("i")
    try:
        # Not socket.recv_fds: it ignores its flags (3.10 to 3.13), and without MSG_CMSG_CLOEXEC
        # programs would inherit the descriptors.
        data, ancillary, _, _ = sock.recvmsg(
            _MAX_PACKET, socket.CMSG_SPACE(_MAX_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError:
        return None
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    message = decode(data, fds) if data else None
    if isinstance(message, messages.Enclosed):
        with os.fdopen(message.descriptors.file, "rb") as file:
            return decode(file.read())
    return message


def send_enclosed(sock: socket.socket, message: Message) -> bool:
    """Send one message that may be too large for a packet; False: the other end is gone."""
    fd = os.memfd_create("nbtoolkit-message", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, encode(message), 0)
        return send_packet(sock, messages.Enclosed(descriptors=messages.FileDescriptor(file=fd)))
    finally:
        os.close(fd)


def notify_files_changed(connection: Connection) -> None:
    """Let the other end read the files again; without this it does so a little later."""
    if not connection.closed:
        connection.send_nowait(messages.FilesChanged())


def free_port() -> int:
    """A TCP port that is free now; another process may take it before it is used."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
