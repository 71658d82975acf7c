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
from sheets import PANEL, TRAIN, write_notebook

LARGER = {'"n_trials": 4': '"n_trials": 12', '"train.epochs": 5': '"train.epochs": 12'}


def main(folder: Path) -> None:
    """Take all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home, server(Path(home) / "jupyter") as jupyter:
        sheet = PANEL
        for small, large in LARGER.items():
            sheet = sheet.replace(small, large)
        write_notebook(jupyter.root / "panel.ipynb", TRAIN, sheet)
        with chromium() as browser, person(browser, jupyter, "lab", height=1400) as anna:
            anna.opens("panel.ipynb")
            anna.page.keyboard.press("Control+b")  # the file browser
            anna.page.set_viewport_size({"width": 1050, "height": 1400})
            anna.runs(0)
            anna.runs(1)
            take_all(anna, folder)


def take_all(one: Person, folder: Path) -> None:
    """While a sweep runs, and once it has ended."""
    one.clicks("Sweep")
    one.sees(re.compile("[4-9] of 12 trials"))
    take(one, folder, "overview")
    one.sees("12 of 12 trials")
    one.goes_to("Curves")
    one.sees("Importance for val_accuracy")
    take(one, folder, "curves")
    one.goes_to("Settings")
    one.chooses("section", "distributed")
    one.types("world_size", "three")
    one.sees("allowed:")
    take(one, folder, "settings")
    one.types("world_size", "2")
    one.goes_to("Trials")
    one.chooses("sort by", "val_accuracy")
    one.sees("val_accuracy ▾")
    one.turns("Dark")
    take(one, folder, "trials-dark")


def take(one: Person, folder: Path, name: str) -> None:
    """A picture of the panel."""
    one.page.mouse.move(0, 0)  # no tooltip
    one.panel.screenshot(path=folder / f"panel-{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
