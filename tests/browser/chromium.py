"""Find and start the system's Chromium without a window; the message if there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = f"NO BROWSER HERE ({', '.join(NAMES)}): the panel was not clicked; make test-browser"

# --no-sandbox: CI is root. The others: it says and fetches nothing by itself.
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find_chromium() -> str | None:
    """The program's path; None: there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser, closed at the end."""
    from playwright.sync_api import sync_playwright

    path = find_chromium()
    assert path, MISSING
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=path, headless=True, args=list(_FLAGS), env=dict(os.environ)
        )
        try:
            yield browser
        finally:
            browser.close()
