"""Take the screenshots of docs/panel.md into a given folder; `make screenshots` runs it."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))  # as pytest does it

from chromium import chromium
from person import Person, person
from server import server
from sheets import FRIEDMAN, FRIEDMAN_PANEL, write_notebook


def main(folder: Path) -> None:
    """Take all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home, server(Path(home) / "jupyter") as jupyter:
        write_notebook(jupyter.root / "panel.ipynb", FRIEDMAN, FRIEDMAN_PANEL)
        with chromium() as browser, person(browser, jupyter, "lab", height=1700) as anna:
            anna.opens("panel.ipynb")
            anna.page.keyboard.press("Control+b")  # the file browser
            anna.runs(0)
            anna.runs(1)
            take_all(anna, folder)


def take_all(one: Person, folder: Path) -> None:
    """Before a sweep, while it runs, and once it has ended."""
    one.types("learning rate", "0,01")
    one.sees(re.compile("decimal point"))
    take(one, folder, "setup")
    one.types("learning rate", "0.001")
    one.opens_set_up(closed=True)
    one.clicks("Sweep")
    one.sees(re.compile("^([89]|1[0-9])/20$"))  # the whole sweep takes some seconds
    take(one, folder, "overview")
    one.sees(re.compile("✓ completed"))
    one.turns("Dark")
    one.page.wait_for_timeout(5000)  # the importance
    take(one, folder, "ended-dark")


def take(one: Person, folder: Path, name: str) -> None:
    """A picture of the panel."""
    one.page.mouse.move(0, 0)  # no tooltip
    one.panel.screenshot(path=folder / f"panel-{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
