"""A whole session with the panel, by mouse and keyboard, in JupyterLab and Notebook 7."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from person import FRONTS, Front, Person, person
from server import Server
from sheets import PANEL, TRAIN, write_notebook

import nbtoolkit as nb

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(900)]

SHEET, FIRST = 1, 2
"""The cell of the panel, and the one with ``1 + 1``."""


def begins(one: Person) -> None:
    """Open the notebook and run its cells down to the panel."""
    one.opens("sheet.ipynb")
    shows_the_panel(one)


def shows_the_panel(one: Person) -> None:
    one.runs(0)
    one.runs(SHEET)
    one.sees("devices:")


def refuses_a_wrong_value_and_takes_a_right_one(one: Person) -> None:
    one.goes_to("Settings")
    one.types("epochs", "many")
    one.sees("allowed:")
    one.wait_until(lambda: not one.can("Launch"), "Launch is disabled")
    assert not one.can("Sweep")
    one.types("epochs", "4")
    one.wait_until(lambda: one.can("Launch"), "Launch is enabled")
    one.goes_to("Search")
    one.types("trials", "3")


def uses_the_notebook_meanwhile(one: Person) -> None:
    one.runs(FIRST)
    assert one.output(FIRST).inner_text().strip().endswith("2")


def watches_it(one: Person) -> None:
    """Every page while it runs."""
    one.goes_to("Trials")
    one.sees(re.compile(r"\d trials, page 1 of 1"))
    one.goes_to("Curves")
    one.sees("val_accuracy while training")
    one.panel.locator("svg polyline").first.wait_for()
    one.goes_to("Devices")
    one.sees(re.compile(r"rank 1: .* cores of CPU"))
    one.goes_to("Log")
    one.chooses("log of", "trial 0, rank 1")
    one.sees("rank 1 of 2 has trained")
    one.goes_to("Overview")


def pauses_goes_on_and_asks_for_more(one: Person) -> None:
    one.clicks("Pause")
    one.sees(re.compile("digits-[0-9a-f]{4}: paused"))
    one.types("more", "2")
    one.clicks("Add trials")
    one.sees(re.compile("of 5 trials"))
    one.clicks("Go on")
    one.sees(re.compile("digits-[0-9a-f]{4}: running"))


def stops_a_trial(one: Person, number: int) -> None:
    """It ends, and the next one begins."""
    one.types("trial", str(number))
    one.clicks("Stop trial")
    one.goes_to("Trials")
    one.sees(f"{number + 2} trials, page 1")
    one.goes_to("Overview")


def stops_and_goes_on(one: Person) -> None:
    one.clicks("Stop")
    one.sees(re.compile(": stopped"))
    one.clicks("Go on")
    one.sees(re.compile(": running"))


def comes_back_after_a_restart(one: Person, run: str) -> None:
    one.restarts()
    shows_the_panel(one)
    one.chooses("watch", run)
    one.sees(re.compile(f"{run}: running"))


def trains_the_best(one: Person) -> None:
    one.clicks("Train the best")
    one.sees(re.compile("run .*-best-.*: completed"))
    one.sees(re.compile(r"val_accuracy 0\.\d+"))


def saves_and_loads(one: Person) -> None:
    one.goes_to("Settings")
    one.types("epochs", "4")
    one.goes_to("Files")
    one.types("file", "mine.yaml")
    one.clicks("Save")
    one.sees("saved to")
    one.goes_to("Settings")
    one.types("epochs", "77")
    one.goes_to("Files")
    one.sees("'train.epochs': 77")
    one.clicks("Load")
    one.sees("loaded mine.yaml")
    one.goes_to("Settings")
    assert one.field("epochs").input_value() == "4"


# The short form of the one in Notebook 7 is in test_panel_told.py: two notebooks.
@pytest.mark.parametrize("front", FRONTS)
def test_a_whole_session(browser: Browser, jupyter: Server, front: Front) -> None:
    write_notebook(jupyter.root / "sheet.ipynb", TRAIN, PANEL, "1 + 1")
    hold, outputs = jupyter.root / "hold", jupyter.root / "outputs"
    hold.touch()
    before = {one.name for one in outputs.glob("*-*")}  # of the session in the other front end
    with person(browser, jupyter, front) as anna:
        begins(anna)
        refuses_a_wrong_value_and_takes_a_right_one(anna)
        anna.button("Sweep").dblclick()
        anna.goes_to("Overview")
        anna.sees("of 3 trials")
        uses_the_notebook_meanwhile(anna)
        watches_it(anna)
        anna.menu("Kernel", "kernelmenu:interrupt")
        run = anna.chosen("watch")
        assert {one.name for one in outputs.glob("*-*")} - before == {run}
        stops_a_trial(anna, 0)
        pauses_goes_on_and_asks_for_more(anna)
        stops_and_goes_on(anna)
        comes_back_after_a_restart(anna, run)
        hold.unlink()
        anna.sees("5 of 5 trials")
        anna.goes_to("Overview")
        trains_the_best(anna)
        saves_and_loads(anna)
        assert not anna.errors
    assert nb.load_config(jupyter.root / "mine.yaml", env=None).train.epochs == 4
