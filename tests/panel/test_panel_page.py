"""The panel's page: what it attaches to, its buttons by state, its rows, and what it asks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import nbformat
import panel_functions
import pytest
from kernels import until
from panels import (
    Open,
    controller,
    numbers,
    pressable,
    region,
    settle,
    shown_rows,
    told,
    visible,
)
from run_folders import NOON, hold_lock, sweep, trained, trial, write_run

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.errors import RunFolderError
from nbtoolkit.panel.form import EDITS_FILE, FormState, keep_edits, kept_edits
from nbtoolkit.panel.widgets import HIDDEN

COMPLETED = {"type": "ended", "status": "completed", "seconds": 5.0}


@pytest.fixture
def out(home: Path) -> Path:
    return home / "out"


def three(out: Path, *more: Any, config: dict[str, Any] | None = None) -> Path:
    """A sweep that maximizes, of three complete trials; ``config``: its settings."""
    events = [trial(n, value=value, best=n == 1) for n, value in enumerate((0.5, 0.9, 0.1))]
    return sweep(out, [*events, *more], config=config).folder


# --- what a new panel shows ---


def test_a_first_panel_opens_its_settings_and_says_what_to_press(opened: Open) -> None:
    panel = opened()
    board = controller(panel).board
    assert board.sections.opened == "Set up"
    assert "No run yet" in region(panel, "strip")
    assert pressable(panel) == {"launch"}
    assert "1 process" in board.place.value
    assert not visible(board.trials)


def test_a_new_panel_attaches_to_what_runs_else_to_the_newest(opened: Open, out: Path) -> None:
    old = write_run(out, "20250101T000000-old-0001", events=trained({"loss": [1.0]}))
    new = write_run(out, "20260101T000000-new-0002", events=trained({"loss": [1.0]}))
    panel = opened()
    assert panel.folder == new.folder
    assert controller(panel).board.sections.opened == ""
    with hold_lock(old):
        assert opened().folder == old.folder
    panel.watch(None)
    panel.refresh()
    assert (panel.folder, controller(panel).board.run.value) == (None, "")


def test_settings_of_the_run_are_loaded_unless_the_cell_names_some(
    opened: Open, out: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.chdir(home)
    config = nb.load_config(env=None, overrides={"optim.lr": 0.125, "train.epochs": 9})
    folder = three(home / "outputs", config=config.to_dict())
    bare = nb.panel(panel_functions.reports)
    try:
        assert bare.config == config
        assert "low: 0.001" in controller(bare).board.setup.state.space
    finally:
        bare.close()
    given = opened(**{"runtime.output_dir": str(home / "outputs")})
    assert given.folder == folder
    assert given.config is not None
    assert given.config.train.epochs == 2
    controller(given).board.load_run.click()
    given.refresh()
    assert given.config == config


def test_a_run_of_an_older_version_is_shown_and_its_settings_stay_where_they_are(
    opened: Open, out: Path
) -> None:
    folder = three(out, config={"train": {"patience": 3, "epochs": "many"}})
    panel = opened()
    assert panel.folder == folder
    assert pressable(panel) == {"launch", "resume", "train_best"}
    controller(panel).board.load_run.click()
    assert 'role="alert"' in told(panel)
    assert panel.config is not None
    assert controller(panel).board.best_code.value == ""


def test_a_single_run_has_neither_best_settings_nor_a_comparison(opened: Open, out: Path) -> None:
    sweep_folder = three(out)
    (sweep_folder / "config.yaml").write_text(nb.load_config(env=None).to_yaml())
    board = controller(panel := opened()).board
    assert visible(board.best_code)
    assert visible(board.sections.headings["Compare"])
    panel.watch(write_run(out, "train-0001", events=trained({"loss": [1.0, 0.5]})).folder)
    panel.refresh()
    assert not visible(board.best_code)
    assert not visible(board.sections.headings["Compare"])
    panel.watch(sweep_folder)
    panel.refresh()
    assert visible(board.sections.headings["Compare"])


def test_edits_of_a_kernel_that_died_are_offered(opened: Open, out: Path) -> None:
    three(out)
    first = opened()
    controller(first).board.setup.input("optim.lr").value = "0.5"
    until(lambda: first.refresh() or (out / EDITS_FILE).exists(), "the kept edits")
    again = opened()  # as after a restart: the first one is not asked
    board = controller(again).board
    assert board.sections.opened == "Set up"
    assert visible(board.asking)
    assert "Unsaved edits from just now" in board.question.value
    board.yes.click()
    again.refresh()
    assert again.config is not None
    assert again.config.optim.lr == 0.5
    assert not visible(board.asking)
    assert not visible(controller(opened(**{"optim.lr": 0.5})).board.asking)  # they are equal


def test_discarded_edits_are_not_offered_again(opened: Open, out: Path) -> None:
    three(out)
    state = FormState(Config())
    state.texts["seed"] = "5"
    assert keep_edits(out, state)
    os.utime(out / EDITS_FILE, (0, 0))
    panel = opened()
    board = controller(panel).board
    assert " days ago" in board.question.value
    board.no.click()
    panel.refresh()
    assert board.setup.state.texts["seed"] == "0"
    assert kept_edits(out) is None
    assert not visible(board.asking)


# --- buttons by state ---


@pytest.mark.parametrize(
    ("events", "live", "expected"),
    [
        ([trial(0, value=0.5, best=True)], True, {"pause", "stop", "add_trials"}),
        ([{"type": "command", "op": "pause"}], True, {"resume", "stop", "add_trials"}),
        (
            [trial(0, value=0.5, best=True), COMPLETED],
            False,
            {"launch", "train_best", "add_trials"},
        ),
        ([COMPLETED], False, {"launch", "add_trials"}),  # none complete: there is no best
        ([trial(0, value=0.5, best=True)], False, {"launch", "resume", "train_best"}),
    ],
)
def test_only_those_buttons_are_shown_that_do_something(
    opened: Open, out: Path, events: list[Any], live: bool, expected: set[str]
) -> None:
    paths = sweep(out, events)
    with hold_lock(paths if live else write_run(out, "other")):
        panel = opened()
        panel.watch(paths.folder)
        assert pressable(panel) == expected
        board = controller(panel).board
        assert {name for name, one in board.buttons.items() if visible(one)} == expected


def test_stopping_what_has_run_for_long_asks_once(opened: Open, out: Path) -> None:
    paths = sweep(out, [trial(0, "running")])  # it began long ago
    with hold_lock(paths):
        panel = opened()
        board = controller(panel).board
        board.buttons["stop"].click()
        panel.refresh()
        assert "Stop after" in board.question.value
        assert visible(board.asking)
        board.no.click()
        panel.refresh()
        assert not visible(board.asking)
        assert not paths.stop.exists()
        board.buttons["stop"].click()
        panel.refresh()
        board.yes.click()
        until(lambda: panel.refresh() or paths.stop.exists(), "the request")
        assert "Stopping: waiting for each worker" in told(panel)


def test_errors_are_counted_and_reached_by_a_click(opened: Open, out: Path) -> None:
    three(out)
    panel = opened()
    board = controller(panel).board
    board.setup.input("optim.lr").value = "0,01"
    board.setup.section.value = "train"
    panel.refresh()
    assert board.errors.description == "1 error: optim.lr"
    assert "optim.lr" in board.setup.together.value
    assert pressable(panel) == {"resume", "train_best"}
    board.errors.click()
    panel.refresh()
    assert board.sections.opened == "Set up"
    assert "0.01 (decimal point)" in board.setup.errors["optim.lr"].value
    board.setup.input("optim.lr").value = "0.01"
    panel.refresh()
    assert not visible(board.errors)


# --- the rows of trials ---


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_rows_stand_best_first_and_a_header_sorts(opened: Open, out: Path, direction: str) -> None:
    best = 2 if direction == "minimize" else 1
    events = [trial(n, value=value, best=n == best) for n, value in enumerate((0.5, 0.9, 0.1))]
    paths = sweep(out, events)
    file = paths.folder / "sweep.yaml"
    file.write_text(file.read_text().replace("maximize", direction))
    panel = opened()
    by_value = [2, 0, 1] if direction == "minimize" else [1, 0, 2]
    assert numbers(panel) == by_value
    table = controller(panel).board.table.root
    # A grid of three columns: none may be left out.
    assert not [part for part in table.children if HIDDEN in part._dom_classes]
    assert len(table.children) == 3 * (1 + len(by_value))
    heads = {head.description: head for head in controller(panel).board.table.heads}
    heads["#"].click()
    assert numbers(panel) == [2, 1, 0]
    heads["#"].click()
    assert numbers(panel) == [0, 1, 2]
    heads["score"].click()
    assert numbers(panel) == by_value
    assert heads["score"].description == "score ▾"
    with paths.events.open("a") as log:  # the order stays when a column is added
        event = {"t": NOON, **trial(3, value=0.3), "params": {"another": 1}}
        log.write(json.dumps(event) + "\n")
    assert numbers(panel) == ([2, 3, 0, 1] if direction == "minimize" else [1, 0, 3, 2])


def test_what_a_click_changes_is_drawn_even_if_a_poll_comes_before_its_task(
    opened: Open, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three(out)
    panel = opened()
    assert numbers(panel) == [1, 0, 2]
    submit = controller(panel).worker.submit

    def late(task: Any) -> Any:
        submit(controller(panel).poll)  # the one of the thread's own, at the worst moment
        return submit(task)

    monkeypatch.setattr(controller(panel).worker, "submit", late)
    controller(panel).board.table.heads[0].click()
    monkeypatch.undo()
    assert numbers(panel) == [2, 1, 0]


def test_two_ticked_trials_are_compared_and_have_notes(opened: Open, out: Path) -> None:
    folder = three(out)
    panel = opened()
    board = controller(panel).board
    settle(panel)
    first, second, _ = shown_rows(panel)
    first.tick.value = True
    panel.refresh()
    assert board.note.description == "note on trial 1"
    assert visible(board.note)
    board.note.value = "wide enough"
    panel.refresh()
    assert nb_notes(folder) == {"1": "wide enough"}
    second.tick.value = True
    panel.refresh()
    assert board.note.value == ""  # of the other trial
    assert board.sections.opened == "Compare"
    assert "optim.lr" in region(panel, "compare")
    second.tick.value = first.tick.value = False
    panel.refresh()
    assert not visible(board.note)
    assert nb_notes(folder) == {"1": "wide enough"}


def nb_notes(folder: Path) -> Any:
    return json.loads((folder / "annotations.json").read_text())["notes"]


def test_a_click_on_a_row_that_has_just_moved_does_nothing(opened: Open, out: Path) -> None:
    paths = sweep(out, [trial(0, "running"), trial(1, value=0.5, best=True)])
    with hold_lock(paths):
        panel = opened()
        settle(panel)
        [running] = [row for row in shown_rows(panel) if visible(row.stop)]
        assert running.number == 0
        assert running.stop.description == "Stop trial 0"  # its name; the style draws the sign
        running.since = time.monotonic()
        running.stop.click()
        panel.refresh()
        assert not [*paths.folder.glob("commands/*.json")]
        settle(panel)
        running.stop.click()
        until(lambda: [*paths.folder.glob("commands/*.json")], "the request")


def test_a_sweep_of_several_objectives_has_its_front_and_no_best(opened: Open, out: Path) -> None:
    events = [trial(n, values=[n, 2 - n]) for n in range(3)]
    paths = sweep(out, [*events, COMPLETED])
    file = paths.folder / "sweep.yaml"
    text = file.read_text().replace(
        "metric: score, direction: maximize", "metric: [a, b], direction: [maximize, maximize]"
    )
    file.write_text(text)
    panel = opened()
    assert pressable(panel) == {"launch", "add_trials"}
    assert len(numbers(panel)) == 3
    assert controller(panel).board.best_code.value == ""


# --- names, the trash, files ---


def test_a_run_is_renamed_and_moved_to_the_trash(opened: Open, out: Path) -> None:
    folder = three(out)
    panel = opened()
    board = controller(panel).board
    board.name.value = "wider <b>"
    board.rename.click()
    panel.refresh()
    assert any("wider <b>" in label for label, _ in board.run.options)
    board.csv.click()
    panel.refresh()
    lines = (folder / "trials.csv").read_text().splitlines()
    assert lines[0] == "trial,state,score,seconds,reason,optim.lr"
    assert len(lines) == 4
    board.delete.click()
    panel.refresh()
    assert folder.exists()
    board.yes.click()
    panel.refresh()
    assert not folder.exists()
    assert (out / ".trash" / folder.name).is_dir()
    assert panel.folder is None
    assert [folder for _, folder in board.run.options] == [""]


def test_a_live_run_is_not_deleted(opened: Open, out: Path) -> None:
    paths = sweep(out, [trial(0, "running")])
    with hold_lock(paths):
        panel = opened()
        board = controller(panel).board
        board.delete.click()
        panel.refresh()
        board.yes.click()
        assert "is running" in told(panel)
        assert paths.folder.exists()
        with pytest.raises(RunFolderError):
            controller(panel)._delete(paths.folder)


# --- the end ---


def test_the_tab_is_marked_at_the_end_if_wanted(out: Path, settings: dict[str, Any]) -> None:
    for notify in (False, True):
        paths = write_run(out, f"run-{notify}", events=trained({"loss": [1.0]}))
        panel = nb.panel(panel_functions.reports, settings, notify=notify)
        with hold_lock(paths):
            panel.watch(paths.folder)
            panel.refresh()
            assert controller(panel).board.notice.outputs == ()
            with paths.events.open("a") as log:
                log.write(json.dumps({"t": NOON + 9, **COMPLETED}) + "\n")
            panel.refresh()
        outputs = controller(panel).board.notice.outputs
        assert bool(outputs) is notify
        assert not outputs or "document.title" in outputs[0]["data"]["application/javascript"]
        panel.close()


# --- a saved notebook ---

SAVED = """
import sys
sys.path.insert(0, {support!r})
import panel_functions
import nbtoolkit as nb
panel = nb.panel(panel_functions.reports, {settings!r})
panel
"""

WORK = """
panel.press("launch")
nb.attach(panel.folder).result()
panel.refresh()
panel.close()
"""


@pytest.mark.long
def test_a_saved_notebook_and_nbconvert_show_the_page(home: Path, settings: dict[str, Any]) -> None:
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    cells = [
        SAVED.format(support=str(Path(__file__).parents[1] / "support"), settings=settings),
        WORK,
    ]
    saved = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(saved, timeout=300, resources={"metadata": {"path": str(home)}}).execute()
    page, _ = HTMLExporter().from_notebook_node(saved)
    assert "nbtoolkit-saved-" in page
    assert "completed" in page
    assert "<polyline" in page or "<path" in page
    assert page.count("completed") >= 1
