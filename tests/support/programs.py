"""Small notebooks for tests to run as programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_notebook

from nbtoolkit.notebooks.handle import NotebookResult
from nbtoolkit.notebooks.run import run_notebook

PYTHON = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


def write_program(
    folder: Path, *cells: str, declares: str = "", name: str = "work", **metadata: Any
) -> Path:
    """Write a notebook of code cells, the parameters cell first where there is one."""
    code = [new_code_cell(cell) for cell in cells]
    if declares:
        code.insert(0, new_code_cell(declares, metadata={"tags": ["parameters"]}))
    path = folder / f"{name}.ipynb"
    nbformat.write(new_notebook(cells=code, metadata={**PYTHON, **metadata}), path)
    return path


def run_program(folder: Path, *cells: str, declares: str = "", **options: Any) -> NotebookResult:
    """Write a notebook and run it; nothing is shown, no page is written."""
    path = write_program(folder, *cells, declares=declares)
    quiet = {"output": folder / "done.ipynb", "html": False, "display": "off", **options}
    return run_notebook(path, **quiet)


def outputs(result_or_path: NotebookResult | Path) -> list[list[Any]]:
    """The outputs of an executed copy's code cells, in order."""
    path = getattr(result_or_path, "output", result_or_path)
    notebook = nbformat.read(path, as_version=4)
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
