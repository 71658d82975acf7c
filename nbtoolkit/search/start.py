"""From the kernel to a conductor: choose the search's folder, pack everything, hand it over."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import LaunchError, PlanError
from nbtoolkit.runtime.choose import ChosenRun, discard, write_header
from nbtoolkit.runtime.hardware import detect_hardware
from nbtoolkit.runtime.host import Host, detect_host
from nbtoolkit.runtime.launchpad import Launchpad, launchpad
from nbtoolkit.runtime.payload import pack_content, pack_function
from nbtoolkit.runtime.plan import make_plan
from nbtoolkit.runtime.surroundings import surroundings
from nbtoolkit.runtime.timing import time_limit
from nbtoolkit.runtime.wire import Line
from nbtoolkit.search.choose import choose_search, identity_of
from nbtoolkit.search.slots import Placement, Slots, make_slots

if TYPE_CHECKING:
    from nbtoolkit.config import Config
    from nbtoolkit.search.folds import Folds


# What torch imports when the first optimizer is made, 1 s: every trial would.
_LATE = ["torch._dynamo"]


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is to be searched, and how its jobs are run.

    Attributes:
        kind: ``"sweep"`` or ``"cv"``: of what kind its folder is.
        program: who decides, as ``"module:function"``; called as ``function(about, diary,
            folder)`` in the conductor's process.
        about: plain data for it.
        identity: what makes it another search when it differs: with configuration and function
            it decides which unfinished one ``resume="auto"`` goes on with.
        placement: see :func:`~nbtoolkit.search.slots.make_slots`.
        per_device: jobs that share a device.
        jobs: how many jobs there will be; None: many, or not known.
        total: how much is asked for in all, over all sessions: a completed search that was asked
            for less is gone on with, too; None: no number, or never.
        slots: where they run; None: as placement and hardware say.
        folds: whose ``[job.fold]`` is ``ctx.fold`` in a job; None: none.
        timeout: seconds; None: no limit but the host's.
        preload: modules the program imports, or functions (``"module:function"``) that prepare it,
            called once in the launchpad.
    """

    kind: str
    program: str
    about: Mapping[str, Any]
    identity: Mapping[str, Any] = field(default_factory=dict)
    placement: Placement = "auto"
    per_device: int = 1
    jobs: int | None = None
    total: int | None = None
    slots: Slots | None = None
    folds: Folds | None = None
    timeout: float | None = None
    preload: tuple[str, ...] = ()


@dataclass(frozen=True)
class Started:
    """A search that has started.

    Attributes:
        run: its folder, and whether it was gone on with.
        line: to its conductor.
        tracked: has the tracking service look at it now; None: it is not tracked.
        deadline: unix time at which it is to end; None: no limit.
    """

    run: ChosenRun
    line: Line
    tracked: Callable[[], int] | None
    deadline: float | None


def start_search(
    train: Callable[..., Any],
    config: Config,
    search: Search,
    *,
    name: str,
    resume: str | os.PathLike[str] = "auto",
    detach: bool = False,
) -> Started:
    """Start the conductor of a search.

    Args:
        train: the training function.
        config: what every job's settings are laid over.
        search: what is searched.
        name: the end of a new folder's name.
        resume: ``"auto"`` goes on with the newest search of equal configuration, function and
            identity that nobody owns, and that is unfinished or was asked for less; ``"never"``; or
            a search's id or folder.
        detach: it outlives this process.

    Raises:
        ResumeError: the named search differs, or is owned.
        CannotPickle: the function captured something that cannot travel.
        LaunchError: the launchpad did not start.
    """
    from nbtoolkit.tracking import choose_tracking

    host, tracking = _not_a_rank(search), choose_tracking(config.to_dict()["tracking"])
    around = surroundings()
    pad = launchpad(tracking=tracking.on)  # it starts while everything here is prepared
    pad.import_ahead(_LATE, around["environ"])
    hardware = detect_hardware()
    slots = search.slots or make_slots(
        config, hardware, search.placement, per_device=search.per_device, jobs=search.jobs
    )
    first = slots.slots[0]
    plan = make_plan(config.with_overrides(dict(first.overrides)), host, first.hardware)
    identity = identity_of(train, config, search.kind, search.identity, search.total)
    with choose_search(config, identity, name, resume) as run:
        header = write_header(run, config, plan, host, train, **identity)
        limit = time_limit(_limited(config, search.timeout))
        notes = [*limit.notes, *(("warning", note) for note in tracking.notes)]
        shared = {
            "around": around,
            "detach": detach,
            "deadline": limit.deadline,
            "config": config,
            "host": host,
        }
        own = {"plan": plan, "slots": slots, "notes": notes, **_of_conductor(run, header, search)}
        own["about"]["imposed"] = limit.imposed
        try:
            pad.preload(["nbtoolkit.search.conductor", *search.preload])
            line = _send(pad, train, shared, own, run)
        except LaunchError:
            discard(run)
            raise
        if detach:
            pad.let_outlive(run.paths)
    tracked = partial(pad.track, run.paths.folder) if tracking.on else None
    if tracked is not None:
        tracked()
    return Started(run, line, tracked, limit.deadline)


def _not_a_rank(search: Search) -> Host:
    """Where this is, unless it is one process of several."""
    host = detect_host()
    if host.is_rank:
        raise PlanError(
            f"a {search.kind} was started in one rank of several ({host.rank_reason})",
            allowed="a notebook, a script or the command line, once",
            do="start it without torchrun: it starts the ranks of its trials itself",
        )
    return host


def _of_conductor(run: ChosenRun, header: dict[str, Any], search: Search) -> dict[str, Any]:
    """What the conductor needs besides what its jobs get, too."""
    kept = ("function", "host", "versions")
    return {
        "folder": str(run.paths.folder),
        "header": {**header, "search": search.kind},
        "job_header": {key: header[key] for key in kept},
        "program": search.program,
        "about": dict(search.about),
        "folds": search.folds,
    }


def _send(
    pad: Launchpad,
    train: Callable[..., Any],
    shared: dict[str, Any],
    own: dict[str, Any],
    run: ChosenRun,
) -> Line:
    payload = pack_function(train, shared)
    try:
        apart = pack_content(own)
        mine, theirs = Line.pair()
        try:
            pad.run([payload, theirs.fileno(), run.lock.fileno(), apart], search=True)
        except BaseException:
            mine.close()
            raise
        finally:
            theirs.close()
            os.close(apart)
    finally:
        os.close(payload)
    return mine


def _limited(config: Config, timeout: float | None) -> Config:
    """The configuration with the search's own time as its time budget."""
    return config if timeout is None else config.with_overrides({"runtime.time_budget": timeout})
