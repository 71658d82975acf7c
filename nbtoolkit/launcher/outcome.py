"""Define how a run, or one group of its ranks, can end: one class for each end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nbtoolkit.environment.plan import GroupNotFormed, PortBusy
from nbtoolkit.errors import GroupStartFailed
from nbtoolkit.wire.serialization import PackedError, one_line, pack_error

if TYPE_CHECKING:
    from nbtoolkit.environment.launch_plan import LaunchPlan
    from nbtoolkit.run.paths import RunPaths
    from nbtoolkit.run.record import RunRecord


@dataclass(frozen=True)
class Finished:
    """All ranks left the training function without an error.

    Attributes:
        status: ``"completed"``, or why they left early, such as ``"deadline"``.
    """

    status: str


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A rank raised an exception, died or hung.

    Attributes:
        error: the error that the launch raises.
        rank: the rank that failed first.
        cause: whether the user's code raised, a rank died or hung, or another attempt cannot help.
        notes: sentences that are added to the error.
    """

    error: PackedError
    rank: int
    cause: Literal["raised", "died", "final"]
    notes: tuple[str, ...] = ()

    @property
    def brief(self) -> str:
        """The failure in a few words."""
        kind = self.error.type.rpartition(".")[2]
        if kind == "WorkerDied":
            return self.error.text.partition(" (")[0]
        if kind == "WorkerHung":
            return f"rank {self.rank} hung"
        return f"rank {self.rank} raised {one_line(self.error.type, self.error.text)}"


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(Failed):
    """Memory ran out on a rank.

    Attributes:
        can_split: the same batch can be trained in smaller forward passes.
    """

    can_split: bool


Outcome = Finished | Failed | OutOfMemory | GroupNotFormed | PortBusy


def record_end(record: RunRecord, outcome: Outcome, plan: LaunchPlan) -> None:
    """Write the last event of a run."""
    match outcome:
        case Finished():
            record.complete(outcome.status, plan.processes)
        case Failed():
            record.fail(outcome.error, rank=outcome.rank, notes=outcome.notes)
        case GroupNotFormed() | PortBusy():
            record.fail(error_of(outcome, record.paths, plan), rank=None)


def error_of(
    outcome: Failed | GroupNotFormed | PortBusy, paths: RunPaths, plan: LaunchPlan
) -> PackedError:
    """Return the error that the launch raises for a run that has ended so."""
    match outcome:
        case Failed():
            return outcome.error
        case GroupNotFormed():
            reason = outcome.reason
        case PortBusy():
            reason = f"another program uses port {outcome.port}"
    text = "the rank could not start"
    allowed = ""
    if plan.processes > 1:
        text = f"{plan.processes} ranks could not form a process group"
        allowed = "distributed.fallback: true continues with one process"
    error = GroupStartFailed(
        f"{text}: {reason}",
        allowed=allowed,
        do=f"read {paths.agent_log} and {paths.log(0)}",
    )
    return pack_error(error)
