"""Find the logs of a run or a search, and render the end of one."""

from __future__ import annotations

import re
from pathlib import Path

from nbtoolkit.study.table import SweepTable
from nbtoolkit.views.devices import read_tail
from nbtoolkit.views.markup import code_block, paragraph
from nbtoolkit.views.state import State

_LINES = 20
_TAIL = 16_000  # bytes read from the end
_WIDTH = 300  # characters of a line
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def log_names(state: State | None) -> dict[str, Path]:
    """Return the logs by name: ``"rank 0"`` or ``"trial 7, rank 0"``.

    The first one is the most interesting: of a sweep the newest running trial's, else that of the
    trial that ended last; of a cross-validation the newest fold's.
    """
    if state is None:
        return {}
    logs: dict[str, Path] = {}
    if isinstance(state.table, SweepTable):
        for trial in [*state.table.running[::-1], *state.table.waiting, *state.table.last()]:
            logs |= _rank_logs(state.trial(trial.number).folder, f"trial {trial.number}, ")
    if state.kind == "cv":
        folders = (path for path in state.paths.folder.glob("folds/*") if path.name.isdecimal())
        for folder in sorted(folders, key=lambda folder: int(folder.name), reverse=True):
            logs |= _rank_logs(folder, f"fold {folder.name}, ")
    return logs | _rank_logs(state.paths.folder, "")


def log_html(file: Path) -> str:
    """Render the end of a log."""
    text = log_text(file)
    return code_block(text) if text else paragraph("Nothing was written yet.", faint=True)


def log_text(file: Path, lines: int = _LINES) -> str:
    """Return the last lines of a log without colours, progress bars in their last state."""
    last = read_tail(file, _TAIL).rstrip("\n").split("\n")[-lines:]
    return "\n".join(map(_visible, last))


def _visible(line: str) -> str:
    """Return what is left of a line that a progress bar has overwritten."""
    text = _ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2])
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"


def _rank_logs(folder: Path, prefix: str) -> dict[str, Path]:
    files = {int(path.parent.name): path for path in folder.glob("ranks/[0-9]*/log.txt")}
    return {f"{prefix}rank {rank}": files[rank] for rank in sorted(files)}
