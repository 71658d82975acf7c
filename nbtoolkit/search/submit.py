"""Choose a search's folder, new or resumed, and submit the search to the fork server."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from nbtoolkit.environment.deadline import check_deadline, time_limit
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.plan import Evidence, make_plan
from nbtoolkit.environment.variables import kernel_environment
from nbtoolkit.errors import LaunchError, PlanError, ResumeError
from nbtoolkit.host import Host, detect_host
from nbtoolkit.launcher.fork_servers import fork_server, let_outlive, start_supervisor, track
from nbtoolkit.launcher.options import LaunchOptions
from nbtoolkit.launcher.remote import submit_to_cluster
from nbtoolkit.launcher.run_handle import StartedRun
from nbtoolkit.run.attempts import (
    completed,
    kind_of,
    opening_event,
    readable_first_event,
    run_config,
)
from nbtoolkit.run.events import RECORD
from nbtoolkit.run.identity import Identity
from nbtoolkit.run.kept_answers import measured_speed
from nbtoolkit.run.paths import KIND_NAMES, RunPaths, runs_in
from nbtoolkit.run.resume import (
    ChosenRun,
    begin_attempt,
    changed_settings,
    find_named_run,
    lock_run,
    new_run,
    refuse_other_function,
    resumable_first_event,
    roll_back,
    why_not_resumed,
    write_header,
)
from nbtoolkit.search.pool import Search, SearchRequest
from nbtoolkit.search.slots import make_slots
from nbtoolkit.wire.payload import pack_content, pack_function

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.run.paths import Kind


def choose_search(
    train: Callable[..., Any],
    config: Config,
    wanted: WantedSearch,
    name: str,
    resume: str | os.PathLike[str],
) -> ChosenRun:
    """Find or make the folder of a search, and lock it.

    Args:
        train: the training function.
        config: the base configuration.
        wanted: what the search is, and how much it is to do.
        name: suffix of a new folder's name.
        resume: see :func:`start_search`.

    Raises:
        ResumeError: the named search differs, or is running.
        RunFolderError: the output folder cannot be written.
    """
    named = None if resume in ("auto", "never") else _named(resume, train, config, wanted.kind)
    resumable: Iterable[RunPaths] = () if named is None else (named,)
    if resume == "auto":
        resumable = unfinished(config.runtime.output_dir, wanted)
    for paths in resumable:
        if (lock := lock_run(paths)) is not None:
            return begin_attempt(paths, lock, wanted.identity)
    if named is not None:
        raise ResumeError(
            f"the {wanted.kind} {named.run_id} is running",
            allowed="one supervisor at a time",
            do="attach to it with nb.attach(folder)",
        )
    output_dir = config.runtime.output_dir
    if resume == "never":
        return new_run(output_dir, name)
    return new_run(output_dir, name, why_not_resumed(output_dir, wanted.kind, wanted.identity))


@dataclass(frozen=True)
class WantedSearch:
    """What identifies a search when it is resumed, and how much it is to do.

    Attributes:
        kind: a sweep or a cross-validation.
        identity: what decides its result.
        total: the number of jobs; None: no limit.
        timeout: its seconds; None: no limit.
    """

    kind: Kind
    identity: Identity
    total: int | None
    timeout: float | None

    @classmethod
    def of(cls, train: Callable[..., Any], config: Config, search: Search) -> WantedSearch:
        """Return that of a search of ``train`` with a base configuration."""
        settings = {**config.to_dict(), search.kind: dict(search.identity)}
        return cls(search.kind, Identity.of(settings, train), search.total, search.timeout)

    def fields(self) -> dict[str, Any]:
        """Return the fields of the first event that are a search's own."""
        return {
            "search": self.kind,
            "identity": self.identity.hash,
            "total": self.total,
            "timeout": self.timeout,
        }


def unfinished(output_dir: str | Path, wanted: WantedSearch) -> Iterator[RunPaths]:
    """Yield the searches that ``resume="auto"`` can resume, newest first; one of them may run.

    Args:
        output_dir: the folder of the runs.
        wanted: the search.
    """
    return (paths for paths in _same(output_dir, wanted) if not _complete(paths, wanted))


def complete(output_dir: str | Path, wanted: WantedSearch) -> RunPaths | None:
    """Return the newest of the same searches if it has done all that is asked for; else None.

    Args:
        output_dir: the folder of the runs.
        wanted: the search.
    """
    newest = next(_same(output_dir, wanted), None)
    return newest if newest is not None and _complete(newest, wanted) else None


def _same(output_dir: str | Path, wanted: WantedSearch) -> Iterator[RunPaths]:
    """Yield the searches of the same kind, configuration and function, newest first."""
    for paths in runs_in(output_dir):
        if kind_of(opening_event(paths)) != wanted.kind:
            continue
        first = readable_first_event(paths)
        if first is None or first.record != RECORD:
            continue
        if first.identity == wanted.identity.hash:
            yield paths


def _complete(paths: RunPaths, wanted: WantedSearch) -> bool:
    """Whether a search has ended, and a session of ``wanted`` would add nothing to it."""
    first = readable_first_event(paths)
    if first is None or (first.total is None) != (wanted.total is None):
        return False
    # Without a number of trials, the time limit decides when a search is complete.
    asked = wanted.timeout
    before = first.timeout
    if wanted.total is not None:
        asked = wanted.total
        before = first.total
    return completed(paths) and (asked or math.inf) <= (before or math.inf)


