"""Call accelerate's notebook_launcher for one group of ranks, in a process of its own.

``notebook_launcher`` blocks, changes ``os.environ`` and needs the main thread. Its own process also
contains what it leaves behind: signal handlers, variables, temporary folders. The fork server forks
the process; with ``start="fork"`` the kernel does, if a probe finds that safe.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nbtoolkit.environment.fork_diagnosis import probe_fork
from nbtoolkit.environment.variables import KernelEnvironment, apply_environment
from nbtoolkit.errors import ForkRefused
from nbtoolkit.run import messages
from nbtoolkit.run.payload import JobSpec, PackedFunction, load_function, unpack
from nbtoolkit.run.signals import without_interrupts
from nbtoolkit.run.transport import Connection, GroupConnections
from nbtoolkit.worker.forking import die_with_parent, run_and_exit
from nbtoolkit.worker.main import RankJob, default_signals, run_rank, write_output_to

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"
# Seconds between two checks of the ranks by elastic. Its default, 0.1 s, would be most of a warm
# launch.
POLL_SECONDS = 0.01


def run_agent(message: messages.ForkAgent) -> None:
    """Run an agent; the main function of its process."""
    given = message.descriptors
    packed, spec = unpack(given.payload, PackedFunction), unpack(given.spec, JobSpec)
    load = partial(load_function, given.payload, packed)
    call_launcher(
        RankJob(spec=spec, load=load, group=given.group), packed.environment, message.port
    )


def call_launcher(job: RankJob, environment: KernelEnvironment, port: int) -> None:
    """Start the ranks, wait for their end, and report it to the supervisor.

    Args:
        job: what the ranks receive.
        environment: the kernel's environment.
        port: port of the rendezvous.
    """
    # An agent that the kernel forked does not lead a process group yet.
    os.setpgid(0, 0)
    line = Connection(socket.socket(fileno=job.group.agent))
    paths = job.spec.paths
    write_output_to(paths.agent_log)
    apply_environment(environment, job.spec.plan, paths.folder)
    # elastic leaves a log folder in the temporary folder; the supervisor removes this one.
    paths.elastic.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(paths.elastic)
    line.send(launch_ranks(job, port))


def launch_ranks(job: RankJob, port: int) -> messages.AgentResult:
    """Call notebook_launcher; return the message that tells the supervisor how the ranks ended."""
    from accelerate import notebook_launcher
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(plain_record)
    plan = job.spec.plan
    try:
        store = _loopback_store(port) if plan.processes > 1 else None  # until the ranks end
        notebook_launcher(
            run_rank,
            args=(job,),
            num_processes=plan.processes,
            mixed_precision="no" if plan.precision == "fp32" else plan.precision,
            use_port=str(port),
            monitor_interval=POLL_SECONDS,
        )
    except ChildFailedError as error:
        codes = {str(rank): failure.exitcode for rank, failure in error.failures.items()}
        return messages.RanksExited(codes=codes)
    except Exception as error:  # the supervisor classifies it
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        busy = "EADDRINUSE" in text or getattr(error, "errno", None) == errno.EADDRINUSE
        return messages.RanksNotStarted(error=text, busy=busy)
    del store
    return messages.RanksExited(codes={})


def plain_record(record: logging.LogRecord) -> bool:
    """Remove the traceback from elastic's log line about the end of a rank.

    To format a traceback, torch 2.15 imports torch._dynamo, which takes 6 s of CPU.
    """
    record.exc_info = None
    return True


def _loopback_store(port: int) -> TCPStore:
    """Make the ranks' store on loopback; elastic finds it by its port and makes none of its own.

    Its own would listen on all interfaces.
    """
    from torch._C._distributed_c10d import TCPStore

    listener = socket.create_server((LOOPBACK, port), backlog=128)
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
        use_libuv=False,  # torch 2.6's other back end takes no listener
    )


# --- start="fork": an agent that the kernel forks ---


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
            run_and_exit(lambda: self._run(train, job, environment, lines))

    def _run(
        self,
        train: Callable[..., Any],
        job: JobSpec,
        environment: KernelEnvironment,
        lines: GroupConnections,
    ) -> None:
        """Be the agent, in the forked child."""
        default_signals()
        die_with_parent(signal.SIGKILL)
        self._lines.close()  # the supervisor's ends
        for state in accelerate_states():
            state.clear()  # notebook_launcher refuses to start after an Accelerator of the kernel
        message = lines.agent.receive()  # None if no supervisor was started
        if isinstance(message, messages.StartRanks):
            group = replace(lines.descriptors, agent=os.dup(lines.agent.fileno()))
            rank_job = RankJob(spec=job, load=lambda: train, group=group)
            call_launcher(rank_job, environment, message.port)

    @property
    def descriptors(self) -> messages.GroupDescriptors:
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


def accelerate_states() -> list[dict[str, Any]]:
    """Return what accelerate keeps for this process; empty if it is not imported."""
    module = sys.modules.get("accelerate.state")
    names = ("PartialState", "AcceleratorState", "GradientState")
    return [getattr(module, name)._shared_state for name in names] if module is not None else []
