"""ctx.watch: all ranks of an own loop save and stop after the same step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kernels import until
from records import owner_pid

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.run.events import StopRequested
from nbtoolkit.worker.context import RunContext

SECONDS = 120
BOTH = pytest.mark.parametrize("ranks", [1, 2])


@pytest.fixture
def config(tmp_path: Path) -> Config:
    settings = {
        "tracking.mlflow": False,
        "runtime.output_dir": str(tmp_path),
        "checkpoint.every_minutes": None,
        "data": {"steps": 40, "seconds": 0.0, "save_seconds": 0.0},
    }
    return nb.load_config(env=None, overrides=settings)


def loop(config: Config, ctx: RunContext) -> dict[str, Any]:
    """Steps of ``data.seconds`` each, 5 in a resumed run; the step it begins at, and the saved."""
    state = ctx.load() or {"step": 0}
    first, saved = state["step"], []

    def save() -> None:
        time.sleep(config.data.save_seconds)
        saved.append(step)
        ctx.save({"step": step}, step=step)
        (ctx.paths.folder / f"saved-{ctx.rank}-{step}").touch()

    last = first + 5 if first else config.data.steps
    for step in range(first + 1, last + 1):
        # The ranks are not equally fast.
        time.sleep(config.data.seconds * (1 + 0.2 * ctx.rank))
        (ctx.paths.folder / f"up-{ctx.rank}").touch()
        ctx.watch(save, step=step)
    return {"first": first, "saved": saved}


def launched(config: Config, ranks: int, **data: Any) -> nb.RunResult:
    more = {f"data.{name}": value for name, value in data.items()}
    return nb.launch(loop, config.with_overrides(more), processes=ranks, display="off")


def saved_steps(folder: Path, rank: int) -> list[int]:
    return sorted(int(path.name.split("-")[2]) for path in folder.glob(f"saved-{rank}-*"))


@BOTH
def test_a_checkpoint_is_saved_every_steps(config: Config, ranks: int) -> None:
    result = launched(config.with_overrides({"checkpoint.every_steps": 15}), ranks)
    assert [value["saved"] for value in result.values] == [[15, 30]] * ranks


@BOTH
def test_without_checkpoints_nothing_is_saved(config: Config, ranks: int) -> None:
    settings = {"checkpoint.every_steps": 15, "checkpoint.enabled": False}
    result = launched(config.with_overrides(settings), ranks)
    assert [value["saved"] for value in result.values] == [[]] * ranks


@BOTH
def test_a_checkpoint_is_saved_every_minutes(config: Config, ranks: int) -> None:
    settings = {"checkpoint.every_minutes": 0.5 / 60}
    result = launched(config.with_overrides(settings), ranks, steps=60, seconds=0.05)
    saved = result.values[0]["saved"]
    assert 1 <= len(saved) <= 5  # of 3 s; the ranks look once a second
    assert [value["saved"] for value in result.values] == [saved] * ranks


def requested(handle: nb.RunHandle) -> None:
    handle.stop()


def session_ends(handle: nb.RunHandle) -> None:
    """As a host that is about to end the session."""
    os.kill(owner_pid(handle.paths.folder), signal.SIGTERM)


@BOTH
@pytest.mark.parametrize(("end", "status"), [(requested, "stopped"), (session_ends, "deadline")])
def test_all_ranks_save_and_leave_after_the_same_step_and_resume_with_the_next_one(
    config: Config, ranks: int, end: Callable[[nb.RunHandle], None], status: str
) -> None:
    long = config.with_overrides({"data.steps": 10**6, "data.seconds": 0.01})
    handle = nb.launch(loop, long, processes=ranks, wait=False, display="off")
    folder = handle.paths.folder
    until(lambda: len([*folder.glob("up-*")]) == ranks, "all ranks")
    end(handle)
    began = time.monotonic()
    stopped = handle.result(timeout=SECONDS)
    assert (stopped.status, stopped.values) == (status, [])
    assert time.monotonic() - began < 20  # the steps would take hours
    [step] = saved_steps(folder, 0)
    assert [saved_steps(folder, rank) for rank in range(ranks)] == [[step]] * ranks
    result = nb.launch(loop, long, processes=ranks, display="off", resume=folder.name)
    assert [value["first"] for value in result.values] == [step] * ranks


def test_a_run_stops_early_enough_before_the_deadline_to_save(config: Config) -> None:
    """A checkpoint takes 1.5 s here, and the first one shows it. The ranks start in seconds."""
    settings = {"runtime.time_budget": 20.0, "checkpoint.every_steps": 20}
    result = launched(
        config.with_overrides(settings), 2, steps=10**6, seconds=0.05, save_seconds=1.5
    )
    assert result.status == "deadline"
    [reason] = [
        event.reason
        for event in nb.attach(result.paths.folder).events()
        if isinstance(event, StopRequested)
    ]
    assert "is used up, except" in reason  # before the deadline, not after it
    assert saved_steps(result.paths.folder, 0) == saved_steps(result.paths.folder, 1)


def test_the_ranks_agree_about_once_a_second(config: Config) -> None:
    def train(config: Config, ctx: RunContext) -> tuple[int, float]:
        import torch.distributed as dist

        calls, reduce = [], dist.all_reduce

        def counted(*values: Any, **more: Any) -> Any:
            calls.append(values)
            return reduce(*values, **more)

        dist.all_reduce = counted
        began = time.monotonic()
        for _ in range(400):
            time.sleep(0.01)
            ctx.watch(lambda: None)
        seconds = time.monotonic() - began
        dist.all_reduce = reduce
        return len(calls), seconds

    for calls, seconds in nb.launch(train, config, processes=2, display="off").values:
        # On a machine in use, some steps take longer, and the number of the next ones is smaller.
        assert seconds / 2 < calls < 2 * seconds + 4


def test_a_pruned_trial_leaves_without_saving(config: Config) -> None:
    def train(config: Config, ctx: RunContext) -> float:
        def save() -> None:
            (ctx.paths.folder / f"saved-{ctx.rank}").touch()

        for step in range(1, 200):
            ctx.log({"score": ctx.params["optim.lr"]}, step=step)
            ctx.report({"score": ctx.params["optim.lr"]}, step=step)
            time.sleep(0.02)
            ctx.watch(save)
        return 1.0

    study = {
        "study": {
            "metric": "score",
            "direction": "maximize",
            "sampler": "random",
            "pruner": "median",
            "pruner_options": {"n_startup_trials": 1},
        },
        "space": {"optim.lr": {"type": "float", "low": 1e-8, "high": 1.0}},
        "first_trials": [{"optim.lr": rate} for rate in (1.0, 1.0, 1e-8)],
    }
    result = nb.sweep(train, config, study, n_trials=3, display="off")
    assert list(result.trials["state"])[2] == "pruned"
    assert not [*(result.paths.folder / result.trials.iloc[2]["folder"]).glob("saved-*")]
