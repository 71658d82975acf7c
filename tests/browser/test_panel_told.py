"""The panel in a browser: several pages, closed pages, killed processes, hostile names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from person import kill_supervisor, person
from server import Server
from sheets import PANEL, TRAIN, write_notebook

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(900)]

SHEET = 1

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>$$x$$ 日本"

EVIL_PANEL = PANEL.replace('"name": "digits"', f'"name": {EVIL!r}').replace(
    '"train.epochs": 5', f'"train.epochs": 1, "model.say": {EVIL!r}, "model.{EVIL}": 1'
)


@pytest.fixture
def hold(jupyter: Server) -> Iterator[Path]:
    """While this file is there, trials go on."""
    write_notebook(jupyter.root / "sheet.ipynb", TRAIN, PANEL)
    file = jupyter.root / "hold"
    file.touch()
    yield file
    file.unlink(missing_ok=True)


def test_panels_in_two_notebooks_agree_and_a_closed_page_stops_nothing(
    browser: Browser, jupyter: Server, hold: Path
) -> None:
    write_notebook(jupyter.root / "other.ipynb", TRAIN, PANEL)
    with person(browser, jupyter, "notebook") as anna:
        anna.opens("sheet.ipynb")
        anna.runs(0)
        anna.runs(SHEET)
        anna.clicks("Sweep")
        anna.sees(re.compile("^0/4$"))
        run = anna.watched()
        with person(browser, jupyter, "notebook") as bert:
            bert.opens("other.ipynb")
            bert.runs(0)
            bert.runs(SHEET)
            bert.sees(re.compile("● running"))  # it attaches to what runs by itself
            assert bert.watched() == run
            bert.chooses("run", "(none)")
            bert.sees(re.compile("No run yet"))
            bert.chooses_run(run)
            bert.sees(re.compile("● running"))
            bert.clicks("Pause")
            anna.sees(re.compile("❙❙ paused"))
            anna.clicks("Resume")
            bert.sees(re.compile("● running"))
        anna.saves()
    hold.unlink()  # all pages are closed
    with person(browser, jupyter, "notebook") as anna:
        anna.opens("sheet.ipynb")
        anna.sees(re.compile("^4/4$"))  # the panel as it was left, as its kernel is still there
        anna.sees("Each trial, best so far")
        assert anna.can("Train best settings")
        saved = anna.output(SHEET).locator("[class^=nbtoolkit-saved-]")  # for a saved notebook
        assert saved.count() == 1
        assert not saved.is_visible()


# How soon it is shown is measured by `python -m tests.bench browser`: within 2 s.
def test_a_killed_sweep_is_shown_and_resumed(browser: Browser, jupyter: Server, hold: Path) -> None:
    with person(browser, jupyter, "lab") as anna:
        anna.opens("sheet.ipynb")
        anna.runs(0)
        anna.runs(SHEET)
        anna.clicks("Sweep")
        anna.sees(re.compile("1 running"))
        kill_supervisor(jupyter.root / "outputs" / anna.watched())
        anna.sees(re.compile("Interrupted: its process died.*Resume continues it"))
        hold.unlink()
        anna.clicks("Resume")
        anna.sees(re.compile("^4/4$"))


def test_what_looks_like_html_is_shown_as_it_was_written(browser: Browser, jupyter: Server) -> None:
    write_notebook(jupyter.root / "evil.ipynb", TRAIN, EVIL_PANEL)
    with person(browser, jupyter, "lab") as anna:
        anna.opens("evil.ipynb")
        anna.runs(0)
        anna.runs(SHEET)
        anna.clicks("Sweep")
        anna.sees(re.compile("^4/4$"))
        anna.chooses("log of", "trial 0, rank 0")
        anna.sees(EVIL)
        anna.opens_set_up()
        anna.types("epochs", EVIL)
        anna.sees(re.compile("is not allowed"))
        assert anna.panel.locator("img, script, .MathJax").count() == 0
        assert anna.dialogs == []
