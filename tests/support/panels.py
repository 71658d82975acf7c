"""Read and press a panel from a test, without a browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels import until

import nbtoolkit as nb
from nbtoolkit.panel.board import TABS

SPACE = {
    "study": {"metric": "score", "sampler": "random", "pruner": "none"},
    "budget": {"n_trials": 4},
    "space": {"optim.lr": {"type": "float", "low": 0.01, "high": 0.1}},
}

Open = Callable[..., nb.Panel]


def controller(panel: nb.Panel) -> Any:
    return panel._controller


def status(panel: nb.Panel) -> str:
    panel.refresh()
    return str(controller(panel).state.status)


def ends(panel: nb.Panel) -> str:
    """How what is watched ends, once it has."""
    until(lambda: status(panel) not in ("running", "paused"), "the end")
    return status(panel)


def pressable(panel: nb.Panel) -> set[str]:
    panel.refresh()
    return {name for name, button in controller(panel).board.buttons.items() if not button.disabled}


def told(panel: nb.Panel) -> str:
    panel.refresh()
    return str(controller(panel).board.message.value)


def trials_begun(panel: nb.Panel) -> int:
    panel.refresh()
    return len(controller(panel).state.trials)


def page(panel: nb.Panel, name: str) -> str:
    controller(panel).board.tabs.selected_index = TABS.index(name)
    panel.refresh()
    return str(controller(panel).board.pages[name].value)


def click(panel: nb.Panel, name: str) -> None:
    """What the browser's message does."""
    controller(panel).board.buttons[name].click()
    panel.refresh()
