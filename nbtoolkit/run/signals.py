"""Handle signals that announce an end (pre-emption, a cluster's warning), then save and exit."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from nbtoolkit.host import in_kernel

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""What Slurm sends some time before the end (``--signal=USR1@120``), maybe to every process."""
ENDING = (signal.SIGTERM, *WARNINGS)


class Heard:
    """Which signal has come while it was heeded."""

    def __init__(self) -> None:
        self.number = 0
        """The last one; 0: none."""


@contextmanager
def heeded(heard: Heard) -> Iterator[None]:
    """Note signals that announce an end in ``heard``, instead of dying of them.

    Only in the main thread (Python runs handlers nowhere else), only those that nobody has a
    handler for (yours, or submitit's, stays), and never in a notebook's kernel: its server ends it
    by SIGTERM. At the end of the block all is as it was.
    """
    if threading.current_thread() is not threading.main_thread() or in_kernel(sys.modules):
        yield
        return
    process = os.getpid()

    def note(number: int, _: FrameType | None) -> None:
        if os.getpid() == process:
            heard.number = number
        else:  # a DataLoader worker or a pool's, which its parent ends so
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    taken = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number in taken:
            if signal.getsignal(number) is note:  # else the block has set another one
                signal.signal(number, signal.SIG_DFL)


def announcement(number: int) -> str:
    """What a signal means for the run, as the reason of its stop."""
    name = signal.Signals(number).name
    return f"{name} announces an end from outside: a pre-emption, a time limit or a shutdown"


def ignore_warnings() -> None:
    """Let this process and its children live on when a cluster scheduler warns a whole job."""
    for number in WARNINGS:
        signal.signal(number, signal.SIG_IGN)
