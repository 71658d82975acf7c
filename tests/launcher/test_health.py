"""Ranks that are slow to form their group or to write their stacks do not count as hung."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbtoolkit as nb
from nbtoolkit.environment.plan import GroupNotFormed, make_plan
from nbtoolkit.launcher.health import HangDetector, HealthMonitor
from nbtoolkit.launcher.worker_group import WorkerGroup
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.record import RunRecord
from nbtoolkit.wire.messages import FunctionLeft, StopPending
from nbtoolkit.wire.transport import Connection, GroupConnections
from nbtoolkit.worker.main import STACKS_SIGNAL

RANK = """
import faulthandler, sys
faulthandler.register(int(sys.argv[2]), file=open(sys.argv[1], "w"), all_threads=True)
print("up", flush=True)
while True: pass
"""


@pytest.fixture
def config() -> nb.Config:
    settings = {"tracking.device_metrics": False, "runtime.hang_timeout": 2.0}
    return nb.load_config(env=None, overrides=settings)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths.create(tmp_path, "care")
    paths.stacks(0).parent.mkdir(parents=True)
    return paths


@pytest.fixture
def rank(paths: RunPaths) -> Iterator[subprocess.Popen[str]]:
    """A process that works, and writes its stacks as a rank does."""
    command = [sys.executable, "-c", RANK, str(paths.stacks(0)), str(int(STACKS_SIGNAL))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture
def worker_group(
    config: nb.Config, paths: RunPaths, rank: subprocess.Popen[str]
) -> Iterator[WorkerGroup]:
    plan = make_plan(config, nb.detect_host(), nb.detect_hardware())
    mine, theirs = GroupConnections.pair(plan.processes)
    worker_group = WorkerGroup(plan, mine, paths.elastic)
    worker_group.ranks[0].pid = rank.pid
    yield worker_group
    worker_group.close()
    theirs.close()


def test_ranks_that_work_may_take_their_time_to_form_a_group(
    config: nb.Config, paths: RunPaths, worker_group: WorkerGroup, rank: subprocess.Popen[str]
) -> None:
    care = HealthMonitor(worker_group, RunRecord(paths, deadline=None), config, start_seconds=1.0)
    while time.monotonic() < worker_group.started_at + 2.0:
        assert care.check() is None
        time.sleep(0.05)
    rank.send_signal(signal.SIGSTOP)
    while (late := care.check()) is None:
        time.sleep(0.05)
    assert isinstance(late, GroupNotFormed)
    assert late.late
    assert "the ranks did not form a group" in late.reason


def test_a_rank_that_writes_its_stacks_late_is_waited_for(
    paths: RunPaths, worker_group: WorkerGroup, rank: subprocess.Popen[str]
) -> None:
    rank.send_signal(signal.SIGSTOP)
    timer = threading.Timer(0.6, lambda: rank.send_signal(signal.SIGCONT))
    timer.start()
    stacks = HangDetector(worker_group, paths, 2.0).stacks()
    timer.join()
    assert "Current thread" in stacks[0]


def test_what_a_rank_said_last_is_heard_when_a_message_to_it_comes_too_late() -> None:
    supervisor, rank = Connection.pair()
    rank.send(FunctionLeft(status="deadline"))
    rank.close()
    assert not supervisor.send(StopPending())
    assert supervisor.closed
    assert supervisor.drain() == [FunctionLeft(status="deadline")]
    assert supervisor.drain() == []
    supervisor.close()
