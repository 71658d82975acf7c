"""The owner of one run: a process of its own, which carries the run to its end."""

from __future__ import annotations

import errno
import os
import socket
import time
import traceback
from pathlib import Path
from typing import Any

from nbtoolkit.errors import LaunchError
from nbtoolkit.runtime.carrier import TICK, Carrier
from nbtoolkit.runtime.desk import Desk, KernelGone, LaunchpadGone
from nbtoolkit.runtime.paths import RunPaths, boot_id, folder_error, write_json
from nbtoolkit.runtime.payload import unpack
from nbtoolkit.runtime.wire import Line, Message

# What no folder causes: processes, sockets, memory, too many open files.
_OF_THE_MACHINE = (
    *(errno.ESRCH, errno.ECHILD, errno.EPIPE, errno.ECONNRESET),
    *(errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
)


def own(
    payload_fd: int,
    kernel: socket.socket,
    launchpad: socket.socket,
    lock_fd: int,
    forked: list[int],
) -> None:
    """Carry one run from its plan to its last event; the main function of an owner process.

    Args:
        payload_fd: the packed function and what belongs to it.
        kernel: the line to whoever launched.
        launchpad: packets to the launchpad: asks for pilots, hears of their end.
        lock_fd: holds the run's lock; let go before the line, so that who hears of the run's end
            can go on with it at once.
        forked: the lines of a pilot and ranks that the kernel forks itself; empty otherwise.
    """
    content = unpack(payload_fd)
    line = Line(kernel)
    try:
        sign(RunPaths(Path(content["folder"])), detached=content["detach"])
        desk = Desk(line, launchpad, detached=content["detach"])
        _carry(Carrier(content, [payload_fd], desk.tower, forked=forked), desk)
    except LaunchpadGone:
        tell_lost(line, launchpad_lost())
    except OSError as error:
        tell_lost(line, lost_to(error, Path(content["folder"])))
    finally:
        os.close(lock_fd)
        line.close()


def _carry(carrier: Carrier, desk: Desk) -> None:
    """Run, and write how it ended when it could not go on to its end."""
    try:
        carrier.begin()
        while not carrier.turn():
            for request in _heard(carrier, desk):
                _obey(carrier, request)
    except KernelGone:
        carrier.abandon()
        carrier.record.note("the kernel is gone: the run was ended, unfinished", level="warning")
    except LaunchpadGone:
        carrier.abandon()
        carrier.record.note("the launchpad is gone: the run was ended, unfinished", level="warning")
        raise
    finally:
        carrier.abandon()


def _heard(carrier: Carrier, desk: Desk) -> list[Message]:
    try:
        return desk.wait(carrier.lines(), TICK)
    except LaunchpadGone:
        if not carrier.landing:  # else the ranks are gone, and how they ended is known
            raise
        return []


def _obey(carrier: Carrier, request: Message) -> None:
    if request["type"] == "stop":
        status = request.get("status", "stopped")
        carrier.stop(request["reason"], request.get("grace"), status)
    elif request["type"] == "kill":
        carrier.stop("killed on request", 0.0)


def sign(paths: RunPaths, *, detached: bool) -> None:
    """Write down which process owns a run, and whether it outlives the one that launched."""
    about = {"pid": os.getpid(), "boot_id": boot_id(), "since": time.time(), "detached": detached}
    write_json(paths.owner, about, durable=False)


def launchpad_lost() -> LaunchError:
    """The error of a run whose launchpad died."""
    return LaunchError(
        "the launchpad process died, and the ranks with it (its usual end: out of memory)",
        do="launch again: a new launchpad is started, a run with a checkpoint goes on",
    )


def lost_to(error: OSError, folder: Path) -> LaunchError:
    """The error of a run whose owner met an OSError: its folder cannot be written, or another."""
    if error.errno not in _OF_THE_MACHINE:
        return folder_error(folder, error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return LaunchError(
        f"the process that owned the run {folder} failed in {place.name}(): {error}",
        do="launch again: a run with a checkpoint goes on; report it if it comes back",
    )


def tell_lost(line: Line, error: LaunchError) -> None:
    """The run cannot go on, nor its folder say so: tell whoever still listens."""
    about: dict[str, Any] = {"what": error.what, "allowed": error.allowed, "do": error.do}
    line.send({"type": "lost", "error": type(error).__name__, **about})
