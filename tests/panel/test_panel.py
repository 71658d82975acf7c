"""nb.panel without a browser: its widgets, the runs it starts, and the faults it survives."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import panel_functions
import pytest
import yaml
from harmless import EVIL, assert_harmless
from kernels import SECONDS, notebook, until
from notebook_sizes import FOLDER, QUICK
from panels import SPACE, Open, click, controller, ends, page, pressable, status, told, trials_begun

import nbtoolkit as nb
from nbtoolkit.errors import LaunchError, ResumeError
from nbtoolkit.launcher.arguments import task_name
from nbtoolkit.panel.actions import command_line, python_cell
from nbtoolkit.panel.board import BUTTONS, TABS
from nbtoolkit.panel.form import FormState, config_fields, text_of, texts_of
from nbtoolkit.run.paths import find_run

NOTEBOOK = FOLDER / "04_panel.ipynb"

# --- the form ---


def test_every_setting_is_in_the_form_with_its_documentation_and_values(opened: Open) -> None:
    fields = config_fields()
    config = nb.load_config(env=None)
    names = {*config.to_dict()} - set(config.to_dict()) | {"task", "seed", "model", "data"}
    for section in ("optim", "train", "distributed", "checkpoint", "tracking", "runtime"):
        names |= {f"{section}.{key}" for key in config.to_dict()[section]}
    assert set(fields) == names
    form = controller(opened()).board.form
    for name, field in fields.items():
        assert field.help
        assert field.allowed
        widget = form.input(name)
        assert field.help in widget.tooltip
        assert field.allowed in widget.tooltip
        assert widget.description
    assert fields["train.precision"].choices == ("auto", "fp32", "fp16", "bf16")
    assert fields["distributed.enabled"].choices == ("auto", "true", "false")


def test_a_wrong_value_in_any_field_is_told_beside_it_and_nothing_can_be_launched(
    opened: Open,
) -> None:
    panel = opened(space=SPACE)
    form = controller(panel).board.form
    assert pressable(panel) == {"launch", "sweep"}
    typed = [name for name, field in config_fields().items() if not field.choices]
    for name in typed:
        right = form.input(name).value
        form.input(name).value = "[{" if not name.endswith("task") else "no function"
        assert pressable(panel) == set(), name
        error = form.errors[name].value
        assert "allowed" in error, name
        assert 'role="alert"' in error
        assert_harmless(error)
        form.input(name).value = right
        assert pressable(panel) == {"launch", "sweep"}, name
        assert form.errors[name].value == ""


def test_settings_that_are_wrong_together_are_told_above_them(opened: Open) -> None:
    panel = opened()
    form = controller(panel).board.form
    form.input("runtime.hang_timeout").value = "2h"
    assert pressable(panel) == set()
    assert "is not above hang_timeout" in form.together.value
    form.input("distributed.timeout").value = "3h"
    assert pressable(panel) == {"launch"}
    assert form.together.value == ""
    assert panel.config is not None
    assert panel.config.distributed.timeout == 3 * 3600


def test_a_wrong_space_is_told_and_only_the_sweep_cannot_be_started(opened: Open) -> None:
    panel = opened(space=SPACE)
    form = controller(panel).board.form
    for text, error in {
        "optim.lr: {type: float, low: 1.0, high: 0.1}": "low: 1 is above high: 0.1",
        "optim.rl: [1, 2]": "did you mean",
        "a: [": "not YAML",
        "[1]": "not a mapping",
    }.items():
        form.space.value = text
        assert pressable(panel) == {"launch"}
        assert error in form.space_error.value
    form.space.value = "optim.lr: [0.1, 0.2]"
    form.trials.value = "many"
    assert pressable(panel) == {"launch"}
    form.trials.value = "3"
    assert pressable(panel) == {"launch", "sweep"}


@pytest.mark.parametrize(
    "value",
    [None, True, 0, 1e-5, 3e-4, 1e300, "adamw", "null", "1e-3", "a: b", 'q"q', "", [0, 2], "日本"],
)
def test_what_stands_in_a_field_is_read_as_the_value_it_stands_for(value: Any) -> None:
    from nbtoolkit.config.yaml_source import parse_value

    assert parse_value(text_of(value)) == value


def test_a_draft_makes_the_configuration_it_came_from() -> None:
    config = nb.load_config(
        overrides={
            "model": {"kind": "cnn", "deep": {"a": [1, 2]}},
            "train.batch_size_per_device": 4,
            "optim": {"lr": 3e-4, "options": {"betas": [0.9, 0.99]}},
            "runtime.output_dir": EVIL,
        }
    )
    assert FormState(config).validate().config == config
    assert texts_of(config)["optim.lr"] == "0.0003"


# --- launching ---


def test_what_is_set_in_the_form_is_what_runs(opened: Open) -> None:
    panel = opened()
    controller(panel).board.form.input("train.epochs").value = "3"
    click(panel, "launch")
    assert ends(panel) == "completed"
    assert panel.folder is not None
    assert nb.load_config(panel.folder / "config.yaml", env=None).train.epochs == 3
    assert "step 3 of 3" in page(panel, "Overview")
    assert "<polyline" in page(panel, "Curves")
    assert "hello from 0" in page(panel, "Log")
    assert (panel.folder.name, str(panel.folder)) in controller(panel).board.run.options
    assert "run" in panel.text()
    assert "completed" in panel.text()


def test_launch_pressed_twice_starts_one_run(opened: Open, home: Path) -> None:
    panel = opened(panel_functions.until_told)
    button, free = controller(panel).board.buttons["launch"], threading.Event()
    controller(panel).worker.submit(free.wait)  # nothing starts before all have been pressed
    assert controller(panel).press("launch") is controller(panel).press("launch")
    button.click()
    assert button.disabled  # at once, before anything has started
    free.set()
    panel.refresh()
    button.click()  # a slow second click
    panel.refresh()
    with pytest.raises(LaunchError, match="Launch cannot be pressed now"):
        panel.press("launch")
    assert len([*(home / "out").iterdir()]) == 1
    panel.press("stop")
    assert ends(panel) == "stopped"


def test_what_fails_is_shown_with_its_error(opened: Open) -> None:
    def fails(config: Any, ctx: Any) -> None:
        raise ValueError(f"no {EVIL}")

    panel = opened(fails)
    panel.press("launch")
    assert ends(panel) == "failed"
    shown = page(panel, "Overview")
    assert "ValueError: no &lt;script&gt;" in shown
    until(lambda: "go_on" in pressable(panel), "the end of its supervisor")


def test_a_folder_that_cannot_be_written_is_told_and_the_panel_goes_on(
    opened: Open, home: Path
) -> None:
    (home / "file").write_text("in the way")
    panel = opened(**{"runtime.output_dir": str(home / "file/out")})
    click(panel, "launch")
    assert "cannot be written" in told(panel)
    controller(panel).board.file.value = str(home / "file/saved.yaml")
    controller(panel).board.save.click()
    assert "file" in told(panel)
    assert 'role="alert"' in told(panel)
    assert pressable(panel) == {"launch"}


# --- sweeps ---


def test_a_sweep_is_paused_gone_on_with_added_to_and_its_best_is_trained(
    opened: Open, home: Path
) -> None:
    panel = opened(panel_functions.until_told, SPACE)
    click(panel, "sweep")
    until(lambda: trials_begun(panel) == 2, "two trials that report")
    assert (
        "trial 1, rank 0" in controller(panel).board.log.options or page(panel, "Log") is not None
    )
    assert pressable(panel) == {"pause", "stop", "add_trials", "stop_trial"}
    click(panel, "pause")
    until(lambda: status(panel) == "paused", "the pause")
    controller(panel).board.number.value = 1
    click(panel, "stop_trial")
    until(lambda: controller(panel).state.table.trials[1].ended, "the end of trial 1")
    assert len(controller(panel).state.table.trials) == 2  # nothing new is started
    controller(panel).board.more.value = 2
    click(panel, "add_trials")
    until(lambda: status(panel) and controller(panel).state.table.n_trials == 6, "two trials more")
    click(panel, "go_on")
    until(lambda: trials_begun(panel) == 3, "the third trial")
    (home / "end").touch()
    assert ends(panel) == "completed"
    assert pressable(panel) == {"launch", "sweep", "train_best"}
    assert "<circle" in page(panel, "Curves")
    sweep = panel.folder
    assert sweep is not None
    best = find_best(sweep)
    click(panel, "train_best")
    assert ends(panel) == "completed"
    assert panel.folder is not None
    assert panel.folder.name.split("-")[1] == "best"
    assert nb.load_config(panel.folder / "config.yaml", env=None).optim.lr == best


def find_best(sweep: Path) -> float:
    summary = json.loads((sweep / "result.json").read_text())["summary"]
    return float(summary["best_params"]["optim.lr"])


def test_another_panel_attaches_both_agree_and_both_may_press_stop(opened: Open) -> None:
    one = opened(panel_functions.until_told, SPACE)
    one.press("sweep")
    until(lambda: trials_begun(one) == 2, "two trials")
    other = opened(panel_functions.until_told, SPACE)
    folder = str(one.folder)
    other.refresh()
    board = controller(other).board
    assert folder in [path for _, path in board.run.options]
    board.run.value = folder  # as who chooses it in the list
    other.refresh()
    assert (other.folder, status(other)) == (one.folder, "running")
    assert pressable(other) == pressable(one)
    futures = [controller(panel).press("stop") for panel in (one, other)]
    for future in futures:
        assert future.exception() is None or isinstance(future.exception(), LaunchError)
    assert (ends(one), ends(other)) == ("stopped", "stopped")
    assert page(one, "Trials") == page(other, "Trials")
    one.close()
    until(lambda: "go_on" in pressable(other), "the end of its supervisor")
    click(other, "go_on")
    until(lambda: status(other) == "running", "the sweep that goes on")
    assert str(other.folder) == folder
    other.press("stop")
    assert ends(other) == "stopped"


def test_going_on_with_another_function_is_refused_and_said(opened: Open) -> None:
    panel = opened(panel_functions.until_told, SPACE)
    panel.press("sweep")
    until(lambda: trials_begun(panel) == 2, "two trials")
    panel.press("stop")
    assert ends(panel) == "stopped"
    other = opened(panel_functions.reports, SPACE)
    assert panel.folder is not None
    other.watch(panel.folder)
    until(lambda: "go_on" in pressable(other), "the end of its supervisor")
    with pytest.raises(ResumeError):
        other.press("go_on")
    assert 'role="alert"' in told(other)


def test_a_killed_process_is_told_and_the_sweep_goes_on_from_there(
    opened: Open, home: Path
) -> None:
    panel = opened(panel_functions.until_told, SPACE)
    panel.press("sweep")
    until(lambda: trials_begun(panel) == 2, "two trials")
    assert panel.folder is not None
    os.kill(json.loads((panel.folder / "owner.json").read_text())["pid"], signal.SIGKILL)
    assert ends(panel) == "cut off"
    assert "its process died" in page(panel, "Overview")
    assert {"go_on", "launch"} <= pressable(panel)
    (home / "end").touch()
    click(panel, "go_on")
    assert ends(panel) == "completed"
    assert "4 of 4 trials" in page(panel, "Overview")


def test_a_folder_deleted_while_it_is_watched_leaves_the_panel_usable(opened: Open) -> None:
    panel = opened(space=SPACE)
    panel.press("sweep")
    assert ends(panel) == "completed"
    assert panel.folder is not None
    until(lambda: not controller(panel).state.paths.owned(), "the end of its supervisor")
    shutil.rmtree(panel.folder)
    assert status(panel) == "gone"
    for name in TABS:
        page(panel, name)
    assert pressable(panel) == {"launch", "sweep"}
    controller(panel).board.run.value = ""
    panel.refresh()
    assert panel.folder is None


# --- files and what is equal ---


def test_settings_are_saved_and_loaded_as_yaml(opened: Open, home: Path) -> None:
    panel = opened()
    board = controller(panel).board
    board.form.input("optim.lr").value = "0.25"
    board.file.value = str(home / "mine.yaml")
    board.save.click()
    assert "saved to" in told(panel)
    assert yaml.safe_load((home / "mine.yaml").read_text())["optim"]["lr"] == 0.25
    other = opened()
    controller(other).board.file.value = str(home / "mine.yaml")
    controller(other).board.load.click()
    other.refresh()
    assert other.config == panel.config
    assert controller(other).board.form.input("optim.lr").value == "0.25"
    (home / "mine.yaml").write_text("optim: {lrr: 1}")
    controller(other).board.load.click()
    assert "mine.yaml:1" in told(other)
    assert "did you mean" in told(other)


def test_the_command_line_and_the_cell_are_equal_to_the_form(settings: dict[str, Any]) -> None:
    overrides = {**settings, "model": {"a": [1, "it's"], "b": None}, "optim.lr": 3e-4}
    del overrides["model.end"]
    config = nb.load_config(env=None, overrides=overrides)
    words = shlex.split(command_line(overrides))
    assert words[:2] == ["nbtoolkit", "train"]
    given = [word for word in words[2:] if word != "-o"]
    assert nb.load_config(env=None, overrides=given) == config
    variables: dict[str, Any] = {"train": panel_functions.reports}
    exec(python_cell(overrides, train="train"), variables)
    assert variables["result"].metrics["score"]
    assert nb.load_config(variables["result"].paths.config, env=None).optim.lr == 3e-4
    search = command_line({}, "optim.lr: [1, 2]", "5")
    assert search.endswith("nbtoolkit sweep space.yaml --trials 5")
    named = command_line({}, task=task_name(panel_functions.reports))
    assert named == "nbtoolkit train -o task=panel_functions:reports"
    assert "a function of a cell" in command_line({}, task=task_name(lambda config, ctx: None))
    assert "nb.sweep(train, config, space, n_trials=5)" in python_cell({}, SPACE, "5")
    ast.parse(python_cell(overrides, SPACE, ""))


def test_what_differs_from_the_defaults_is_shown(opened: Open) -> None:
    shown = page(opened(), "Files")
    assert "train.epochs" in shown
    assert "optim.lr<" not in shown
    assert "nb.launch(reports, config)" in shown


# --- what is shown where, and the end ---


def test_where_no_widgets_are_shown_it_is_text_and_a_picture(opened: Open) -> None:
    panel = opened(space=SPACE)
    panel.press("sweep")
    assert ends(panel) == "completed"
    bundle = panel._repr_mimebundle_(include=None, exclude=None)
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "4 of 4 trials" in bundle["text/plain"]
    assert "<svg" in bundle["text/html"]
    assert_harmless(bundle["text/html"])
    assert repr(panel) == bundle["text/plain"]
    assert "plan:" in repr(panel)


def test_names_of_any_kind_are_shown_as_text(opened: Open, home: Path) -> None:
    panel = opened(**{"model": {"end": str(home / "end"), EVIL: EVIL}})
    panel.press("launch")
    assert ends(panel) == "completed"
    for name in TABS:
        assert_harmless(page(panel, name) or "<p></p>")
    assert "&lt;script&gt;" in page(panel, "Files")


def test_every_control_has_a_label_and_the_widgets_are_core_ones(opened: Open) -> None:
    import ipywidgets

    def walk(widget: Any) -> Iterator[Any]:
        yield widget
        for child in getattr(widget, "children", ()):
            yield from walk(child)

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
    future = controller(panel).worker.submit(lambda: 1 / 0)
    assert isinstance(future.exception(), ZeroDivisionError)
    assert "ZeroDivisionError" in told(panel)
    panel.press("launch")
    assert ends(panel) == "completed"


def test_a_run_that_is_not_there_is_refused(opened: Open) -> None:
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
overview = panel._controller.board.pages["Overview"]
while "completed" not in overview.value:
    pass  # the main thread does nothing for the panel
print("seen")
"""


