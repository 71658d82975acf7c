"""Every notebook, run in a plain kernel, shows the outputs stored in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from notebook_outputs import HOME, KEEP, read, strip
from notebook_sizes import NOTEBOOKS
from records import last_of

pytestmark = pytest.mark.timeout(900)  # whole notebooks

CONFIG = Path(__file__).parents[1] / "nbval.cfg"
ANYTHING = "nbval-ignore-output"
"""Tag of cells that show something else every time."""


def stem(path: Path) -> str:
    return path.stem


def nbval(notebook: Path) -> subprocess.CompletedProcess[str]:
    """Run a notebook in its folder and compare what its cells show with what is stored."""
    options = ["-q", "-p", "no:cacheprovider", "--nbval", "--nbval-current-env"]
    # A path ends at a space in nbval.cfg, and the folder for temporary files may have one.
    config = notebook.with_suffix(".cfg")
    here = f"regex: {re.escape(str(notebook.parent))}\nreplace: {HOME}\n\n"
    config.write_text(here + CONFIG.read_text())
    options += ["--nbval-sanitize-with", str(config), "--nbval-cell-timeout", "800"]
    program = [sys.executable, "-m", "pytest", *options, "--rootdir", str(notebook.parent)]
    # How this run of the tests was started is nothing to the one inside.
    environ = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [*program, str(notebook)],
        cwd=notebook.parent,
        env=environ,
        capture_output=True,
        text=True,
        timeout=800,
    )


# The others take minutes: `make test-hosts` and `make test-pythons` run every notebook under nbval.
@pytest.mark.long
@pytest.mark.parametrize("notebook", [*NOTEBOOKS[:2], NOTEBOOKS[3]], ids=stem)
def test_in_full_every_cell_shows_what_is_stored(notebook: Path, tmp_path: Path) -> None:
    done = nbval(Path(shutil.copy(notebook, tmp_path)))
    assert done.returncode == 0, done.stdout + done.stderr
    if notebook.stem == "01_train":
        [run] = (tmp_path / "outputs").glob("*-digits-*")
        assert last_of(run).metrics["val_accuracy"] >= 0.97


def test_under_nbval_nobody_looks(tmp_path: Path) -> None:
    code = "from nbtoolkit.run.output import choose_screen, find_display\n"
    cell = nbformat.v4.new_code_cell(code + "print(choose_screen('auto', find_display()).shape)")
    cell.execution_count = 1
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="lines\n")]
    notebook = nbformat.v4.new_notebook(cells=[cell])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, tmp_path / "shape.ipynb")
    done = nbval(tmp_path / "shape.ipynb")
    assert "1 passed" in done.stdout, done.stdout


def test_another_output_than_the_stored_one_is_found(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell(f"print({text!r})") for text in ("PATH", "2 models")]
    for cell, shown in zip(cells, ("/somewhere/else", "3 models"), strict=True):
        cell.execution_count = 1
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=f"{shown}\n")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, tmp_path / "other.ipynb")
    done = nbval(tmp_path / "other.ipynb")
    assert "1 failed, 1 passed" in done.stdout
    assert "3 models" in done.stdout


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=stem)
def test_outputs_are_stored_where_the_tags_say_so_and_nowhere_else(notebook: Path) -> None:
    for cell in read(notebook).cells:
        if cell.cell_type != "code":
            continue
        tags = set(cell.metadata.get("tags", []))
        assert bool(cell.outputs) == (KEEP in tags), cell.id
        assert not {KEEP, ANYTHING} <= tags, cell.id
        assert (cell.execution_count is None) == (not cell.outputs), cell.id
        kinds = {kind for output in cell.outputs for kind in output.get("data", {})}
        assert kinds <= {"text/plain", "text/html"}, cell.id  # no pictures: they change, and weigh


def test_stripping_takes_away_what_is_not_to_be_kept_and_nothing_else(tmp_path: Path) -> None:
    notebook = read(NOTEBOOKS[0])
    assert strip(read(NOTEBOOKS[0])) == notebook
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and not cell.outputs:
            cell.execution_count = number
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="anything\n")]
    assert strip(notebook) == read(NOTEBOOKS[0])
