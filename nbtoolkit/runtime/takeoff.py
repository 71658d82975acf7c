"""From the kernel to an owner: pack function and surroundings, hand them to the launchpad."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import LaunchError
from nbtoolkit.runtime.choose import ChosenRun, discard
from nbtoolkit.runtime.forked import ForkedPilot
from nbtoolkit.runtime.launchpad import Launchpad, launchpad
from nbtoolkit.runtime.payload import pack_function
from nbtoolkit.runtime.surroundings import surroundings
from nbtoolkit.runtime.timing import time_limit
from nbtoolkit.runtime.wire import Line

if TYPE_CHECKING:
    from nbtoolkit.config import Config
    from nbtoolkit.runtime.hardware import Hardware
    from nbtoolkit.runtime.host import Host
    from nbtoolkit.runtime.plan import LaunchPlan


def take_off(
    train: Callable[..., Any],
    config: Config,
    plan: LaunchPlan,
    run: ChosenRun,
    header: dict[str, Any],
    host: Host,
    hardware: Hardware,
    *,
    detach: bool,
) -> tuple[Line, Callable[[], int] | None, ForkedPilot | None]:
    """Start the run's owner.

    Returns:
        The line to the owner; where the run is tracked, a call that has the tracking service look
        at it now; the pilot where this process forked it (to be reaped).

    Raises:
        CannotPickle: the function captured something that cannot travel.
        ForkRefused: ``start="fork"``, and this process is not fork-safe.
        LaunchError: the launchpad did not start.
    """
    from nbtoolkit.tracking import choose_tracking

    forked: ForkedPilot | None = None
    try:
        tracking = choose_tracking(config.to_dict()["tracking"])
        pad = launchpad(
            tracking=tracking.on
        )  # first: it imports torch while the function is packed
        limit = time_limit(config)
        content = {
            "folder": str(run.paths.folder),
            "config": config,
            "plan": plan,
            "host": host,
            "hardware": hardware,
            "header": header,
            "notes": [*limit.notes, *(("warning", note) for note in tracking.notes)],
            "around": surroundings(),
            "detach": detach,
            "deadline": limit.deadline,
            "params": {},
            "fold": None,
        }
        if plan.start == "fork":
            forked = ForkedPilot(train, plan, content)
            content["pilot_pid"] = forked.pid
        line = _send(pad, None if forked else train, content, run, forked.fds if forked else [])
        if detach:
            pad.let_outlive(run.paths)
        track = partial(pad.track, run.paths.folder) if tracking.on else None
        if track is not None:
            track()
    except BaseException as error:
        if forked is not None:
            forked.kill()
        if isinstance(
            error, LaunchError
        ):  # it did not start; an interrupt may have come when it had
            discard(run)
        raise
    finally:
        if forked is not None:
            forked.close()
    return line, track, forked


def _send(
    pad: Launchpad,
    train: Callable[..., Any] | None,
    content: dict[str, Any],
    run: ChosenRun,
    fds: list[int],
) -> Line:
    payload = pack_function(train, content)
    try:
        mine, theirs = Line.pair()
        try:
            pad.run([payload, theirs.fileno(), run.lock.fileno(), *fds])
        except BaseException:
            mine.close()  # else a traceback that the notebook keeps would keep the owner waiting
            raise
        finally:
            theirs.close()
    finally:
        os.close(payload)
    return mine
