"""Desk: what the process that owns a run hears: ranks, its kernel, signals, the launchpad."""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterable
from typing import Any

from nbtoolkit.runtime.flight import Flight
from nbtoolkit.runtime.plan import LaunchPlan
from nbtoolkit.runtime.processes import Peer
from nbtoolkit.runtime.signals import ENDING, announcement
from nbtoolkit.runtime.wire import Line, Message, receive_packet, send_packet


class LaunchpadGone(Exception):
    """The launchpad's process died; the ranks died with it."""


class KernelGone(Exception):
    """The kernel is gone and the run was not detached."""


class Tower:
    """The launchpad as an owner sees it: it forks pilots, and says when they have ended."""

    def __init__(self, launchpad: socket.socket) -> None:
        self.socket = launchpad
        self.patient = False
        """Whether pilots wait for the launchpad's first branch, where it is just being made."""
        self.branches = 0
        """How often ranks have come to be forked from a process that has imported more."""
        self.branched_at = -math.inf
        """When they last did (monotonic)."""
        self._flights: dict[int, Flight] = {}
        self._ticket = 0

    def clear(self, flight: Flight, port: int, fds: list[int], environment: str) -> None:
        """Have a pilot forked for ``flight``, from the branch for ``environment``, if there is one.

        Args:
            flight: is told the pilot's pid, and later its exit code.
            port: where its ranks are to meet.
            fds: the payload, the pilot's end of its line, the ranks' ends of theirs, and what is
                this flight's own (see :func:`~nbtoolkit.runtime.pilot.fly`).
            environment: see :func:`~nbtoolkit.runtime.ahead.environment_key`.
        """
        self._ticket += 1
        self._flights[self._ticket] = flight
        plan: LaunchPlan = flight.plan
        message = {"op": "pilot", "plan": plan.to_dict(), "port": port, "ticket": self._ticket}
        message |= {"environment": environment, "patient": self.patient}
        send_packet(self.socket, message, fds)

    def adopt(self, flight: Flight) -> None:
        """Hear of the end of a pilot that somebody else forked."""
        self._ticket += 1
        self._flights[self._ticket] = flight

    def hear(self) -> None:
        """Take one message.

        Raises:
            LaunchpadGone: it died. The flights are ended.
        """
        packet = receive_packet(self.socket)
        if packet is None:
            for flight in self._flights.values():
                flight.kill()
                flight.exited = -signal.SIGKILL
            raise LaunchpadGone
        message, _ = packet
        if message["op"] == "forked":
            if (asked := self._flights.get(message["ticket"])) is not None:
                asked.pilot_pid = message["pid"]
        elif message["op"] == "branched":
            self.branches, self.branched_at = self.branches + 1, time.monotonic()
        else:
            self._ended(message["pid"], message["code"])

    def dismiss(self, flight: Flight) -> None:
        """End a flight's processes."""
        flight.kill()
        flight.close()
        self.forget(flight)

    def forget(self, flight: Flight) -> None:
        """A flight is over."""
        self._flights = {at: one for at, one in self._flights.items() if one is not flight}

    def _ended(self, pid: int, code: int) -> None:
        for flight in self._flights.values():
            if flight.pilot_pid == pid:
                flight.exited = code


class Desk:
    """The kernel's line, signals and the launchpad, heard together with the ranks.

    Args:
        kernel: the line to whoever launched.
        launchpad: packets to the launchpad.
        detached: whether the run outlives the kernel.
    """

    def __init__(self, kernel: Line, launchpad: socket.socket, *, detached: bool) -> None:
        self.kernel, self.tower = kernel, Tower(launchpad)
        self._detached, self._kernel_process = detached, Peer(kernel)
        self._read_end, self._write_end = os.pipe()
        self._catch_signals()

    def wait(self, lines: Iterable[Line], seconds: float) -> list[Message]:
        """Wait until one of ``lines`` or somebody else has something to say; returns the requests.

        A request is a ``stop`` or ``kill`` message, or another one of the kernel's own.

        Raises:
            LaunchpadGone: the launchpad died, and the ranks with it.
            KernelGone: the kernel ended, and the run is to end with it.
        """
        ready = self._select(lines, seconds)
        requests = []
        if self._read_end in ready:
            requests.append(_request(os.read(self._read_end, 512)[0]))
        if self.tower.socket in ready:
            self.tower.hear()
        if self.kernel in ready:
            requests += self.kernel.drain()
        if not self._detached and (self.kernel.closed or self._kernel_process.gone()):
            raise KernelGone
        return requests

    def _select(self, lines: Iterable[Line], seconds: float) -> set[Any]:
        with selectors.DefaultSelector() as selector:
            sources: list[Line | socket.socket | int] = [self.tower.socket, self._read_end]
            for source in [*lines, *sources]:
                selector.register(source, selectors.EVENT_READ)
            if not self.kernel.closed:
                selector.register(self.kernel, selectors.EVENT_READ)
            return {key.fileobj for key, _ in selector.select(seconds)}

    def _catch_signals(self) -> None:
        os.set_blocking(self._write_end, False)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in (*ENDING, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)


def _request(number: int) -> Message:
    """An interrupt is somebody's wish; other signals announce an end that nobody here chose."""
    if number == signal.SIGINT:
        return {"type": "stop", "reason": "the owner was interrupted"}
    return {"type": "stop", "reason": announcement(number), "status": "deadline"}
