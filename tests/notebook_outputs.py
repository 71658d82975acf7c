"""Store those outputs of the notebooks that are the same every time.

Cells with such outputs have the tag ``keep_output``, cells whose output varies
``nbval-ignore-output``; see docs/notebook-runs/project.md.

    python tests/notebook_outputs.py store          run every notebook in full, store what is kept
    python tests/notebook_outputs.py strip FILES    take all other outputs away (a pre-commit hook)
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import nbformat
import papermill
from demo import IPC
from nbformat import NotebookNode
from notebook_sizes import NOTEBOOKS

KEEP = "keep_output"
HOME = "/home/me"  # stands for the folder that a notebook was run in


def main(verb: str = "", *files: str) -> int:
    """Do as the module's first lines say."""
    if verb not in ("store", "strip"):
        print(__doc__, file=sys.stderr)
        return 2
    for path in [Path(file) for file in files] or NOTEBOOKS:
        began = time.monotonic()
        write(path, store(path) if verb == "store" else strip(read(path)))
        print(f"{path.name}: {time.monotonic() - began:.0f} s", flush=True)
    return 0


def read(path: Path) -> NotebookNode:
    """A notebook as it is."""
    return nbformat.read(path, as_version=4)


def write(path: Path, notebook: NotebookNode) -> None:
    """Write a notebook where it is another than the file's."""
    if nbformat.writes(notebook) != nbformat.writes(read(path)):
        nbformat.write(notebook, path)


def strip(notebook: NotebookNode) -> NotebookNode:
    """Take away outputs, with their counts, of cells that are not tagged to keep them."""
    for cell in notebook.cells:
        if cell.cell_type == "code" and KEEP not in cell.metadata.get("tags", []):
            cell.outputs, cell.execution_count = [], None
    return notebook


def store(path: Path) -> NotebookNode:
    """A notebook with what its tagged cells show when it is run in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, path.name)
        executed = papermill.execute_notebook(
            path, target, cwd=folder, progress_bar=False, config=IPC
        )
    notebook = read(path)
    shown = {cell.id: cell for cell in executed.cells}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _moved(shown[cell.id].outputs, folder)
            cell.execution_count = shown[cell.id].execution_count  # nbval calls others not run
    return strip(notebook)


def _moved(value: object, folder: str) -> object:
    """Outputs without this machine's folder."""
    if isinstance(value, str):
        return value.replace(folder, HOME)
    if isinstance(value, dict):
        return nbformat.from_dict({key: _moved(inner, folder) for key, inner in value.items()})
    return [_moved(inner, folder) for inner in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
