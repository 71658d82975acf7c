"""A whole session with the panel, by mouse and keyboard, in JupyterLab and Notebook 7."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from person import BOTH_FRONTS, Front, Person, person, short_name
from server import Server
from sheets import PANEL, TRAIN, write_notebook

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(900)]

SHEET, FIRST = 1, 2
"""The cell of the panel, and the one with ``1 + 1``."""


def shows_the_panel(one: Person) -> None:
    one.runs(0)
    one.runs(SHEET)
    one.sees(re.compile("^plan: "))


def refuses_a_wrong_value_and_takes_a_right_one(one: Person) -> None:
    """Set up is open, as nothing was ever run."""
    one.opens_set_up()
    one.types("epochs", "many")
    one.sees(re.compile("'many' is not allowed"))
    one.wait_until(lambda: not one.can("Launch"), "Launch is disabled")
    assert not one.can("Sweep")
    one.types("epochs", "4")
    one.wait_until(lambda: one.can("Launch"), "Launch is enabled")
    one.types("trials", "3")


def uses_the_notebook_meanwhile(one: Person) -> None:
    one.runs(FIRST)
    assert one.output(FIRST).inner_text().strip().endswith("2")


def watches_it(one: Person) -> None:
    """Everything stands on the page."""
    one.sees(re.compile("Best val_accuracy"))
    one.sees("Learning curves")
    one.sees("Workers")
    one.panel.locator("svg polyline").first.wait_for()
    one.sees(re.compile(r"rank 1.*CPU|slot 0.*CPU"))
    one.chooses("log of", "trial 0, rank 1")
    one.sees(re.compile("rank 1 of 2 has trained"))
    one.chooses("log of", "newest running")


def stops_a_trial(one: Person, number: int) -> None:
    """It ends, and the next one begins."""
    one.stops_trial(number)
    one.wait_until(lambda: number + 1 in one.numbers(), "the next trial")
    one.sees(re.compile("^stopped"))


def pauses_resumes_and_asks_for_more(one: Person) -> None:
    one.clicks("Pause")
    one.sees(re.compile("❙❙ paused"))
    one.types("add", "2")
    one.clicks("+2 trials")
    one.sees(re.compile("/5$"))
    one.clicks("Resume")
    one.sees(re.compile("● running"))


def stops_and_resumes(one: Person) -> None:
    one.clicks("Stop")
    one.sees(re.compile("■ stopped"))
    one.clicks("Resume")
    one.sees(re.compile("● running"))


def comes_back_after_a_restart(one: Person, run: str) -> None:
    """The panel attaches to what runs by itself."""
    one.restarts()
    shows_the_panel(one)
    one.sees(re.compile("● running"))
    assert one.watched() == run
    assert short_name(run) in one.chosen("run")


def trains_the_best(one: Person) -> None:
    one.clicks("Train best settings")
    one.wait_until(lambda: "-best-" in one.watched(), "the run")
    one.sees(re.compile("✓ completed"))
    one.sees(re.compile("Best val_loss"))


def copies_the_form(one: Person) -> None:
    one.opens_set_up()
    one.types("epochs", "77")
    shown = one.field("the same as a cell")
    one.wait_until(lambda: "'train.epochs': 77" in shown.input_value(), "the code")


# The short form of the one in Notebook 7 is in test_panel_told.py: two notebooks.
@pytest.mark.parametrize("front", BOTH_FRONTS)
def test_a_whole_session(browser: Browser, jupyter: Server, front: Front) -> None:
    write_notebook(jupyter.root / "sheet.ipynb", TRAIN, PANEL, "1 + 1")
    hold, outputs = jupyter.root / "hold", jupyter.root / "outputs"
    hold.touch()
    before = {one.name for one in outputs.glob("*-*")}  # of the session in the other front end
    with person(browser, jupyter, front) as anna:
        anna.opens("sheet.ipynb")
        shows_the_panel(anna)
        refuses_a_wrong_value_and_takes_a_right_one(anna)
        anna.button("Sweep").dblclick()
        anna.sees(re.compile("^0/3$"))
        uses_the_notebook_meanwhile(anna)
        watches_it(anna)
        anna.menu("Kernel", "kernelmenu:interrupt")
        run = anna.watched()
        assert {one.name for one in outputs.glob("*-*")} - before == {run}
        stops_a_trial(anna, 0)
        pauses_resumes_and_asks_for_more(anna)
        stops_and_resumes(anna)
        comes_back_after_a_restart(anna, run)
        hold.unlink()
        anna.sees(re.compile("^5/5$"))
        trains_the_best(anna)
        copies_the_form(anna)
        assert not anna.errors
