"""Describe a search for the process that owns it: what to search, and where its jobs run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbtoolkit.environment.grace import EXIT_GRACE
from nbtoolkit.run.events import RunStarted
from nbtoolkit.run.paths import Kind

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.environment.deadline import Note
    from nbtoolkit.environment.placement import MeasuredSpeed
    from nbtoolkit.folds.folds import Folds
    from nbtoolkit.host import Host
    from nbtoolkit.run.paths import RunPaths
    from nbtoolkit.search.slots import Placement, Slots
    from nbtoolkit.study.sweep_config import SweepConfig


@dataclass(frozen=True, kw_only=True)
class Search:
    """What to search, and how to run its jobs.

    Attributes:
        kind: ``"sweep"`` or ``"cv"``.
        loop: ``"module:function"``; called as ``function(pool, event_writer)`` in the process that
            owns the search, it runs all jobs on the pool and returns a
            :class:`~nbtoolkit.search.pool.SearchEnd`.
        sweep_config: the sweep's settings; None for a cross-validation.
        identity: values that must be equal, besides configuration and function, for
            ``resume="auto"`` to resume a search.
        placement: see :func:`~nbtoolkit.search.slots.make_slots`.
        per_device: jobs per device.
        jobs: number of jobs; None if it is large or unknown.
        total: number of trials over all sessions. A completed search with a smaller total resumes,
            too. None for no number.
        folds: ``folds[job.fold]`` becomes ``ctx.fold``; None without folds.
        timeout: limit in seconds; None for the host's limit only.
    """

    kind: Kind
    loop: str
    sweep_config: SweepConfig | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    placement: Placement = "auto"
    per_device: int = 1
    jobs: int | None = None
    total: int | None = None
    folds: Folds | None = None
    timeout: float | None = None


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What the process that owns a search receives.

    Attributes:
        paths: the search's folder.
        config: the base configuration; each job overrides some of its settings.
        slots: where jobs run.
        host: the host, for the jobs' plans.
        header: the first event of the search.
        notes: messages to show at the start.
        deadline: unix time at which the search ends; None for no limit.
        imposed: True if the deadline is the end of the host's session, not the user's own limit.
        search: what is searched.
        grace: seconds that jobs get to leave at the deadline; ``fit`` has saved before it.
        speed: what a calibration has measured, for the jobs' plans.
    """

    paths: RunPaths
    config: Config
    slots: Slots
    host: Host
    header: RunStarted
    notes: tuple[Note, ...]
    deadline: float | None
    imposed: bool
    search: Search
    grace: float = EXIT_GRACE
    speed: MeasuredSpeed | None = None
