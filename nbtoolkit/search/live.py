"""LiveTable: the table of a sweep or of folds in a cell, always the newest; lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from nbtoolkit.runtime.cell import MAX_BYTES, Display
from nbtoolkit.runtime.events import Event

_SECONDS = 1.0  # between two states of the table in a cell


class Table(Protocol):
    """What is shown: SweepTable or FoldTable."""

    def take(self, event: Event) -> None:
        """Take one event."""

    def summary(self) -> str:
        """How far it is, in one line."""

    def html(self) -> str:
        """The whole table for a cell."""

    def line(self, event: Event) -> str | None:
        """What there is to say about an event where there is no cell; None: nothing."""


class LiveTable:
    """Shows a table while somebody waits; called by the thread that waits.

    In a notebook one HTML output is written anew about once a second. In a script and with
    ``display="text"`` each trial or fold that ends is a line.

    Args:
        table: the table; it is handed the events here.
        display: ``"auto"``, ``"text"`` or ``"off"``.
    """

    def __init__(self, table: Table, display: Display) -> None:
        self.table, self._on = table, display != "off"
        self._cell = _display_handle() if display == "auto" else None
        self._shown_at = 0.0
        self._written = 0

    def event(self, event: Event) -> None:
        """Show what an event says."""
        self.table.take(event)
        if event["type"] == "note":
            self.say(("warning: " if event["level"] == "warning" else "") + event["text"])
        elif event["type"] == "stop":
            self.say(f"stopping: {event['reason']}")
        elif self._cell is None and (line := self.table.line(event)):
            self.say(line)

    def say(self, text: str) -> None:
        """Show a line of our own."""
        if self._on and self._written <= MAX_BYTES:
            self._written += len(text)
            print(text)

    def pump(self) -> None:
        """Show the table's present state, if there is a cell and it is time."""
        if self._cell is not None and time.monotonic() - self._shown_at >= _SECONDS:
            self._show()

    def close(self) -> None:
        """Show how it ended."""
        if self._cell is not None:
            self._show()
        elif self._on:
            print(self.table.summary())
            sys.stdout.flush()

    def _show(self) -> None:
        """Running seconds grow, so that the table is new even where no event came."""
        self._shown_at = time.monotonic()
        if self._cell is not None:
            self._cell.update(_html(self.table.html()))


def _display_handle() -> Any:
    """An output of this cell that can be written anew; None where this is no notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    return display(_html(""), display_id=True)  # type: ignore[no-untyped-call] # not annotated


def _html(text: str) -> Any:
    from IPython.display import HTML

    return HTML(text)  # type: ignore[no-untyped-call] # not annotated
