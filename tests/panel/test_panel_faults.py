"""Bad input and faults on the panel: each is reported in place, and the panel goes on."""

from __future__ import annotations

import itertools
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
from kernels import SECONDS, until
from panels import SPACE, Open, click, controller, ends, page, pressable, status, told, trials_begun
from run_folders import sweep, trained, trial, write_run
from traitlets import TraitError

import nbtoolkit as nb
from nbtoolkit.config.schema import Config
from nbtoolkit.config.yaml_source import parse_value
from nbtoolkit.errors import ConfigError, LaunchError
from nbtoolkit.panel.board import TABS
from nbtoolkit.panel.form import FormState, config_fields
from nbtoolkit.run.events import EventReader

FIELDS = config_fields()

# What people and pastes leave in a field. Most are wrong for most fields, none may break the form.
TYPED = [
    *("[{", "null", "true", "-1", "0", "1.5", ".nan", ".inf", "1e400", "a text", "2h", "-2h"),
    *("[1]", "{a: 1}", "", "   ", "2020-01-01", '"\\0"', "a: b: c", "{1: 2}", "日本", "@", "\x07"),
    *("9" * 5000, "&a {b: *a}", "!!int x", "!!timestamp x", "!!python/name:os.system"),
    EVIL,
]

SPACES = [
    *(
        "[",
        "[" * 500,
        "3",
        "1: 2",
        "study: 3",
        "space: null",
        "optim.lr: null",
        "optim.lr: [[1]]",
        "optim: 3",
    ),
    *("&a {b: *a}", "optim.lr: &a [*a]", "a" * 10_000, "? [a]\n: b", "!!python/name:os.system"),
    *(f"optim.lr: {{type: int, low: {'9' * 5000}}}", f"optim.lr: {{{EVIL!r}: 1}}"),
    f"{EVIL!r}: [1]",
]


# --- the form ---


def test_whatever_is_typed_into_any_field_is_taken_or_told_beside_it() -> None:
    """Taken is what the configuration itself takes, by the same name; lists take no typing."""
    for name, text in itertools.product(FIELDS, TYPED):
        if FIELDS[name].choices and text not in ("[{", "a text"):
            continue
        form = FormState(Config())
        form.texts[name] = text
        checked = form.validate()
        assert set(checked.errors) <= {name}, text
        told = bool(checked.errors or checked.together)
        assert (checked.config is None, told) == (not _accepted(name, text),) * 2, (name, text)


def _accepted(name: str, text: str) -> bool:
    try:
        value = parse_value(text)
        if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
            return False  # as in a file
        free = FIELDS[name].free and value is None  # an empty section
        Config().with_overrides({name: {} if free else value})
    except Exception:  # of whatever kind: it is not taken
        return False
    return True


def test_a_wrong_value_of_its_own_in_every_field_disables_launch_and_sweep(opened: Open) -> None:
    """The first that the field refuses though it is YAML; lists offer only what is right."""
    panel = opened(space=SPACE)
    form = controller(panel).board.form
    for name, field in FIELDS.items():
        right = form.input(name).value
        if field.choices:
            with pytest.raises(TraitError):
                form.input(name).value = "another"
            continue
        wrong = next(one for one in TYPED[1:] if not _accepted(name, one) and len(one) < 50)
        form.input(name).value = wrong
        assert pressable(panel) == set(), (name, wrong)
        assert 'role="alert"' in form.errors[name].value + form.together.value
        form.input(name).value = right
        assert pressable(panel) == {"launch", "sweep"}, name


def test_whatever_is_typed_as_a_space_is_told_below_it() -> None:
    for text, trials in itertools.product(SPACES, ("", "0", "-1", "1.5", "²", "9" * 5000)):
        form = FormState(Config(), text)
        form.trials = trials
        checked = form.validate()
        assert checked.config is not None
        assert checked.sweep_config is None
        assert checked.space_error, text[:40]


def test_numbers_of_a_space_are_read_as_in_a_file(opened: Open) -> None:
    panel = opened(space=SPACE)
    form = controller(panel).board.form
    sweep_config = "study: {metric: score}\nbudget: {n_trials: 2}\n"
    form.space.value = f"{sweep_config}space: {{optim.lr: [1e-4, 1e-3]}}"
    assert pressable(panel) == {"launch", "sweep"}
    assert "0.0001" in page(panel, "Files")
    assert "&#x27;1e-4" not in page(panel, "Files")


def test_a_section_may_be_made_while_another_thread_shows_errors(opened: Open) -> None:
    """Sections are made in the kernel's thread, errors shown in the panel's."""
    panel = opened()
    form = controller(panel).board.form
    made: list[bool] = []

    def make(_: Any) -> None:
        thread = threading.Thread(target=lambda: form.input("optim.lr"))
        thread.start()
        thread.join(SECONDS)
        made.append(not thread.is_alive())

    form.errors["train.epochs"].observe(make, "value")  # in the middle of showing them
    form.input("train.epochs").value = "many"
    assert told(panel) == ""
    assert made
    assert all(made)
    assert "allowed" in form.errors["train.epochs"].value
    assert form.errors["optim.lr"].value == ""


def test_a_task_takes_what_stood_there_when_its_button_was_pressed(
    opened: Open, home: Path
) -> None:
    """The panel may be busy then: a launch takes seconds."""
    panel = opened()
    board, free = controller(panel).board, threading.Event()
    controller(panel).worker.submit(free.wait)
    for name, rate in (("a", "0.25"), ("b", "0.5")):
        board.form.input("optim.lr").value = rate
        board.file.value = str(home / f"{name}.yaml")
        board.save.click()
    board.buttons["launch"].click()
    board.form.input("optim.lr").value = "[{"
    free.set()
    panel.refresh()
    assert nb.load_config(home / "a.yaml", env=None).optim.lr == 0.25
    assert nb.load_config(home / "b.yaml", env=None).optim.lr == 0.5
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


