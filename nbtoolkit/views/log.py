"""Log: the last lines that a rank wrote."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from nbtoolkit.search.table import SweepTable
from nbtoolkit.views.markup import boxed, said
from nbtoolkit.views.state import State

LINES = 20
"""Lines that are shown."""

_BYTES, _WIDTH = 16_000, 300  # read from the end; characters of a line
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def log_names(state: State | None) -> dict[str, Path]:
    """The logs that can be looked at: ``"rank 0"`` or ``"trial 7, rank 0"`` -> file.

    Of a sweep those of trials that run, then of the ones that ended last.
    """
    if state is None:
        return {}
    found = _logs(state.paths.folder, "")
    if isinstance(state.table, SweepTable):
        for trial in [*state.table.running, *state.table.waiting, *state.table.last()]:
            found |= _logs(state.trial(trial.number).folder, f"trial {trial.number}, ")
    if state.kind == "cv":
        for folder in sorted((state.paths.folder / "folds").glob("*")):
            found |= _logs(folder, f"fold {folder.name}, ")
    return found


def log(file: Path | None, lines: int = LINES) -> str:
    """The end of a log as HTML.

    Args:
        file: the log; None: none is chosen.
        lines: how many of its last lines.
    """
    if file is None:
        return ""
    text = log_text(file, lines)
    style = "margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px"
    return boxed(f'<pre style="{style}">{escape(text)}</pre>' if text else said("nothing written"))


def log_text(file: Path, lines: int = LINES) -> str:
    """The same as text: bars in their last state, no colours; empty where there is nothing."""
    try:
        with file.open("rb") as raw:
            raw.seek(max(raw.seek(0, 2) - _BYTES, 0))
            text = raw.read(_BYTES).decode(errors="replace")
    except OSError:
        return ""
    last = text.rstrip("\n").split("\n")[-lines:]
    return "\n".join(_line(line) for line in last)


def _line(line: str) -> str:
    """What is left of a line that a progress bar has overwritten."""
    seen = _ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2])
    return seen if len(seen) <= _WIDTH else f"{seen[:_WIDTH]}…"


def _logs(folder: Path, prefix: str) -> dict[str, Path]:
    files = {int(p.parent.name): p for p in folder.glob("ranks/[0-9]*/log.txt")}
    return {f"{prefix}rank {rank}": files[rank] for rank in sorted(files)}
