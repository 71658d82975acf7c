"""start="inline": a run in this process, which leaves nothing behind in it."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from pathlib import Path
from typing import Any

import functions
import pytest
from launches import settings_in, types
from records import last_of

import nbtoolkit as nb
from nbtoolkit.environment.variables import temporary_variables
from nbtoolkit.errors import CannotPickle, NestedLaunch, PlanError
from nbtoolkit.run.paths import runs_in


def launch(train: Any, outputs: Path, *, display: Any = "off", **options: Any) -> nb.RunResult:
    config = settings_in(outputs, **options.pop("config", {}))
    return nb.launch(train, config, start="inline", display=display, **options)


def test_runs_in_this_thread_of_this_process(tmp_path: Path) -> None:
    """So that a breakpoint stops where one types."""
    here = os.getpid(), threading.get_ident()
    seen = launch(lambda config, ctx: (os.getpid(), threading.get_ident()), tmp_path)
    assert seen.value == here


def test_result_and_folder_are_those_of_other_launches(tmp_path: Path) -> None:
    def train(config, ctx):
        ctx.log({"loss": 0.5}, step=1)
        ctx.report({"score": 2.0}, step=1)
        ctx.save({"weight": 3.0})
        return {"score": 2.0, "seed": ctx.seed, "drawn": functions.draws(config, ctx)}

    here = launch(train, tmp_path)
    there = nb.launch(train, settings_in(tmp_path), display="off")
    for name in ("status", "metrics", "values"):
        assert getattr(here, name) == getattr(there, name)
    files = [{file.name for file in run.paths.folder.iterdir()} for run in (here, there)]
    assert files[1] - files[0] == {"ranks"}  # logs: here, output goes where this process's goes
    assert (here.checkpoint, here.plan.start) == (here.paths.checkpoints / "last.pt", "inline")


def test_an_exception_passes_as_it_is_and_is_recorded(tmp_path: Path) -> None:
    error = ValueError("mine")

    def train(config, ctx):
        raise error

    with pytest.raises(ValueError, match="mine") as caught:
        launch(train, tmp_path)
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    [paths] = runs_in(tmp_path)
    assert last_of(paths.folder).error == "ValueError: mine"
    assert not paths.owned()
    with pytest.raises(ValueError, match="mine"):
        nb.attach(paths.folder).result()


def test_a_value_that_cannot_be_kept_is_an_error_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(CannotPickle, match="value\\['lock'\\]"):
        launch(lambda config, ctx: {"lock": threading.Lock()}, tmp_path)
    [paths] = runs_in(tmp_path)
    assert "CannotPickle" in str(last_of(paths.folder).error)


def test_an_interrupt_stops_the_run(tmp_path: Path) -> None:
    def train(config, ctx):
        ctx.report({"score": 1.0})
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        launch(train, tmp_path)
    [paths] = runs_in(tmp_path)
    result = nb.attach(paths.folder).result()
    assert (result.status, result.value, result.metrics) == ("stopped", None, {"score": 1.0})
    assert types(result)[-2:] == ["stop", "ended"]


def test_events_come_while_it_runs(tmp_path: Path) -> None:
    events: list[str] = []
    during: list[list[str]] = []

    def train(config, ctx):
        ctx.log({"loss": 1.0}, step=0)
        during.append(list(events))

    launch(train, tmp_path, on_event=lambda event: events.append(event.type))
    assert during == [["run", "metrics"]]
    assert events == ["run", "metrics", "ended"]


def test_a_resumed_run_tells_of_its_own_attempt_only(tmp_path: Path) -> None:
    def train(config, ctx):
        before = ctx.load()
        ctx.save({"epochs": config.train.epochs})
        return before

    first = launch(train, tmp_path, config={"train.epochs": 1})
    events: list[Any] = []
    config = {"train.epochs": 2}
    second = launch(
        train, tmp_path, config=config, resume=first.paths.folder, on_event=events.append
    )
    assert (second.value, second.paths) == ({"epochs": 1}, first.paths)
    kinds = [event.type for event in events]
    assert kinds == ["run", "checkpoint", "report", "ended"]  # the report: what it returned
    assert events[0].attempt == 2


@pytest.mark.parametrize(("display", "shown"), [("auto", True), ("off", False)])
def test_display(display: Any, shown: bool, tmp_path: Path, capsys: Any) -> None:
    def train(config, ctx):
        print("said in the function")
        nb.attach(ctx.paths.folder).stop("enough")
        ctx.report({"score": 1.0})
        raise AssertionError("the report let it go on")

    result = launch(train, tmp_path, display=display)
    assert result.status == "stopped"
    out = capsys.readouterr().out
    assert "said in the function\n" in out
    assert (
        f"1 process on the CPU, fp32, batch 128, start: inline -> {result.paths.folder}" in out
    ) is shown
    assert ("stopping: enough\n" in out) is shown


# --- what is of the run and what is of this process -----------------------------------------------


def test_variables_are_the_runs_while_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")  # accelerate would wait for a second process
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")

    def train(config, ctx):
        os.environ["MINE"] = "stays"
        return (
            "OMPI_COMM_WORLD_SIZE" in os.environ,
            os.environ["RANK"],
            os.environ["ACCELERATE_MIXED_PRECISION"],
            ctx.accelerator.num_processes,
        )

    before = dict(os.environ)
    assert launch(train, tmp_path).value == (False, "0", "no", 1)
    assert os.environ.pop("MINE") == "stays"
    assert dict(os.environ) == before


def _divide_with_lent_variables() -> None:
    with temporary_variables({"CHANGED": "lent", "NEW": "lent"}):
        assert dict(os.environ) == {"CHANGED": "lent", "NEW": "lent"}
        1 / 0  # noqa: B018


def test_variables_come_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGED", "before")
    monkeypatch.setenv("GONE", "before")
    with pytest.raises(ZeroDivisionError):
        _divide_with_lent_variables()
    assert (os.environ["CHANGED"], os.environ["GONE"]) == ("before", "before")
    assert "NEW" not in os.environ


def test_each_run_has_accelerate_to_itself(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    def precision(config, ctx):
        return ctx.accelerator.mixed_precision

    try:
        mine = Accelerator(cpu=True, mixed_precision="no")
        state = mine.state
        for wanted in ("bf16", "fp32"):
            seen = launch(precision, tmp_path, config={"train.precision": wanted}).value
            assert seen == {"bf16": "bf16", "fp32": "no"}[wanted]
        assert Accelerator(cpu=True).state.mixed_precision == "no"
        assert state.num_processes == 1
    finally:
        AcceleratorState._reset_state()
        PartialState._reset_state()


def test_a_launch_inside_is_refused_and_the_next_one_works(tmp_path: Path) -> None:
    def train(config, ctx):
        return launch(lambda config, ctx: 1, tmp_path)

    with pytest.raises(NestedLaunch, match="inside a rank"):
        launch(train, tmp_path)
    assert launch(lambda config, ctx: 2, tmp_path).value == 2


def test_several_processes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match='world_size is 2, but start="inline"'):
        launch(lambda config, ctx: None, tmp_path, processes=2)


@pytest.mark.long
def test_good_and_failed_runs_are_tracked(tmp_path: Path) -> None:
    def train(config, ctx):
        ctx.report({"score": config.model.score}, step=1)
        assert config.model.score > 0

    tracked = {"tracking.mlflow": True}
    launch(train, tmp_path, config={**tracked, "model": {"score": 1.0}})
    with pytest.raises(AssertionError):
        launch(train, tmp_path, config={**tracked, "model": {"score": -1.0}})
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        runs = database.execute(
            "select status, value from runs join metrics using (run_uuid) where key = 'score'"
        )
        assert sorted(runs) == [("FAILED", -1.0), ("FINISHED", 1.0)]
