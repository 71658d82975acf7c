"""What ``nbtoolkit lint`` prints of several notebooks: sentences, or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from nbtoolkit.lint.find import find_hazards
from nbtoolkit.lint.hazard import Hazard


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
