"""TableLines: what a sweep or a cross-validation says in lines: notes, and each trial or fold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from nbtoolkit.runtime.cell import MAX_BYTES, to_stdout
from nbtoolkit.runtime.events import Event
from nbtoolkit.runtime.screen import Shape


class Table(Protocol):
    """What is told: SweepTable or FoldTable."""

    def take(self, event: Event) -> None:
        """Take one event."""

    def summary(self) -> str:
        """How far it is, in one line."""

    def line(self, event: Event) -> str | None:
        """What there is to say about an event; None: nothing."""


class TableLines:
    """Shows lines while somebody waits; called by the thread that waits.

    Args:
        table: is handed the events here.
        shape: how it is shown. With ``"lines"`` and ``"bar"`` each trial or fold that ends is a
            line, with ``"lines"`` the end one, too; ``"off"``: nothing is; else notes only.
        since: unix seconds. Events before are those of earlier sessions, whose lines were shown.
    """

    def __init__(self, table: Table, shape: Shape, *, since: float = 0.0) -> None:
        self.table, self._on, self._since = table, shape != "off", since
        self._each, self._sums_up = shape in ("lines", "bar"), shape == "lines"
        self._written = 0
        self._write: Callable[[str], object] | None = None

    def through(self, write: Callable[[str], object]) -> None:
        """Write lines by this from now on: a bar of ours is on the terminal's last line."""
        self._write = write

    def open(self, *, waits: bool) -> None:
        """Nothing: lines come as things happen."""

    def event(self, event: Event) -> None:
        """Show what an event says."""
        self.table.take(event)
        if event["t"] < self._since:
            return
        if event["type"] == "note":
            self.say(("warning: " if event["level"] == "warning" else "") + event["text"])
        elif event["type"] == "stop":
            self.say(f"stopping: {event['reason']}")
        elif self._each and (line := self.table.line(event)):
            self.say(line)

    def say(self, text: str) -> None:
        """Show a line of our own."""
        if self._on and self._written <= MAX_BYTES:
            self._written += len(text)
            self._print(text)

    def pump(self) -> None:
        """Nothing: lines come as things happen."""

    def close(self) -> None:
        """Say how it ended."""
        if self._sums_up:
            self._print(self.table.summary())
            self._sums_up = False
        if self._on:
            print(end="", flush=True)

    def _print(self, text: str) -> None:
        (self._write or to_stdout)(text + "\n")
