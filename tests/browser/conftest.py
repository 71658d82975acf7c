"""The browser tests' server and browser; skipped loudly where there is no browser."""

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
def jupyter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for a file's tests, as it takes 2 s to start."""
    with server(tmp_path_factory.mktemp("jupyter")) as running:
        yield running


@pytest.fixture
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(autouse=True)
def no_kernel_left(jupyter: Server) -> Iterator[None]:
    yield
    jupyter.end_kernels()
