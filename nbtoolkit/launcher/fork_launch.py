"""Launch with ``start="fork"``: fork the agent from this process, if a probe finds that safe."""

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
    """A child of this process that starts the ranks when the supervisor says so.

    Raises:
        ForkRefused: the probe found that a forked child of this process could not work.
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
        preload()  # else the probe, the agent and each later launch would import for 2 s
        probe = probe_fork(device=job.plan.device_type == "cuda")
        if not probe.ok:
            raise ForkRefused(
                f'start="fork" would not work in this process: {probe.reason}',
                allowed='start="forkserver" (forks from a clean process), or a kernel that has '
                "not computed yet",
                do="leave start out; an error names what cannot be pickled",
            )
        print(end="", flush=True)
        print(end="", file=sys.stderr, flush=True)  # either may be None
        with warnings.catch_warnings():
            # Python 3.12 warns about a fork in a process with threads; the probe has checked that.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        self._reaped = False
        if self.pid == 0:
            _child(train, job, environment, lines, self._lines)

    @property
    def descriptors(self) -> GroupDescriptors:
        """The supervisor's ends of the connections."""
        return self._lines.descriptors

    def close(self) -> None:
        """Close this process's copies of the connections, once the supervisor has its own."""
        self._lines.close()

    def kill(self) -> None:
        """Kill and reap the agent and its ranks; further calls have no effect."""
        if self._reaped:
            return
        for kill in (os.killpg, os.kill):  # it may not lead its group yet
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self._reaped = True


def _child(
    train: Callable[..., Any],
    job: JobSpec,
    environment: KernelEnvironment,
    lines: GroupConnections,
    supervisor_lines: GroupConnections,
) -> None:
    """Run the agent in the forked child, and exit.

    Args:
        train: the training function.
        job: the run.
        environment: the kernel's environment.
        lines: the child's ends of the connections.
        supervisor_lines: the other ends, to be closed here.
    """
    code = 1
    try:
        from nbtoolkit.launcher.agent import call_launcher
        from nbtoolkit.worker.forking import die_with_parent
        from nbtoolkit.worker.main import RankJob, default_signals

        default_signals()
        die_with_parent(signal.SIGKILL)
        supervisor_lines.close()
        _reset_accelerate()
        message = lines.agent.receive()  # None if no supervisor was started
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


def _reset_accelerate() -> None:
    """Reset accelerate: notebook_launcher refuses to start if the kernel made an Accelerator."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
