"""Fixtures of the browser tests: server and browser. Without a browser, the tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from chromium import MISSING, chromium, find_chromium
from server import Server, server

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_chromium():
        return
    for item in items:
        if item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.skip(reason=MISSING))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if any(MISSING in str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])):
        terminalreporter.section(MISSING, sep="!", red=True, bold=True)


@pytest.fixture(scope="module")
def jupyter_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for a file's tests, as it takes 2 s to start."""
    with server(tmp_path_factory.mktemp("jupyter")) as running:
        yield running


@pytest.fixture
def jupyter(jupyter_server: Server) -> Iterator[Server]:
    """The server; a test leaves no kernel in it."""
    yield jupyter_server
    jupyter_server.end_kernels()


@pytest.fixture
def browser(jupyter: Server) -> Iterator[Browser]:
    """A browser of the test's own, which is gone before the kernels are."""
    with chromium() as running:
        yield running
