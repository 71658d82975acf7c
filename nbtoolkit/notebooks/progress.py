"""One line a cell: which one runs, what it says last, how long it took."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Literal, TextIO, get_args

from nbtoolkit.errors import NotebookError
from nbtoolkit.runtime.host import in_kernel

Display = Literal["auto", "text", "off"]

_REFRESH = 0.2  # seconds between two states of the line that is live


class Progress:
    """Writes a line for each cell; on a terminal the line lives while its cell runs.

    Args:
        display: ``"auto"`` (live on a terminal, finished cells elsewhere), ``"text"`` (finished
            cells), ``"off"``.
        cells: how many there are.
        stream: where to; default: stdout in a notebook, else stderr.

    Raises:
        NotebookError: there is no such display.
    """

    def __init__(self, display: Display, cells: int, stream: TextIO | None = None) -> None:
        if display not in get_args(Display):
            raise NotebookError(
                f"display is {display!r}", allowed=", ".join(map(repr, get_args(Display)))
            )
        self._stream = stream or (sys.stdout if in_kernel(sys.modules) else sys.stderr)
        self._on = display != "off"
        self._live = display == "auto" and self._stream.isatty()
        self._cells = cells
        self._begun = self._drawn = 0.0
        self._label = ""

    def begin(self, number: int, source: str) -> None:
        """A cell begins.

        Args:
            number: which one, from 1.
            source: its code; the first line of it is shown that says something.
        """
        self._begun = time.monotonic()
        self._label = f"[{number}/{self._cells}] {_gist(source)}"
        self._draw("")

    def output(self, text: str) -> None:
        """The running cell has written something."""
        if time.monotonic() - self._drawn >= _REFRESH:
            self._draw((text.strip().splitlines() or [""])[-1])

    def end(self, word: str = "") -> None:
        """The running cell has ended.

        Args:
            word: how, where it did not end well.
        """
        if not self._on:
            return
        line = "  ".join([self._label, self._seconds(), *([word] if word else [])])
        print(f"\r\x1b[K{line}" if self._live else line, file=self._stream, flush=True)

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._begun:.1f} s"

    def _draw(self, last: str) -> None:
        if not self._live:
            return
        self._drawn = time.monotonic()
        line = f"{self._label}  {self._seconds()}  {last}"
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(f"\r\x1b[K{line[:width]}")
        self._stream.flush()


def _gist(source: str) -> str:
    lines = [line.strip() for line in source.splitlines()]
    told = [line for line in lines if line and not line.startswith(("#", "import ", "from "))]
    return (told or lines or [""])[0][:60]
