"""What a sweep prepares ahead: ranks, imports, the next trial's parameters."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import functions
import psutil
import pytest
from kernels import SECONDS, ranks_up, until

import nbtoolkit as nb
from nbtoolkit.launcher.forkserver_client import pids, shutdown
from nbtoolkit.run.paths import RunPaths

LR = {"optim.lr": {"type": "float", "low": 1e-4, "high": 1e-1, "log": True}}
ONE_SLOT = {
    "study": {"sampler": "random", "pruner": "none"},
    "space": LR,
    "placement": "all_devices_per_trial",
}

# Installed with Matplotlib; nothing that the fork server or a rank imports needs it.
SMALL = "kiwisolver"


@pytest.fixture
def config(tmp_path: Path) -> nb.Config:
    overrides = {"runtime.output_dir": str(tmp_path / "out"), "tracking.mlflow": False}
    return nb.load_config(env=None, overrides=overrides)


def started(train: Any, config: nb.Config, trials: int) -> nb.SweepHandle:
    handle: nb.SweepHandle = nb.sweep(
        train, config, ONE_SLOT, n_trials=trials, wait=False, display="off"
    )
    return handle


def in_reserve(folder: Path) -> list[int]:
    """The processes that wait for a job: they write into the reserve's folder."""
    found = []
    for process in psutil.process_iter():
        try:
            output = os.readlink(f"/proc/{process.pid}/fd/1")
        except OSError:  # gone, or not ours
            continue
        if output.startswith(str(folder / "reserve")):
            found.append(process.pid)
    return found


def settled(folder: Path) -> int:
    """The process that waits, once nothing is imported any more, for which it would be replaced.

    Who imports computes or reads: the fork server, its branches and the rank in reserve do neither
    at eight looks in a row. The scheduler forks a rank in reserve 0.3 s after the last import.
    """
    quiet, seen = 0, None
    limit = time.monotonic() + SECONDS
    while quiet < 8 or seen is None:
        assert time.monotonic() < limit, "the imports ahead do not come to an end"
        kept = pids()
        time.sleep(0.1)
        now = in_reserve(folder)
        rests = len(now) == 1 and all(state_of(pid) == "S" for pid in [*kept, *now])
        quiet = quiet + 1 if rests and now == seen else 0
        seen = now
    return seen[0]


def state_of(pid: int) -> str:
    """One letter: R runs or wants to, D reads a disk, S waits to be spoken to."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def wait_for(file: Path) -> None:
    """A function of the test's own, for trials: until the test lets them go on."""
    while not file.exists():
        time.sleep(0.01)


def test_the_next_trial_runs_on_a_rank_that_waited_for_it(
    config: nb.Config, tmp_path: Path
) -> None:
    go = tmp_path / "go"

    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        functions.says_it_is_up(ctx)
        wait_for(go)
        print("trial of", os.getpid())
        return {"val_loss": os.getpid()}

    handle = started(train, config, 3)
    folder = handle.paths.folder
    ranks_up(folder / "trials" / "0000", 1)
    waiting = settled(folder)
    go.touch()
    pids = [int(pid) for pid in handle.result().trials["value"]]
    assert pids[1] == waiting
    assert len(set(pids)) == 3, "each takes one job only"
    assert "started" in phases(folder / "trials" / "0000")
    assert "started" not in phases(folder / "trials" / "0001"), "it had started before"
    log = RunPaths(folder / "trials" / "0001").log(0)
    assert f"trial of {pids[1]}" in log.read_text(), "its output is the trial's"
    assert not (folder / "reserve").exists()


def phases(folder: Path) -> list[str]:
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event["phase"] for event in events if event["type"] == "rank"]


def test_a_rank_that_died_in_reserve_costs_nothing(config: nb.Config, tmp_path: Path) -> None:
    go = tmp_path / "go"

    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        functions.says_it_is_up(ctx)
        wait_for(go)
        return {"val_loss": os.getpid()}

    handle = started(train, config, 3)
    ranks_up(handle.paths.folder / "trials" / "0000", 1)
    waiting = settled(handle.paths.folder)
    os.kill(waiting, signal.SIGKILL)
    until(lambda: not in_reserve(handle.paths.folder), "its end")
    time.sleep(0.6)  # a dozen looks of the scheduler's
    assert in_reserve(handle.paths.folder) == [], "what killed it would kill others, too"
    go.touch()
    result = handle.result()
    assert list(result.trials["state"]) == ["complete"] * 3
    assert waiting not in {int(pid) for pid in result.trials["value"]}


@pytest.mark.long
def test_a_rank_in_reserve_has_what_was_imported_after_it_was_forked(
    config: nb.Config, tmp_path: Path
) -> None:
    go, end = tmp_path / "go", tmp_path / "end"

    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        import importlib
        import sys

        before = SMALL in sys.modules
        wait_for(go)  # meanwhile the first rank in reserve is forked
        importlib.import_module(SMALL)
        wait_for(end)  # a branch imports it too, and the warm workers are started again
        return {"val_loss": float(before)}

    shutdown()  # no branch of an earlier test
    handle = started(train, config, 2)
    first = until(lambda: in_reserve(handle.paths.folder), "a rank in reserve")
    assert not any(map(has_small, first))
    go.touch()
    until(lambda: any(map(has_small, in_reserve(handle.paths.folder))), "one that has it")
    settled(handle.paths.folder)
    end.touch()
    assert list(handle.result().trials["value"]) == [0.0, 1.0]


def has_small(pid: int) -> bool:
    """Whether a process has the library of SMALL in its memory."""
    try:
        return SMALL in Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.long
def test_the_first_trials_of_a_kernel_need_not_import_what_optimizers_need(
    config: nb.Config,
) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        import sys

        return {"val_loss": float("torch._dynamo" in sys.modules)}

    shutdown()
    result = nb.sweep(train, config, LR, n_trials=2, display="off")
    assert list(result.trials["value"]) == [1.0, 1.0]


def test_a_reserve_leaves_with_a_stopped_sweep(config: nb.Config, tmp_path: Path) -> None:
    def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, float]:
        step = 0
        while True:
            time.sleep(0.01)
            ctx.report({"val_loss": 1.0}, step := step + 1)

    handle = started(train, config, 3)
    until(lambda: in_reserve(handle.paths.folder), "a rank in reserve")
    handle.stop()
    assert handle.result().status == "stopped"
    until(lambda: not in_reserve(handle.paths.folder), "the end of the rank in reserve")
