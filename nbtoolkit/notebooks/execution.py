"""Keep the limits, output, progress, memory and first failure of one notebook run."""

from __future__ import annotations

import re
import shutil
import sys
import time
from dataclasses import dataclass, field
from os import sysconf
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO, get_args

from nbtoolkit.environment.resources import children
from nbtoolkit.errors import NotebookError
from nbtoolkit.host import in_kernel, memory_limit
from nbtoolkit.notebooks.document import executed_copy, is_own_code
from nbtoolkit.notebooks.handle import CellFailure, FailureKind
from nbtoolkit.run.paths import write_whole
from nbtoolkit.text_table import gib

if TYPE_CHECKING:
    from nbformat import NotebookNode

Display = Literal["auto", "text", "off"]
"""How a run shows its cells: live on a terminal, one line per finished cell, or not at all."""

MAX_OUTPUT = 1_000_000
"""Default limit on the output of one cell, in characters; a browser still opens ten such cells."""

# Seconds between two updates of the live line.
_REFRESH_SECONDS = 0.2
# Seconds between two measurements of the kernel's memory; one takes about a millisecond.
_MEMORY_SECONDS = 0.2
# Seconds between two saves while one cell keeps writing output.
_SAVE_SECONDS = 10.0

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PAGE_SIZE = sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a notebook run."""

    cell_timeout: float | None = None
    """Seconds for each cell; None: no limit."""
    timeout: float | None = None
    """Seconds for the whole notebook, from the kernel's start; None: no limit."""
    max_output: int = MAX_OUTPUT
    """Characters of output that the executed copy keeps of each cell."""


class KernelMemory:
    """The last measured memory of a kernel and of the processes it started."""

    def __init__(self) -> None:
        self._size = 0
        self._measured_at = 0.0

    def measure(self, pid: int) -> None:
        """Measure the memory, unless the last measurement is recent or the process has ended."""
        now = time.monotonic()
        if now - self._measured_at >= _MEMORY_SECONDS and (size := _tree_size(pid)):
            self._size, self._measured_at = size, now

    def __str__(self) -> str:
        if not self._size:
            return "its memory is not known"
        limit = memory_limit()
        of_limit = f" of {gib(limit)}" if limit else ""
        age = time.monotonic() - self._measured_at
        return f"{gib(self._size)}{of_limit} in use {age:.1f} s before"


def _tree_size(pid: int) -> int:
    """Resident bytes of a process and its descendants; shared pages count for each process."""
    child_pids = children()
    pending, size = [pid], 0
    while pending:
        current = pending.pop()
        size += _resident_size(current)
        pending += child_pids.get(current, [])
    return size


def _resident_size(pid: int) -> int:
    """Resident bytes of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_SIZE
    except OSError:
        return 0


class CellProgress:
    """Print one line per cell; on a terminal, update the line while the cell runs.

    Args:
        display: ``"auto"`` (live on a terminal, finished cells elsewhere), ``"text"`` (finished
            cells), ``"off"``.
        cells: number of cells.

    Raises:
        NotebookError: ``display`` is none of these.
    """

    def __init__(self, display: Display, cells: int) -> None:
        if display not in get_args(Display):
            raise NotebookError(
                f"display is {display!r}", allowed=", ".join(map(repr, get_args(Display)))
            )
        self._stream = sys.stdout if in_kernel(sys.modules) else sys.stderr
        self._enabled = display != "off"
        self._live = display == "auto" and self._stream.isatty()
        self._cells = cells
        self._started_at = self._drawn_at = 0.0
        self._label = ""

    def start(self, number: int, source: str) -> None:
        """Begin the line of a cell.

        Args:
            number: the cell's number, from 1.
            source: its code; the line shows the first statement that is not an import.
        """
        self._started_at = time.monotonic()
        self._label = f"[{number}/{self._cells}] {_first_statement(source)}"
        self._draw("")

    def output(self, text: str) -> None:
        """Show the last line of the running cell's output."""
        if time.monotonic() - self._drawn_at >= _REFRESH_SECONDS:
            self._draw((text.strip().splitlines() or [""])[-1])

    def finish(self, outcome: str = "") -> None:
        """Complete the line of the running cell.

        Args:
            outcome: how the cell failed; empty if it did not.
        """
        if not self._enabled:
            return
        line = "  ".join([self._label, self._seconds(), *([outcome] if outcome else [])])
        print(f"\r\x1b[K{line}" if self._live else line, file=self._stream, flush=True)

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._started_at:.1f} s"

    def _draw(self, last_line: str) -> None:
        if not self._live:
            return
        self._drawn_at = time.monotonic()
        line = f"{self._label}  {self._seconds()}  {last_line}"
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(f"\r\x1b[K{line[:width]}")
        self._stream.flush()


