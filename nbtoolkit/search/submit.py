"""Choose a search's folder, new or resumed, and submit the search to the fork server."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.config.schema import load_config
from nbtoolkit.environment.deadline import time_limit
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.environment.variables import kernel_environment
from nbtoolkit.errors import LaunchError, PlanError, ResumeError
from nbtoolkit.host import Host, detect_host
from nbtoolkit.launcher.forkserver_client import fork_server
from nbtoolkit.launcher.handle import StartedRun
from nbtoolkit.run.paths import read_record, runs_in
from nbtoolkit.run.payload import pack_content, pack_function
from nbtoolkit.run.resume import (
    ChosenRun,
    archive_attempt,
    changed_settings,
    find_named_run,
    fingerprint,
    lock_run,
    new_run,
    read_versions,
    refuse_old_run,
    roll_back,
    source_hash,
    write_header,
)
from nbtoolkit.search.algorithm import SearchRequest
from nbtoolkit.search.slots import Placement, Slots, make_slots

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.folds.folds import Folds
    from nbtoolkit.study.sweep_config import SweepConfig


# --- choose ---
# Which search a call is: a new one, or one to go on with. Who holds its lock owns the folder.


def choose_search(
    config: Config, identity: Mapping[str, Any], name: str, resume: str | os.PathLike[str]
) -> ChosenRun:
    """Find or make the folder of a search, and lock it.

    Args:
        config: the configuration all jobs start from.
        identity: of :func:`identity_of`.
        name: the end of a new folder's name.
        resume: see :func:`~nbtoolkit.search.submit.start_search`.

    Raises:
        ResumeError: the named search differs, or is owned.
        RunFolderError: the output folder cannot be written.
    """
    if resume == "auto":
        chosen = _to_go_on_with(Path(config.runtime.output_dir), identity)
    elif resume == "never":
        chosen = None
    else:
        chosen = _named(resume, config, identity)
    if chosen is not None:
        archive_attempt(chosen.paths)
        return chosen
    return new_run(config.runtime.output_dir, name)


def identity_of(
    train: Callable[..., Any], config: Config, kind: str, own: Mapping[str, Any], total: int | None
) -> dict[str, Any]:
    """What a search's folder remembers, to be found and checked by.

    Args:
        train: the training function.
        config: the configuration all jobs start from.
        kind: ``"sweep"`` or ``"cv"``.
        own: what else makes it another search when it differs.
        total: how much is asked for, over all sessions.
    """
    return {
        "kind": kind,
        "fingerprint": fingerprint({**config.to_dict(), kind: dict(own)}, train),
        "source": source_hash(train),
        "total": total,
    }


def _to_go_on_with(output_dir: Path, identity: Mapping[str, Any]) -> ChosenRun | None:
    for paths in runs_in(output_dir):
        about = read_versions(paths)
        fits = all(about.get(key) == identity[key] for key in ("kind", "fingerprint"))
        more = (identity["total"] or 0) > (about.get("total") or sys.maxsize)
        if fits and (more or not paths.completed()) and (lock := lock_run(paths)) is not None:
            return ChosenRun(paths, lock, about["attempt"] + 1)
    return None


def _named(run: str | os.PathLike[str], config: Config, identity: Mapping[str, Any]) -> ChosenRun:
    kind, output_dir = identity["kind"], Path(config.runtime.output_dir)
    paths = find_named_run(run, output_dir)
    about: dict[str, Any] = read_record(paths.versions) or {}
    if about.get("kind") != kind:
        raise ResumeError(
            f"{paths.folder} is no {kind}, but a {about.get('kind', 'run')}",
            allowed=f"the folder of a {kind}",
            do="look into the folders' versions.json for their kind",
        )
    refuse_old_run(paths)
    if about.get("source") != identity["source"]:
        raise ResumeError(
            f"the {kind} {paths.run_id} was made by another function: the source of "
            f"{about.get('function')} differs",
            allowed="the same training function",
            do="start a new one with resume='never'",
        )
    if changes := changed_settings(load_config(paths.config, env=None), config):
        raise ResumeError(
            f"the {kind} {paths.run_id} was made with another configuration: {changes}",
            allowed="other output, tracking, checkpoint and distributed settings",
            do="load its own config.yaml, or start a new one with resume='never'",
        )
    lock = lock_run(paths)
    if lock is None:
        raise ResumeError(
            f"the {kind} {paths.run_id} is going on",
            allowed="one supervisor at a time",
            do="attach to it with nb.attach(folder)",
        )
    return ChosenRun(paths, lock, int(about["attempt"]) + 1)


# --- start ---


_SCHEDULER = "nbtoolkit.search.scheduler:schedule_search"

# What torch imports when the first optimizer is made, 1 s: every trial would.
_LATE = ["torch._dynamo"]


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is to be searched, and how its jobs are run.

    Attributes:
        kind: ``"sweep"`` or ``"cv"``: of what kind its folder is.
        program: who decides, as ``"module:function"``; called as ``function(request, diary)`` in
            the scheduler's process.
        sweep_config: what is wished of a sweep; None: it is none.
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
            called once in the fork server.
    """

    kind: str
    program: str
    sweep_config: SweepConfig | None = None
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
        process: its scheduler.
        deadline: unix time at which it is to end; None: no limit.
    """

    run: ChosenRun
    process: StartedRun
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
    """Start the scheduler of a search.

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
        LaunchError: the fork server did not start.
    """
    from nbtoolkit.tracking.tracker import choose_tracking

    host, tracking = _not_a_rank(search), choose_tracking(config.to_dict()["tracking"])
    environment = kernel_environment()
    pad = fork_server(tracking=tracking.on)  # it starts while everything here is prepared
    pad.import_ahead(_LATE, environment.environ)
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
        request = SearchRequest(
            paths=run.paths,
            config=config,
            slots=slots,
            host=host,
            header=replace(header, search=search.kind),
            notes=(*limit.notes, *(("warning", note) for note in tracking.notes)),
            deadline=limit.deadline,
            imposed=limit.imposed,
            program=search.program,
            folds=search.folds,
            sweep_config=search.sweep_config,
        )
        try:
            pad.preload(["nbtoolkit.search.scheduler", *search.preload])
            with pack_function(train, environment) as payload, pack_content(request) as content:
                line = pad.run(_SCHEDULER, payload, content, run.lock, detached=detach)
        except LaunchError:
            roll_back(run)
            raise
        if detach:
            pad.let_outlive(run.paths)
    tracked = partial(pad.track, run.paths.folder) if tracking.on else None
    if tracked is not None:
        tracked()
    process = StartedRun(line=line, tracked=tracked, detached=detach)
    return Started(run, process, limit.deadline)


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


def _limited(config: Config, timeout: float | None) -> Config:
    """The configuration with the search's own time as its time budget."""
    return config if timeout is None else config.with_overrides({"runtime.time_budget": timeout})
