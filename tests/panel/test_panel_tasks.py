"""nb.panel without a function: a notebook in the background runs a task given by name.

Also panels on runs that they did not start: a cross-validation, a sweep with folds.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fold_functions
import panel_functions
import pytest
from harmless import EVIL
from kernels import SECONDS, all_gone, descendants, until
from kernels import notebook as jupyter
from panels import SPACE, Open, ends, page, pressable, status, told, trials_begun
from programs import write_program

import nbtoolkit as nb
from nbtoolkit.errors import ConfigError, LaunchError, NotebookError, NotebookFailed
from nbtoolkit.notebooks.background import overrides_of
from nbtoolkit.notebooks.run import run_notebook
from nbtoolkit.panel.controller import BackgroundNotebooks


@pytest.fixture
def settings(settings: dict[str, Any], home: Path) -> dict[str, Any]:
    return {**settings, "data.folder": str(home)}


@pytest.fixture
def opened(settings: dict[str, Any], home: Path) -> Iterator[Open]:
    """Opens panels; at the end they are closed, and what they started ends."""
    panels: list[nb.Panel] = []

    def open_one(train: Any = None, space: Any = None, **more: Any) -> nb.Panel:
        panels.append(nb.panel(train, {**settings, **more}, space))
        return panels[-1]

    yield open_one
    home.mkdir(exist_ok=True)
    (home / "end").touch()
    for one in panels:
        until(lambda one=one: not at_work(one), "the end of its notebooks")
        one.close()


def at_work(panel: nb.Panel) -> bool:
    """Whether a notebook that a panel has started has not ended."""
    panel.refresh()
    begun = panel._controller.notebooks
    return begun.starting is not None or bool(begun._running)


def notebooks_in(home: Path) -> list[nb.NotebookHandle]:
    return [nb.NotebookHandle(file) for file in sorted((home / "out/notebooks").glob("*.ipynb"))]


# --- a task by name ---


@pytest.mark.long
def test_a_task_by_name_is_launched_by_a_notebook_with_the_form_s_values(
    opened: Open, home: Path
) -> None:
    panel = opened(task="panel_functions:reports")
    panel._controller.board.form.input("train.epochs").value = "3"
    panel.press("launch")
    folder = panel.folder
    assert folder is not None
    assert folder.parent == home / "out"
    assert "reports" in folder.name
    assert ends(panel) == "completed"
    assert nb.load_config(folder / "config.yaml", env=None) == panel.config
    until(lambda: not at_work(panel), "the end of the notebook")
    [notebook] = notebooks_in(home)
    result = notebook.result()
    assert (result.values["status"], result.runs) == ("completed", [folder])
    overrides = result.parameters["overrides"]
    assert (overrides["train.epochs"], overrides["task"]) == (3, "panel_functions:reports")
    direct = nb.launch(panel_functions.reports, panel.config, display="off")
    about = [nb.attach(one).paths.versions.read_text() for one in (folder, direct.paths.folder)]
    fingerprints = [json.loads(text)["fingerprint"] for text in about]
    assert fingerprints[0] == fingerprints[1]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"model": {"deep": {"a": [1, {"b": None}]}, "empty": {}, EVIL: EVIL}, "data.x": None},
        {"train.batch_size_per_device": 4, "optim.lr_rule": "sqrt"},
        {"runtime": {"time_budget": "2h", "output_dir": EVIL}, "optim.options": {"betas": [0.9]}},
    ],
)
def test_a_configuration_s_differences_make_it_again_in_the_notebook(
    settings: dict[str, Any],
) -> None:
    config = nb.load_config(overrides=settings)
    overrides = overrides_of(config)
    assert "runtime.output_dir" not in overrides  # a parameter of its own
    given = {"runtime.output_dir": config.runtime.output_dir}
    assert nb.load_config(None, overrides=overrides).with_overrides(given) == config


def test_a_task_that_is_not_there_is_told_before_a_notebook_starts(
    opened: Open, home: Path
) -> None:
    panel = opened(task="panel_functions:report")
    with pytest.raises(ConfigError, match="did you mean"):
        panel.press("launch")
    assert "did you mean" in told(panel)
    assert not (home / "out").exists()
    assert pressable(panel) == {"launch"}


@pytest.mark.long
def test_a_sweep_by_a_notebook_is_watched_paused_stopped_gone_on_with_and_its_best_trained(
    opened: Open, home: Path
) -> None:
    panel = opened(None, SPACE, task="panel_functions:until_told")
    panel.press("sweep")
    sweep = panel.folder
    assert sweep is not None
    until(lambda: trials_begun(panel) == 2, "two trials")
    other = opened(None, SPACE, task="panel_functions:until_told")
    other.watch(sweep)
    assert pressable(other) == pressable(panel)
    panel.press("pause")
    until(lambda: status(other) == "paused", "the pause")
    other.press("go_on")
    until(lambda: status(panel) == "running", "the sweep that goes on")
    other.press("stop")
    assert (ends(panel), ends(other)) == ("stopped", "stopped")
    until(lambda: not at_work(panel), "the end of the notebook")
    assert notebooks_in(home)[0].result().values["status"] == "stopped"
    until(lambda: "go_on" in pressable(panel), "the end of its supervisor")
    (home / "end").touch()
    panel.press("go_on")
    assert ends(panel) == "completed"
    assert panel.folder == sweep
    assert "4 of 4 trials" in page(panel, "Overview")
    panel.press("train_best")
    assert ends(panel) == "completed"
    assert panel.folder is not None
    assert panel.folder.name.split("-")[1] == "best"
    assert len(notebooks_in(home)) == 2


def test_a_notebook_that_fails_before_its_run_is_told_with_its_error(
    opened: Open, home: Path
) -> None:
    panel = opened(task="panel_functions:reports", **{"distributed.world_size": 10_000})
    with pytest.raises(NotebookFailed, match="PlanError"):
        panel.press("launch")
    assert "PlanError" in told(panel)
    assert 'role="alert"' in told(panel)
    assert panel.folder is None
    assert pressable(panel) == {"launch"}


# --- faults ---

WAITS_FOR_EVER = """
import time
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def never_ready(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pythons that are started from here do not come to their program: no notebook begins."""
    (home / "slow").mkdir()
    (home / "slow/sitecustomize.py").write_text(WAITS_FOR_EVER)
    monkeypatch.setenv("PYTHONPATH", str(home / "slow"))


def test_launch_pressed_twice_starts_one_notebook_and_stop_is_answered_meanwhile(
    opened: Open, home: Path, never_ready: None
) -> None:
    panel = opened(task="panel_functions:until_told")
    coming = panel._controller.press("launch").result()
    assert pressable(panel) == {"stop"}
    assert panel.folder is None
    [notebook] = [*(home / "out/notebooks").glob("*.run.log")]
    assert str(notebook) in told(panel)
    assert str(notebook) in panel.text()
    with pytest.raises(LaunchError, match=r"Launch cannot be pressed now: a notebook is starting"):
        panel.press("launch")
    panel.press("stop")  # it does not wait for the run
    assert isinstance(coming.exception(timeout=SECONDS), NotebookFailed)
    assert pressable(panel) == {"launch"}
    assert len([*(home / "out/notebooks").glob("*.run.log")]) == 1


def test_a_click_is_not_held_up_by_who_waits_for_a_run(
    opened: Open, home: Path, never_ready: None
) -> None:
    panel = opened(task="panel_functions:until_told")
    with ThreadPoolExecutor() as threads:
        waits = threads.submit(panel.press, "launch")
        until(lambda: pressable(panel) == {"stop"}, "the notebook that starts")
        panel._controller.board.buttons["stop"].click()
        assert isinstance(waits.exception(timeout=SECONDS), NotebookFailed)


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
    [notebook] = notebooks_in(home)
    assert (notebook.done(), notebook.runs) == (False, [folder])
    (home / "end").touch()
    assert nb.attach(folder).result(timeout=SECONDS).status == "completed"
    assert notebook.result(timeout=SECONDS).values["status"] == "completed"


def test_a_killed_notebook_is_told_and_its_run_goes_on_without_one(
    opened: Open, home: Path
) -> None:
    folders = {*Path(tempfile.gettempdir()).iterdir()}
    panel = opened(task="panel_functions:until_told")
    panel.press("launch")
    folder = panel.folder
    [record] = (home / "out/notebooks").glob("*.run.json")
    pid = json.loads(record.read_text())["pid"]
    family = descendants(pid)
    os.kill(pid, signal.SIGKILL)
    assert ends(panel) == "cut off"
    until(lambda: not at_work(panel), "the end of the notebook")
    assert "is gone" in told(panel)
    all_gone(family)
    for left in {*Path(tempfile.gettempdir()).iterdir()} - folders:
        shutil.rmtree(left)  # its kernel's: a killed process removes nothing
    (home / "end").touch()
    panel.press("go_on")
    assert ends(panel) == "completed"
    assert panel.folder == folder
    assert len(notebooks_in(home)) == 1


@pytest.mark.long
def test_a_run_deleted_while_it_is_watched_leaves_the_panel_usable(
    opened: Open, home: Path
) -> None:
    panel = opened(task="panel_functions:until_told")
    panel.press("launch")
    assert panel.folder is not None
    shutil.rmtree(panel.folder)
    assert status(panel) == "gone"
    assert pressable(panel) == {"launch"}
    (home / "end").touch()
    until(lambda: not at_work(panel), "the end of the notebook")
    panel.press("launch")
    assert ends(panel) == "completed"


def test_a_folder_that_cannot_be_written_is_told_and_nothing_is_started(
    opened: Open, home: Path
) -> None:
    (home / "file").write_text("in the way")
    for press, panel in {
        "launch": opened(
            task="panel_functions:reports", **{"runtime.output_dir": str(home / "file/out")}
        ),
        "sweep": opened(
            None,
            SPACE,
            task="panel_functions:reports",
            **{"runtime.output_dir": str(home / "file/out")},
        ),
    }.items():
        with pytest.raises(NotebookError, match="cannot be written"):
            panel.press(press)
        assert "cannot be written" in told(panel)
        assert press in pressable(panel)


def test_a_notebook_that_ends_and_has_started_nothing_is_told(home: Path) -> None:
    begun = BackgroundNotebooks()
    notebook = run_notebook(write_program(home, "1"), home / "o.ipynb", html=False, wait=False)
    coming = begun.add(notebook)
    until(notebook.done, "the end of the notebook")
    with pytest.raises(LaunchError, match=r"o\.ipynb ended without starting a run"):
        begun.poll()
    assert isinstance(coming.exception(), LaunchError)
    assert (begun.starting, begun.poll()) == (None, None)


def test_who_waits_for_a_run_that_does_not_come_is_told(opened: Open) -> None:
    with pytest.raises(LaunchError, match="no run has started after 0 s; the notebook continues"):
        opened()._wait_for(Future(), seconds=0)


# --- what was started elsewhere ---


def test_a_stopped_cross_validation_goes_on_with_its_folds(
    opened: Open, settings: dict[str, Any], home: Path
) -> None:
    folds = nb.make_folds([0, 1] * 15, k=3)
    handle = nb.cross_validate(
        fold_functions.waits, nb.load_config(overrides=settings), folds, wait=False, display="off"
    )
    panel = opened(fold_functions.waits)
    panel.watch(handle.paths.folder)
    until(lambda: status(panel) == "running" and complete_folds(panel) == {0}, "the first fold")
    panel.press("stop")
    assert ends(panel) == "stopped"
    until(lambda: "go_on" in pressable(panel), "the end of its supervisor")
    (home / "open").touch()
    panel.press("go_on")
    assert ends(panel) == "completed"
    assert panel.folder == handle.paths.folder
    assert "2     complete  2" in panel.text()
    result = nb.attach(panel.folder).result()
    assert [*result.scores["score"]] == [0.0, 1.0, 2.0]
    assert result.folds == folds


def complete_folds(panel: nb.Panel) -> set[int]:
    return set(panel._controller.state.folds)


def test_a_stopped_sweep_over_folds_goes_on_with_its_folds(
    opened: Open, settings: dict[str, Any], home: Path
) -> None:
    folds = nb.make_folds([0, 1] * 15, k=2)
    config = nb.load_config(overrides=settings)
    handle = nb.sweep(
        panel_functions.until_told, config, SPACE, folds=folds, wait=False, display="off"
    )
    panel = opened(panel_functions.until_told)
    panel.watch(handle.paths.folder)
    until(lambda: status(panel) == "running" and panel._controller.state.table.trials, "a trial")
    panel.press("stop")
    assert ends(panel) == "stopped"
    until(lambda: "go_on" in pressable(panel), "the end of its supervisor")
    (home / "end").touch()
    panel.press("go_on")
    assert ends(panel) == "completed"
    assert "4 of 4 trials" in page(panel, "Overview")
