"""Fixtures of the panel's tests; a test file may define its own with these names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import panel_functions
import pytest
from panels import Open

import nbtoolkit as nb


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def settings(home: Path) -> dict[str, Any]:
    return {
        "tracking.mlflow": False,
        "train.epochs": 2,
        "runtime.output_dir": str(home / "out"),
        "model.end": str(home / "end"),
    }


@pytest.fixture
def opened(settings: dict[str, Any], home: Path) -> Iterator[Open]:
    """Opens panels; at the end they are closed, and what they started ends."""
    panels: list[nb.Panel] = []

    def open_one(train: Any = panel_functions.reports, space: Any = None, **more: Any) -> nb.Panel:
        panels.append(nb.panel(train, {**settings, **more}, space))
        return panels[-1]

    yield open_one
    home.mkdir(exist_ok=True)
    (home / "end").touch()
    for one in panels:
        one.close()
