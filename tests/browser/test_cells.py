"""Cells show launches and searches live, in both themes, and keep the output afterwards."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from looks import ugly
from person import Person, person
from server import Server
from sheets import SETTINGS, TRAIN, write_notebook

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(900)]

LAUNCH, SWEEP, BACKGROUND, STOP = 2, 3, 4, 5
SEEN = {LAUNCH: re.compile("rank 0 of 2 has trained"), SWEEP: re.compile("^0/4$")}
"""What stands in a cell once there is something to look at."""
CELLS = (
    "nb.launch(train, config)",
    "nb.sweep(train, config, space)",
    "run = nb.launch(train, config, wait=False)",
    "run.stop()",
)


def look(one: Person, index: int, what: str) -> list[str]:
    """What is wrong with a cell's outputs."""
    if folder := os.environ.get("NBTOOLKIT_PICTURES"):
        one.output(index).screenshot(path=Path(folder) / f"cell-{what}.png")
    outputs = one.output(index).locator(".jp-OutputArea-output").all()
    assert outputs
    return [f"{what}: {told}" for output in outputs for told in ugly(output)]


def runs_and_looks(one: Person, cell: int, hold: Path, theme: str) -> list[str]:
    """Look while it waits for the file to go, and after its end."""
    hold.touch()
    one.runs(cell, wait=False)
    one.output(cell).get_by_text("● running").first.wait_for()
    one.output(cell).get_by_text(SEEN[cell]).first.wait_for()
    found = look(one, cell, f"{theme}-{cell}-live")
    hold.unlink()
    one.waits_for(cell)
    one.output(cell).get_by_text("✓ completed").first.wait_for()
    return found + look(one, cell, f"{theme}-{cell}-ended")


def test_cells_show_what_runs_and_what_came_of_it(browser: Browser, jupyter: Server) -> None:
    write_notebook(jupyter.root / "cells.ipynb", TRAIN, SETTINGS, *CELLS)
    hold = jupyter.root / "hold"
    with person(browser, jupyter, "lab") as anna:
        anna.opens("cells.ipynb")
        anna.runs(0)
        anna.runs(1)
        found = runs_and_looks(anna, LAUNCH, hold, "light")
        anna.turns("Dark")
        found += look(anna, LAUNCH, "dark") + runs_and_looks(anna, SWEEP, hold, "dark")
        hold.touch()
        anna.runs(BACKGROUND)
        anna.runs(STOP)
        anna.output(BACKGROUND).get_by_text("■ stopped").first.wait_for()
        found += look(anna, BACKGROUND, "stopped")
        hold.unlink()
        assert not found, "\n".join(found)
