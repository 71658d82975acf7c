"""Read and press a panel from a test, without a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kernels import until

import nbtoolkit as nb
from nbtoolkit.panel.widgets import HIDDEN, INVISIBLE, SHARED

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
    return not {HIDDEN, INVISIBLE} & {*widget._dom_classes}


def models() -> set[str]:
    """The ids of all widgets of this process, but for the layouts and styles that are shared."""
    from ipywidgets.widgets.widget import _instances

    return set(_instances) - {widget.model_id for widget in SHARED.values()}


def pressable(panel: nb.Panel) -> set[str]:
    """The buttons that are shown and enabled."""
    panel.refresh()
    buttons = controller(panel).board.buttons
    return {name for name, button in buttons.items() if visible(button) and not button.disabled}


def told(panel: nb.Panel) -> str:
    panel.refresh()
    return str(controller(panel).board.message.value)


def trials_begun(panel: nb.Panel) -> int:
    panel.refresh()
    return len(controller(panel).state.trials)


def region(panel: nb.Panel, name: str) -> str:
    """What a part of the page shows."""
    panel.refresh()
    board = controller(panel).board
    return str((board.strip if name == "strip" else board.cards[name]).value)


def regions(panel: nb.Panel) -> str:
    """All that the widgets show, and the page as static HTML."""
    panel.refresh()
    board = controller(panel).board
    parts = [board.strip, board.message, board.place, board.count, *board.cards.values()]
    parts += [row.cells for row in shown_rows(panel)]
    return "".join(part.value for part in parts) + panel.html()


def shown_rows(panel: nb.Panel) -> list[Any]:
    """The rows of the table of trials that are visible."""
    panel.refresh()
    rows = controller(panel).board.table.rows
    return [row for row in rows if row.number is not None]


def numbers(panel: nb.Panel) -> list[int]:
    """The trials' numbers from above."""
    return [row.number for row in shown_rows(panel)]


def settle(panel: nb.Panel) -> None:
    """Let the rows stand long enough for a click to mean the trial that they show."""
    panel.refresh()
    for row in controller(panel).board.table.rows:
        row.since = 0.0


def click(panel: nb.Panel, name: str) -> None:
    """What the browser's message does."""
    controller(panel).board.buttons[name].click()
    panel.refresh()


def walk(widget: Any) -> Iterator[Any]:
    """A widget and all in it."""
    yield widget
    for child in getattr(widget, "children", ()):
        yield from walk(child)
