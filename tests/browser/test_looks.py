"""The panel's layout and keyboard operation: nothing clipped, faint, unnamed or unreachable."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from chromium import chromium
from looks import by_tab, nameless, ugly
from page_folders import sweep
from person import BOTH_FRONTS, Front, Person, person
from server import Server
from sheets import PANEL, TRAIN, write_notebook

from nbtoolkit.views.page import page_html
from nbtoolkit.views.state import read_state

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(900)]

SHEET = 1

PICTURES = os.environ.get("NBTOOLKIT_PICTURES", "")
"""A folder for a picture of each page; empty: none are made."""


def prepares(one: Person) -> None:
    """A sweep that has ended is shown."""
    one.opens("sheet.ipynb")
    one.runs(0)
    one.runs(SHEET)
    one.clicks("Sweep")
    one.sees(re.compile("^4/4$"))
    one.sees(re.compile("✓ completed"))


def found_on(one: Person, what: str) -> list[str]:
    """What is wrong with what is seen now."""
    if PICTURES:
        one.panel.screenshot(path=Path(PICTURES) / f"{what}.png")
    return [f"{what}: {told}" for told in (*ugly(one.panel), *nameless(one.panel))]


def looks_at_it(one: Person, width: int, theme: Literal["Light", "Dark"]) -> list[str]:
    """The page, with *Set up* closed, open, and with an error."""
    one.page.set_viewport_size({"width": width, "height": 1900})
    one.opens_set_up(closed=True)
    one.page.wait_for_timeout(300)
    found = found_on(one, f"{width}-{theme}-closed")
    one.opens_set_up()
    one.page.wait_for_timeout(300)
    found += found_on(one, f"{width}-{theme}-open")
    one.types("learning rate", "0,01")
    one.sees(re.compile("decimal point"))
    found += found_on(one, f"{width}-{theme}-error")
    one.types("learning rate", "0.001")
    return found


@pytest.mark.parametrize("front", BOTH_FRONTS)
def test_the_page_can_be_read_at_both_widths_in_both_themes(
    browser: Browser, jupyter: Server, front: Front
) -> None:
    write_notebook(jupyter.root / "sheet.ipynb", TRAIN, PANEL)
    with person(browser, jupyter, front) as anna:
        prepares(anna)
        if front == "lab":  # its side bar is open at first, that of Notebook 7 is closed
            anna.page.keyboard.press("Control+b")
        found = looks_at_it(anna, 1280, "Light") + looks_at_it(anna, 390, "Light")
        anna.turns("Dark")
        found += looks_at_it(anna, 800, "Dark") + looks_at_it(anna, 1280, "Dark")
        sweep = anna.watched()
        anna.clicks("Launch")  # a run has other cards
        anna.wait_until(lambda: anna.watched() not in ("", sweep), "the run")
        anna.sees(re.compile("✓ completed"))
        found += looks_at_it(anna, 1280, "Dark")
        assert not found, "\n".join(found)


def test_everything_is_done_by_keyboard(browser: Browser, jupyter: Server) -> None:
    write_notebook(jupyter.root / "sheet.ipynb", TRAIN, PANEL)
    with person(browser, jupyter, "lab") as anna:
        prepares(anna)
        keys = anna.page.keyboard
        anna.panel.get_by_role("button", name=re.compile("^[▸▾] Set up$")).focus()
        keys.press("Enter")
        anna.button("▾ Set up").wait_for()
        expected, seen = by_tab(anna.panel)
        assert seen == expected
        anna.field("precision").focus()
        for key in ("Space", "ArrowDown", "Enter"):  # JupyterLab takes arrows where no list is open
            keys.press(key)
        anna.wait_until(lambda: anna.field("precision").input_value() != "", "the choice")
        anna.field("sort").focus()
        for key in ("Space", "ArrowDown", "Enter"):
            keys.press(key)
        anna.wait_until(lambda: anna.numbers() == [3, 2, 1, 0], "the order")
        for key in ("Enter", "Space"):
            before = anna.watched()
            anna.button("Launch").focus()
            keys.press(key)
            anna.wait_until(lambda before=before: anna.watched() != before, "the run")
            anna.sees(re.compile("✓ completed"))
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


# Grounds and texts are those of VS Code's themes; Colab's light theme is as the first.
@pytest.mark.parametrize(("ground", "colour"), [("#ffffff", "#3b3b3b"), ("#1f1f1f", "#cccccc")])
def test_a_stored_page_can_be_read_without_jupyter(
    ground: str, colour: str, tmp_path: Path
) -> None:
    stored = page_html(read_state(sweep(tmp_path).folder))
    style = f"background:{ground};color:{colour};margin:8px;font-family:sans-serif"
    with chromium() as browser:
        for width in (1280, 390):
            page = browser.new_page(viewport={"width": width, "height": 1000})
            page.set_content(f'<body style="{style}">{stored}</body>')
            assert page.locator("img").count() > 5
            assert not ugly(page.locator("body"))
            assert page.evaluate("document.documentElement.scrollWidth") == width
            page.close()
