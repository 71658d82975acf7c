"""How a kernel died: its memory when it was last seen, its exit code, and what that means."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from nbtoolkit.runtime.limits import ROOT, memory_limit
from nbtoolkit.runtime.processes import children
from nbtoolkit.runtime.table import gib
from nbtoolkit.runtime.verdict import describe

_INTERVAL = 0.2  # seconds between two looks: one costs about a millisecond


@dataclass
class Memory:
    """How much memory a kernel and the processes it started were last seen to use."""

    size: int = 0
    """Bytes; shared pages count for each process."""
    seen: float = 0.0
    """When (``time.monotonic``)."""

    def look(self, pid: int, root: Path = ROOT) -> None:
        """Look, unless that was done a moment ago or the process is gone."""
        now = time.monotonic()
        if now - self.seen < _INTERVAL:
            return
        if size := _tree_size(pid, root):
            self.size, self.seen = size, now

    def __str__(self) -> str:
        if not self.size:
            return "its memory is not known"
        limit = memory_limit()
        of = f" of {gib(limit)}" if limit else ""
        return f"{gib(self.size)}{of} in use {time.monotonic() - self.seen:.1f} s before"


def meaning(code: int | None, asked: bool) -> str:
    """How a kernel ended, in words.

    Args:
        code: its exit code; negative: minus the signal.
        asked: whether a cell asked it to end (``exit()``, ``quit()``).
    """
    if asked or code == 0:
        return "ended its kernel with exit() or quit()"
    return f"lost its kernel: {describe(code)}"


def _tree_size(pid: int, root: Path) -> int:
    families = children()
    todo, size = [pid], 0
    while todo:
        here = todo.pop()
        size += _resident(root / "proc" / str(here) / "status")
        todo += families.get(here, [])
    return size


def _resident(status: Path) -> int:
    """Bytes in memory; 0 for a process that is gone."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