def _named(
    run: str | os.PathLike[str],
    train: Callable[..., Any],
    config: Config,
    kind: Kind,
) -> RunPaths:
    """Return the named search, if it is of this kind, function and configuration."""
    paths = find_named_run(run, Path(config.runtime.output_dir))
    first = resumable_first_event(paths)
    if kind_of(first) != kind:
        raise ResumeError(
            f"{paths.folder} is no {KIND_NAMES[kind]}, but a {KIND_NAMES[kind_of(first)]}",
            allowed=f"the folder of a {KIND_NAMES[kind]}",
            do="choose another folder; the name of a run tells what was launched",
        )
    refuse_other_function(paths, first, train)
    if changes := changed_settings(run_config(paths), config):
        raise ResumeError(
            f"the {kind} {paths.run_id} was made with another configuration: {changes}",
            allowed="other output, tracking, checkpoint and distributed settings",
            do="load its own config.yaml, or start a new one with resume='never'",
        )
    return paths


_SCHEDULER = "nbtoolkit.search.scheduler:schedule_search"

schedule_here: ContextVar[Callable[[Callable[..., Any], SearchRequest, ChosenRun], None] | None] = (
    ContextVar("schedule_here", default=None)
)
"""Runs a search to its end in this process, in place of a scheduler below the fork server.

It gets the training function, the search and its locked folder: the job of a cluster sets it.
"""


@dataclass(frozen=True)
class Started:
    """A started search.

    Attributes:
        run: its folder, new or resumed.
        process: its scheduler; None: it runs in a job of a cluster.
        deadline: unix time at which it ends; None for no limit.
    """

    run: ChosenRun
    process: StartedRun | None
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
        config: the base configuration.
        search: the search.
        name: suffix of a new folder's name.
        resume: ``"auto"`` resumes the newest search of equal configuration, function and identity
            that is not running, and is unfinished or had a smaller budget; ``"never"`` starts a new
            one; a search's id or folder resumes that one.
        detach: the search outlives this process.

    Raises:
        ResumeError: the named search differs, or is running.
        DeadlinePassed: the notebook's deadline leaves no time.
        TuningError: ``distributed.strategy`` is ``measured``, and no calibration is kept.
        CannotPickle: the function captured something that cannot be pickled.
        LaunchError: the fork server did not start.
    """
    from nbtoolkit.tracking.tracker import choose_tracking

    check_deadline(config)
    host = _not_a_rank(search)
    tracking = choose_tracking(config.to_dict()["tracking"])
    speed = measured_speed(train, config)
    evidence: tuple[Evidence, ...] = () if speed is None else (speed,)
    environment = kernel_environment()
    schedule = schedule_here.get()
    if schedule is None:
        # It starts while everything here is prepared.
        fork_server(tracking=tracking.on, search=True)
    hardware = detect_hardware()
    slots = make_slots(
        config, hardware, search.placement, per_device=search.per_device, jobs=search.jobs
    )
    first = slots.slots[0]
    plan = make_plan(config.with_overrides(dict(first.overrides)), host, first.hardware, evidence)
    wanted = WantedSearch.of(train, config, search)
    with choose_search(train, config, wanted, name, resume) as run:
        header = write_header(run, config, plan, host, train, detached=detach, **wanted.fields())
        budget = {} if search.timeout is None else {"runtime.time_budget": search.timeout}
        limit = time_limit(config.with_overrides(budget))
        request = SearchRequest(
            paths=run.paths,
            config=config,
            slots=slots,
            host=host,
            header=header,
            notes=(
                *run.notes,
                *limit.notes,
                *(("warning", note) for note in tracking.notes),
            ),
            deadline=limit.deadline,
            imposed=limit.imposed,
            search=search,
            grace=limit.grace,
            speed=speed,
        )
        if schedule is not None:
            schedule(train, request, run)
            return Started(run, None, limit.deadline)
        try:
            packed = cloudpickle.dumps(request)
            with pack_function(train, environment) as payload, pack_content(packed) as content:
                connection = start_supervisor(_SCHEDULER, payload, content, run.lock)
        except LaunchError:
            roll_back(run)
            raise
        if detach:
            let_outlive(run.paths)
    tracked = partial(track, run.paths.folder) if tracking.on else None
    if tracked is not None:
        tracked()
    process = StartedRun(line=connection, tracked=tracked, detached=detach)
    return Started(run, process, limit.deadline)


def start_or_submit(
    train: Callable[..., Any],
    config: Config,
    search: Search,
    options: LaunchOptions,
    *,
    name: str,
    again: Callable[..., object],
) -> Started:
    """Start a search on this machine, or submit it to the cluster that the options name.

    Args:
        train: the training function.
        config: the base configuration.
        search: the search.
        options: of the call.
        name: suffix of a new folder's name.
        again: the call, for the job of a cluster; gets the search's folder as ``resume``.

    Raises:
        NbtoolkitError: see :func:`start_search` and
            :func:`~nbtoolkit.launcher.remote.submit_to_cluster`.
    """
    resume = options.resume
    if options.where == "local":
        return start_search(train, config, search, name=name, resume=resume, detach=options.detach)
    wanted = WantedSearch.of(train, config, search)
    run = submit_to_cluster(
        options.where,
        train,
        config,
        choose=partial(choose_search, train, config, wanted, name, resume),
        call=lambda paths, _: partial(again, resume=paths.folder, display="off"),
        is_search=True,
        **wanted.fields(),
    )
    return Started(run, None, None)


def _not_a_rank(search: Search) -> Host:
    """Return the host; refuse to start a search in one rank of several."""
    host = detect_host()
    if host.is_rank:
        raise PlanError(
            f"a {search.kind} was started in one rank of several ({host.rank_reason})",
            allowed="a notebook, a script or the command line, once",
            do="start it without torchrun: it starts the ranks of its trials itself",
        )
    return host
