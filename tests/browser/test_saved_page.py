"""A saved notebook shows one page wherever it is read: by anybody, exported, and as a report."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import nbformat
import papermill
import pytest
from demo import IPC
from kernels import SECONDS
from nbconvert import HTMLExporter
from nbformat.sign import NotebookNotary
from person import person
from server import Server
from sheets import write_notebook

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(900)]

CELLS = (
    """
import nbtoolkit as nb
from IPython.display import HTML

def train(config, ctx):
    print("trained at", config.optim.lr)
    for step in range(5):
        ctx.report({"val_loss": 1 / (step + 1) + config.optim.lr}, step)

settings = {"tracking.mlflow": False}
space = {"study": {"metric": "val_loss", "sampler": "random"}, "budget": {"n_trials": 4},
         "space": {"optim.lr": {"type": "float", "low": 1e-3, "high": 0.1}}}
HTML('<svg id="control"><title>poured</title></svg>')
""",
    "nb.launch(train, settings)",
    "nb.sweep(train, settings, space)",
    "nb.panel(train, settings, space)",
    "nb.report('outputs')",
)
RUN, SWEEP, PANEL, REPORT = 1, 2, 3, 4
"""The cells with pages."""

# What is seen of each card. A picture is an image in a notebook and SVG in a widget or a file, so
# texts inside SVG do not count: the picture's own words do.
CARDS = """all => all.filter(card => card.checkVisibility()).map(card => {
  const pictures = [...card.querySelectorAll("img, svg[role=img]")].map(picture => [
    picture.getAttribute("alt") || picture.getAttribute("aria-label"),
    picture.getBoundingClientRect().width > 80 && picture.naturalWidth !== 0,
  ]);
  card.querySelectorAll("svg").forEach(picture => picture.remove());
  return [card.innerText, pictures];
})"""
CARD = ".tex2jax_ignore"
OUTPUTS = ".jp-Notebook .jp-Cell-outputArea"


class SeenCard(NamedTuple):
    """What is seen of a card: its text, and the words of its pictures."""

    text: str
    pictures: tuple[str, ...]


def seen_cards(cards: Locator) -> list[SeenCard]:
    """The visible cards; each picture is drawn."""
    seen = []
    for text, pictures in cards.evaluate_all(CARDS):
        assert all(is_drawn for _, is_drawn in pictures)
        words = tuple(words for words, _ in pictures)
        seen.append(SeenCard(re.sub(r"\s+", " ", text).strip(), words))
    return seen


@pytest.fixture
def notebook(jupyter: Server) -> Path:
    """The notebook as papermill saves it, before a browser has a loop of its own."""
    file = jupyter.root / "theirs.ipynb"
    write_notebook(file, *CELLS)
    papermill.execute_notebook(
        file, file, cwd=jupyter.root, progress_bar=False, start_timeout=SECONDS, config=IPC
    )
    return file


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page without Jupyter."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    yield page
    page.close()


def stored_pages(notebook: Path, page: Page) -> list[list[SeenCard]]:
    """The cards of the first page of each cell, as its HTML is stored."""
    pages = []
    for cell in nbformat.read(notebook, as_version=4).cells:
        stored = [output.get("data", {}).get("text/html", "") for output in cell.outputs]
        page.set_content(next((html for html in stored if CARD[1:] in html), ""))
        pages.append(seen_cards(page.locator(CARD)))
    return pages


def exported(notebook: Path, page: Page) -> list[SeenCard]:
    """The cards in nbconvert's HTML."""
    text, _ = HTMLExporter().from_filename(str(notebook))
    file = notebook.with_suffix(".html")
    file.write_text(text)
    page.goto(file.as_uri(), wait_until="domcontentloaded")  # its scripts lie on the internet
    return seen_cards(page.locator(CARD))


def opened(
    notebook: Path, browser: Browser, at: Server, *, count: int, trusted: bool
) -> list[SeenCard]:
    """The cards in JupyterLab, as soon as there are so many: cells out of sight come later."""
    copy = notebook.with_stem("trusted" if trusted else "not-trusted")
    copy.write_text(notebook.read_text())
    if trusted:
        notary = NotebookNotary(data_dir=str(at.root.parent / "JUPYTER_DATA_DIR"))
        notary.sign(nbformat.read(copy, as_version=4))
        notary.store.close()
    with person(browser, at, "lab", height=8000) as anna:
        anna.opens(copy.name)
        if trusted:
            anna.output(0).locator("svg#control").wait_for()
            anna.strip.locator(CARD).wait_for()  # until then the saved page is shown
        else:
            anna.output(0).get_by_text("poured").wait_for()
        cards = anna.page.locator(f"{OUTPUTS} {CARD}")
        visible = cards.locator("visible=true")
        anna.wait_until(lambda: visible.count() >= count, f"{count} cards")
        images = anna.page.locator(f"{OUTPUTS} img")
        loaded = "all => all.every(image => image.complete)"
        anna.wait_until(lambda: images.evaluate_all(loaded), "the pictures")
        seen = seen_cards(cards)
        assert not anna.errors
    return seen


def test_the_page_is_the_same_wherever_it_is_read(
    notebook: Path, browser: Browser, jupyter: Server, page: Page
) -> None:
    pages = stored_pages(notebook, page)
    run, sweep = pages[RUN], pages[SWEEP]
    titles = "sweep-.... ✓ completed 4/4, Best val_loss, Each trial, Learning curves, Values by p"
    titles += ", Importance, Trials 1 to 4 of 4, Workers, Log trial ., Settings and files"
    for card, title in zip(sweep, titles.split(", "), strict=True):
        assert re.match(title, card.text)
    assert [len(card.pictures) for card in sweep] == [0, 0, 1, 1, 1, 0, 0, 1, 0, 0]
    assert "best so far" in sweep[2].text
    assert not re.search("optim.lr = ", str(pages))  # a hover text

    assert pages[PANEL] == sweep
    overview, *rest = pages[REPORT]
    assert rest == sweep + run
    page.goto((notebook.parent / "outputs/report.html").as_uri())
    assert seen_cards(page.locator(CARD)) == [overview, *rest]

    # The values of the cells stand between the pages: a run's is a card, a sweep's a line.
    everywhere = exported(notebook, page)
    values = [card for card in everywhere if card not in [*run, *sweep, overview]]
    assert [card.text.partition(" ")[0] for card in values] == ["run", sweep[0].text[:10] + ":"]
    assert everywhere == [*run, values[0], *sweep, values[1], *sweep, overview, *rest]

    for trusted in (False, True):
        seen = opened(notebook, browser, jupyter, count=len(everywhere), trusted=trusted)
        assert seen == everywhere
