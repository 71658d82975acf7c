"""Each end of a run is one class, has one last event, and raises one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import nbtoolkit as nb
from nbtoolkit.environment.plan import GroupNotFormed, PortBusy, make_plan
from nbtoolkit.errors import GroupStartFailed, WorkerDied
from nbtoolkit.launcher.out_of_memory import as_out_of_memory
from nbtoolkit.launcher.outcome import Failed, Finished, Outcome, OutOfMemory, record_end
from nbtoolkit.run.attempts import last_event
from nbtoolkit.run.failure import raise_failure
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.record import RunRecord
from nbtoolkit.wire.serialization import pack_error


def failed(error: Exception, cause: Any = "raised", **more: Any) -> Failed:
    return Failed(error=pack_error(error), rank=1, cause=cause, **more)


def recorded(outcome: Outcome, folder: Path, processes: int = 2) -> RunPaths:
    config = nb.load_config(env=None, overrides={"distributed.world_size": processes})
    paths = RunPaths.create(folder, "ends")
    record = RunRecord(paths, deadline=None)
    record_end(record, outcome, make_plan(config, nb.detect_host({}), nb.detect_hardware()))
    return paths


@pytest.mark.parametrize("status", ["completed", "stopped", "deadline", "pruned"])
def test_the_status_of_ranks_that_have_left(status: str, tmp_path: Path) -> None:
    ended = last_event(recorded(Finished(status), tmp_path))
    assert ended is not None
    assert (ended.status, ended.error, ended.processes) == (status, None, 2)


MEMORY = OutOfMemory(
    error=pack_error(MemoryError("32 samples")), rank=1, cause="raised", can_split=True
)


@pytest.mark.parametrize(
    ("outcome", "processes", "rank", "raised", "text"),
    [
        (failed(ValueError("no"), notes=("once",)), 2, 1, ValueError, "no"),
        (failed(WorkerDied("rank 1 died"), "died"), 2, 1, WorkerDied, "rank 1 died"),
        (MEMORY, 2, 1, MemoryError, "32 samples"),
        (
            GroupNotFormed("no route"),
            2,
            None,
            GroupStartFailed,
            r"2 ranks could not form a process group: no route\n  Allowed: distributed.fallback",
        ),
        (
            GroupNotFormed("no memory"),
            1,
            None,
            GroupStartFailed,
            r"the rank could not start: no memory\n  Do now:  read .*launcher.txt",
        ),
        (
            PortBusy(29500),
            2,
            None,
            GroupStartFailed,
            "2 ranks could not form a process group: another program uses port 29500",
        ),
    ],
)
def test_the_error_and_the_rank_of_a_failed_run(
    outcome: Outcome,
    processes: int,
    rank: int | None,
    raised: type[Exception],
    text: str,
    tmp_path: Path,
) -> None:
    paths = recorded(outcome, tmp_path, processes)
    ended = last_event(paths)
    assert ended is not None
    assert (ended.status, ended.rank) == ("failed", rank)
    assert ended.notes == [*getattr(outcome, "notes", ())]
    with pytest.raises(raised, match=text):
        raise_failure(paths)


KILLED = failed(WorkerDied("rank 1 died with signal SIGKILL (killed)"), "died")
FULL = failed(RuntimeError("CUDA out of memory: tried to allocate 2 GiB"))


@pytest.mark.parametrize(
    ("failure", "kills", "in_loop", "settings", "can_split"),
    [
        (failed(ValueError("no")), None, True, {}, None),
        (FULL, 0, True, {}, True),
        (FULL, 0, False, {}, False),
        (FULL, 0, True, {"train.gradient_accumulation_steps": 2}, False),
        (FULL, 0, True, {"train.batch_size_per_device": 16}, False),
        (FULL, 0, True, {"train.batch_size": 2}, False),  # one sample in a forward pass
        # The count of kills for memory has changed since -1; None: it cannot be read.
        (KILLED, -1, True, {}, True),
        (KILLED, None, True, {}, True),
        (failed(WorkerDied("rank 1 died with signal SIGSEGV"), "died"), -1, True, {}, None),
    ],
)
def test_which_failures_are_for_memory(
    failure: Failed, kills: int | None, in_loop: bool, settings: Any, can_split: bool | None
) -> None:
    config = nb.load_config(env=None, overrides={"distributed.world_size": 2, **settings})
    plan = make_plan(config, nb.detect_host({}), nb.detect_hardware())
    outcome = as_out_of_memory(failure, plan, config, in_loop=in_loop, kills=kills)
    if can_split is None:
        assert outcome is failure
        return
    assert isinstance(outcome, OutOfMemory)
    assert outcome.can_split == can_split
    assert (outcome.cause == "final") == ("train.batch_size" in settings)
