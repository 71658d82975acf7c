"""Print one line per cell, with what it printed last and how long it took."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any, Literal, TextIO, cast, get_args

from nbtoolkit.errors import NotebookError
from nbtoolkit.host import in_kernel

# --- slow imports ---
# Two imports that are a good part of a small notebook's run, and serve nothing in it.


def skip_slow_imports() -> None:
    """Let papermill load without what it does not need here, as far as that is not loaded yet.

    nbformat loads jsonschema, which takes ``rfc3987_syntax`` where JupyterLab has brought it: as it
    is imported it builds 38 grammars (1.2 s), to check URIs, of which a notebook's schema has none.
    papermill loads ``pyarrow`` (0.2 s), to read notebooks from Hadoop, where MLflow has brought it.
    Both do without them by design. For a process of ours only, not for somebody's kernel.
    """
    modules = cast("dict[str, Any]", sys.modules)
    for name in ("rfc3987_syntax", "pyarrow"):
        modules.setdefault(name, None)  # None: an import of it raises ImportError


# --- progress ---


Display = Literal["auto", "text", "off"]

_REFRESH = 0.2  # seconds between two states of the line that is live


class CellProgress:
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
