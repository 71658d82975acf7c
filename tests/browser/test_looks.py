"""The panel's layout and keyboard operation: nothing clipped, faint, unnamed or unreachable."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from chromium import chromium
from looks import by_tab, nameless, ugly
from person import FRONTS, Front, Person, person
from server import Server
from sheets import PANEL, TRAIN, write_notebook

from nbtoolkit.panel.board import TABS
from nbtoolkit.panel.form import config_fields

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(900)]

SHEET = 1

# What stands on a page once it is drawn; pages of fields are there at once.
DRAWN = {
    "Overview": "4 of 4 trials",
    "Trials": "4 trials, page 1 of 1",
    "Curves": "val_accuracy of each trial",
    "Devices": re.compile("cores of CPU|No device was read"),
    "Log": "rank 0 of 2 has trained",
    "Files": "The same in a cell",
}

PICTURES = os.environ.get("NBTOOLKIT_PICTURES", "")
"""A folder for a picture of each page; empty: none are made."""


def prepares(one: Person) -> None:
    """A sweep that has ended is watched, with a wrong value in the form's optim section."""
    one.opens("sheet.ipynb")
    one.runs(0)
    one.runs(SHEET)
    one.clicks("Sweep")
    one.sees("4 of 4 trials")
    one.goes_to("Log")
    one.chooses("log of", "trial 0, rank 0")


def turns_to(one: Person, page: str) -> None:
    """Turn to a page and wait until it is drawn."""
    one.goes_to(page)
    if page in DRAWN:
        one.sees(DRAWN[page])


def found_on(one: Person, what: str) -> list[str]:
    """What is wrong with what is seen now."""
    if PICTURES:
        one.panel.screenshot(path=Path(PICTURES) / f"{what}.png")
    return [f"{what}: {told}" for told in (*ugly(one.panel), *nameless(one.panel))]


def looks_at_all_pages(one: Person, width: int, theme: Literal["Light", "Dark"]) -> list[str]:
    one.page.set_viewport_size({"width": width, "height": 1500})
    found = []
    for page in TABS:
        turns_to(one, page)
        found += found_on(one, f"{width}-{theme}-{page}")
    return found


def looks_at_all_settings(one: Person, what: str) -> list[str]:
    """Each section of the form, and an error beside a field."""
    one.goes_to("Settings")
    found = []
    for section in dict.fromkeys(field.section for field in config_fields().values()):
        one.chooses("section", section)
        first = next(name for name, field in config_fields().items() if field.section == section)
        one.field(first.removeprefix(f"{section}.")).wait_for()
        found += found_on(one, f"{what}-{section}")
    one.chooses("section", "optim")
    one.types("lr", "fast")
    one.sees("allowed:")
    found += found_on(one, f"{what}-error")
    one.types("lr", "0.001")
    return found


@pytest.mark.parametrize("front", FRONTS)
def test_every_page_can_be_read_at_both_widths_in_both_themes(
    browser: Browser, jupyter: Server, front: Front
) -> None:
    write_notebook(jupyter.root / "sheet.ipynb", TRAIN, PANEL)
    with person(browser, jupyter, front) as anna:
        prepares(anna)
        anna.page.keyboard.press("Control+b")  # the file browser
        found = looks_at_all_settings(anna, "Light")
        found += looks_at_all_pages(anna, 1280, "Light") + looks_at_all_pages(anna, 800, "Light")
        anna.turns("Dark")
        found += looks_at_all_pages(anna, 800, "Dark") + looks_at_all_pages(anna, 1280, "Dark")
        found += looks_at_all_settings(anna, "Dark")
        assert not found, "\n".join(found)


def test_everything_is_done_by_keyboard(browser: Browser, jupyter: Server) -> None:
    write_notebook(jupyter.root / "sheet.ipynb", TRAIN, PANEL)
    with person(browser, jupyter, "lab") as anna:
        prepares(anna)
        for page in TABS:
            turns_to(anna, page)
            expected, seen = by_tab(anna.panel)
            assert seen == expected, page
        keys = anna.page.keyboard
        anna.panel.get_by_role("tab", name="Settings").focus()
        keys.press("ArrowRight")
        keys.press("Enter")
        anna.field("space").wait_for()
        anna.goes_to("Settings")
        anna.field("precision").focus()
        for key in ("Space", "ArrowDown", "Enter"):  # JupyterLab takes arrows where no list is open
            keys.press(key)
        anna.wait_until(lambda: anna.field("precision").input_value() == "fp32", "the choice")
        anna.goes_to("Trials")
        anna.field("largest first").focus()
        keys.press("Space")
        anna.sees("trial ▴")
        anna.goes_to("Overview")
        for key in ("Enter", "Space"):
            anna.button("Launch").focus()
            keys.press(key)
            anna.sees(re.compile("run .*: completed"))
            anna.button("Launch").and_(anna.page.locator(":enabled")).wait_for()


# --- the checks themselves ---

WRONG = """
<div id="right"><label>name <input value="here" style="border:1px solid #767676"></label>
  <button disabled style="color:#ddd">not now</button><p>plain</p></div>
<div id="faint"><p style="color:#999">too light</p></div>
<div id="faded"><p style="opacity:0.4">too light</p></div>
<div id="clipped">
  <div style="width:40px;overflow:hidden;white-space:nowrap">a long label</div></div>
<div id="placeholder"><input aria-label="x" placeholder="a long placeholder"
  style="width:40px;border:1px solid #767676"></div>
<div id="border"><input aria-label="x" value="1" style="border:1px solid #ddd"></div>
<div id="overlapping" style="position:relative;height:40px"><p style="position:absolute">one</p>
  <p style="position:absolute">two</p></div>
<div id="curve"><svg role="img" width="99" height="99">
  <polyline points="0,0 90,90" fill="none" stroke="#eee"/></svg></div>
<div id="cut"><svg role="img" width="99" height="30">
  <text x="60" y="20">a long name</text></svg></div>
<div id="nameless"><button></button><input value="1"></div>
<div id="unreachable">
  <button>one</button><button tabindex="3">two</button><button>three</button></div>
"""


def test_the_checks_find_what_is_wrong() -> None:
    with chromium() as browser:
        page = browser.new_page()
        page.set_content(WRONG)
        part = page.locator
        assert ugly(part("#right")) == nameless(part("#right")) == []
        for name, told in {
            "faint": "contrast 2.85 < 4.5",
            "faded": "contrast 2.85 < 4.5",
            "clipped": "clipped",
            "placeholder": "clipped",
            "border": "contrast of the border",
            "overlapping": "overlapping",
            "curve": "contrast 1.16 < 3",
            "cut": "clipped",
        }.items():
            [found] = ugly(part(f"#{name}"))
            assert found.startswith(told), name
        assert nameless(part("#nameless")) == ["button", "textbox"]
        expected, seen = by_tab(part("#unreachable"))
        assert seen != expected
