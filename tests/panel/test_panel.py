"""nb.panel without a browser: its widgets, the runs it starts, and the faults it survives."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import nbformat
import panel_functions
import pytest
from harmless import EVIL, assert_harmless
from kernels import SECONDS, notebook, until
from notebook_sizes import FOLDER, QUICK
from panels import (
    SPACE,
    Open,
    adds,
    click,
    controller,
    ends,
    error_at,
    pressable,
    region,
    regions,
    status,
    stop_trial,
    told,
    trials_started,
    types,
    walk,
)
from records import last_of, owned_runs, owner_pid

import nbtoolkit as nb
from nbtoolkit.errors import LaunchError, ResumeError
from nbtoolkit.panel.buttons import BUTTONS, python_cell
from nbtoolkit.panel.form import FIELDS
from nbtoolkit.run.paths import find_run

NOTEBOOK = FOLDER / "04_panel.ipynb"

# --- the form ---


def test_a_wrong_value_in_any_field_is_told_beside_it_and_nothing_can_be_launched(
    opened: Open,
) -> None:
    panel = opened(space=SPACE)
    assert pressable(panel) == {"launch", "sweep"}
    for field in FIELDS:
        if field.choices:
            continue
        right = controller(panel).board.setup.fields[field.name].value
        types(panel, field.name, "[{")
        assert pressable(panel) == set(), field.name
        assert 'role="alert"' in error_at(panel, field.name)
        assert_harmless(error_at(panel, field.name))
        types(panel, field.name, right)
        assert pressable(panel) == {"launch", "sweep"}, field.name
        assert error_at(panel, field.name) == ""


def test_settings_that_are_wrong_together_are_told_below_the_yaml(opened: Open) -> None:
    panel = opened()
    before = controller(panel).board.setup.state.yaml
    types(panel, "YAML", before.replace("runtime:\n", "runtime:\n  hang_timeout: 2h\n"))
    assert pressable(panel) == set()
    assert "is not above hang_timeout" in error_at(panel, "YAML")
    adds(panel, "distributed: {timeout: 3h}\n")
    assert pressable(panel) == {"launch"}
    assert error_at(panel, "YAML") == ""
    assert panel.config is not None
    assert panel.config.distributed.timeout == 3 * 3600


def test_a_wrong_space_is_told_and_only_the_sweep_cannot_be_started(opened: Open) -> None:
    panel = opened()
    before = controller(panel).board.setup.state.yaml
    for text, error in {
        "space: {optim.lr: {type: float, low: 1.0, high: 0.1}}": "high",
        "space: {optim.rl: [1, 2]}": "did you mean",
        "space: {a: [": "not valid YAML",
        "space: [1]": "is a section",
    }.items():
        types(panel, "YAML", f"{before}study: {{metric: score}}\n{text}\n")
        assert pressable(panel) <= {"launch"}
        assert error in error_at(panel, "YAML")
        with pytest.raises(LaunchError, match="Sweep cannot be pressed now"):
            panel.press("sweep")
    types(panel, "YAML", f"{before}study: {{metric: score}}\nspace: {{optim.lr: [0.1, 0.2]}}\n")
    assert pressable(panel) == {"launch", "sweep"}
    types(panel, "budget.n_trials", "many")
    assert pressable(panel) == set()
    types(panel, "budget.n_trials", "3")
    assert pressable(panel) == {"launch", "sweep"}


def test_a_space_that_does_not_say_when_it_ends_is_searched_with_20_trials(opened: Open) -> None:
    space = {"optim.lr": {"type": "float", "low": 0.01, "high": 0.1}}
    panel = opened(space={"study": {"metric": "score"}, "space": space})
    setup = controller(panel).board.setup
    assert pressable(panel) == {"launch", "sweep"}
    assert "20 trials" in setup.cost.value
    assert "'n_trials': 20" in setup.code.value
    assert "nb.sweep(reports, config, search)" in setup.code.value
    types(panel, "budget.n_trials", "4")
    assert pressable(panel) == {"launch", "sweep"}
    assert "4 trials" in setup.cost.value


# --- launching ---


def test_what_is_set_in_the_form_is_what_runs(opened: Open) -> None:
    panel = opened()
    types(panel, "train.epochs", "3")
    click(panel, "launch")
    assert ends(panel) == "completed"
    assert panel.folder is not None
    assert nb.load_config(panel.folder / "config.yaml", env=None).train.epochs == 3
    assert "3/3" in region(panel, "strip")
    assert "<svg" in region(panel, "curves")
    assert "hello from 0" in region(panel, "log")
    folders = [folder for _, folder in controller(panel).board.run.options]
    assert str(panel.folder) in folders
    assert controller(panel).board.run.value == str(panel.folder)
    assert "completed" in panel.text()


def test_launch_pressed_twice_starts_one_run(opened: Open, home: Path) -> None:
    panel = opened(panel_functions.until_told)
    button, free = controller(panel).board.buttons["launch"], threading.Event()
    controller(panel).watcher.submit(free.wait)  # nothing starts before all have been pressed
    assert controller(panel).press("launch") is controller(panel).press("launch")
    button.click()
    assert button.disabled  # at once, before anything has started
    assert "Launch ..." in controller(panel).board.message.value
    free.set()
    panel.refresh()
    button.click()  # a slow second click
    panel.refresh()
    with pytest.raises(LaunchError, match="Launch cannot be pressed now"):
        panel.press("launch")
    assert len([path for path in (home / "out").iterdir() if path.is_dir()]) == 1
    panel.press("stop")
    assert "Stopping: waiting for each worker" in told(panel) + region(panel, "strip")
    assert ends(panel) == "stopped"


def test_a_cell_that_ends_with_the_run_shows_its_end(opened: Open) -> None:
    """A saved notebook keeps what is shown then, and the panel reads once a second."""
    panel = opened()
    panel.press("launch")
    assert panel.folder is not None
    nb.attach(panel.folder, display="off").result(SECONDS)
    assert "completed" in panel.text()
    assert "✓ completed" in panel.html()
    panel.refresh()
    assert "✓ completed" in region(panel, "strip")


def test_what_fails_is_shown_with_its_error(opened: Open) -> None:
    def fails(config: Any, ctx: Any) -> None:
        raise ValueError(f"no {EVIL}")

    panel = opened(fails)
    panel.press("launch")
    assert ends(panel) == "failed"
    assert "ValueError: no &lt;script&gt;" in region(panel, "strip")
    until(lambda: "resume" in pressable(panel), "the end of its supervisor")


def test_a_folder_that_cannot_be_written_is_told_and_the_panel_goes_on(
    opened: Open, home: Path
) -> None:
    (home / "file").write_text("in the way")
    panel = opened(**{"runtime.output_dir": str(home / "file/out")})
    click(panel, "launch")
    assert "cannot be written" in told(panel)
    assert 'role="alert"' in told(panel)
    assert pressable(panel) == {"launch"}


# --- sweeps ---


def test_a_sweep_is_paused_resumed_added_to_and_its_best_is_trained(
    opened: Open, home: Path
) -> None:
    panel = opened(panel_functions.until_told, SPACE)
    click(panel, "sweep")
    until(lambda: trials_started(panel) == 2, "two trials that report")
    until(lambda: "rank 0" in str(controller(panel).board.log.options), "their logs")
    assert pressable(panel) == {"pause", "stop", "add_trials"}
    click(panel, "pause")
    until(lambda: status(panel) == "paused", "the pause")
    assert pressable(panel) == {"resume", "stop", "add_trials"}
    stop_trial(panel, 1)
    until(lambda: controller(panel).state.table.trials[1].ended, "the end of trial 1")
    assert len(controller(panel).state.table.trials) == 2  # nothing new is started
    controller(panel).board.more.value = 2
    panel.refresh()
    assert controller(panel).board.buttons["add_trials"].description == "+2 trials"
    click(panel, "add_trials")
    until(lambda: status(panel) and controller(panel).state.table.n_trials == 6, "two trials more")
    click(panel, "resume")
    until(lambda: trials_started(panel) == 3, "the third trial")
    (home / "end").touch()
    assert ends(panel) == "completed"
    sweep = panel.folder
    assert sweep is not None
    everything = {"launch", "sweep", "train_best", "add_trials"}
    until(lambda: pressable(panel) == everything, "the end of its supervisor")
    click(panel, "add_trials")  # a completed sweep resumes with more
    until(lambda: controller(panel).state.table.n_trials == 8, "two trials more")
    assert ends(panel) == "completed"
    assert panel.folder == sweep
    assert controller(panel).state.counts() == (8, 8)
    best = last_of(sweep).summary["best_params"]["optim.lr"]
    click(panel, "train_best")
    assert ends(panel) == "completed"
    assert panel.folder is not None
    assert panel.folder.name.split("-")[1] == "best"
    assert nb.load_config(panel.folder / "config.yaml", env=None).optim.lr == best


def test_another_panel_attaches_both_agree_and_both_may_press_stop(opened: Open) -> None:
    one = opened(panel_functions.until_told, SPACE)
    one.press("sweep")
    until(lambda: trials_started(one) == 2, "two trials")
    other = opened(panel_functions.until_told, SPACE)
    assert (other.folder, status(other)) == (one.folder, "running")  # by itself
    folder = str(one.folder)
    board = controller(other).board
    board.run.value = ""
    other.refresh()
    assert other.folder is None
    board.run.value = folder  # as who chooses it in the list
    other.refresh()
    assert (other.folder, status(other)) == (one.folder, "running")
    assert pressable(other) == pressable(one)
    futures = [controller(panel).press("stop") for panel in (one, other)]
    for future in futures:
        assert future.exception() is None or isinstance(future.exception(), LaunchError)
    assert (ends(one), ends(other)) == ("stopped", "stopped")
    assert region(one, "trials") == region(other, "trials")
    one.close()
    until(lambda: "resume" in pressable(other), "the end of its supervisor")
    click(other, "resume")
    until(lambda: status(other) == "running", "the sweep that goes on")
    assert str(other.folder) == folder
    other.press("stop")
    assert ends(other) == "stopped"


def test_resuming_with_another_function_is_refused_and_said(opened: Open) -> None:
    panel = opened(panel_functions.until_told, SPACE)
    panel.press("sweep")
    until(lambda: trials_started(panel) == 2, "two trials")
    panel.press("stop")
    assert ends(panel) == "stopped"
    other = opened(panel_functions.reports, SPACE)
    assert panel.folder is not None
    other.watch(panel.folder)
    until(lambda: "resume" in pressable(other), "the end of its supervisor")
    with pytest.raises(ResumeError):
        other.press("resume")
    assert 'role="alert"' in told(other)


def test_sweep_says_that_it_continues_an_unfinished_one(opened: Open, home: Path) -> None:
    panel = opened(panel_functions.until_told, SPACE)
    panel.press("sweep")
    until(lambda: trials_started(panel) == 2, "two trials")
    sweep = panel.folder
    assert sweep is not None
    panel.press("stop")
    assert ends(panel) == "stopped"
    until(lambda: "sweep" in pressable(panel), "the end of its supervisor")
    (home / "end").touch()
    panel.press("sweep")
    assert panel.folder == sweep
    assert f"Sweep continues {sweep.name}" in told(panel)
    assert ends(panel) == "completed"


def test_set_up_closes_when_a_run_starts_and_another_panel_says_how_to_leave_that(
    opened: Open,
) -> None:
    panel = opened(panel_functions.until_told)
    assert controller(panel).board.is_set_up_open
    panel.press("launch")
    assert not controller(panel).board.is_set_up_open
    folder, other = panel.folder, opened(panel_functions.reports)
    assert folder is not None
    message = (
        rf"(?s){folder.name} is running.*Allowed: stop.*watch\(None\).*leaves that run running"
    )
    with pytest.raises(LaunchError, match=message):
        other.press("launch")
    other.watch(None)
    other.press("launch")
    assert ends(other) == "completed"
    assert status(panel) == "running"


def test_a_killed_process_is_told_and_the_sweep_goes_on_from_there(
    opened: Open, home: Path
) -> None:
    panel = opened(panel_functions.until_told, SPACE)
    panel.press("sweep")
    until(lambda: trials_started(panel) == 2, "two trials")
    assert panel.folder is not None
    os.kill(owner_pid(panel.folder), signal.SIGKILL)
    assert ends(panel) == "cut off"
    assert "its process died" in region(panel, "strip")
    assert {"resume", "launch"} <= pressable(panel)
    (home / "end").touch()
    click(panel, "resume")
    assert ends(panel) == "completed"
    assert "4/4" in region(panel, "strip")


def test_a_folder_deleted_while_it_is_watched_leaves_the_panel_usable(opened: Open) -> None:
    panel = opened(space=SPACE)
    panel.press("sweep")
    assert ends(panel) == "completed"
    assert panel.folder is not None
    until(lambda: not controller(panel).state.paths.owned(), "the end of its supervisor")
    shutil.rmtree(panel.folder)
    assert status(panel) == "gone"
    regions(panel)
    assert pressable(panel) == {"launch", "sweep"}
    controller(panel).board.run.value = ""
    panel.refresh()
    assert panel.folder is None


# --- files and code ---


def test_the_cell_is_equal_to_the_form(settings: dict[str, Any]) -> None:
    overrides = {**settings, "model": {"a": [1, "it's"], "b": None}, "optim.lr": 3e-4}
    del overrides["model.end"]
    variables: dict[str, Any] = {"train": panel_functions.reports}
    exec(python_cell(overrides, train="train"), variables)
    assert variables["result"].metrics["score"]
    assert nb.load_config(variables["result"].paths.config, env=None).optim.lr == 3e-4
    assert "nb.sweep(train, config, search)" in python_cell({}, SPACE, train="train")
    ast.parse(python_cell(overrides, SPACE))


# --- what is shown where, and the end ---


def test_where_no_widgets_are_shown_it_is_text_and_a_picture(opened: Open) -> None:
    panel = opened(space=SPACE)
    panel.press("sweep")
    assert ends(panel) == "completed"
    bundle = panel._repr_mimebundle_(include=None, exclude=None)
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "4/4" in bundle["text/plain"]
    assert "<img alt=" in bundle["text/html"]
    assert_harmless(bundle["text/html"])
    assert repr(panel) == panel.text()
    assert "plan:" in repr(panel)


def test_every_control_has_a_label_and_the_widgets_are_core_ones(opened: Open) -> None:
    import ipywidgets

    for widget in walk(opened().widget):
        assert type(widget).__module__.startswith(ipywidgets.__name__)
        if hasattr(widget, "disabled"):
            assert widget.description, widget


def test_close_ends_the_thread_and_the_widgets_and_not_the_run(opened: Open, home: Path) -> None:
    threads = {*threading.enumerate()}
    panel = opened(panel_functions.until_told)
    panel.press("launch")
    folder = panel.folder
    assert folder is not None
    panel.close()
    panel.close()
    assert {*threading.enumerate()} <= threads
    assert controller(panel).board.root.comm is None
    assert find_run(folder).owned()
    (home / "end").touch()
    assert nb.attach(folder).result(timeout=SECONDS).status == "completed"
    assert str(folder) in panel.text()  # what was last seen
    with pytest.raises(LaunchError, match="the panel is closed"):
        panel.press("launch")


def test_an_error_while_looking_is_told_and_does_not_end_the_panel(opened: Open) -> None:
    panel = opened()
    future = controller(panel).watcher.submit(lambda: 1 / 0)
    assert isinstance(future.exception(), ZeroDivisionError)
    assert "ZeroDivisionError" in told(panel)
    panel.press("launch")
    assert ends(panel) == "completed"


def test_a_run_or_a_button_that_is_not_there_is_refused(opened: Open) -> None:
    with pytest.raises(LaunchError, match="there is no run nowhere"):
        opened().watch("nowhere")
    with pytest.raises(LaunchError, match="Stop cannot be pressed now"):
        opened().press("stop")
    with pytest.raises(LaunchError, match="lunch cannot be pressed now"):
        opened().press("lunch")


# --- in a kernel ---

IN_KERNEL = """
import panel_functions
panel = nb.panel(panel_functions.until_told, {config!r})
panel
"""

CLICK = "print(panel._controller.board.buttons['launch'].comm.comm_id)"

WAITS = """
import pathlib, time
pathlib.Path("waiting").touch()
while True:
    time.sleep(0.05)
