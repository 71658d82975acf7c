"""A user of a notebook's page: opens notebooks, runs cells, clicks, types and reads."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from kernels import SECONDS
from records import owner_pid
from server import Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Locator, Page, Response

Front = Literal["lab", "notebook"]

BOTH_FRONTS = ("lab", pytest.param("notebook", marks=pytest.mark.apart))

_PATHS = {"lab": "/lab/tree/{}?reset", "notebook": "/notebooks/{}"}
_COUNT = """() => {
  const count = (e) => { window.clicked += e.isTrusted && e.detail > 0 ? 1 : 0; };
  if (window.clicked === undefined) document.addEventListener("click", count, true);
  window.clicked = 0;
}"""
_IDLE = '[data-status="idle"]'


def _is_written(answer: Response) -> bool:
    """Whether the server says that it has a file."""
    return answer.request.method == "PUT" and "/api/contents/" in answer.url


class Person:
    """Somebody before one page with one notebook.

    Args:
        page: of the browser.
        at: the server.
        front: JupyterLab or Notebook 7.
    """

    def __init__(self, page: Page, at: Server, front: Front) -> None:
        self.page, self._server, self.front = page, at, front
        self.dialogs: list[str] = []
        self.errors: list[str] = []
        page.set_default_timeout(SECONDS * 1000)
        page.on("dialog", self._answer)
        # What runs while the kernel is still being started is asked for one, and then runs.
        asked = page.locator(".jp-Dialog", has_text="Select Kernel")
        page.add_locator_handler(asked, lambda it: it.locator("button.jp-mod-accept").click())
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    # --- the notebook ---

    def opens(self, name: str) -> None:
        """Open a notebook, and wait until its kernel can be asked."""
        self.page.goto(self._server.url(_PATHS[self.front].format(name)))
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Notebook .jp-Cell")
        self.waits_for_kernel()
        self.errors.clear()  # Notebook 7 misses a command of JupyterLab's while it starts

    def waits_for_kernel(self) -> None:
        """Until the kernel is connected and idle: what is run before is lost."""
        self.page.wait_for_selector(f".jp-Notebook-ExecutionIndicator{_IDLE}")

    def cell(self, index: int) -> Locator:
        """A cell, from 0; the last: -1."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def prompt(self, index: int) -> str:
        """What stands before a cell: its number, or a star."""
        text = self.cell(index).locator(".jp-InputPrompt").first.text_content() or ""
        return re.sub(r"[\[\]:\s]", "", text)

    def runs(self, index: int, *, wait: bool = True) -> None:
        """Run a cell by Shift+Enter; again where the page was not ready yet."""
        before = self.prompt(index)
        self.cell(index).locator(".jp-InputPrompt").first.click()
        for _ in range(20):
            self.page.keyboard.press("Shift+Enter")
            # Pressed again too soon it runs twice, where the page is slow to show the first.
            if self._changes(index, before, seconds=5.0):
                break
            self.cell(index).locator(".jp-InputPrompt").first.click()
            if self._changes(index, before, seconds=1.0):
                break
        if wait:
            self.waits_for(index)

    def waits_for(self, index: int) -> None:
        """Until a cell has run."""
        self.wait_until(lambda: self.prompt(index).isdigit(), f"the end of cell {index}")

    def output(self, index: int) -> Locator:
        """What a cell shows."""
        return self.cell(index).locator(".jp-Cell-outputArea")

    def restarts(self) -> None:
        """Restart the kernel by the menu, and agree in the dialog."""
        self.menu("Kernel", "kernelmenu:restart")
        self.page.click(".jp-Dialog button.jp-mod-accept")
        self.page.wait_for_selector(".jp-Dialog", state="detached")
        self.waits_for_kernel()

    def menu(self, title: str, command: str) -> None:
        """Choose an entry of a menu by its command."""
        self.page.click(f".lm-MenuBar-item:has-text('{title}')")
        self.page.click(f'.lm-Menu li[data-command="{command}"]')

    def saves(self) -> None:
        """Save the notebook, and wait until it is saved."""
        # Notebook 7 does not show that it is still writing, and a page that is closed then has not.
        with self.page.expect_response(_is_written) as answer:
            self.menu("File", "docmanager:save")
        assert answer.value.ok

    def turns(self, theme: str) -> None:
        """Change the theme by the menu: Light or Dark."""
        self.page.click(".lm-MenuBar-item:has-text('Settings')")
        self.page.hover(".lm-Menu-item:has-text('Theme')")
        entry = f'.lm-Menu li[data-command="apputils:change-theme"]:has-text("JupyterLab {theme}")'
        self.page.locator(entry).first.click()
        light = "true" if theme == "Light" else "false"
        self.page.wait_for_selector(f'body[data-jp-theme-light="{light}"]', state="attached")
        self.page.wait_for_selector("#jupyterlab-splash", state="detached")

    # --- the panel ---

    @property
    def panel(self) -> Locator:
        """The newest panel on the page."""
        return self.page.locator(".jupyter-widgets.nbtoolkit-panel").last

    @property
    def strip(self) -> Locator:
        """The panel's first line: status, progress, times and the best value."""
        return self.panel.locator(":scope > .widget-html").nth(1)

    def button(self, label: str) -> Locator:
        """A button by its label."""
        return self.panel.get_by_role("button", name=label, exact=True)

    def clicks(self, label: str) -> None:
        """Click a button, once it can be clicked."""
        self.button(label).click()

    def opens_set_up(self, *, closed: bool = False) -> None:
        """Open *Set up*, or close it, unless it is as wanted."""
        heading = self.panel.get_by_role("button", name=re.compile("^[▸▾] Set up$"))
        if ("▸" in (heading.text_content() or "")) != closed:
            heading.click()

    def field(self, label: str) -> Locator:
        """A visible field by its label."""
        return self.panel.get_by_label(label, exact=True).locator("visible=true").first

    def types(self, label: str, text: str) -> None:
        """Click a field, type in place of what stands there, and leave it."""
        self.field(label).click()
        self.field(label).fill(text)
        self.field(label).press("Tab")

    def chooses(self, label: str, entry: str) -> None:
        """Choose from a list."""
        self.field(label).select_option(entry)

    def chosen(self, label: str) -> str:
        """The entry of a list that is chosen."""
        entry: str = self.field(label).evaluate("e => e.selectedOptions[0].text")
        return entry

    def chooses_run(self, run: str) -> None:
        """Choose from the list of runs by the name, which begins an entry's text."""
        entries = self.field("run").locator("option")
        self.wait_until(
            lambda: entries.filter(has_text=short_name(run)).count(), f"{run} in the list"
        )
        label = entries.filter(has_text=short_name(run)).first.text_content() or ""
        self.field("run").select_option(label=label)

    def watched(self) -> str:
        """The id of the run that is shown; empty: there is none."""
        named = self.strip.locator("b[title]")
        return named.first.get_attribute("title") or "" if named.count() else ""

    def numbers(self) -> list[int]:
        """The trials of the table, from above."""
        rows = self.panel.locator("table", has_text="Δ best").locator("tbody tr")
        cells = rows.locator("td:first-child").all_text_contents()
        return [int(text.lstrip("★ ")) for text in cells]

    def stops_trial(self, number: int) -> None:
        """Choose a running trial, and stop it."""
        if self.chosen("trial") != str(number):
            self.chooses("trial", str(number))
        self.clicks("Stop trial")

    def sees(self, text: str | re.Pattern[str], seconds: float = SECONDS) -> None:
        """Wait until a text stands in the panel."""
        found = self.panel.get_by_text(text).locator("visible=true").first
        found.wait_for(timeout=seconds * 1000)

    def can(self, label: str) -> bool:
        """Whether a button is there and can be pressed."""
        button = self.button(label)
        return button.is_visible() and button.is_enabled()

    def counts_clicks(self) -> None:
        """Count the mouse's clicks on the page from now on; see :attr:`clicked`."""
        self.page.evaluate(_COUNT)

    @property
    def clicked(self) -> int:
        """How often the mouse was clicked."""
        return int(self.page.evaluate("window.clicked"))

    def wait_until(self, look: Callable[[], Any], what: str, seconds: float = SECONDS) -> None:
        """Until ``look()`` is true; the page is given time meanwhile."""
        for _ in range(int(seconds / 0.05)):
            if look():
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"{what} did not come within {seconds:g} s")

    def _changes(self, index: int, before: str, seconds: float) -> bool:
        for _ in range(int(seconds / 0.05)):
            if self.prompt(index) != before:
                return True
            self.page.wait_for_timeout(50)
        return False

    def _answer(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.accept()


def short_name(run: str) -> str:
    """A run's name and 4 hex digits: its id without the time."""
    return run.partition("-")[2]


@contextmanager
def person(
    browser: Browser, at: Server, front: Front, width: int = 1280, height: int = 1000
) -> Iterator[Person]:
    """A person before a new page, which is closed at the end; a failure leaves a picture."""
    page = browser.new_page(viewport={"width": width, "height": height})
    try:
        yield Person(page, at, front)
    except BaseException:
        seen = at.root.parent / f"failed-{front}.png"
        page.screenshot(path=seen)
        print(f"what was seen: {seen}", *page.locator(".jp-Dialog").all_inner_texts())
        print(*page.locator(".jp-Cell-outputArea").all_inner_texts(), sep="\n---\n")
        raise
    finally:
        page.close()


def kill_supervisor(run: Path) -> None:
    """Kill the supervisor of a run or a sweep, as the OOM killer does."""
    os.kill(owner_pid(run), signal.SIGKILL)
