"""train.profile: a trace per rank, a table of operators, and nothing else changes."""

from __future__ import annotations

import gzip
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Run, configured
from torch import nn
from torch.nn.functional import cross_entropy

import nbtoolkit as nb
from nbtoolkit.config.schema import load_config
from nbtoolkit.run.identity import Identity
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.training.callbacks import split_steps


def train(config: nb.Config, ctx: nb.RunContext) -> dict[str, Any]:
    torch.manual_seed(0)
    inputs = torch.randn(96, 16)
    data = inputs, (inputs[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    callbacks = []
    if "stop_after" in config.model:

        class Stop(nb.Callback):
            def on_train_batch_end(self, state: nb.FitState) -> None:
                if state.step == config.model["stop_after"] and not state.epoch > 1:
                    (ctx.paths.folder / "reached").touch()
                    while not ctx.stop_requested() and ctx.is_main:
                        time.sleep(0.01)

        callbacks = [Stop()]
    values = nb.fit(ctx, config, model, data, data, loss=cross_entropy, callbacks=callbacks)
    weights = [value.tolist() for value in model.state_dict().values()]
    return {**values, "weights": weights}


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "train.batch_size": 4,
        "train.epochs": 2,
        "tracking.mlflow": False,
        "runtime.output_dir": str(folder),
        **more,
    }


def operators(paths: RunPaths, rank: int) -> list[str]:
    """The names in a trace."""
    with gzip.open(paths.trace(rank), "rt") as file:
        return [str(event.get("name")) for event in json.load(file)["traceEvents"]]


def traces(paths: RunPaths) -> list[Path]:
    return sorted((paths.folder / "ranks").rglob("*trace*"))


def test_a_profile_changes_no_result_and_leaves_a_trace_and_a_table(tmp_path: Path) -> None:
    plain = nb.launch(train, settings(tmp_path))
    result = nb.launch(train, settings(tmp_path, **{"train.profile": True}), resume="never")
    assert result.value["weights"] == plain.value["weights"]
    assert not traces(plain.paths)
    assert traces(result.paths) == [result.paths.trace(0)]
    found = operators(result.paths, 0)
    assert "aten::addmm" in found
    assert sorted({name for name in found if name.startswith("ProfilerStep")}) == [
        f"ProfilerStep#{step}" for step in (10, 11, 7, 8, 9)
    ]
    printed = result.paths.log(0).read_text()
    assert re.search(r"^ +Name +Self CPU %", printed, re.MULTILINE)
    assert re.search(r"^ +aten::\w+ +\d", printed, re.MULTILINE)
    one, other = load_config(overrides={"train.profile": True}), load_config()
    assert Identity.of(one.to_dict(), train) == Identity.of(other.to_dict(), train)


def test_each_of_two_ranks_leaves_a_trace_and_rank_0_prints(tmp_path: Path) -> None:
    result = nb.launch(train, settings(tmp_path, **{"train.profile": True}), processes=2)
    assert traces(result.paths) == [result.paths.trace(rank) for rank in (0, 1)]
    for rank in (0, 1):
        assert "DistributedDataParallel.forward" in operators(result.paths, rank)
    assert "Self CPU %" in result.paths.log(0).read_text()
    assert "Self CPU %" not in result.paths.log(1).read_text()


@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_of_few_steps_records_fewer(tmp_path: Path, steps: int) -> None:
    more = {"train.profile": True, "train.max_steps": steps}
    result = nb.launch(train, settings(tmp_path, **more))
    assert "aten::addmm" in operators(result.paths, 0)
    recorded = {name for name in operators(result.paths, 0) if name.startswith("ProfilerStep")}
    assert len(recorded) == split_steps(steps)[2] == 1


def test_steps_are_split_into_waiting_warming_up_and_recording() -> None:
    assert split_steps(1000) == (5, 2, 5)
    assert split_steps(12) == (5, 2, 5)
    assert split_steps(8) == (2, 2, 4)
    for steps in range(1, 20):
        assert sum(split_steps(steps)) == min(steps, 12)


@pytest.mark.long
def test_a_run_stopped_while_it_records_keeps_what_it_has_and_resumes(tmp_path: Path) -> None:
    """The stop request comes in the third recorded step; the rest of the epoch is profiled."""
    more = {"train.profile": True, "train.epochs": 3}
    config = settings(tmp_path, **more, **{"model.stop_after": 10})
    handle = nb.launch(train, config, wait=False)
    paths = handle.paths
    while not (paths.folder / "reached").exists():
        time.sleep(0.02)
    handle.stop("a test")
    assert handle.result().status == "stopped"
    assert any(name.startswith("ProfilerStep") for name in operators(paths, 0))
    before = paths.trace(0).stat().st_mtime_ns
    resumed = nb.launch(train, config)
    assert resumed.paths.folder == paths.folder
    assert resumed.status == "completed"
    assert paths.trace(0).stat().st_mtime_ns > before
    plain = nb.launch(train, settings(tmp_path / "plain", **{"train.epochs": 3}))
    assert resumed.value["weights"] == plain.value["weights"]


def test_a_run_that_resumes_after_the_last_step_of_an_epoch_records_the_next_one(
    tmp_path: Path,
) -> None:
    def fails_once(config: nb.Config, ctx: nb.RunContext) -> None:
        class Fail(nb.Callback):
            def on_train_epoch_end(self, state: nb.FitState) -> None:
                if not (ctx.paths.folder / "failed").exists():
                    (ctx.paths.folder / "failed").touch()
                    raise ValueError("once")

        data = torch.randn(96, 4), torch.zeros(96, dtype=torch.long)
        nb.fit(ctx, config, nn.Linear(4, 2), data, None, loss=cross_entropy, callbacks=[Fail()])

    steps_of_an_epoch = 24
    more = {"train.profile": True, "checkpoint.every_steps": steps_of_an_epoch}
    with pytest.raises(ValueError, match="once"):
        nb.launch(fails_once, settings(tmp_path, **more))
    (run,) = (path.parent for path in tmp_path.glob("*/failed"))
    trace = RunPaths(run).trace(0)
    trace.unlink()
    assert nb.launch(fails_once, settings(tmp_path, **more)).paths.folder == run
    assert trace.exists()


@pytest.mark.long
def test_the_trace_becomes_an_artifact(tmp_path: Path) -> None:
    more = {"train.profile": True, "tracking.mlflow": True}
    result = nb.launch(train, settings(tmp_path, **more))
    (copy,) = tmp_path.glob("mlartifacts/**/ranks/0/trace.json.gz")
    assert copy.read_bytes() == result.paths.trace(0).read_bytes()


def test_a_failing_run_reports_its_own_error(tmp_path: Path) -> None:
    def failing(config: nb.Config, ctx: nb.RunContext) -> None:
        def forward(model: nn.Module, batch: Any) -> Any:
            forward.calls += 1  # type: ignore[attr-defined]
            if forward.calls == 9:  # type: ignore[attr-defined]
                raise ValueError("broken sample")
            return model(batch[0]), batch[1]

        forward.calls = 0  # type: ignore[attr-defined]
        data = torch.randn(96, 4), torch.zeros(96, dtype=torch.long)
        nb.fit(ctx, config, nn.Linear(4, 2), data, None, loss=cross_entropy, step=forward)

    with pytest.raises(ValueError, match="broken sample"):
        nb.launch(failing, settings(tmp_path, **{"train.profile": True}))
    # In this process, too, the profiler has stopped and can start again.
    with pytest.raises(ValueError, match="broken sample"):
        nb.launch(failing, settings(tmp_path, **{"train.profile": True}), start="inline")
    again = nb.launch(train, settings(tmp_path, **{"train.profile": True}), start="inline")
    assert "aten::addmm" in operators(again.paths, 0)


def test_without_it_no_step_calls_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it costs nothing: the loop has no profiler, and asks none."""

    def made(*_: object) -> None:
        raise AssertionError("a profiler was made")

    monkeypatch.setattr("nbtoolkit.training.fit.StepProfiler", made)
    monkeypatch.setattr("torch.profiler.profile.start", made)
    Run(tmp_path / "off").fit(config=configured())
    with pytest.raises(AssertionError, match="a profiler was made"):
        Run(tmp_path / "on").fit(config=configured(overrides={"train.profile": True}))
