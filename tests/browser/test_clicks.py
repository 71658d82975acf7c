"""Count the clicks of ten common tasks, and the pixels above the first value; nothing listens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from kernels import descendants
from person import Person, person
from server import Server
from sheets import ONE, TRAIN, write_notebook

import nbtoolkit as nb

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(900)]

SHEET = 1

MOST_CLICKS, MOST_PIXELS, MOST_ACTIONS = 14, 110, 3


@pytest.fixture
def hold(jupyter: Server) -> Iterator[Path]:
    """While this file is there, trials continue."""
    write_notebook(jupyter.root / "sheet.ipynb", TRAIN, ONE)
    file = jupyter.root / "hold"
    yield file
    file.unlink(missing_ok=True)


def clicks_for(one: Person, task: Callable[[], object]) -> int:
    """The mouse's clicks while a task is done."""
    one.counts_clicks()
    task()
    return one.clicked


def changes_epochs_and_launches(one: Person) -> None:
    one.types("epochs", "3")
    one.clicks("Launch")
    one.sees(re.compile("✓ completed"))
    one.sees(re.compile("^epoch 3/3|^step 3/3"))


def starts_a_sweep(one: Person) -> None:
    one.clicks("Sweep")
    one.sees(re.compile("2 running"))


def sees_value_trend_and_workers(one: Person) -> None:
    one.sees("Best val_accuracy")
    one.sees("Learning curves")
    one.sees("Each trial, best so far")
    one.sees(re.compile(r"trial [01], step \d+"))


def reads_the_log(one: Person) -> None:
    one.sees(re.compile("rank 0 of 1 has trained"))


def stops_a_running_trial(one: Person) -> None:
    one.stops_trial(0)
    one.wait_until(lambda: 2 in one.numbers(), "the next trial")


def kernel_dies(one: Person, jupyter: Server) -> None:
    """Kill the kernel as the OOM killer does; the server starts it again."""
    children = [psutil.Process(pid) for pid in descendants(jupyter.process.pid)]
    [kernel] = [child for child in children if child.ppid() == jupyter.process.pid]
    kernel.kill()
    one.page.locator(".jp-Dialog").wait_for()


def comes_back(one: Person) -> int:
    """Close the dialog and run both cells; return the number of these actions."""
    one.page.click(".jp-Dialog button.jp-mod-accept")
    one.page.wait_for_selector(".jp-Dialog", state="detached")
    one.waits_for_kernel()
    one.runs(0)
    one.runs(SHEET)
    one.counts_clicks()
    one.sees(re.compile("● running"))
    return 3 + one.clicked


def adds_ten(one: Person) -> None:
    one.clicks("+10 trials")
    one.sees(re.compile("^14/14$"))


def copies_the_best(one: Person, folder: Path) -> None:
    best = nb.attach(folder).result().best_params
    one.sees(re.compile(re.escape(repr(best["optim.lr"]))))


def pixels_above_the_first_value(one: Person) -> float:
    """From the panel's upper edge to the first card."""
    card = one.panel.get_by_text("Best val_accuracy").first.locator("xpath=ancestor::div[2]")
    above, below = one.panel.bounding_box(), card.bounding_box()
    assert above
    assert below
    return below["y"] - above["y"]


def listening(processes: set[int]) -> set[tuple[str, int]]:
    """The addresses at which processes listen."""
    found = set()
    for pid in processes:
        for connection in psutil.Process(pid).net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                found.add(tuple(connection.laddr))
    return found


@pytest.mark.apart
def test_ten_common_tasks(browser: Browser, jupyter: Server, hold: Path) -> None:
    """In as few clicks as docs/panel/buttons.md says; see there for the tasks."""
    outputs = jupyter.root / "outputs"
    # With the file browser beside it, the panel is as wide as without it in 1280 pixels.
    with person(browser, jupyter, "lab", width=1520) as anna:
        anna.opens("sheet.ipynb")
        anna.runs(0)
        quiet = listening(descendants(jupyter.process.pid))
        anna.runs(SHEET)
        clicks = {"launch": clicks_for(anna, lambda: changes_epochs_and_launches(anna))}
        hold.touch()
        clicks["sweep"] = clicks_for(anna, lambda: starts_a_sweep(anna))
        clicks["look"] = clicks_for(anna, lambda: sees_value_trend_and_workers(anna))
        assert listening(descendants(jupyter.process.pid)) == quiet
        run = outputs / anna.watched()
        clicks["log"] = clicks_for(anna, lambda: reads_the_log(anna))
        clicks["stop trial"] = clicks_for(anna, lambda: stops_a_running_trial(anna))
        kernel_dies(anna, jupyter)
        clicks["come back"] = comes_back(anna)
        assert clicks["come back"] <= MOST_ACTIONS
        assert outputs / anna.watched() == run
        hold.unlink()
        anna.sees(re.compile("^4/4$"))
        anna.sees(re.compile("✓ completed"))
        trials = nb.attach(run).result().trials
        complete = trials[trials["state"] == "complete"].sort_values("value", ascending=False)
        clicks["best first"] = clicks_for(anna, lambda: None)
        assert anna.numbers()[: len(complete)] == list(complete.index)
        anna.wait_until(lambda: pixels_above_the_first_value(anna) <= MOST_PIXELS, "72 pixels", 25)
        clicks["add"] = clicks_for(anna, lambda: adds_ten(anna))
        anna.sees(re.compile("✓ completed"))
        clicks["best settings"] = clicks_for(anna, lambda: copies_the_best(anna, run))
        assert sum(clicks.values()) <= MOST_CLICKS, clicks
        assert not anna.errors


# What would be lost if a widget were replaced instead of updated.
_CHOSEN = """() => {
  const e = document.activeElement;
  return [e.tagName, e.value, e.selectionStart, e.selectionEnd];
}"""


def test_no_selection_is_lost_while_a_sweep_runs(
    browser: Browser, jupyter: Server, hold: Path
) -> None:
    hold.touch()
    with person(browser, jupyter, "notebook") as anna:
        anna.opens("sheet.ipynb")
        anna.runs(0)
        anna.runs(SHEET)
        anna.clicks("Sweep")
        anna.sees(re.compile("2 running"))
        anna.chooses("sort", "val_accuracy")
        strip = anna.strip.inner_text()
        anna.opens_set_up()
        for label in ("learning rate", "YAML"):
            field = anna.field(label)
            field.fill("0.01" if label == "learning rate" else "seed: 1")
            for key in ("Home", "Shift+ArrowRight", "Shift+ArrowRight"):
                anna.page.keyboard.press(key)
            chosen = anna.page.evaluate(_CHOSEN)
            assert chosen[3] - chosen[2] == 2
            anna.page.wait_for_timeout(4000)
            assert anna.page.evaluate(_CHOSEN) == chosen
        assert anna.strip.inner_text() != strip, "nothing was updated"
        assert anna.chosen("sort") == "val_accuracy"
