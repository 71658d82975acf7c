"""The panel's page: what it attaches to, its buttons by state, and its rows."""

from __future__ import annotations

import json
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
    stop_trial,
    told,
    visible,
)
from run_folders import NOON, hold_lock, sweep, trained, trial, write_run

import nbtoolkit as nb

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
    assert board.is_set_up_open
    assert "No run yet" in region(panel, "strip")
    assert pressable(panel) == {"launch"}
    assert "1 process" in board.place.value
    assert not visible(board.trials)


def test_a_new_panel_attaches_to_what_runs_else_to_the_newest(opened: Open, out: Path) -> None:
    old = write_run(out, "20250101T000000-old-0001", events=trained({"loss": [1.0]}))
    new = write_run(out, "20260101T000000-new-0002", events=trained({"loss": [1.0]}))
    panel = opened()
    assert panel.folder == new.folder
    assert not controller(panel).board.is_set_up_open
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
        assert "low: 0.001" in controller(bare).board.setup.state.yaml
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


# --- the rows of trials ---


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_rows_stand_best_first_and_a_list_sorts(opened: Open, out: Path, direction: str) -> None:
    best = 2 if direction == "minimize" else 1
    events = [trial(n, value=value, best=n == best) for n, value in enumerate((0.5, 0.9, 0.1))]
    paths = sweep(out, events)
    file = paths.folder / "sweep.yaml"
    file.write_text(file.read_text().replace("maximize", direction))
    panel = opened()
    by_value = [2, 0, 1] if direction == "minimize" else [1, 0, 2]
    assert numbers(panel) == by_value
    board = controller(panel).board
    assert dict(board.sort.options)["score"] == "score"
    board.sort.value = "#"
    assert numbers(panel) == [2, 1, 0]
    board.reverse.value = True
    assert numbers(panel) == [0, 1, 2]
    board.reverse.value = False
    board.sort.value = "score"
    assert numbers(panel) == by_value
    with paths.events.open("a") as log:  # the order stays when a column is added
        event = {"t": NOON, **trial(3, value=0.3), "params": {"another": 1}}
        log.write(json.dumps(event) + "\n")
    assert numbers(panel) == ([2, 3, 0, 1] if direction == "minimize" else [1, 0, 3, 2])
    assert board.sort.value == "score"


def test_what_a_click_changes_is_drawn_even_if_a_poll_comes_before_its_task(
    opened: Open, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three(out)
    panel = opened()
    assert numbers(panel) == [1, 0, 2]
    submit = controller(panel).watcher.submit

    def late(task: Any) -> Any:
        submit(controller(panel).look)  # the one of the thread's own, at the worst moment
        return submit(task)

    monkeypatch.setattr(controller(panel).watcher, "submit", late)
    controller(panel).board.sort.value = "#"
    monkeypatch.undo()
    assert numbers(panel) == [2, 1, 0]


def test_a_running_trial_is_chosen_and_stopped(opened: Open, out: Path) -> None:
    paths = sweep(out, [trial(0, "running"), trial(1, value=0.5, best=True)])
    with hold_lock(paths):
        panel = opened()
        board = controller(panel).board
        assert [number for _, number in board.trial.options] == [0]
        stop_trial(panel, 0)
        until(lambda: [*paths.folder.glob("commands/*.json")], "the request")
        assert "Stopping the trial" in told(panel)
    panel.refresh()
    assert board.stop_trial.disabled


def test_a_text_of_the_page_stays_selected_until_something_is_new(opened: Open, out: Path) -> None:
    """A browser keeps a selection in HTML that is not set again."""
    paths = sweep(out, [trial(0, "running"), trial(1, value=0.5, best=True)])
    with hold_lock(paths):
        board = controller(opened()).board
        drawn: list[str] = []
        board.body.observe(lambda change: drawn.append(change["new"]), "value")
        strips: list[str] = []
        board.strip.observe(lambda change: strips.append(change["new"]), "value")
        until(lambda: len(strips) >= 2, "two seconds")
        assert drawn == []
        with paths.events.open("a") as log:
            log.write(json.dumps({"t": NOON, **trial(2, value=0.7)}) + "\n")
        until(lambda: drawn, "the new trial")


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
    assert "data:image/svg+xml" in page
    assert page.count("completed") >= 1
