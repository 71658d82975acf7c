"""Read and press a panel from a test, without a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kernels import until
from page_folders import row_numbers

import nbtoolkit as nb
from nbtoolkit.cards import html
from nbtoolkit.panel.widgets import HIDDEN
from nbtoolkit.views.page import cards_of

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


def visible(widget: Any) -> bool:
    return HIDDEN not in widget._dom_classes


def models() -> set[str]:
    """The ids of all widgets of this process."""
    from ipywidgets.widgets.widget import _instances

    return set(_instances)


def pressable(panel: nb.Panel) -> set[str]:
    """The buttons that are shown and enabled."""
    panel.refresh()
    buttons = controller(panel).board.buttons
    return {name for name, button in buttons.items() if visible(button) and not button.disabled}


def told(panel: nb.Panel) -> str:
    panel.refresh()
    return str(controller(panel).board.message.value)


def trials_started(panel: nb.Panel) -> int:
    panel.refresh()
    return len(controller(panel).state.trials)


def region(panel: nb.Panel, name: str) -> str:
    """What a card of the page shows."""
    panel.refresh()
    if name == "strip":
        return str(controller(panel).board.strip.value)
    shown = cards_of(controller(panel).state, controller(panel).chosen)
    return html([shown[name]], images=False) if name in shown else ""


def regions(panel: nb.Panel) -> str:
    """All that the widgets show, and the page as static HTML."""
    panel.refresh()
    board = controller(panel).board
    parts = [board.strip, board.body, board.message, board.place]
    return "".join(part.value for part in parts) + panel.html()


def numbers(panel: nb.Panel) -> list[int]:
    """The trials' numbers in the table, from above."""
    panel.refresh()
    return row_numbers(controller(panel).state, controller(panel).chosen)


def stop_trial(panel: nb.Panel, number: int) -> None:
    """Choose a running trial and stop it."""
    panel.refresh()
    controller(panel).board.trial.value = number
    controller(panel).board.stop_trial.click()
    panel.refresh()


def types(panel: nb.Panel, name: str, text: str) -> None:
    """Type into a field, or into ``"YAML"``."""
    setup = controller(panel).board.setup
    widget = setup.yaml if name == "YAML" else setup.fields[name]
    widget.value = text


def adds(panel: nb.Panel, text: str) -> None:
    """Type below what stands in the YAML."""
    types(panel, "YAML", controller(panel).board.setup.state.yaml + text)


def error_at(panel: nb.Panel, name: str) -> str:
    """The error beside a field, or of the ``"YAML"``."""
    panel.refresh()
    return str(controller(panel).board.setup.errors[name].value)


def click(panel: nb.Panel, name: str) -> None:
    """What the browser's message does."""
    controller(panel).board.buttons[name].click()
    panel.refresh()


def walk(widget: Any) -> Iterator[Any]:
    """A widget and all in it."""
    yield widget
    for child in getattr(widget, "children", ()):
        yield from walk(child)
