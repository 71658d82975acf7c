"""Handle signals that announce the end of a run, and hold interrupts back."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from nbtoolkit.errors import RunStopped
from nbtoolkit.host import in_kernel

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""What Slurm sends some time before the end (``--signal=USR1@120``), possibly to every process."""
ENDING = (signal.SIGTERM, *WARNINGS)


_REPEAT_SECONDS = 1.0
"""Seconds after a SIGTERM from which another one is a second request.

``timeout`` and Slurm signal a process and its group: the process gets the signal twice at once.
"""


class SignalFlag:
    """The signals that this process has caught."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the last signal; 0: none has come."""
        self.repeated = False
        """True after a second SIGTERM: the run must end now."""
        self._interrupts = False
        self._first_at: float | None = None

    def note(self, number: int) -> None:
        """Note a signal that has come."""
        self.number = number
        if number != signal.SIGTERM:
            return
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
        self.repeated = now - self._first_at >= _REPEAT_SECONDS
        if self.repeated and self._interrupts:
            self._interrupts = False
            raise RunStopped("deadline")

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let a second SIGTERM raise ``RunStopped`` in the block: it may never look at the flag."""
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False


@contextmanager
def catch_termination_signals(flag: SignalFlag) -> Iterator[None]:
    """Set ``flag`` when a signal announces the end, instead of ending this process.

    Catches signals in the main thread only (Python runs handlers nowhere else), and only those
    without a handler: yours, or submitit's, stays. Does nothing in a notebook's kernel, whose
    server ends it with SIGTERM. The previous handlers return at the end of the block.
    """
    if threading.current_thread() is not threading.main_thread() or in_kernel(sys.modules):
        yield
        return
    process = os.getpid()

    def handle(number: int, _: FrameType | None) -> None:
        if os.getpid() == process:
            flag.note(number)
        else:  # a worker of a DataLoader or a pool, which its parent ends with this signal
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    caught = [n for n in ENDING if signal.getsignal(n) in (signal.SIG_DFL, not_yet)]
    before = {number: signal.getsignal(number) for number in caught}
    for number in caught:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in caught:
            if signal.getsignal(number) is handle:  # else the block has set another handler
                signal.signal(number, before[number])


def not_yet(number: int, _: FrameType | None) -> None:
    """Ignore a signal outside of :func:`catch_termination_signals`; a handler, set by a job.

    Slurm may repeat its warning, and the default action would end a process that is about to end.
    """


def describe_signal(number: int) -> str:
    """Return what a signal means for the run, as the reason of its stop."""
    return f"{signal.Signals(number).name} {_ANNOUNCES}"


_ANNOUNCES = "announces an end from outside: a pre-emption, a time limit or a shutdown"


def is_signal_reason(reason: str) -> bool:
    """Whether the reason of a stop was a signal."""
    return reason.endswith(_ANNOUNCES)


def ignore_warning_signals() -> None:
    """Ignore, here and in child processes, the warning a cluster scheduler sends to a whole job."""
    for number in WARNINGS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Hold SIGINT back until the end of the block, for work that must not be left half done.

    The previous handler then receives it; Python's own raises KeyboardInterrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # interrupts are raised in the main thread only
        return
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
    if held:
        signal.raise_signal(signal.SIGINT)
