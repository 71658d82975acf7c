"""Apply every rule to notebooks, and format the hazards as text or JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from nbtoolkit.lint.rules import (
    absolute_paths,
    built_before_launch,
    device_in_kernel,
    fixed_device,
    lone_collectives,
    out_of_order,
    undefined_names,
    unguarded_writes,
    unseeded_splits,
)
from nbtoolkit.lint.source import ADVICE, Cell, Hazard, NotebookProgram, hazard, read_cells
from nbtoolkit.notebooks.document import read_as_saved
from nbtoolkit.text_table import counted, did_you_mean

# Commands that IPython takes for magics if a line begins with them ("automagic").
_MAGICS = ("pip", "conda", "cd", "ls", "cp", "mv", "rm", "mkdir", "cat")

_CELL_RULES = (undefined_names, out_of_order, absolute_paths)
_PROGRAM_RULES = (
    device_in_kernel,
    fixed_device,
    built_before_launch,
    unguarded_writes,
    lone_collectives,
    unseeded_splits,
)


def find_hazards(path: str | os.PathLike[str]) -> list[Hazard]:
    """Find what fails on another machine, at another time or in several ranks.

    Nothing is run. A comment ``# nb: ignore[code]`` on a line, or alone on the line above, allows
    a hazard.

    Args:
        path: the notebook.

    Returns:
        The hazards, from top to bottom.

    Raises:
        NotebookError: the notebook cannot be read.
        MissingExtra: pyflakes is not installed.
    """
    cells = read_cells(read_as_saved(Path(path).expanduser()))
    program = NotebookProgram(cells)
    hazards = [*_not_python(cells), *_parameters_cells(cells), *_unknown_ignores(cells)]
    for cell_rule in _CELL_RULES:
        hazards += cell_rule(cells)
    for program_rule in _PROGRAM_RULES:
        hazards += program_rule(program)
    ignored = {cell.number: cell.ignored for cell in cells}
    kept = (h for h in hazards if h.code not in ignored.get(h.cell, {}).get(h.line, ()))
    return sorted(kept, key=lambda hazard: (hazard.cell, hazard.line))


def _not_python(cells: list[Cell]) -> Iterator[Hazard]:
    for cell in cells:
        if cell.error is not None:
            what = f"the cell is not Python: {cell.error.msg}"
            word = (cell.error.text or "").partition(" ")[0]
            do = f"write %{word}: only an interactive kernel guesses it" if word in _MAGICS else ""
            yield hazard("not-python", what, cell=cell.number, line=cell.error.lineno or 0, do=do)


def _parameters_cells(cells: list[Cell]) -> Iterator[Hazard]:
    tagged = [cell.number for cell in cells if cell.is_parameters]
    if not tagged:
        what = "no cell is tagged 'parameters': the notebook always runs with the same settings"
        yield hazard("no-parameters", what)
    for number in tagged[1:]:
        what = f"a second cell tagged 'parameters'; the first is cell {tagged[0]}"
        yield hazard("two-parameters", what, cell=number)


def _unknown_ignores(cells: list[Cell]) -> Iterator[Hazard]:
    """Find comments with a misspelt or missing code, which allow nothing."""
    for cell in cells:
        for line, codes in cell.ignored.items():
            for code in (code for code in codes if code not in ADVICE):
                what = f"no hazard is called {code!r}" if code else "the comment names no hazard"
                do = did_you_mean(code, ADVICE, "# nb: ignore[{}]")
                yield hazard("unknown-ignore", what, cell=cell.number, line=line, do=do)


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
