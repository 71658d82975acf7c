"""A pilot: one group of ranks; its main thread calls accelerate's notebook_launcher.

``notebook_launcher`` blocks, patches ``os.environ`` and wants the main thread: so it gets a process
to itself, which also keeps what it leaves behind (signal handlers, variables, temporary folders)
away from everybody else.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.runtime.paths import RunPaths
from nbtoolkit.runtime.plan import LaunchPlan
from nbtoolkit.runtime.signals import ignore_warnings
from nbtoolkit.runtime.surroundings import enter
from nbtoolkit.runtime.wire import Line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"
# How often elastic looks at the ranks; its own 0.1 s would be most of a warm launch.
POLL_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank of a group gets from its pilot."""

    content: dict[str, Any]
    plan: LaunchPlan
    paths: RunPaths
    payload_fd: int
    rank_fds: list[int]
    """Every rank's line, then every rank's quiet line."""
    function: Callable[..., Any] | None = None
    """The training function, where ranks are forked from the kernel; else it is in the payload."""


def fly(
    payload_fds: list[int],
    message: dict[str, Any],
    sock: socket.socket,
    rank_fds: list[int],
    function: Callable[..., Any] | None = None,
) -> None:
    """Start the ranks, wait for them, tell the owner how they ended: a pilot process's life.

    Args:
        payload_fds: the packed function with what belongs to it, and what is this run's own, where
            many runs share a function.
        message: plan and port.
        sock: the pilot's end of the line to the owner.
        rank_fds: the ranks' ends of theirs.
        function: where it need not be unpacked.
    """
    from nbtoolkit.runtime.payload import unpack_all

    os.setpgid(0, 0)  # where the kernel forked it; from the launchpad it leads a group already
    line = Line(sock)
    content = unpack_all(payload_fds)
    plan = LaunchPlan.from_dict(message["plan"])
    paths = RunPaths(Path(content["folder"]))
    write_output_to(paths.pilot_log())  # what goes wrong from here on is found there
    enter(content["around"], plan, paths.folder)
    job = Job(
        content=content,
        plan=plan,
        paths=paths,
        payload_fd=payload_fds[0],
        rank_fds=rank_fds,
        function=function,
    )
    # elastic leaves its log folder in the temporary folder: give it one that the owner removes
    paths.elastic.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(paths.elastic)
    line.send(launch_ranks(job, message["port"]))


def launch_ranks(job: Job, port: int) -> dict[str, Any]:
    """Call notebook_launcher; returns the message for the owner: how the ranks ended."""
    from accelerate import notebook_launcher
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from nbtoolkit.runtime.worker import run_rank

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(plain_record)
    try:
        store = _loopback_store(port) if job.plan.processes > 1 else None  # until the ranks end
        notebook_launcher(
            run_rank,
            args=(job,),
            num_processes=job.plan.processes,
            mixed_precision="no" if job.plan.precision == "fp32" else job.plan.precision,
            use_port=str(port),
            monitor_interval=POLL_SECONDS,
        )
    except ChildFailedError as error:
        codes = {str(rank): failure.exitcode for rank, failure in error.failures.items()}
        return {"type": "failures", "codes": codes}
    except Exception as error:  # whatever kept the ranks from starting is the owner's to judge
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        busy = "EADDRINUSE" in text or getattr(error, "errno", None) == errno.EADDRINUSE
        return {"type": "not_started", "error": text, "busy": busy}
    del store
    return {"type": "landed"}


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


def write_output_to(path: Path) -> None:
    """Append this process's stdout and stderr, C libraries included, to a file; whole lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(
            number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def default_signals() -> None:
    """Default signal handling, whatever was installed in the process this one was forked from.

    But a scheduler's warning, which may reach every process of a job, is for the owner to heed.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGHUP", "SIGQUIT", "SIGCHLD"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    ignore_warnings()