def _first_statement(source: str) -> str:
    lines = [line.strip() for line in source.splitlines()]
    statements = [line for line in lines if line and not line.startswith(("#", "import ", "from "))]
    return (statements or lines or [""])[0][:60]


@dataclass
class Execution:
    """A running notebook: its files, its limits, and its state so far."""

    copy: Path
    """Path of the executed copy."""
    log: TextIO
    environ: dict[str, str]
    """The kernel's environment variables."""
    cwd: Path
    folder: Path
    """The kernel's private folder."""
    progress: CellProgress
    limits: Limits
    """The time of the whole notebook counts from the creation of this object."""
    memory: KernelMemory = field(default_factory=KernelMemory)
    failure: CellFailure | None = None
    started: bool = False
    """Whether the kernel has started: a cell has begun."""
    notebook: NotebookNode | None = None
    """The notebook with its outputs so far: papermill's own copy of its input."""
    number: int = 0
    """The running cell's number; the injected cell has the number of the cell before it."""
    started_at: float = field(default_factory=time.monotonic)
    _output_size: int = 0
    _omitted: int = 0
    _saved_at: float = 0.0

    def time_left(self) -> float | None:
        """Seconds that the cell which starts now may take; None: no limit. Never 0: no limit."""
        limits = self.limits
        left = [] if limits.cell_timeout is None else [limits.cell_timeout]
        if limits.timeout is not None:
            left.append(self.started_at + limits.timeout - time.monotonic())
        return max(0.01, min(left)) if left else None

    def describe_timeout(self) -> str:
        """Return a sentence without a subject on the limit that was exceeded."""
        limit = self.limits.timeout
        if limit is not None and time.monotonic() - self.started_at >= limit:
            return f"was still running after the {limit:g} s that the notebook may take"
        return f"took longer than the {self.limits.cell_timeout:g} s that a cell may"

    def start_cell(self, cell: NotebookNode) -> None:
        """Record that a cell starts."""
        self.started = True
        self._output_size = self._omitted = 0
        if is_own_code(cell):
            self.number += 1
            self.progress.start(self.number, cell.source)

    def finish_cell(self, cell: NotebookNode, notebook: NotebookNode) -> None:
        """Record that a cell has ended, successfully or not, and save the executed copy."""
        if self._omitted:
            from nbformat.v4 import new_output

            text = f"\n... {self._omitted:,} characters more: {self.log.name}\n"
            cell.outputs.append(new_output("stream", name="stderr", text=text))
        if is_own_code(cell):
            self.progress.finish(self.failure["kind"] if self.failure else "")
        self.save(notebook)

    def fail(self, kind: FailureKind, what: str, traceback: str = "") -> None:
        """Record a failure of the running cell; only the first one counts."""
        if self.failure is None:
            plain = _COLOURS.sub("", traceback)
            self.failure = {"cell": self.number, "kind": kind, "what": what, "traceback": plain}

    def write_output(self, text: str) -> str:
        """Log text that the running cell writes; return the part that the notebook keeps."""
        self.log.write(text)
        self.log.flush()
        self.progress.output(text)
        return text[: self.count_output(len(text))]

    def count_output(self, size: int) -> int:
        """Count an output of ``size`` characters; return how many of them the notebook keeps."""
        kept = max(0, min(size, self.limits.max_output - self._output_size))
        self._output_size += size
        self._omitted += size - kept
        return kept

    def clear_output(self) -> None:
        """Forget the running cell's output so far: the cell called ``clear_output``."""
        self._output_size = self._omitted = 0

    def save_if_due(self, notebook: NotebookNode) -> None:
        """Save the executed copy in the middle of a long cell, every 10 s."""
        if time.monotonic() - self._saved_at >= _SAVE_SECONDS:
            self.save(notebook)

    def save(self, notebook: NotebookNode) -> None:
        """Write the executed copy with the outputs so far."""
        self.notebook, self._saved_at = notebook, time.monotonic()
        write_whole(self.copy, executed_copy(notebook), durable=False)