"""

BUSY = """
strip = panel._controller.board.strip
while "completed" not in strip.value:
    pass  # the main thread does nothing for the panel
print("seen")
"""


def test_in_a_kernel_a_click_starts_and_the_view_follows_while_a_cell_is_busy(
    home: Path, settings: dict[str, Any]
) -> None:
    with notebook(home) as kernel:
        shown = kernel.run(IN_KERNEL.format(config=settings)).ok().displayed
        assert "No run yet" in shown[0]["text/plain"]
        assert "application/vnd.jupyter.widget-view+json" in shown[0]
        assert "No run yet" in shown[1]["text/html"]
        press(kernel, kernel.run(CLICK).ok().text.strip())
        until(lambda: owned_runs(home / "out"), "the run")
        waits = kernel.start(WAITS)
        until((home / "waiting").exists, "the cell that waits")
        kernel.interrupt()
        assert kernel.wait(waits).error == "KeyboardInterrupt"
        busy = kernel.start(BUSY)
        (home / "end").touch()
        assert kernel.wait(busy).ok().text == "seen\n"
        assert kernel.run("print(panel)").ok().text.count("completed") == 1
        kernel.restart()
        kernel.run(IN_KERNEL.format(config=settings)).ok()  # attaches by itself
        assert "completed" in kernel.run("print(panel); panel.close()").ok().text


def press(kernel: Any, comm: str) -> None:
    """The message that a front end sends when a button is clicked."""
    client = kernel._client
    data = {"method": "custom", "content": {"event": "click"}}
    client.shell_channel.send(client.session.msg("comm_msg", {"comm_id": comm, "data": data}))


# --- no logic of its own ---

PACKAGE = Path(nb.__file__).parent


def test_the_panel_imports_no_private_name_and_nothing_heavy() -> None:
    for file in (PACKAGE / "panel").glob("*.py"):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nbtoolkit"):
                assert not [name.name for name in node.names if name.name.startswith("_")], file
        heavy = {"torch", "pandas", "mlflow", "multiprocessing", "subprocess", "fcntl"}
        assert not [name for name in heavy if re.search(rf"import {name}\b", text)], file


def test_every_button_has_a_label_and_a_tooltip(opened: Open) -> None:
    board = controller(opened()).board
    assert [*board.buttons] == [*BUTTONS]
    for button in [*board.buttons.values(), board.toggle, board.load_run, board.stop_trial]:
        assert button.description
        assert button.tooltip


# --- the notebook ---


@pytest.mark.long
@pytest.mark.timeout(900)  # a whole notebook
def test_the_notebook_presses_its_own_buttons_under_papermill(home: Path) -> None:
    parameters = {**QUICK["04_panel"], "output_dir": str(home / "out")}
    result = nb.run_notebook(NOTEBOOK, home / "panel.ipynb", parameters, html=False)
    assert (result.values["status"], result.values["trials"]) == ("completed", 2)
    assert Path(result.values["final_folder"]).parent == home / "out"
    cells = {cell.id: cell for cell in nbformat.read(result.output, as_version=4).cells}
    widget, saved = (output.data for output in cells["panel"].outputs[-2:])
    assert "plan:" in widget["text/plain"]
    assert "nbtoolkit-saved-" in saved["text/html"]
    picture = cells["picture"].outputs[-1].data["text/html"]
    assert "2/2" in picture
    assert "completed" in picture
    assert_harmless(picture)
