"""Launch with ``start="fork"``: fork the agent from this process; refused where that is unsafe."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nbtoolkit.environment.fork_diagnosis import probe_fork
from nbtoolkit.environment.variables import KernelEnvironment
from nbtoolkit.errors import ForkRefused
from nbtoolkit.launcher.preload import preload
from nbtoolkit.run.messages import GroupDescriptors, StartRanks
from nbtoolkit.run.request import JobSpec
from nbtoolkit.run.signals import without_interrupts
from nbtoolkit.run.transport import GroupConnections


class ForkedAgent:
    """A child of this process that waits for the supervisor's word, then starts the ranks.

    Raises:
        ForkRefused: the probe says that a forked child of this process could not work.
    """

    def __init__(
        self, train: Callable[..., Any], job: JobSpec, environment: KernelEnvironment
    ) -> None:
        self._lines, theirs = GroupConnections.pair(job.plan.processes)
        self._reaped = True
        try:
            # A torch that was interrupted during its import cannot be imported again.
            with without_interrupts():
                self._fork(train, job, environment, theirs)
        except BaseException:  # an interrupt that was held back, or no memory for a child
            self.close()
            self.kill()
            raise
        finally:
            theirs.close()

    def _fork(
        self,
        train: Callable[..., Any],
        job: JobSpec,
        environment: KernelEnvironment,
        lines: GroupConnections,
    ) -> None:
        preload()  # else the probe, the agent and each launch after this one would do it: 2 s
        probe = probe_fork(device=job.plan.device_type == "cuda")
        if not probe.ok:
            raise ForkRefused(
                f'start="fork" would not work in this process: {probe.reason}',
                allowed='start="forkserver" (ranks of a clean process), or a kernel that has '
                "not computed yet",
                do="leave start out; what cannot be pickled is named then",
            )
        print(end="", flush=True)
        print(end="", file=sys.stderr, flush=True)  # either may be None
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # Python 3.12 on fork beside threads: probed above
            self.pid = os.fork()
        self._reaped = False
        if self.pid == 0:
            _child(train, job, environment, lines, self._lines)

    @property
    def descriptors(self) -> GroupDescriptors:
        """The supervisor's ends of the lines."""
        return self._lines.descriptors

    def close(self) -> None:
        """Close this process's copies of the lines, once the supervisor has its own."""
        self._lines.close()

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


def _child(
    train: Callable[..., Any],
    job: JobSpec,
    environment: KernelEnvironment,
    lines: GroupConnections,
    others: GroupConnections,
) -> None:
    code = 1
    try:
        from nbtoolkit.launcher.agent import call_launcher
        from nbtoolkit.worker.forking import die_with_parent
        from nbtoolkit.worker.main import RankJob, default_signals

        default_signals()
        die_with_parent(signal.SIGKILL)
        others.close()
        _forget_accelerators()
        message = (
            lines.agent.receive()
        )  # the supervisor's word; None when there will be no supervisor
        if isinstance(message, StartRanks):
            group = replace(lines.descriptors, agent=os.dup(lines.agent.fileno()))
            call_launcher(
                RankJob(spec=job, load=lambda: train, group=group), environment, message.port
            )
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
