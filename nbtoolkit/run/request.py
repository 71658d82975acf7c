"""Define what a run's supervisor, its agent and its ranks receive, pickled once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.environment.deadline import Note
    from nbtoolkit.environment.hardware import Hardware
    from nbtoolkit.environment.launch_plan import LaunchPlan
    from nbtoolkit.environment.measured_speed import MeasuredSpeed
    from nbtoolkit.folds.folds import Fold
    from nbtoolkit.host import Host
    from nbtoolkit.run.events import RunStarted
    from nbtoolkit.run.paths import RunPaths


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One run of the training function, for its ranks.

    Attributes:
        paths: its folder.
        plan: how many ranks, on which devices.
        config: the resolved configuration.
        deadline: unix time at which the run is asked to stop; None: no limit.
        params: a trial's parameters.
        fold: the value of ``ctx.fold``.
        synchronous_reports: whether every report waits for an answer.
        reuse_workers: whether the ranks run another job afterwards.
        standby: whether the ranks wait for the actual job, which comes with its function.
    """

    paths: RunPaths
    plan: LaunchPlan
    config: Config
    deadline: float | None = None
    params: Mapping[str, object] = field(default_factory=dict)
    fold: Fold | None = None
    synchronous_reports: bool = False
    reuse_workers: bool = False
    standby: bool = False


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A planned run, for its supervisor.

    Attributes:
        job: for its ranks.
        host: where it runs, to make another plan.
        hardware: what it may use, to make another plan.
        header: its first event.
        notes: for the user, at the start.
        speed: how fast each strategy was when it was measured, to make another plan.
        agent_pid: the agent, if the kernel has forked it.
    """

    job: JobSpec
    host: Host
    hardware: Hardware
    header: RunStarted
    notes: tuple[Note, ...] = ()
    speed: MeasuredSpeed | None = None
    agent_pid: int | None = None