def test_in_a_kernel_a_click_starts_and_the_view_follows_while_a_cell_is_busy(
    home: Path, settings: dict[str, Any]
) -> None:
    with notebook(home) as kernel:
        shown = kernel.run(IN_KERNEL.format(config=settings)).ok().displayed[0]
        assert "nothing is watched" in shown["text/plain"]
        assert "application/vnd.jupyter.widget-view+json" in shown
        press(kernel, kernel.run(CLICK).ok().text.strip())
        (owner_file,) = until(lambda: [*home.glob("out/*/owner.json")], "the run")
        waits = kernel.start(WAITS)
        until((home / "waiting").exists, "the cell that waits")
        kernel.interrupt()
        assert kernel.wait(waits).error == "KeyboardInterrupt"
        busy = kernel.start(BUSY)
        (home / "end").touch()
        assert kernel.wait(busy).ok().text == "seen\n"
        assert kernel.run("print(panel)").ok().text.count("completed") == 1
        kernel.restart()
        again = kernel.run(
            IN_KERNEL.format(config=settings) + f"\npanel.watch({str(owner_file.parent)!r})"
        )
        again.ok()
        assert "completed" in kernel.run("print(panel); panel.close()").ok().text


def press(kernel: Any, comm: str) -> None:
    """The message that a front end sends when a button is clicked."""
    client = kernel._client
    data = {"method": "custom", "content": {"event": "click"}}
    client.shell_channel.send(client.session.msg("comm_msg", {"comm_id": comm, "data": data}))