def test_an_output_folder_that_is_read_only_is_told_and_so_is_a_file(opened: Open) -> None:
    """The system's own, which not even root may write to."""
    panel = opened(**{"runtime.output_dir": "/sys/out"})
    click(panel, "launch")
    assert "/sys/out" in told(panel)
    assert 'role="alert"' in told(panel)
    assert pressable(panel) == {"launch"}
    controller(panel).board.file.value = f"/sys/{EVIL.replace('/', '')}.yaml"
    controller(panel).board.save.click()
    assert "Error: [Errno" in told(panel)
    assert "&lt;script&gt;" in told(panel)
    assert_harmless(told(panel))
    controller(panel).board.load.click()
    assert "Allowed: a file in one of" in told(panel)
    assert_harmless(told(panel))


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
    assert "Is a directory" in page(panel, "Overview")
    assert pressable(panel) == {"launch"}
    for name in TABS:
        page(panel, name)
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
    for name in TABS:
        page(panel, name)
    assert told(panel) == ""


def test_a_running_run_whose_folder_is_deleted_is_gone_and_another_can_be_launched(
    opened: Open, home: Path
) -> None:
    panel = opened(panel_functions.until_told)
    panel.press("launch")
    folder = panel.folder
    assert folder is not None
    until(lambda: (status(panel), controller(panel).state.curves)[1], "its first report")
    supervisor = json.loads((folder / "owner.json").read_text())["pid"]
    shutil.rmtree(folder, ignore_errors=True)
    until(lambda: not folder.exists() or shutil.rmtree(folder, ignore_errors=True), "its end")
    assert status(panel) == "gone"
    assert "its folder was deleted" in page(panel, "Overview")
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
    shown = page(panel, "Log")
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()
    assert "&lt;script&gt;" in shown
    assert "the end" in shown
    assert len(shown) < 20_000
    assert_harmless(shown)


def test_a_sweep_of_a_thousand_trials_can_be_paged_sorted_and_looked_at(
    opened: Open, home: Path
) -> None:
    events = [trial(n, value=n / 1000, best=True) for n in range(1000)]
    panel = opened()
    panel.watch(sweep(home / "out", events, count=1000).folder)
    board = controller(panel).board
    for name in TABS:
        page(panel, name)
    page(panel, "Trials")
    board.sort.value, board.part.value = "score", 50
    assert "page 50 of 50" in page(panel, "Trials")
    assert board.part.max == 50
    board.down.value = False
    board.part.value = 1
    assert page(panel, "Trials").index(">0<") > 0
    assert "1000 of 1000 trials" in panel.text()


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
    for name in TABS:
        assert_harmless(page(panel, name) or "<p></p>")
    assert_harmless(panel.html())
    assert EVIL in controller(panel).board.sort.options  # a list shows its entries as text


# --- processes that are killed: the clock looks each second, nobody asks it to ---


def overview(panel: nb.Panel) -> str:
    return str(controller(panel).board.pages["Overview"].value)


def test_a_killed_run_is_told_without_being_asked_and_goes_on(opened: Open, home: Path) -> None:
    panel = opened(panel_functions.until_told)
    panel.press("launch")
    assert panel.folder is not None
    until(lambda: "step " in overview(panel), "its first report")
    os.kill(json.loads((panel.folder / "owner.json").read_text())["pid"], signal.SIGKILL)
    until(lambda: "its process died" in overview(panel), "the fault")
    until(lambda: not controller(panel).board.buttons["go_on"].disabled, "the offer")
    (home / "end").touch()
    folder = panel.folder
    panel.press("go_on")
    assert ends(panel) == "completed"
    assert panel.folder == folder


def test_a_killed_rank_of_a_run_is_an_error_with_its_signal(opened: Open, home: Path) -> None:
    panel = opened(panel_functions.until_told)
    panel.press("launch")
    until(lambda: "step " in overview(panel), "its first report")
    os.kill(rank_of(panel), signal.SIGKILL)
    assert ends(panel) == "failed"
    assert "SIGKILL" in page(panel, "Overview")
    until(lambda: "go_on" in pressable(panel), "the end of its supervisor")


def test_a_killed_rank_of_a_trial_costs_the_trial_and_not_the_sweep(
    opened: Open, home: Path
) -> None:
    panel = opened(panel_functions.until_told, SPACE)
    panel.press("sweep")
    until(lambda: trials_begun(panel) == 2, "two trials")
    controller(panel).board.number.value = 77
    with pytest.raises(LaunchError, match=r"(?s)trial 77 does not run.*Allowed: 0, 1"):
        panel.press("stop_trial")
    os.kill(rank_of(panel, "trials/0001"), signal.SIGKILL)
    until(lambda: "rank 0 died" in page(panel, "Trials"), "the fault")
    (home / "end").touch()
    assert ends(panel) == "completed"


def rank_of(panel: nb.Panel, job: str = ".") -> int:
    """The process of rank 0."""
    assert panel.folder is not None
    diary = EventReader(panel.folder / job / "events.jsonl").read()
    return int([event.pid for event in diary if event.type == "rank" and event.pid][-1])


# --- the end ---


def test_close_takes_every_widget_with_it(opened: Open) -> None:
    """ipywidgets keeps all that were made, each with a layout and a style."""
    from ipywidgets.widgets.widget import _instances

    before = set(_instances)
    panel = opened()
    for name in FIELDS:
        controller(panel).board.form.input(name)
    assert len(_instances) > len(before) + len(FIELDS)
    panel.close()
    assert set(_instances) <= before
