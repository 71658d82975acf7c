"""What follows the end of a group of ranks: other ranks, a pause, or the end of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import functions
import pytest
from machines import SCRIPT, cpu_machine, plan_on, plan_settings

from nbtoolkit.environment.plan import GroupNotFormed, PortBusy
from nbtoolkit.environment.variables import kernel_environment
from nbtoolkit.errors import WorkerDied
from nbtoolkit.launcher.outcome import Failed, Outcome, OutOfMemory
from nbtoolkit.launcher.supervisor import Exiting, Pausing, Running, RunSupervisor
from nbtoolkit.launcher.worker_group import Spawner
from nbtoolkit.run.events import RunStarted
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.wire.payload import JobSpec, RunRequest, pack_function
from nbtoolkit.wire.serialization import pack_error
from nbtoolkit.wire.transport import Connection

LATE = GroupNotFormed("not in time", late=True)
NOT_FORMED = GroupNotFormed("no route")
BUSY = PortBusy(29500)
FULL = OutOfMemory(error=pack_error(MemoryError()), rank=1, cause="raised", can_split=True)
DIED = Failed(error=pack_error(WorkerDied("rank 1 died with signal SIGKILL")), rank=1, cause="died")


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., RunSupervisor]]:
    """Begins to supervise a run whose fork server forks nothing: its end of the line is unread."""
    with ExitStack() as stack:

        def begin(settings: dict[str, Any], too_large: int | None) -> RunSupervisor:
            settings = {"train__batch_size": 64, "distributed__world_size": 2, **settings}
            plan = replace(plan_on(cpu_machine(), **settings), too_large=too_large)
            paths, config = RunPaths.create(tmp_path, "run"), plan_settings(settings)
            job = JobSpec(paths=paths, plan=plan, config=config)
            payload = stack.enter_context(pack_function(functions.ranks, kernel_environment()))
            lines = [*Connection.pair(), *Connection.pair()]
            for line in lines:
                stack.callback(line.close)
            header, hardware = RunStarted(), cpu_machine()
            request = RunRequest(job=job, host=SCRIPT, hardware=hardware, header=header)
            supervisor = RunSupervisor(request, Spawner(lines[0], payload, lines[2]))
            stack.callback(supervisor.abandon)
            supervisor.begin()
            return supervisor

        yield begin


ONCE = {"runtime__restarts": 1}
# Settings, a known limit of memory, how groups of ranks end, and what follows each of them: the
# state, and the processes and samples in a forward pass of its plan.
FOLLOWS: dict[str, tuple[dict[str, Any], int | None, list[Outcome], list[str]]] = {
    "late, then a fallback": (
        {},
        None,
        [LATE, LATE, NOT_FORMED],
        ["Running 2x32", "Running 1x32", "Ended 1x32"],
    ),
    "no fallback": ({"distributed__fallback": False}, None, [NOT_FORMED], ["Ended 2x32"]),
    "a fallback keeps a known limit": ({}, 16, [NOT_FORMED], ["Running 1x8"]),
    "busy ports": ({}, None, [BUSY] * 5, ["Running 2x32"] * 4 + ["Ended 2x32"]),
    "out of memory": ({}, None, [FULL, FULL], ["Running 2x16", "Running 2x8"]),
    "a rank died": (ONCE, None, [DIED], ["Pausing 2x32"]),
    "no restarts": ({"runtime__restarts": 0}, None, [DIED], ["Ended 2x32"]),
}


def ends(supervisor: RunSupervisor, outcome: Outcome) -> str:
    """Let the ranks end so; what follows."""
    supervisor._state = Exiting(supervisor._state.group, outcome, limit=0.0)
    supervisor.poll()
    plan = supervisor.plan
    return f"{type(supervisor._state).__name__} {plan.processes}x{plan.batch_size_per_device}"


@pytest.mark.parametrize(
    ("settings", "too_large", "outcomes", "follows"), FOLLOWS.values(), ids=FOLLOWS
)
def test_what_follows_the_end_of_the_ranks(
    supervise: Callable[..., RunSupervisor],
    settings: dict[str, Any],
    too_large: int | None,
    outcomes: list[Outcome],
    follows: list[str],
) -> None:
    supervisor = supervise(settings, too_large)
    assert [ends(supervisor, outcome) for outcome in outcomes] == follows


@pytest.mark.parametrize("outcome", [FULL, DIED], ids=["out of memory", "a rank died"])
def test_a_run_that_was_asked_to_stop_does_not_start_again(
    supervise: Callable[..., RunSupervisor], outcome: Outcome
) -> None:
    supervisor = supervise(ONCE, None)
    supervisor.stop("enough")
    assert ends(supervisor, outcome) == "Ended 2x32"


def test_the_ranks_start_again_after_the_pause_and_not_before(
    supervise: Callable[..., RunSupervisor],
) -> None:
    supervisor = supervise(ONCE, None)
    ends(supervisor, DIED)
    supervisor.poll()
    pause = supervisor._state
    assert isinstance(pause, Pausing)
    supervisor._state = replace(pause, until=0.0)
    supervisor.poll()
    assert isinstance(supervisor._state, Running)
