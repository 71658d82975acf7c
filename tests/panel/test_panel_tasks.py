"""nb.panel without a function: it runs the task of a name. And runs that it did not start:
cross-validations, sweeps with folds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fold_functions
import panel_functions
import pytest
from kernels import SECONDS, all_gone, until
from kernels import notebook as jupyter
from panels import SPACE, Open, click, ends, pressable, region, status, told, trials_started, types
from records import first_of

import nbtoolkit as nb
from nbtoolkit.errors import ConfigError, PlanError, RunFolderError


@pytest.fixture
def settings(settings: dict[str, Any], home: Path) -> dict[str, Any]:
    return {**settings, "data.folder": str(home)}


# --- a task by name ---


def test_a_task_by_name_is_launched_with_the_form_s_values(opened: Open, home: Path) -> None:
    panel = opened(None, task="panel_functions:reports")
    types(panel, "train.epochs", "3")
    panel.press("launch")
    folder = panel.folder
    assert folder is not None
    assert folder.parent == home / "out"
    assert "reports" in folder.name
    assert ends(panel) == "completed"
    assert nb.load_config(folder / "config.yaml", env=None) == panel.config
    direct = nb.launch(panel_functions.reports, panel.config, display="off")
    assert first_of(folder).identity == first_of(direct.paths.folder).identity != ""


def test_a_task_that_is_not_there_is_told_and_nothing_starts(opened: Open, home: Path) -> None:
    panel = opened(None, task="panel_functions:report")
    with pytest.raises(ConfigError, match="did you mean"):
        panel.press("launch")
    assert "did you mean" in told(panel)
    assert not (home / "out").exists()
    assert pressable(panel) == {"launch"}


def test_a_plan_that_is_refused_is_told_before_and_after_the_press(opened: Open) -> None:
    panel = opened(None, task="panel_functions:reports", **{"distributed.world_size": 10_000})
    assert "refused" in panel._controller.board.place.value
    with pytest.raises(PlanError):
        panel.press("launch")
    assert 'role="alert"' in told(panel)
    assert panel.folder is None
    assert pressable(panel) == {"launch"}


@pytest.mark.long
def test_a_sweep_by_name_is_paused_stopped_resumed_by_another_panel_and_its_best_trained(
    opened: Open, home: Path
) -> None:
    panel = opened(None, SPACE, task="panel_functions:until_told")
    panel.press("sweep")
    sweep = panel.folder
    until(lambda: trials_started(panel) == 2, "two trials")
    other = opened(None, SPACE, task="panel_functions:until_told")
    assert other.folder == sweep
    assert pressable(other) == pressable(panel)
    panel.press("pause")
    until(lambda: status(other) == "paused", "the pause")
    other.press("resume")
    until(lambda: status(panel) == "running", "the sweep that goes on")
    other.press("stop")
    assert (ends(panel), ends(other)) == ("stopped", "stopped")
    until(lambda: "resume" in pressable(panel), "the end of its supervisor")
    (home / "end").touch()
    panel.press("resume")
    assert ends(panel) == "completed"
    assert panel.folder == sweep
    assert "4/4" in region(panel, "strip")
    panel.press("train_best")
    assert ends(panel) == "completed"
    assert panel.folder is not None
    assert panel.folder.name.split("-")[1] == "best"


def test_a_folder_that_cannot_be_written_is_told_and_nothing_is_started(
    opened: Open, home: Path
) -> None:
    (home / "file").write_text("in the way")
    bad = {"runtime.output_dir": str(home / "file/out"), "task": "panel_functions:reports"}
    for press, panel in {
        "launch": opened(None, **bad),
        "sweep": opened(None, SPACE, **bad),
    }.items():
        with pytest.raises(RunFolderError, match="cannot be written"):
            panel.press(press)
        assert "cannot be written" in told(panel)
        assert press in pressable(panel)


IN_KERNEL = """
import panel_functions
panel = nb.panel(None, {config!r})
panel.press("launch")
print(panel.folder)
"""


@pytest.mark.long
def test_what_was_started_goes_on_when_the_kernel_is_interrupted_and_killed(
    settings: dict[str, Any], home: Path
) -> None:
    config = {**settings, "task": "panel_functions:until_told"}
    with jupyter(home) as kernel:
        folder = Path(kernel.run(IN_KERNEL.format(config=config)).ok().text.strip())
        kernel.interrupt()
        kernel.kill()
        all_gone({kernel.pid})
    assert nb.attach(folder).paths.owned()
    (home / "end").touch()
    assert nb.attach(folder).result(timeout=SECONDS).status == "completed"


# --- cross-validations, and sweeps with folds ---


def test_a_cross_validation_is_started_stopped_and_resumed_with_its_folds(
    opened: Open, settings: dict[str, Any], home: Path
) -> None:
    folds = nb.make_folds([0, 1] * 15, k=3)
    panel = nb.panel(fold_functions.waits, settings, folds=folds)
    try:
        assert pressable(panel) == {"launch", "cross_validate"}
        assert "3 folds = 3 trainings" in panel._controller.board.setup.cost.value
        click(panel, "cross_validate")
        folder = panel.folder
        assert status(panel) == "running"
        until(lambda: status(panel) and complete_folds(panel) == {0}, "the first fold")
        assert pressable(panel) == {"pause", "stop"}
        panel.press("stop")
        assert ends(panel) == "stopped"
        until(lambda: "resume" in pressable(panel), "the end of its supervisor")
        (home / "open").touch()
        panel.press("resume")
        assert ends(panel) == "completed"
        assert panel.folder == folder
        assert "<svg" in region(panel, "curves") + region(panel, "workers")
        assert region(panel, "folds")
        result = nb.attach(panel.folder).result()
        assert [*result.scores["score"]] == [0.0, 1.0, 2.0]
        assert result.folds == folds
    finally:
        (home / "open").touch()
        panel.close()


def complete_folds(panel: nb.Panel) -> set[int]:
    folds = panel._controller.state.folds()
    return {fold.fold for fold in folds if fold.state == "complete"}


def test_a_stopped_sweep_over_folds_goes_on_with_its_folds(
    opened: Open, settings: dict[str, Any], home: Path
) -> None:
    folds = nb.make_folds([0, 1] * 15, k=2)
    config = nb.load_config(overrides=settings)
    nb.sweep(panel_functions.until_told, config, SPACE, folds=folds, wait=False, display="off")
    panel = opened(panel_functions.until_told)  # attaches by itself
    until(lambda: status(panel) == "running" and panel._controller.state.table.trials, "a trial")
    panel.press("stop")
    assert ends(panel) == "stopped"
    until(lambda: "resume" in pressable(panel), "the end of its supervisor")
    (home / "end").touch()
    panel.press("resume")
    assert ends(panel) == "completed"
    assert "4/4" in region(panel, "strip")


def test_a_sweep_whose_space_asks_for_folds_takes_those_of_the_panel(
    settings: dict[str, Any], home: Path
) -> None:
    folds = nb.make_folds([0, 1] * 15, k=2)
    space = {**SPACE, "folds": {"k": 2}, "budget": {"n_trials": 1}}
    panel = nb.panel(panel_functions.reports, settings, space, folds)
    try:
        panel.press("sweep")
        assert ends(panel) == "completed"
        assert panel.folder is not None
        assert nb.Folds.load(panel.folder / "folds.json") == folds
    finally:
        panel.close()
