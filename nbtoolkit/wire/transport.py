"""Send messages between nbtoolkit's processes over inherited socket pairs.

messages.py defines the messages. A packet carries one message as JSON and its open descriptors
(SOCK_SEQPACKET keeps message boundaries). The content of a large message is in a file in memory,
which the packet carries.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
from dataclasses import dataclass

from nbtoolkit.wire import messages
from nbtoolkit.wire.messages import Message, decode, encode

_MAX_FDS = 250  # the kernel refuses more than 253 (SCM_MAX_FD) in one message
# A packet must fit into the socket's buffer: 208 KiB by default (net.core.wmem_default).
_MAX_PACKET = 64 * 1024
# Instead of JSON: the packet's first descriptor is the file that has the message.
_IN_FILE = b"\0"


class Connection:
    """Messages in both directions. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        """For select, and for the credentials of the other end."""
        self._at_end = False
        self.closed = False
        """True once the other end is gone; messages that it sent before may still be unread."""

    @classmethod
    def pair(cls) -> tuple[Connection, Connection]:
        """Two connected ends."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(left), cls(right)

    @classmethod
    def inherited(cls, fd: int) -> Connection:
        """Return the connection of a descriptor that this process was given."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """Return the descriptor, for select."""
        return self.socket.fileno()

    def send(self, message: Message) -> bool:
        """Send one message; its descriptors stay open. False when the other end is gone."""
        try:
            self._send(message)
        except OSError:
            self.closed = True
            return False
        return True

    def send_nowait(self, message: Message) -> None:
        """Send one message if the socket's buffer has room for it, else drop it."""
        with contextlib.suppress(OSError):
            self._send(message, socket.MSG_DONTWAIT)

    def receive(self, timeout: float | None = None) -> Message | None:
        """Wait for one message; None if the other end is gone.

        Raises:
            TimeoutError: no message came within ``timeout`` seconds.
        """
        if self._at_end:
            return None
        # Not settimeout(): it would also apply to another thread that sends.
        poller = select.poll()  # select() refuses descriptors above 1023
        poller.register(self.socket, select.POLLIN)
        if not poller.poll(None if timeout is None else timeout * 1000):
            raise TimeoutError(f"no message came within {timeout:g} s")
        return self._receive()

    def drain(self) -> list[Message]:
        """All messages that have arrived, without waiting."""
        received: list[Message] = []
        # Not ``while not self.closed``: after a failed send, messages from there may be unread.
        while not self._at_end:
            try:
                message = self._receive(socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            if message is not None:
                received.append(message)
        return received

    def close(self) -> None:
        """Close this end."""
        self.closed = self._at_end = True
        self.socket.close()

    def _send(self, message: Message, flags: int = 0) -> None:
        fds: list[int] = []
        data = encode(message, fds)
        if len(data) <= _MAX_PACKET:
            self._send_packet(data, fds, flags)
            return
        file = os.memfd_create("nbtoolkit-message", os.MFD_CLOEXEC)
        try:
            os.pwrite(file, data, 0)
            self._send_packet(_IN_FILE, [file, *fds], flags)
        finally:
            os.close(file)

    def _send_packet(self, data: bytes, fds: list[int], flags: int) -> None:
        assert len(fds) <= _MAX_FDS
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        self.socket.sendmsg([data], [rights] if fds else [], flags)

    def _receive(self, flags: int = 0) -> Message | None:
        fds = array.array("i")
        try:
            data, ancillary = self._receive_packet(flags)
        except ConnectionResetError:
            # The other end has closed with messages of this end unread. Linux says so once, before
            # the messages that it had sent.
            data, ancillary = self._receive_packet(flags)
        if not data:
            self.closed = self._at_end = True
            return None
        for _, _, rights in ancillary:
            fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
        if data != _IN_FILE:
            return decode(data, fds)
        with os.fdopen(fds.pop(0), "rb") as file:
            return decode(file.read(), fds)

    def _receive_packet(self, flags: int) -> tuple[bytes, list[tuple[int, int, bytes]]]:
        # Not socket.recv_fds: it ignores its flags (3.10 to 3.13), and without MSG_CMSG_CLOEXEC
        # programs would inherit the descriptors.
        room = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
        data, ancillary, _, _ = self.socket.recvmsg(
            _MAX_PACKET, room, socket.MSG_CMSG_CLOEXEC | flags
        )
        return data, ancillary


@dataclass(frozen=True, kw_only=True)
class GroupDescriptors:
    """One end of every connection of an agent and, by rank, of its ranks, as descriptors."""

    agent: int
    connections: list[int]
    telemetry: list[int]

    @classmethod
    def of(cls, fds: list[int]) -> GroupDescriptors:
        """Return the ends from the list that :meth:`numbers` returns."""
        agent, *others = fds
        ranks = len(others) // 2
        return cls(agent=agent, connections=others[:ranks], telemetry=others[ranks:])

    def numbers(self) -> list[int]:
        """Return all descriptors in one list."""
        return [self.agent, *self.connections, *self.telemetry]


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
        supervisor_ends, group_ends = (
            cls(agent=agent, connections=others[:ranks], telemetry=others[ranks:])
            for agent, *others in ends
        )
        return supervisor_ends, group_ends

    @property
    def descriptors(self) -> GroupDescriptors:
        """Their descriptors."""
        return GroupDescriptors(
            agent=self.agent.fileno(),
            connections=[connection.fileno() for connection in self.connections],
            telemetry=[connection.fileno() for connection in self.telemetry],
        )

    def close(self) -> None:
        """Close these ends."""
        for connection in [self.agent, *self.connections, *self.telemetry]:
            connection.close()


def notify_files_changed(connection: Connection) -> None:
    """Let the other end read the files again; without this it does so a little later."""
    if not connection.closed:
        connection.send_nowait(messages.FilesChanged())


def free_port() -> int:
    """Return a TCP port that is free now; another process may take it before it is used."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
