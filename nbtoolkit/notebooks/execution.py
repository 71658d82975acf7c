"""Execution: what is known of a notebook while it runs, and how it failed."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from nbtoolkit.notebooks.death import Memory
from nbtoolkit.notebooks.document import executed_copy, is_injected, is_sentinel
from nbtoolkit.notebooks.progress import Progress
from nbtoolkit.runtime.paths import write_whole

if TYPE_CHECKING:
    from nbformat import NotebookNode

_SAVE_SECONDS = 10.0  # between two saves of a cell that goes on writing
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass
class Failure:
    """A cell that did not end well."""

    cell: int
    """Its number among the user's code cells, from 1; 0: before the first."""
    kind: str
    """``error``, ``exit``, ``death``, ``timeout`` or ``kernel`` (it did not start)."""
    what: str
    """A sentence without a subject: ``raised ValueError: no luck``."""
    traceback: str = ""
    """Without colours."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a run of a notebook may take."""

    cell_timeout: float | None = None
    """Seconds a cell may take."""
    timeout: float | None = None
    """Seconds the whole notebook may take, from the kernel's start."""
    max_output: int
    """Characters of output kept of one cell."""


@dataclass
class Execution:
    """A notebook that runs: its files, limits, and what has happened so far."""

    copy: Path
    """Where the executed copy goes."""
    log: TextIO
    environ: dict[str, str]
    """The kernel's environment variables."""
    cwd: Path
    folder: Path
    """The kernel's private folder."""
    progress: Progress
    limits: Limits
    """The notebook's time runs from now."""
    memory: Memory = field(default_factory=Memory)
    failure: Failure | None = None
    started: bool = False
    """Whether the kernel has started: a cell has begun."""
    notebook: NotebookNode | None = None
    """What runs, with its outputs so far: papermill's own copy of what it was given."""
    number: int = 0
    """The running cell's number; the injected cell has its predecessor's."""
    begun: float = field(default_factory=time.monotonic)
    _kept: int = 0
    _hidden: int = 0
    _saved: float = 0.0

    def time_left(self) -> float | None:
        """Seconds the cell that begins now may take; None: no limit. Never 0, which is no limit."""
        cell, whole = self.limits.cell_timeout, self.limits.timeout
        left = [] if cell is None else [cell]
        left += [] if whole is None else [self.begun + whole - time.monotonic()]
        return max(0.01, min(left)) if left else None

    def too_long(self) -> str:
        """Which limit was passed, in words."""
        whole = self.limits.timeout
        if whole is not None and time.monotonic() - self.begun >= whole:
            return f"was still running after the {whole:g} s that the notebook may take"
        return f"took longer than the {self.limits.cell_timeout:g} s that a cell may"

    def begin(self, cell: NotebookNode) -> None:
        """A cell begins."""
        self.started = True
        self._kept = self._hidden = 0
        if cell.cell_type == "code" and not is_injected(cell) and not is_sentinel(cell):
            self.number += 1
            self.progress.begin(self.number, cell.source)

    def end(self, cell: NotebookNode, notebook: NotebookNode) -> None:
        """A cell has ended, well or not."""
        if self._hidden:
            text = f"\n... {self._hidden:,} characters more: {self.log.name}\n"
            cell.outputs.append(_stream(text))
        if cell.cell_type == "code" and not is_injected(cell) and not is_sentinel(cell):
            self.progress.end(self.failure.kind if self.failure else "")
        self.save(notebook)

    def fail(self, kind: str, what: str, traceback: str = "") -> None:
        """The running cell has failed; the first failure stands."""
        clean = _COLOURS.sub("", traceback)
        self.failure = self.failure or Failure(self.number, kind, what, clean)

    def take(self, text: str) -> str:
        """Log what the running cell writes; the part of it that the notebook keeps."""
        self.log.write(text)
        self.log.flush()
        self.progress.output(text)
        return text[: self.room(len(text))]

    def room(self, size: int) -> int:
        """Count an output; how many of its characters the notebook still keeps."""
        kept = max(0, min(size, self.limits.max_output - self._kept))
        self._kept += size
        self._hidden += size - kept
        return kept

    def cleared(self) -> None:
        """The cell's output so far was taken back (``clear_output``)."""
        self._kept = self._hidden = 0

    def save_now_and_then(self, notebook: NotebookNode) -> None:
        """Save in the middle of a long cell, so that one can look."""
        if time.monotonic() - self._saved >= _SAVE_SECONDS:
            self.save(notebook)

    def save(self, notebook: NotebookNode) -> None:
        """Write the executed copy as far as it is."""
        self.notebook, self._saved = notebook, time.monotonic()
        write_whole(self.copy, executed_copy(notebook), durable=False)


def _stream(text: str) -> NotebookNode:
    from nbformat.v4 import new_output

    node: NotebookNode = new_output("stream", name="stderr", text=text)
    return node
