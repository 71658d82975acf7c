"""Glance: what a notebook's file says without nbformat, which takes up to 1.5 s to load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbtoolkit.notebooks.document import (
    INJECTED,
    declared_in,
    declared_parameters,
    read_notebook,
    refuse_syntax_errors,
)
from nbtoolkit.notebooks.parameters import Parameter


@dataclass(frozen=True)
class Glance:
    """The part of a notebook that decides what a run of it computes."""

    code: tuple[str, ...]
    """Its code cells."""
    declared: Mapping[str, Parameter]
    """Its parameters, by name."""


def glance(path: Path) -> Glance:
    """Read a notebook's code and parameters.

    Args:
        path: the notebook. One of an old version, or damaged, is read in the long way.

    Raises:
        NotebookError: there is none, it is no notebook, has two parameters cells, or one that is
            no Python.
    """
    try:
        cells = _plain_cells(json.loads(path.read_text(encoding="utf-8")))
        tagged = [(n, code) for n, (code, tags) in enumerate(cells, 1) if "parameters" in tags]
        return Glance(tuple(code for code, _ in cells), declared_in(tagged, path.name))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SyntaxError):
        return _long_way(path)


def _plain_cells(notebook: Any) -> list[tuple[str, list[str]]]:
    """Source and tags of the code cells of a notebook of version 4, as its JSON has them."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    found = [("".join(cell["source"]), cell["metadata"].get("tags", [])) for cell in cells]
    return [(code, tags) for code, tags in found if INJECTED not in tags]


def _long_way(path: Path) -> Glance:
    notebook = read_notebook(path)
    refuse_syntax_errors(notebook, path.name)
    code = tuple(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return Glance(code, declared_parameters(notebook, path.name))
