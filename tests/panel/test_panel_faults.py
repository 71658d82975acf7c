"""Bad input and faults on the panel: each is reported in place, and the panel goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import panel_functions
import pytest
from harmless import EVIL, assert_harmless
from kernels import until
from panels import (
    SPACE,
    Open,
    adds,
    click,
    controller,
    ends,
    models,
    numbers,
    pressable,
    region,
    regions,
    status,
    told,
    trials_started,
    types,
    visible,
)
from records import owner_pid
from run_folders import sweep, trained, trial, write_run

import nbtoolkit as nb
from nbtoolkit.errors import ConfigError, LaunchError
from nbtoolkit.run.events import EventReader

# --- the form ---


def test_numbers_of_a_space_are_read_as_in_a_file(opened: Open) -> None:
    panel = opened()
    adds(panel, "study: {metric: score}\nspace: {optim.lr: [1e-4, 1e-3]}\n")
    assert pressable(panel) == {"launch", "sweep"}
    code = controller(panel).board.setup.code.value
    assert "0.0001" in code
    assert "'1e-4" not in code


def test_a_task_takes_what_stood_there_when_its_button_was_pressed(opened: Open) -> None:
    """The panel may be busy then: a launch takes seconds."""
    panel = opened()
    board, free = controller(panel).board, threading.Event()
    controller(panel).watcher.submit(free.wait)
    types(panel, "optim.lr", "0.5")
    board.buttons["launch"].click()
    types(panel, "optim.lr", "[{")
    free.set()
    panel.refresh()
    assert ends(panel) == "completed"
    assert nb.load_config(panel.folder / "config.yaml", env=None).optim.lr == 0.5


def test_a_panel_over_a_file_with_errors_names_file_and_line(home: Path) -> None:
    file = home / "train.yaml"
    file.write_text("seed: 1\noptim: {lrr: 1}\n")
    with pytest.raises(ConfigError, match=r"(?s)train.yaml:2.*did you mean"):
        nb.panel(panel_functions.reports, file)
    (home / "space.yaml").write_text("optim.lr: [")
    with pytest.raises(ConfigError, match=r"space\.yaml"):
        nb.panel(panel_functions.reports, None, home / "space.yaml")


def test_a_panel_over_nothing_shows_the_defaults(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    panel = nb.panel()
    assert pressable(panel) == {"launch"}
    assert panel.config == nb.load_config()
    panel.close()


# --- folders and files ---


def test_an_output_folder_that_is_read_only_is_told(opened: Open) -> None:
    """The system's own, which not even root may write to."""
    panel = opened(**{"runtime.output_dir": "/sys/out"})
    click(panel, "launch")
    assert "/sys/out" in told(panel)
    assert 'role="alert"' in told(panel)
    assert pressable(panel) == {"launch"}


def test_a_run_that_cannot_be_read_says_so_and_is_shown_when_it_can_be(
    opened: Open, home: Path
) -> None:
    paths = write_run(home / "out", "one", events=trained({"loss": [1.0]}))
    panel = opened()
    panel.watch(paths.folder)
    assert status(panel) == "cut off"
    diary = paths.events.read_text()
    paths.events.unlink()
    paths.events.mkdir()  # reading fails, for root too
    until(lambda: status(panel) == "unreadable", "the fault")
    assert "not a regular file" in region(panel, "strip")
    assert pressable(panel) == {"launch"}
    regions(panel)
    paths.events.rmdir()
    paths.events.write_text(diary)
    assert status(panel) == "cut off"


def test_a_line_of_the_diary_that_is_damaged_or_foreign_costs_no_more_than_itself(
    opened: Open, home: Path
) -> None:
    paths = sweep(home / "out", [trial(0, value=0.5)])
    lines: list[Any] = [{}, {"type": "rank"}, {"type": "trial", "number": 7}]
    lines += [{"type": "trial", "number": [1], "state": 3}, {"type": "note", "text": None}]
    with paths.events.open("ab") as diary:
        for line in lines:
            diary.write(json.dumps({"t": 1.0, **line}).encode() + b"\n")
        diary.write(b'{"t": 1.0, "type": "tri\n\xff\x00\n[1]\n')
        diary.write(json.dumps({"t": 2.0, **trial(1, value=0.75)}).encode() + b"\n")
    panel = opened()
    panel.watch(paths.folder)
    assert controller(panel).state.values == {0: 0.5, 1: 0.75}
    regions(panel)
    assert told(panel) == ""


def test_a_running_run_whose_folder_is_deleted_is_gone_and_another_can_be_launched(
    opened: Open, home: Path
) -> None:
    panel = opened(panel_functions.until_told)
    panel.press("launch")
    folder = panel.folder
    assert folder is not None
    until(lambda: (status(panel), controller(panel).state.curves)[1], "its first report")
    supervisor = owner_pid(folder)
    shutil.rmtree(folder, ignore_errors=True)
    until(lambda: not folder.exists() or shutil.rmtree(folder, ignore_errors=True), "its end")
    assert status(panel) == "gone"
    assert "folder was deleted" in region(panel, "strip")
    assert pressable(panel) == {"launch"}
    (home / "end").touch()
    until(lambda: not Path(f"/proc/{supervisor}").exists(), "the end of its supervisor")
    click(panel, "launch")
    assert ends(panel) == "completed"


def test_a_log_of_ten_megabytes_is_shown_by_its_end(opened: Open, home: Path) -> None:
    paths = write_run(home / "out", "one", events=[{"type": "run"}])
    paths.log(0).parent.mkdir(parents=True)
    paths.log(0).write_text("é" * 5_000_000 + "\n" + f"{EVIL} the end\n")
    panel = opened()
    panel.watch(paths.folder)
    tracemalloc.start()
    shown = region(panel, "log")
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()
    assert "&lt;script&gt;" in shown
    assert "the end" in shown
    assert len(shown) < 20_000
    assert_harmless(shown)


