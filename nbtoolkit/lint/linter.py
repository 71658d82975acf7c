"""Apply every rule to a notebook, and print what is found."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
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

# --- find ---


# Commands that IPython takes for magics where a line begins with them ("automagic").
_MAGICS = ("pip", "conda", "cd", "ls", "cp", "mv", "rm", "mkdir", "cat")

_OF_CELLS = (undefined_names, out_of_order, absolute_paths)
_OF_THE_PROGRAM = (
    device_in_kernel,
    fixed_device,
    built_before_launch,
    unguarded_writes,
    lone_collectives,
    unseeded_splits,
)


def find_hazards(path: str | os.PathLike[str]) -> list[Hazard]:
    """What will go wrong in a notebook on another machine, at another time or in several ranks.

    Nothing is run. A comment ``# nb: ignore[code]`` on a line, or alone on the one above, allows
    what is meant.

    Args:
        path: the notebook.

    Returns:
        The hazards, from top to bottom.

    Raises:
        NotebookError: it cannot be read.
        MissingExtra: pyflakes is not installed.
    """
    cells = read_cells(read_as_saved(Path(path).expanduser()))
    program = NotebookProgram(cells)
    found = [*_not_python(cells), *_parameters_cells(cells), *_unknown_ignores(cells)]
    for look in _OF_CELLS:
        found += look(cells)
    for ask in _OF_THE_PROGRAM:
        found += ask(program)
    ignored = {cell.number: cell.ignored for cell in cells}
    kept = (one for one in found if one.code not in ignored.get(one.cell, {}).get(one.line, ()))
    return sorted(kept, key=lambda one: (one.cell, one.line))


def _not_python(cells: list[Cell]) -> Iterator[Hazard]:
    for cell in cells:
        if cell.error is not None:
            what = f"the cell is not Python: {cell.error.msg}"
            word = (cell.error.text or "").partition(" ")[0]
            do = f"write %{word}: only a person's kernel guesses it" if word in _MAGICS else ""
            yield hazard("not-python", what, cell=cell.number, line=cell.error.lineno or 0, do=do)


def _parameters_cells(cells: list[Cell]) -> Iterator[Hazard]:
    tagged = [cell.number for cell in cells if cell.is_parameters]
    if not tagged:
        what = "no cell is tagged 'parameters': it always runs with the same settings"
        yield hazard("no-parameters", what)
    for number in tagged[1:]:
        what = f"a second cell tagged 'parameters'; the first is cell {tagged[0]}"
        yield hazard("two-parameters", what, cell=number)


def _unknown_ignores(cells: list[Cell]) -> Iterator[Hazard]:
    """A slip in a comment would allow nothing, or be thought to."""
    for cell in cells:
        for line, codes in cell.ignored.items():
            for code in codes:
                if code not in ADVICE:
                    yield _unknown_ignore(cell.number, line, code)


def _unknown_ignore(cell: int, line: int, code: str) -> Hazard:
    near = get_close_matches(code, ADVICE, n=1)
    what = f"no hazard is called {code!r}" if code else "it does not say which hazard"
    do = f"did you mean # nb: ignore[{near[0]}]?" if near else ""
    return hazard("unknown-ignore", what, cell=cell, line=line, do=do)


# --- report ---
# What ``nbtoolkit lint`` prints of several notebooks: sentences, or JSON.


def find_all(notebooks: Iterable[Path]) -> dict[Path, list[Hazard]]:
    """The hazards of each notebook.

    Raises:
        NotebookError: one cannot be read.
        MissingExtra: pyflakes is not installed.
    """
    return {path: find_hazards(path) for path in notebooks}


def report(found: Mapping[Path, list[Hazard]], *, as_json: bool = False) -> str:
    """All hazards as text.

    Args:
        found: notebook -> its hazards.
        as_json: a JSON list, an object for each hazard: notebook, code, cell, line, what, do.
    """
    if as_json:
        rows = [
            {"notebook": str(path), **one.to_dict()}
            for path, hazards in found.items()
            for one in hazards
        ]
        return json.dumps(rows, indent=2)
    lines = [one.sentence(str(path)) for path, hazards in found.items() for one in hazards]
    many = "1 hazard" if len(lines) == 1 else f"{len(lines) or 'no'} hazards"
    looked_at = "1 notebook" if len(found) == 1 else f"{len(found)} notebooks"
    return "\n".join([*lines, f"{many} in {looked_at}"])
