"""The panel in JupyterLab, measured by the page's own clock: from input to visible change."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.figures import Figure, in_fresh_process, median

TESTS = Path(__file__).parents[1]
TIMES, KILLS, WINDOWS = 20, 5, 3

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


# When each step of a running trial is first seen on the page, and the slowest frame.
RECORDER = """() => {
  window.seen = [];
  const look = () => {
    for (const [, trial, step] of document.body.textContent.matchAll(/trial (\\d+), step (\\d+)/g))
      window.seen.push([Date.now() / 1000, +trial, +step]);
  };
  const all = {subtree: true, childList: true, characterData: true};
  new MutationObserver(look).observe(document.body, all);
}"""
FRAMES = """() => new Promise((done) => {
  const began = performance.now();
  let last = began, slowest = 0;
  const frame = (now) => {
    slowest = Math.max(slowest, now - last);
    last = now;
    now - began < 10000 ? requestAnimationFrame(frame) : done(slowest);
  };
  requestAnimationFrame(frame);
})"""


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
        Figure("browser: first value, from Shift+Enter", measured["first"] / 1000, "s", 0.5, 2.0),
        Figure("browser: 1 + 1 while a sweep runs, median", measured["cell"], "ms", 100.0, 200.0),
        Figure("browser: click answered, median", measured["click"], "ms", 200.0, 400.0),
        Figure("browser: click answered, slowest of 20", measured["slowest"], "ms"),
        Figure("browser: report in a rank to the screen, p95", measured["report"], "s", 1.2, 2.4),
        Figure("browser: slowest frame in 10 s of a sweep, median", measured["frame"], "ms", 50.0),
        Figure("browser: slowest frame in 10 s of a sweep, worst of 3", measured["worst"], "ms"),
        Figure("browser: slowest frame in 10 s before the sweep", measured["before"], "ms"),
        Figure("browser: a killed sweep shown, median", measured["killed"], "s", 2.0, 4.0),
    ]


def measure() -> dict[str, float]:
    """Measure with a server, a browser and a sweep on two slots."""
    sys.path[:0] = [str(TESTS / "support"), str(TESTS / "browser")]
    from chromium import chromium
    from person import person
    from server import server
    from sheets import ONE, TRAIN, write_notebook

    with tempfile.TemporaryDirectory() as home, server(Path(home) / "jupyter") as jupyter:
        write_notebook(jupyter.root / "panel.ipynb", TRAIN.replace("0.05", "0.5"), ONE, "1 + 1")
        hold, outputs = jupyter.root / "hold", jupyter.root / "outputs"
        hold.touch()
        with chromium() as browser, person(browser, jupyter, "lab", height=2000) as anna:
            anna.opens("panel.ipynb")
            anna.runs(0)
            up = time_to(anna, "button[title^=Search]:not(:disabled)")
            before = slowest_frames(anna)
            anna.clicks("Sweep")
            anna.sees(re.compile("2 running"))
            anna.sees(re.compile(r"trial 1, step \d+"))
            cells = [time_of_a_cell(anna, 2) for _ in range(TIMES)]
            frames = slowest_frames(anna)
            report = time_of_reports(anna, outputs / anna.watched())
            first = time_to(anna, "svg")
            clicks = [time_of_a_click(anna, at) for at in range(TIMES)]
            hold.unlink()
            anna.sees(re.compile("^4/4$"))
            hold.touch()
            killed = [time_to_the_news(anna, outputs) for _ in range(KILLS)]
            hold.unlink()
    return {
        "killed": median(killed),
        "up": up,
        "first": first,
        "frame": median(frames),
        "worst": max(frames),
        "before": median(before),
        "report": report,
        "cell": median(cells),
        "click": median(clicks),
        "slowest": max(clicks),
    }


def time_to(one: Person, selector: str) -> float:
    """From Shift+Enter in the panel's cell to something in the panel."""
    cell = one.cell(1)
    cell.locator(".jp-InputPrompt").first.click()
    one.page.evaluate("document.querySelectorAll('.nbtoolkit-panel').forEach((e) => e.remove())")
    watch(one, cell, "keydown", f"node.querySelector('.nbtoolkit-panel {selector}')")
    one.page.keyboard.press("Shift+Enter")
    return taken(one)


def slowest_frames(one: Person) -> list[float]:
    """The slowest frame of each window of ten seconds; other load of the machine is in it."""
    return [float(one.page.evaluate(FRAMES)) for _ in range(WINDOWS)]


def time_of_reports(one: Person, folder: Path) -> float:
    """Seconds from a report in a rank until the page shows it or a later one; 95th percentile."""
    one.page.evaluate(RECORDER)
    began = time.time()
    one.page.wait_for_timeout(20_000)
    seen = one.page.evaluate("window.seen")
    latencies = []
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["type"] == "intermediate" and began < event["t"] < began + 15:
            number, step = event["number"], event["step"]
            times = [t for t, trial, at in seen if trial == number and at >= step]
            latencies += [min(times) - event["t"]] if times else [20.0]
    return sorted(latencies)[int(0.95 * len(latencies))]


def time_of_a_cell(one: Person, index: int) -> float:
    """From Ctrl+Enter to the number before the cell, which comes with the answer."""
    cell, before = one.cell(index), one.prompt(index)
    cell.locator(".jp-InputPrompt").first.click()
    prompt = "node.querySelector('.jp-InputPrompt').textContent.replace(/\\D/g, '')"
    watch(one, cell, "keydown", f"{prompt} && {prompt} !== '{before}'")
    one.page.keyboard.press("Control+Enter")
    return taken(one)


def time_of_a_click(one: Person, at: int) -> float:
    """From a click on Pause or Resume, in turn, to the button that cannot be pressed again."""
    label = "Resume" if at % 2 else "Pause"
    one.wait_until(lambda: one.can(label), "the button")
    button = one.button(label)
    watch(one, button, "click", "node.disabled")
    button.click()
    return taken(one)


def time_to_the_news(one: Person, outputs: Path) -> float:
    """Seconds from the kill of a sweep's process until the panel shows it."""
    from person import kill_supervisor

    one.wait_until(lambda: one.can("Resume") or one.can("Sweep"), "an end")
    one.clicks("Resume" if one.can("Resume") else "Sweep")
    one.sees(re.compile("● running"))
    one.sees(re.compile("[12] running"))
    kill_supervisor(outputs / one.watched())
    began = time.perf_counter()
    one.sees(re.compile("✕ interrupted"))
    return time.perf_counter() - began


def watch(one: Person, node: Locator, event: str, done: str) -> None:
    one.page.evaluate(STOPWATCH, [node.element_handle(), event, done])


def taken(one: Person) -> float:
    one.wait_until(lambda: one.page.evaluate("window.taken !== null"), "what is measured")
    return float(one.page.evaluate("window.taken"))


if __name__ == "__main__":
    print(json.dumps(measure()))