def test_an_error_in_the_table_of_trials_leaves_the_panel(
    opened: Open, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("no order")

    monkeypatch.setattr("nbtoolkit.views.trial_rows.ordered", fails)
    panel = opened()
    events = [trial(n, value=n / 10, best=True) for n in range(25)]
    panel.watch(sweep(home / "out", events, count=25).folder)
    panel.refresh()
    board = controller(panel).board
    assert "cannot be shown: ValueError: no order" in board.body.value
    assert "Values by parameter" in board.body.value
    assert board.message.value == ""
    assert board.page.max == 3


def test_a_sweep_of_ten_thousand_trials_can_be_paged_sorted_and_looked_at(
    opened: Open, home: Path
) -> None:
    events = [trial(n, value=n / 10_000, best=True) for n in range(10_000)]
    panel = opened()
    panel.watch(sweep(home / "out", events, count=10_000).folder)
    board = controller(panel).board
    assert numbers(panel)[:2] == [9999, 9998]  # the best first
    board.page.value = 2
    assert numbers(panel)[0] == 9989
    board.page.value = 0  # there is none before the first
    assert numbers(panel)[0] == 9999
    board.sort.value = "#"
    board.reverse.value = True
    assert numbers(panel) == [*range(10)]
    board.filter.value = "failed"
    assert numbers(panel) == []
    assert "10000/10000" in panel.text()


# --- names that are no names ---


def test_parameters_metrics_and_folders_of_any_name_are_text_on_every_page(
    opened: Open, home: Path
) -> None:
    events: list[dict[str, Any]] = [{"type": "note", "text": EVIL}]
    report = {"type": "intermediate", "number": 0, "step": 1, "value": 0.5}
    params = {EVIL: EVIL, "日本": "<b>"}
    events += [trial(0, "running", params=params), report, trial(1, value=0.5, params=params)]
    paths = sweep(home / "<i>out", events, metric=f"{EVIL!r}")
    paths.log(0).parent.mkdir(parents=True)
    paths.log(0).write_text(EVIL)
    panel = opened(**{"runtime.output_dir": str(home / "<i>out"), f"model.{EVIL[1:7]}": EVIL})
    panel.watch(paths.folder)
    assert_harmless(regions(panel))
    names = [name for name, _ in controller(panel).board.sort.options]
    assert any("script" in name for name in names)  # a list shows its entries as text


# --- processes that are killed: the clock looks each second, nobody asks it to ---


def strip(panel: nb.Panel) -> str:
    return str(controller(panel).board.strip.value)


def test_a_killed_run_is_told_without_being_asked_and_goes_on(opened: Open, home: Path) -> None:
    panel = opened(panel_functions.until_told)
    panel.press("launch")
    assert panel.folder is not None
    until(lambda: "step " in strip(panel), "its first report")
    os.kill(owner_pid(panel.folder), signal.SIGKILL)
    until(lambda: "its process died" in strip(panel), "the fault")
    until(lambda: visible(controller(panel).board.buttons["resume"]), "the offer")
    (home / "end").touch()
    folder = panel.folder
    panel.press("resume")
    assert ends(panel) == "completed"
    assert panel.folder == folder


def test_a_killed_rank_of_a_run_is_an_error_with_its_signal(opened: Open, home: Path) -> None:
    panel = opened(panel_functions.until_told)
    panel.press("launch")
    until(lambda: "step " in strip(panel), "its first report")
    os.kill(rank_of(panel), signal.SIGKILL)
    assert ends(panel) == "failed"
    assert "SIGKILL" in region(panel, "strip")
    until(lambda: "resume" in pressable(panel), "the end of its supervisor")


def test_a_killed_rank_of_a_trial_costs_the_trial_and_not_the_sweep(
    opened: Open, home: Path
) -> None:
    panel = opened(panel_functions.until_told, SPACE)
    panel.press("sweep")
    until(lambda: trials_started(panel) == 2, "two trials")
    with pytest.raises(LaunchError, match=r"(?s)trial 77 has already finished.*Allowed: 0, 1"):
        panel.press("stop_trial=77")
    for wrong in ("stop_trial", "stop_trial=-1", "add_trials=0", "add_trials=many"):
        with pytest.raises(LaunchError, match="a whole number"):
            panel.press(wrong)
    controller(panel).board.more.value = -4
    with pytest.raises(LaunchError, match="1 or more"):
        panel.press("add_trials")
    assert 'role="alert"' in told(panel)
    os.kill(rank_of(panel, "trials/0001"), signal.SIGKILL)
    until(lambda: "trial 1 failed" in regions(panel) or "rank 0" in strip(panel), "the fault")
    (home / "end").touch()
    assert ends(panel) == "completed"


def rank_of(panel: nb.Panel, job: str = ".") -> int:
    """The process of rank 0."""
    assert panel.folder is not None
    diary = EventReader(panel.folder / job / "events.jsonl").read()
    return int([event.pid for event in diary if event.type == "rank" and event.pid][-1])


# --- the end ---


def test_close_takes_every_widget_with_it(opened: Open) -> None:
    """ipywidgets keeps all that were made."""
    before = models()
    panel = opened(space=SPACE)
    panel.refresh()
    panel.close()
    assert models() <= before


def test_a_new_panel_needs_few_models(opened: Open, home: Path) -> None:
    """The browser makes one after another before it shows the first value."""
    sweep(home / "out", [trial(n, value=n / 10, best=n == 0) for n in range(12)])
    before = models()
    panel = opened(space=SPACE)
    assert len(numbers(panel)) == 10
    assert len(models() - before) < 260
