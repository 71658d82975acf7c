"""Apply every rule to notebooks, and format the hazards as text or JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from nbtoolkit.notebooks.document import read_as_saved
from nbtoolkit.notebooks.lint_rules import (
    built_before_launch,
    device_in_kernel,
    fixed_device,
    lone_collectives,
    unguarded_writes,
)
from nbtoolkit.notebooks.program import Hazard, NotebookProgram, read_cells
from nbtoolkit.text_table import counted

_RULES = (
    device_in_kernel,
    fixed_device,
    built_before_launch,
    unguarded_writes,
    lone_collectives,
)


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
    ignored = {cell.number: cell.ignored for cell in cells}
    kept = (h for h in hazards if h.code not in ignored.get(h.cell, {}).get(h.line, ()))
    return sorted(kept, key=lambda hazard: (hazard.cell, hazard.line))


def report(hazards: Mapping[Path, list[Hazard]], *, as_json: bool = False) -> str:
    """Format hazards as text, or as JSON.

    Args:
        hazards: notebook -> its hazards.
        as_json: return a JSON list with an object per hazard: notebook, code, cell, line, what, do.
    """
    pairs = [(str(path), hazard) for path, found in hazards.items() for hazard in found]
    if as_json:
        rows = [{"notebook": path, **asdict(hazard)} for path, hazard in pairs]
        return json.dumps(rows, indent=2)
    lines = [hazard.sentence(path) for path, hazard in pairs]
    count = counted(len(lines), "hazard") if lines else "no hazards"
    return "\n".join([*lines, f"{count} in {counted(len(hazards), 'notebook')}"])
