"""nb.panel without a function of its own: a task by name is run by a notebook, in the background.

And what a panel takes up that it did not start: a cross-validation, a sweep judged by folds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fold_functions
import panel_functions
import pytest
from kernels import until
from test_panel import SPACE, Open, ends, page, pressable, status

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
        "data.folder": str(home),
    }


@pytest.fixture
def opened(settings: dict[str, Any], home: Path) -> Iterator[Open]:
    """Opens panels; at the end they are closed, and what they started ends."""
    panels: list[nb.Panel] = []

    def open_one(train: Any = None, space: Any = None, **more: Any) -> nb.Panel:
        panels.append(nb.panel(train, {**settings, **more}, space))
        return panels[-1]

    yield open_one
    home.mkdir(exist_ok=True)
    (home / "end").touch()
    for one in panels:
        one.close()


# --- what was started elsewhere ---


def test_a_stopped_cross_validation_goes_on_with_its_folds(
    opened: Open, settings: dict[str, Any], home: Path
) -> None:
    folds = nb.make_folds([0, 1] * 15, k=3)
    handle = nb.cross_validate(
        fold_functions.waits, nb.load_config(overrides=settings), folds, wait=False, display="off"
    )
    panel = opened(fold_functions.waits)
    panel.watch(handle.paths.folder)
    until(lambda: status(panel) == "running" and desk_folds(panel) == {0}, "the first fold")
    panel.press("stop")
    assert ends(panel) == "stopped"
    until(lambda: "go_on" in pressable(panel), "the end of its owner")
    (home / "open").touch()
    panel.press("go_on")
    until(lambda: status(panel) == "completed", "the end of what was gone on with")
    assert panel.folder == handle.paths.folder
    assert "2     complete  2" in panel.text()
    result = nb.attach(panel.folder).result()
    assert [*result.scores["score"]] == [0.0, 1.0, 2.0]
    assert result.folds == folds


def desk_folds(panel: nb.Panel) -> set[int]:
    return set(panel._desk.state.folds)


def test_a_stopped_sweep_over_folds_goes_on_with_its_folds(
    opened: Open, settings: dict[str, Any], home: Path
) -> None:
    folds = nb.make_folds([0, 1] * 15, k=2)
    config = nb.load_config(overrides=settings)
    handle = nb.sweep(
        panel_functions.until_told, config, SPACE, folds=folds, wait=False, display="off"
    )
    panel = opened(panel_functions.until_told)
    panel.watch(handle.paths.folder)
    until(lambda: status(panel) == "running" and panel._desk.state.table.trials, "a trial")
    panel.press("stop")
    assert ends(panel) == "stopped"
    until(lambda: "go_on" in pressable(panel), "the end of its owner")
    (home / "end").touch()
    panel.press("go_on")
    until(lambda: status(panel) == "completed", "the end of what was gone on with")
    assert "4 of 4 trials" in page(panel, "Overview")