# --- no logic of its own ---

PACKAGE = Path(nb.__file__).parent

# Modules behind public functions, and readers of run folders. The views are a folder of their own.
READERS = {
    "config.fields",
    "config.layers",
    "config.schema",
    "config.validation",
    "config.yaml_source",
    "crossval.cross_validation",
    "dashboards.mlflow_server",
    "dashboards.server",
    "dashboards.study_dashboard",
    "environment.hardware",
    "environment.plan",
    "errors",
    "folds.folds",
    "host",
    "launcher.arguments",
    "launcher.handle",
    "launcher.launch",
    "notebooks.handle",
    "notebooks.background",
    "run.paths",
    "search.sweep",
    "search.sweep_result",
    "study.sweep_config",
    "study.table",
    "tasks.find",
    "text_table",
}


def test_the_panel_uses_public_functions_and_readers_of_folders_only() -> None:
    used = set()
    for file in (PACKAGE / "panel").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nbtoolkit"):
                used.add(str(node.module).removeprefix("nbtoolkit."))
                private = [name.name for name in node.names if name.name.startswith("_")]
                assert not private, file
    assert {name for name in used if not name.startswith(("panel", "views"))} == READERS
    heavy = {"torch", "pandas", "mlflow", "multiprocessing", "subprocess", "fcntl"}
    text = "\n".join(file.read_text() for file in (PACKAGE / "panel").glob("*.py"))
    assert not [name for name in heavy if re.search(rf"import {name}\b", text)]


def test_every_button_has_an_action() -> None:
    from nbtoolkit.panel.controller import Controller

    assert all(callable(getattr(Controller, f"_{name}")) for name in BUTTONS)


# --- the notebook ---


@pytest.mark.long
@pytest.mark.timeout(900)  # a whole notebook
def test_the_notebook_presses_its_own_buttons_under_papermill(home: Path) -> None:
    parameters = {**QUICK["04_panel"], "output_dir": str(home / "out")}
    result = nb.run_notebook(NOTEBOOK, home / "panel.ipynb", parameters, html=False)
    assert (result.values["status"], result.values["trials"]) == ("completed", 2)
    assert Path(result.values["final_folder"]).parent == home / "out"
    cells = {cell.id: cell for cell in nbformat.read(result.output, as_version=4).cells}
    shown = cells["panel"].outputs[-1].data
    assert "plan:" in shown["text/plain"]
    assert "Nothing is watched" in shown["text/html"]
    picture = cells["picture"].outputs[-1].data["text/html"]
    assert "2 of 2 trials" in picture
    assert_harmless(picture)
