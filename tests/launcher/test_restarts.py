"""Ranks that die or raise are started again from the last checkpoint, where nobody watches."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import finish, script, until
from launches import begin, notes
from machines import SCRIPT, cpu_machine, plan_on

import nbtoolkit as nb
from nbtoolkit.errors import WorkerDied, WorkerHung
from nbtoolkit.launcher.outcome import Failed
from nbtoolkit.launcher.restarts import PAUSES, Restarts
from nbtoolkit.run.events import CheckpointSaved, Event, MetricsReported, RunStarted
from nbtoolkit.views.page import page_text
from nbtoolkit.views.state import read_state
from nbtoolkit.views.text import explanation
from nbtoolkit.wire.serialization import pack_error
from nbtoolkit.worker.context import RunContext


@pytest.fixture
def config(config: nb.Config, tmp_path: Path) -> nb.Config:
    return config.with_overrides({"runtime.restarts": 1, "model.marks": str(tmp_path)})


def attempts(handle: nb.RunHandle) -> list[RunStarted]:
    return [event for event in handle.events() if isinstance(event, RunStarted)]


def told(handle: nb.RunHandle) -> list[str]:
    """What the user is told of restarts."""
    return [text for text in notes(handle) if "the ranks start again" in text]


def first_time(config: nb.Config, name: str) -> bool:
    """Whether nobody has asked for ``name`` before."""
    mark = Path(config.model.marks) / name
    if mark.exists():
        return False
    mark.touch()
    return True


def counts(config: nb.Config, ctx: RunContext) -> int:
    """Six steps that save and report; what happens after a step is in ``model``."""
    state = ctx.load() or {"step": 0}
    for step in range(state["step"] + 1, 7):
        if step == config.model.get("raises") and ctx.rank == ctx.world_size - 1:
            raise ValueError(f"wrong at step {step}")
        if config.model.get("saves", True):
            ctx.save({"step": step}, step=step)
        ctx.report({"step": float(step)}, step=step)
        kills = step in config.model.get("kills", []) and ctx.rank == ctx.world_size - 1
        if kills and first_time(config, f"killed-{step}"):
            os.kill(os.getpid(), signal.SIGKILL)
    return int(state["step"])


def fits(config: nb.Config, ctx: RunContext) -> dict[str, torch.Tensor]:
    """16 steps of ``nb.fit``; rank 1 is killed once before its eleventh."""
    torch.manual_seed(0)
    data = torch.randn(64, 3), torch.randn(64, 1)
    model, calls = torch.nn.Linear(3, 1), 0

    def step(model: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if config.model.kill and ctx.rank == 1 and calls == 11 and first_time(config, "killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch[0]), batch[1]

    loss = torch.nn.functional.mse_loss
    nb.fit(ctx, config, model, data, None, loss=loss, step=step)
    return model.state_dict()


# --- ranks that die ---


def test_a_killed_rank_is_started_again_from_the_checkpoint(config: nb.Config) -> None:
    handle = begin(counts, config.with_overrides({"model.kills": [4]}))
    result = finish(handle)
    assert (result.status, result.values) == ("completed", [4, 4])  # began after step 4
    first, second = attempts(handle)
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.restarted_after == ""
    assert second.restarted_after == "rank 1 died with signal SIGKILL"
    [note] = told(handle)
    assert "start again from the newest checkpoint in 1 s (restart 1 of 1)" in note
    state = read_state(handle.paths.folder)
    assert explanation(state) == "Restarted once after rank 1 died with signal SIGKILL."
    assert "Restarted once after rank 1 died" in page_text(state)
    assert len(state.curves["step"]) == 6


def test_a_restarted_fit_ends_with_the_weights_of_an_uninterrupted_one(config: nb.Config) -> None:
    settings = {"train.batch_size": 8, "train.epochs": 2, "checkpoint.every_steps": 3}
    mine = config.with_overrides({**settings, "model.kill": True})
    handle = begin(fits, mine)
    restarted = finish(handle).value
    assert len(attempts(handle)) == 2
    whole = finish(begin(fits, mine.with_overrides({"model.kill": False}))).value
    assert all(torch.equal(restarted[name], whole[name]) for name in whole)


def test_without_a_checkpoint_a_killed_rank_begins_again(config: nb.Config) -> None:
    handle = begin(counts, config.with_overrides({"model.kills": [2], "model.saves": False}))
    assert finish(handle).value == 0
    [note] = told(handle)
    assert "from the beginning (no checkpoint)" in note


def test_the_number_of_restarts_is_a_limit(config: nb.Config) -> None:
    handle = begin(counts, config.with_overrides({"model.kills": [2, 4]}), 1)
    with pytest.raises(WorkerDied, match="SIGKILL") as caught:
        finish(handle)
    assert len(attempts(handle)) == 2
    said = "\n".join(caught.value.__notes__)
    assert "the ranks were restarted once; that is the limit (runtime.restarts)" in said


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"runtime.restarts": 0, "model.kills": [2]}, WorkerDied),
        # An error of the user's code, without a checkpoint.
        ({"model.raises": 2, "model.saves": False}, ValueError),
    ],
)
def test_a_run_that_no_restart_may_help_ends_at_once(
    config: nb.Config, settings: dict[str, Any], error: type[Exception]
) -> None:
    handle = begin(counts, config.with_overrides(settings), 1)
    with pytest.raises(error, match=r"SIGKILL|wrong at step 2"):
        finish(handle)
    assert len(attempts(handle)) == 1


def test_a_run_that_is_stopped_between_two_attempts_ends(config: nb.Config) -> None:
    handle = begin(counts, config.with_overrides({"model.kills": [2]}), 1)
    until(lambda: told(handle), "the pause")
    handle.stop()
    result = finish(handle)
    assert (result.status, result.checkpoint) == ("stopped", result.paths.checkpoints / "last.pt")


# --- errors of the user's code ---


def test_an_error_that_comes_back_at_the_same_step_ends_the_run(config: nb.Config) -> None:
    many = config.with_overrides({"runtime.restarts": 5, "model.raises": 3})
    handle = begin(counts, many)
    with pytest.raises(ValueError, match="wrong at step 3") as caught:
        finish(handle)
    _, second = attempts(handle)
    assert second.restarted_after == "rank 1 raised ValueError: wrong at step 3"
    said = "\n".join(caught.value.__notes__)
    assert "restarted once; this attempt got no further than the one before" in said


# --- the rules ---


def failure(error: Exception, cause: Any) -> Failed:
    return Failed(error=pack_error(error), rank=0, cause=cause)


DIED = failure(WorkerDied("rank 0 died with signal SIGKILL (x)"), "died")
RAISED = failure(ValueError("no"), "raised")


def test_the_pause_grows() -> None:
    restarts = Restarts(5)
    assert [restarts.begin() for _ in range(5)] == [1.0, 10.0, 60.0, 60.0, 60.0]
    assert list(PAUSES) == sorted(PAUSES)


@pytest.mark.parametrize(
    ("first", "second", "again"),
    [
        ([MetricsReported(values={}, step=3)], [MetricsReported(values={}, step=4)], True),
        ([MetricsReported(values={}, step=3)], [MetricsReported(values={}, step=3)], False),
        ([MetricsReported(values={})] * 3, [MetricsReported(values={})] * 4, True),
        ([MetricsReported(values={})] * 3, [MetricsReported(values={})] * 3, False),
        # it began at the checkpoint of the attempt before
        ([CheckpointSaved(path="a")] * 3, [CheckpointSaved(path="a")], True),
        ([], [], False),
    ],
)
def test_a_second_restart_needs_progress(
    first: list[Event], second: list[Event], again: bool
) -> None:
    restarts = Restarts(5)
    for event in first:
        restarts.note(event)
    assert restarts.allows(DIED, has_checkpoint=False)
    restarts.begin()
    for event in second:
        restarts.note(event)
    assert restarts.allows(DIED, has_checkpoint=False) == again


def test_which_failures_another_attempt_may_help() -> None:
    hung = failure(WorkerHung("rank 0 sent nothing"), "died")
    restarts = Restarts(1)
    assert restarts.allows(hung, has_checkpoint=False)
    assert restarts.allows(RAISED, has_checkpoint=True)
    assert not restarts.allows(RAISED, has_checkpoint=False)
    assert not restarts.allows(failure(WorkerDied("exits"), "final"), has_checkpoint=True)
    assert not Restarts(0).allows(DIED, has_checkpoint=True)


# --- the default ---


@pytest.mark.parametrize(
    ("watched", "setting", "start", "restarts", "reason"),
    [
        (False, "auto", "forkserver", 2, "restarts: 2 (nobody watches)"),
        (True, "auto", "forkserver", 0, ""),
        (True, 3, "forkserver", 3, "restarts: 3 (runtime.restarts)"),
        (False, 0, "forkserver", 0, ""),
        (False, "auto", "inline", 0, ""),
    ],
)
def test_the_default_is_two_where_nobody_watches(
    watched: bool, setting: Any, start: Any, restarts: int, reason: str
) -> None:
    host = replace(SCRIPT, watched=watched)
    plan = plan_on(cpu_machine(), host=host, start=start, runtime__restarts=setting)
    assert plan.restarts == restarts
    assert "\n".join(line for line in plan.reasons if "restarts" in line) == reason


def test_nobody_watches_a_script(tmp_path: Path) -> None:
    code = """
    import importlib
    importlib.reload(nbtoolkit.host)
    print(nbtoolkit.host.detect_host().watched)
    """
    with script(code, tmp_path) as running:
        assert running.output().split() == ["False"]


def restarts_of_trial(config: nb.Config, ctx: RunContext) -> dict[str, float]:
    return {"val_loss": float(config.runtime.restarts)}


@pytest.mark.parametrize(("setting", "expected"), [("auto", 0.0), (3, 3.0)])
def test_a_trial_is_restarted_only_if_a_number_says_so(
    config: nb.Config, setting: Any, expected: float
) -> None:
    mine = config.with_overrides({"runtime.restarts": setting})
    search = {
        "study": {"metric": "val_loss", "direction": "minimize"},
        "space": {"optim.lr": {"low": 0.1, "high": 0.2}},
        "budget": {"n_trials": 1},
    }
    assert nb.sweep(restarts_of_trial, mine, search, display="off").best_value == expected
