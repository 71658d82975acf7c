"""Call accelerate's notebook_launcher for one group of ranks.

``notebook_launcher`` blocks, patches ``os.environ`` and wants the main thread: so it gets a process
to itself, which also keeps what it leaves behind (signal handlers, variables, temporary folders)
away from everybody else.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import tempfile
import traceback
from functools import partial
from typing import TYPE_CHECKING

from nbtoolkit.environment.variables import KernelEnvironment, enter
from nbtoolkit.run import messages
from nbtoolkit.run.request import GroupSpec
from nbtoolkit.run.transport import Connection
from nbtoolkit.worker.main import RankJob, run_rank, write_output_to

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"
# How often elastic looks at the ranks; its own 0.1 s would be most of a warm launch.
POLL_SECONDS = 0.01


def run_agent(message: messages.ForkAgent) -> None:
    """The main function of an agent's process."""
    from nbtoolkit.run.payload import PackedFunction, load_function, unpack

    given = message.descriptors
    packed, spec = unpack(given.payload, PackedFunction), unpack(given.spec, GroupSpec)
    load = partial(load_function, given.payload, packed)
    call_launcher(
        RankJob(spec=spec, load=load, group=given.group), packed.environment, message.port
    )


def call_launcher(job: RankJob, environment: KernelEnvironment, port: int) -> None:
    """Start the ranks, wait for them, tell the supervisor how they ended: an agent process's life.

    Args:
        job: what the ranks get.
        environment: the kernel's.
        port: where the ranks are to meet.
    """
    os.setpgid(0, 0)  # where the kernel forked it; from the fork server it leads a group already
    line = Connection(socket.socket(fileno=job.group.agent))
    paths = job.spec.paths
    write_output_to(paths.agent_log)  # what goes wrong from here on is found there
    enter(environment, job.spec.plan, paths.folder)
    # elastic leaves its log folder in the temporary folder: give it one that the supervisor removes
    paths.elastic.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(paths.elastic)
    line.send(launch_ranks(job, port))


def launch_ranks(job: RankJob, port: int) -> messages.AgentResult:
    """Call notebook_launcher; returns the message for the supervisor: how the ranks ended."""
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
    except Exception as error:  # whatever kept the ranks from starting is the supervisor's to judge
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        busy = "EADDRINUSE" in text or getattr(error, "errno", None) == errno.EADDRINUSE
        return messages.RanksNotStarted(error=text, busy=busy)
    del store
    return messages.RanksExited(codes={})


def plain_record(record: logging.LogRecord) -> bool:
    """Leave the traceback out of a line that tells of a rank's end.

    To format one, torch imports torch._dynamo: 6 s of CPU with torch 2.15 before elastic goes on.
    """
    record.exc_info = None
    return True


def _loopback_store(port: int) -> TCPStore:
    """The ranks' store, which elastic finds by its port instead of making one on all interfaces."""
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
