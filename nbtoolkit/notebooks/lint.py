"""Find hazards in notebooks without running them (``nbtoolkit lint``)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from nbtoolkit.notebooks.document import read_as_saved
from nbtoolkit.notebooks.lint_rules import (
    Hazard,
    built_before_launch,
    device_in_kernel,
    fixed_device,
    lone_collectives,
    unguarded_writes,
)
from nbtoolkit.notebooks.program import Cell, NotebookProgram, read_cells
from nbtoolkit.text_table import counted

_RULES = (
    device_in_kernel,
    fixed_device,
    built_before_launch,
    unguarded_writes,
    lone_collectives,
)

_IGNORE = re.compile(r"#\s*nb:\s*ignore\[([^\]]*)\]")


def find_hazards(path: str | os.PathLike[str]) -> list[Hazard]:
    """Find what fails on another machine or in several ranks.

    Nothing is run. A comment ``# nb: ignore[code]`` on a line, or alone on the line above, allows
    a hazard.

    Args:
        path: the notebook.

    Returns:
        The hazards, from top to bottom.

    Raises:
        NotebookError: the notebook cannot be read.
    """
    cells = read_cells(read_as_saved(Path(path).expanduser()))
    program = NotebookProgram(cells)
    hazards = [hazard for rule in _RULES for hazard in rule(program)]
    kept = [each for each in hazards if not _is_ignored(each, cells[each.cell - 1])]
    return sorted(kept, key=lambda hazard: (hazard.cell, hazard.line))


def _is_ignored(hazard: Hazard, cell: Cell) -> bool:
    """Whether a comment on the hazard's line, or alone on the line above, allows it."""
    here = cell.lines[hazard.line - 1]
    above = "".join(cell.lines[hazard.line - 2 : hazard.line - 1])
    comments = here + (above if above.lstrip().startswith("#") else "")
    codes = ",".join(_IGNORE.findall(comments)).split(",")
    return hazard.code in [code.strip() for code in codes]


def report(hazards: Mapping[Path, list[Hazard]], *, as_json: bool = False) -> str:
    """Format hazards as text, or as JSON.

    Args:
        hazards: notebook -> its hazards.
        as_json: return a JSON list with an object per hazard: notebook, code, cell, line, what, do.
    """
    pairs = [(str(path), hazard) for path, in_file in hazards.items() for hazard in in_file]
    if as_json:
        rows = [{"notebook": path, **asdict(hazard)} for path, hazard in pairs]
        return json.dumps(rows, indent=2)
    lines = [hazard.sentence(path) for path, hazard in pairs]
    count = counted(len(lines), "hazard") if lines else "no hazards"
    return "\n".join([*lines, f"{count} in {counted(len(hazards), 'notebook')}"])
