"""A saved notebook of somebody else, which JupyterLab does not trust, shows its charts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import papermill
import pytest
from demo import IPC
from kernels import SECONDS
from person import person
from server import Server
from sheets import write_notebook

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(900)]

CELLS = (
    """
import nbtoolkit as nb
from IPython.display import HTML

def train(config, ctx):
    for step in range(5):
        ctx.report({"val_loss": 1 / (step + 1) + config.optim.lr}, step)

settings = {"tracking.mlflow": False}
space = {"study": {"metric": "val_loss", "sampler": "random"}, "budget": {"n_trials": 4},
         "space": {"optim.lr": {"type": "float", "low": 1e-3, "high": 0.1}}}
HTML('<svg id="control"><title>poured</title></svg>')
""",
    "nb.launch(train, settings).plot()",
    "nb.sweep(train, settings, space)",
)
LOADED = "all => all.filter(one => one.naturalWidth > 0).map(one => one.alt)"
IMAGES = "all => all.map(one => [one.naturalWidth, one.clientWidth, one.alt])"


@pytest.fixture
def theirs(jupyter: Server) -> Path:
    """The notebook as papermill saves it, before a browser has a loop of its own."""
    file = jupyter.root / "theirs.ipynb"
    write_notebook(file, *CELLS)
    papermill.execute_notebook(
        file, file, cwd=jupyter.root, progress_bar=False, start_timeout=SECONDS, config=IPC
    )
    return file


def test_charts_are_seen_in_a_notebook_that_is_not_trusted(
    theirs: Path, browser: Browser, jupyter: Server
) -> None:
    stored = theirs.read_text().count("data:image/svg+xml")
    with person(browser, jupyter, "lab", height=3000) as anna:  # cells out of sight are not drawn
        anna.opens(theirs.name)
        anna.output(0).get_by_text("poured").wait_for()  # so it is not trusted
        outputs = anna.page.locator(".jp-Cell-outputArea")
        images = outputs.locator("img")
        anna.wait_until(lambda: len(images.evaluate_all(LOADED)) == stored, "the charts")
        charts = images.evaluate_all(IMAGES)
        assert len(charts) == stored >= 5
        for natural, shown, words in charts:
            assert natural >= 90
            assert shown > 80
            assert words
        text = "\n".join(outputs.all_inner_texts())
        assert not re.search("optim.lr = ", text)  # a hover text
        assert "best so far" in text
        assert not anna.errors
