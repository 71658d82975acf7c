"""Again: a cell that is run again replaces its panel.

Else the one before would go on looking and drawing, for widgets that nobody sees: ten runs of a
cell, and the browser gets every table ten times a second.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol


class Closes(Protocol):
    """What can be closed."""

    def close(self) -> None:
        """End it."""


_MADE: dict[str, tuple[int, list[Closes]]] = {}
"""Cell -> which run of a cell made panels in it last, and those."""


def replace(panel: Closes, modules: Mapping[str, Any] | None = None) -> None:
    """Keep a new panel, and close those that an earlier run of the same cell has made.

    Args:
        panel: made in the cell that runs now.
        modules: the modules imported so far; default: this process's.
    """
    cell, number = _running(sys.modules if modules is None else modules)
    if not cell:
        return
    before, panels = _MADE.get(cell, (number, []))
    _MADE[cell] = (number, [*panels, panel] if before == number else [panel])
    for other in panels if before != number else []:
        other.close()


def _running(modules: Mapping[str, Any]) -> tuple[str, int]:
    """The id of the cell that runs, and the number of its run; empty where no front end tells."""
    ipython = modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    if not hasattr(shell, "get_parent"):
        return "", 0
    return str(shell.get_parent().get("metadata", {}).get("cellId", "")), shell.execution_count
