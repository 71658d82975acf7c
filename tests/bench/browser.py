"""The panel in JupyterLab, measured by the page's own clock: from input to visible change."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.figures import Figure, in_fresh_process, median

TESTS = Path(__file__).parents[1]
TIMES, KILLS = 20, 5

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.browser.person import Person

# Milliseconds from an event on the page until ``done(node)``; what is seen is what the page holds.
STOPWATCH = """([node, event, done]) => {
  window.taken = null;
  const isDone = new Function("node", `return ${done}`);
  const key = (e) => { if (event !== "keydown" || e.key === "Enter") begin(); };
  const begin = () => {
    document.removeEventListener(event, key, true);
    const began = performance.now();
    const look = () => {
      if (!isDone(node)) return;
      seen.disconnect();
      window.taken = performance.now() - began;
    };
    const seen = new MutationObserver(look);
    const all = {subtree: true, childList: true, attributes: true, characterData: true};
    seen.observe(document.body, all);
  };
  document.addEventListener(event, key, true);
}"""


def figures() -> list[Figure]:
    """All figures of the panel in a browser; none where there is no browser."""
    sys.path[:0] = [str(TESTS / "support"), str(TESTS / "browser")]
    from chromium import MISSING, find_chromium

    if not find_chromium():
        print(MISSING)
        return []
    measured = in_fresh_process("tests.bench.browser")
    return [
        Figure("browser: panel up in JupyterLab", measured["up"] / 1000, "s", 1.0, 2.0),
        Figure("browser: 1 + 1 while a sweep runs, median", measured["cell"], "ms", 100.0, 200.0),
        Figure("browser: click answered, median", measured["click"], "ms", 200.0, 400.0),
        Figure("browser: click answered, slowest of 20", measured["slowest"], "ms"),
        Figure("browser: a killed sweep told, median", measured["killed"], "s", 2.0, 4.0),
    ]


def measure() -> dict[str, float]:
    """Measure with a server, a browser and a sweep on two workers."""
    sys.path[:0] = [str(TESTS / "support"), str(TESTS / "browser")]
    from chromium import chromium
    from person import person
    from server import server
    from sheets import PANEL, TRAIN, write_notebook

    with tempfile.TemporaryDirectory() as home, server(Path(home) / "jupyter") as jupyter:
        write_notebook(jupyter.root / "panel.ipynb", TRAIN, PANEL, "1 + 1")
        hold = jupyter.root / "hold"
        hold.touch()
        with chromium() as browser, person(browser, jupyter, "lab", height=2000) as anna:
            anna.opens("panel.ipynb")
            anna.runs(0)
            up = time_to_the_panel(anna)
            anna.clicks("Sweep")
            anna.sees("0 of 4 trials")
            anna.goes_to("Curves")
            anna.sees("val_accuracy while training")
            cells = [time_of_a_cell(anna, 2) for _ in range(TIMES)]
            clicks = [time_of_a_click(anna, at) for at in range(TIMES)]
            hold.unlink()
            anna.goes_to("Overview")
            anna.sees("4 of 4 trials")
            hold.touch()
            killed = [time_to_the_news(anna, jupyter.root / "outputs") for _ in range(KILLS)]
            hold.unlink()
    return {
        "killed": median(killed),
        "up": up,
        "cell": median(cells),
        "click": median(clicks),
        "slowest": max(clicks),
    }


def time_to_the_panel(one: Person) -> float:
    """From Shift+Enter to the panel's buttons."""
    cell = one.cell(1)
    cell.locator(".jp-InputPrompt").first.click()
    watch(one, cell, "keydown", "node.querySelector('button[title^=Search]:not(:disabled)')")
    one.page.keyboard.press("Shift+Enter")
    return taken(one)


def time_of_a_cell(one: Person, index: int) -> float:
    """From Ctrl+Enter to the number before the cell, which comes with the answer."""
    cell, before = one.cell(index), one.prompt(index)
    cell.locator(".jp-InputPrompt").first.click()
    prompt = "node.querySelector('.jp-InputPrompt').textContent.replace(/\\D/g, '')"
    watch(one, cell, "keydown", f"{prompt} && {prompt} !== '{before}'")
    one.page.keyboard.press("Control+Enter")
    return taken(one)


def time_of_a_click(one: Person, at: int) -> float:
    """From a click on Pause or Go on, in turn, to the button that cannot be pressed again."""
    button = one.button("Go on" if at % 2 else "Pause")
    one.wait_until(button.is_enabled, "the button")
    watch(one, button, "click", "node.disabled")
    button.click()
    return taken(one)


def time_to_the_news(one: Person, outputs: Path) -> float:
    """Seconds from the kill of a sweep's process to the panel saying so."""
    from person import kill_supervisor

    one.clicks("Sweep")  # after a kill it resumes the same one
    one.sees(": running")
    run = one.chosen("watch")
    kill_supervisor(outputs / run)
    began = time.perf_counter()
    one.sees(f"{run}: cut off")
    return time.perf_counter() - began


def watch(one: Person, node: Locator, event: str, done: str) -> None:
    one.page.evaluate(STOPWATCH, [node.element_handle(), event, done])


def taken(one: Person) -> float:
    one.wait_until(lambda: one.page.evaluate("window.taken !== null"), "what is measured")
    return float(one.page.evaluate("window.taken"))


if __name__ == "__main__":
    print(json.dumps(measure()))
