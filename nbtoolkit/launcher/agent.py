"""Call accelerate's notebook_launcher for one group of ranks, in a process of its own.

``notebook_launcher`` blocks, changes ``os.environ`` and needs the main thread. Its own process also
contains what it leaves behind: signal handlers, variables, temporary folders.
"""

from __future__ import annotations

import errno
import logging
import socket
import tempfile
import traceback
from functools import partial
from typing import TYPE_CHECKING

from nbtoolkit.environment.variables import apply_environment
from nbtoolkit.wire import messages
from nbtoolkit.wire.payload import JobSpec, PackedFunction, load_function, unpack
from nbtoolkit.wire.transport import Connection, GroupDescriptors
from nbtoolkit.worker.main import RankJob, run_rank, write_output_to

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"
# Seconds between two checks of the ranks by elastic. Its default, 0.1 s, would be most of a warm
# launch.
POLL_SECONDS = 0.01


def run_agent(descriptors: list[int]) -> None:
    """Start the ranks, wait for their end, and report it; the main function of an agent.

    Args:
        descriptors: the packed function, the packed JobSpec, and the ends of the connections.
    """
    payload, packed_spec, *ends = descriptors
    packed = unpack(payload, PackedFunction)
    spec = unpack(packed_spec, JobSpec)
    group = GroupDescriptors.of(ends)
    connection = Connection.inherited(group.agent)
    write_output_to(spec.paths.agent_log)
    apply_environment(packed.environment, spec.plan, spec.paths.folder)
    # elastic leaves a log folder in the temporary folder; the supervisor removes this one.
    spec.paths.elastic.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(spec.paths.elastic)
    load = partial(load_function, payload, packed)
    job = RankJob(spec=spec, load=load, group=group)
    connection.send(launch_ranks(job))


def launch_ranks(job: RankJob) -> messages.AgentResult:
    """Call notebook_launcher; return the message that tells the supervisor how the ranks ended."""
    from accelerate import notebook_launcher
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(plain_record)
    plan = job.spec.plan
    port = job.spec.port
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
