"""Choose a search's folder, new or resumed, and submit the search to the fork server."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from nbtoolkit.config.schema import load_config
from nbtoolkit.environment.deadline import check_deadline, time_limit
from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.environment.plan import make_plan
from nbtoolkit.environment.variables import kernel_environment
from nbtoolkit.errors import LaunchError, PlanError, ResumeError, RunFileError
from nbtoolkit.host import Host, detect_host
from nbtoolkit.launcher.forkserver_client import fork_server
from nbtoolkit.launcher.handle import StartedRun
from nbtoolkit.run.device_ledger import cost_text, usual_seconds
from nbtoolkit.run.kept_answers import measured_speed
from nbtoolkit.run.paths import RunPaths, read_record, runs_in
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
    from nbtoolkit.environment.launch_plan import LaunchPlan
    from nbtoolkit.folds.folds import Folds
    from nbtoolkit.run.events import RunStarted
    from nbtoolkit.study.sweep_config import SweepConfig


def choose_search(
    config: Config, identity: Mapping[str, Any], name: str, resume: str | os.PathLike[str]
) -> ChosenRun:
    """Find or make the folder of a search, and lock it.

    Args:
        config: the base configuration.
        identity: the result of :func:`identity_of`.
        name: suffix of a new folder's name.
        resume: see :func:`start_search`.

    Raises:
        ResumeError: the named search differs, or is running.
        RunFolderError: the output folder cannot be written.
    """
    if resume == "auto":
        chosen = _resumable(Path(config.runtime.output_dir), identity)
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
    """Return what identifies a search when it is resumed.

    Args:
        train: the training function.
        config: the base configuration.
        kind: ``"sweep"`` or ``"cv"``.
        own: further values that must be equal.
        total: number of trials over all sessions; None for no number.
    """
    return {
        "kind": kind,
        "fingerprint": fingerprint({**config.to_dict(), kind: dict(own)}, train),
        "source": source_hash(train),
        "total": total,
    }


def unfinished(output_dir: str | Path, identity: Mapping[str, Any]) -> Iterator[RunPaths]:
    """Yield the searches that ``resume="auto"`` can resume, newest first; one of them may run.

    Args:
        output_dir: the folder of the runs.
        identity: the result of :func:`identity_of`.
    """
    for paths in runs_in(output_dir):
        about = read_versions(paths)
        fits = all(about.get(key) == identity[key] for key in ("kind", "fingerprint"))
        more = (identity["total"] or 0) > (about.get("total") or sys.maxsize)
        if fits and (more or not paths.completed()):
            yield paths


def _resumable(output_dir: Path, identity: Mapping[str, Any]) -> ChosenRun | None:
    for paths in unfinished(output_dir, identity):
        if (lock := lock_run(paths)) is not None:
            return ChosenRun(paths, lock, read_versions(paths)["attempt"] + 1)
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
            f"the {kind} {paths.run_id} is running",
            allowed="one supervisor at a time",
            do="attach to it with nb.attach(folder)",
        )
    return ChosenRun(paths, lock, int(about["attempt"]) + 1)


_SCHEDULER = "nbtoolkit.search.scheduler:schedule_search"

# torch imports it with the first optimizer, which takes 1 s: the fork server does it ahead.
_LATE = ["torch._dynamo"]


@dataclass(frozen=True, kw_only=True)
class Search:
    """What to search, and how to run its jobs.

    Attributes:
        kind: ``"sweep"`` or ``"cv"``.
        algorithm: ``"module:function"``; called as ``function(request, event_writer)`` in the
            scheduler's process.
        sweep_config: the sweep's settings; None for a cross-validation.
        identity: values that must be equal, besides configuration and function, for
            ``resume="auto"`` to resume a search.
        placement: see :func:`~nbtoolkit.search.slots.make_slots`.
        per_device: jobs per device.
        jobs: number of jobs; None if it is large or unknown.
        total: number of trials over all sessions. A completed search with a smaller total resumes,
            too. None for no number.
        slots: where jobs run; None to derive them from placement and hardware.
        folds: ``folds[job.fold]`` becomes ``ctx.fold``; None without folds.
        timeout: limit in seconds; None for the host's limit only.
        preload: modules to import in the fork server, or functions (``"module:function"``) to call
            there.
        uses_reserve: whether it may use the reserve of the notebook's deadline.
    """

    kind: str
    algorithm: str
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
    uses_reserve: bool = False


@dataclass(frozen=True)
class Started:
    """A started search.

    Attributes:
        run: its folder, new or resumed.
        process: its scheduler.
        deadline: unix time at which it ends; None for no limit.
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
        config: the base configuration.
        search: the search.
        name: suffix of a new folder's name.
        resume: ``"auto"`` resumes the newest search of equal configuration, function and identity
            that is not running and unfinished, or had a smaller total; ``"never"`` starts a new
            one; a search's id or folder resumes that one.
        detach: the search outlives this process.

    Raises:
        ResumeError: the named search differs, or is running.
        DeadlinePassed: the notebook's deadline leaves no time.
        CannotPickle: the function captured something that cannot be pickled.
        LaunchError: the fork server did not start.
    """
    from nbtoolkit.tracking.tracker import choose_tracking

    check_deadline(config, uses_reserve=search.uses_reserve)
    host, tracking = _not_a_rank(search), choose_tracking(config.to_dict()["tracking"])
    environment = kernel_environment()
    server = fork_server(tracking=tracking.on)  # it starts while everything here is prepared
    server.import_ahead(_LATE, environment.environ)
    hardware = detect_hardware()
    slots = search.slots or make_slots(
        config,
        hardware,
        search.placement,
        per_device=search.per_device,
        jobs=search.jobs,
        speed=measured_speed(train, config),
    )
    first = slots.slots[0]
    plan = make_plan(config.with_overrides(dict(first.overrides)), host, first.hardware)
    identity = identity_of(train, config, search.kind, search.identity, search.total)
    with choose_search(config, identity, name, resume) as run:
        header = write_header(run, config, plan, host, train, **identity)
        limit = time_limit(_limited(config, search.timeout), uses_reserve=search.uses_reserve)
        request = SearchRequest(
            paths=run.paths,
            config=config,
            slots=slots,
            host=host,
            header=replace(header, search=search.kind),
            notes=(
                *limit.notes,
                *(("warning", note) for note in tracking.notes),
                *(("info", note) for note in _cost(config, search, slots, plan, header)),
            ),
            deadline=limit.deadline,
            imposed=limit.imposed,
            algorithm=search.algorithm,
            folds=search.folds,
            sweep_config=search.sweep_config,
            grace=limit.grace,
        )
        try:
            server.preload(["nbtoolkit.search.scheduler", *search.preload])
            packed = cloudpickle.dumps(request)
            with pack_function(train, environment) as payload, pack_content(packed) as content:
                line = server.run(_SCHEDULER, payload, content, run.lock, detached=detach)
        except LaunchError:
            roll_back(run)
            raise
        if detach:
            server.let_outlive(run.paths)
    tracked = partial(server.track, run.paths.folder) if tracking.on else None
    if tracked is not None:
        tracked()
    process = StartedRun(line=line, tracked=tracked, detached=detach)
    return Started(run, process, limit.deadline)


def _cost(
    config: Config, search: Search, slots: Slots, plan: LaunchPlan, header: RunStarted
) -> list[str]:
    """Say what the search costs of the quota, by earlier trainings of the function, if any."""
    if config.runtime.quota_hours is None or not search.jobs:
        return []
    try:
        seconds = usual_seconds(config, header.function)
    except (OSError, RunFileError) as error:
        return [f"the cost of this {search.kind} is unknown: {error}"]
    if seconds is None:
        return []
    count, gpus = len(slots.slots), len(plan.devices)
    jobs = search.jobs
    text = cost_text(config, header.host, jobs=jobs, seconds=seconds, slots=count, devices=gpus)
    return [f"this {search.kind} will cost {text}"]


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


def _limited(config: Config, timeout: float | None) -> Config:
    """Return the configuration with the search's timeout as its time budget."""
    return config if timeout is None else config.with_overrides({"runtime.time_budget": timeout})
