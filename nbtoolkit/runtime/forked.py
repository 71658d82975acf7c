"""start="fork": the pilot is forked from this process, nothing is pickled; refused if unsafe."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from nbtoolkit.errors import ForkRefused
from nbtoolkit.runtime.flight import rank_lines
from nbtoolkit.runtime.payload import pack_function
from nbtoolkit.runtime.plan import LaunchPlan
from nbtoolkit.runtime.probe import probe_fork
from nbtoolkit.runtime.wire import Line
from nbtoolkit.runtime.zygote import preload


class ForkedPilot:
    """A child of this process that waits for the owner's word, then starts the ranks.

    Raises:
        ForkRefused: the probe says that a forked child of this process could not work.
    """

    def __init__(
        self, train: Callable[..., Any], plan: LaunchPlan, content: dict[str, Any]
    ) -> None:
        self._lines: list[Line] = []
        self._reaped = True
        try:
            with without_interrupts():
                self._fork(train, plan, content)
        except BaseException:  # an interrupt that was held back, or no memory for a child
            self.close()
            self.kill()
            raise

    def _fork(self, train: Callable[..., Any], plan: LaunchPlan, content: dict[str, Any]) -> None:
        preload()  # else the probe, the pilot and each launch after this one would do it: 2 s
        probe = probe_fork(device=plan.device_type == "cuda")
        if not probe.ok:
            raise ForkRefused(
                f'start="fork" would not work in this process: {probe.reason}',
                allowed='start="launchpad" (ranks come from a clean process), or a kernel that has '
                "not computed yet",
                do="leave start out; what cannot be pickled is named then",
            )
        payload = pack_function(None, content)
        pilot, pilot_end = Line.pair()
        pairs = rank_lines(plan)
        self._lines = [pilot, *(mine for mine, _ in pairs)]
        print(end="", flush=True)
        print(end="", file=sys.stderr, flush=True)  # either may be None
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # Python 3.12 on fork beside threads: probed above
            self.pid = os.fork()
        self._reaped = False
        if self.pid == 0:
            _child(train, payload, pilot_end, [end for _, end in pairs], self._lines)
        os.close(payload)
        for end in [pilot_end, *(end for _, end in pairs)]:
            end.close()

    @property
    def fds(self) -> list[int]:
        """The owner's ends of the lines: pilot, then ranks."""
        return [line.fileno() for line in self._lines]

    def close(self) -> None:
        """Close this process's copies of the lines, once the owner has its own."""
        for line in self._lines:
            line.close()

    def kill(self) -> None:
        """End it, the ranks with it, and reap it; once is enough, more does no harm."""
        if self._reaped:
            return
        for end in (os.killpg, os.kill):  # it may not lead its group yet
            with contextlib.suppress(ProcessLookupError):
                end(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self._reaped = True


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Hold an interrupt back: a torch interrupted at its import cannot be imported again."""
    if threading.current_thread() is not threading.main_thread():
        yield  # interrupts are raised in the main thread only
        return
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)
    if held:
        raise KeyboardInterrupt


def _child(
    train: Callable[..., Any], payload: int, pilot: Line, ranks: list[Line], others: list[Line]
) -> None:
    code = 1
    try:
        from nbtoolkit.runtime.forker import die_with_parent
        from nbtoolkit.runtime.pilot import default_signals, fly

        default_signals()
        die_with_parent(signal.SIGKILL)
        for line in others:
            line.close()
        _forget_accelerators()
        message = (
            pilot.receive()
        )  # the owner's word: plan and port; None when there will be no owner
        if message is not None:
            sock = socket.socket(fileno=os.dup(pilot.fileno()))
            fly([payload], message, sock, [rank.fileno() for rank in ranks], train)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        print(end="", flush=True)
        print(end="", file=sys.stderr, flush=True)  # either may be None
        os._exit(code)


def _forget_accelerators() -> None:
    """With an ``Accelerator()`` made in the kernel notebook_launcher would refuse to start."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
