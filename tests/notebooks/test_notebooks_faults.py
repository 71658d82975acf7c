"""Notebooks that cannot run, fail or die are reported with the cell and the reason."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from kernels import SECONDS, descendants
from nbformat.v4 import new_code_cell
from programs import outputs, run_program, write_program

from nbtoolkit.errors import NotebookDied, NotebookError, NotebookFailed, NotebookTimeout
from nbtoolkit.notebooks.run import run_notebook


def record(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "done.run.json").read_text())
    return found


# --- refused before a kernel starts ---


def test_a_notebook_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    write_program(tmp_path, "1", name="train")
    with pytest.raises(NotebookError, match=r"No such file[\s\S]*there are train\.ipynb"):
        run_notebook(tmp_path / "trian.ipynb")


@pytest.mark.parametrize(
    "text", ["{", "[1, 2]", '{"a": 1}', '{"nbformat": 4, "cells": 3}', "\udcff"]
)
def test_a_file_that_is_no_notebook_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "work.ipynb"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(NotebookError, match=r"work\.ipynb cannot be read"):
        run_notebook(path)


def test_a_syntax_error_in_the_last_cell_is_found_before_the_first_runs(tmp_path: Path) -> None:
    cells = "open('ran', 'w').close()", "%time 1", "!true", "await x", "print('a'\n"
    with pytest.raises(NotebookError, match=r"code cell 5 is not Python: .* never closed"):
        run_program(tmp_path, *cells, cwd=tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_magic_without_its_sign_is_taken_as_ipython_takes_it(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    cells = "cd below", "import nbtoolkit as nb, os\nnb.publish({'at': os.getcwd()})"
    assert run_program(tmp_path, *cells, cwd=tmp_path).values == {"at": str(tmp_path / "below")}
    with pytest.raises(NotebookError, match="code cell 1 is not Python"):
        run_program(tmp_path, "pip install x\nprint(1)", cwd=tmp_path)


def test_two_cells_of_parameters_are_refused(tmp_path: Path) -> None:
    path = write_program(tmp_path, "1", declares="a = 1")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(new_code_cell("b = 1", metadata={"tags": ["parameters"]}))
    nbformat.write(notebook, path)
    with pytest.raises(NotebookError, match="2 cells tagged 'parameters': code cells 1 and 3"):
        run_notebook(path)


def test_a_kernel_that_is_not_installed_is_told_with_those_that_are(tmp_path: Path) -> None:
    path = write_program(tmp_path, "1", kernelspec={"name": "conda-env-x", "display_name": "x"})
    with pytest.raises(NotebookError, match=r"kernel 'conda-env-x'[\s\S]*Allowed: .*python3"):
        run_notebook(path)
    done = run_notebook(path, tmp_path / "d.ipynb", kernel="python3", html=False, display="off")
    assert done.values == {}


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path = write_program(tmp_path, "1")
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file/done.ipynb", Path("/proc/done.ipynb")):
        with pytest.raises(NotebookError, match=f"the executed copy {output} cannot be written"):
            run_notebook(path, output)
    ends = r"does not end in \.ipynb[\s\S]*output='.*/out/work.ipynb'"
    with pytest.raises(NotebookError, match=ends):
        run_notebook(path, tmp_path / "out")
    with pytest.raises(NotebookError, match="is the notebook itself"):
        run_notebook(path, path)


def test_a_second_run_into_one_output_is_refused(tmp_path: Path) -> None:
    inner = write_program(tmp_path, "1", name="inner")
    call = (
        f"import nbtoolkit as nb\nnb.run_notebook({str(inner)!r}, {str(tmp_path / 'done.ipynb')!r})"
    )
    with pytest.raises(NotebookFailed, match=r"NotebookError: another run writes to .*done\.ipynb"):
        run_program(tmp_path, call)


def test_a_limit_of_no_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotebookError, match="cell_timeout is 0\n  Allowed: seconds above 0"):
        run_program(tmp_path, "1", cell_timeout=0)


@pytest.mark.parametrize("program", ["false", "/not/there"])
def test_a_kernel_that_does_not_start_is_told(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "jupyter/kernels/broken/kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": [program], "display_name": "b", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    with pytest.raises(NotebookDied, match=r"work\.ipynb could not start its kernel 'broken'"):
        run_program(tmp_path, "1", kernel="broken")
    assert record(tmp_path)["status"] == "failed"


# --- failed ---


def test_a_failing_cell_is_told_with_its_traceback_and_marked_in_the_copy(tmp_path: Path) -> None:
    with pytest.raises(
        NotebookFailed, match=r"code cell 2 of work\.ipynb raised ValueError: no luck"
    ) as caught:
        run_program(
            tmp_path,
            "kept = 1\nkept",
            "raise ValueError('no luck')",
            "open('ran', 'w')",
            cwd=tmp_path,
        )
    assert "----> 1 raise ValueError('no luck')" in str(caught.value)
    assert (caught.value.cell, caught.value.output) == (2, tmp_path / "done.ipynb")
    assert not (tmp_path / "ran").exists()
    copy = nbformat.read(tmp_path / "done.ipynb", as_version=4)
    assert "code cell 2 of work.ipynb raised ValueError: no luck" in copy.cells[0].source
    assert outputs(tmp_path / "done.ipynb")[0][0].data["text/plain"] == "1"
    assert record(tmp_path)["status"] == "failed"


def test_the_executed_copy_of_a_failed_run_can_be_run_again(tmp_path: Path) -> None:
    with pytest.raises(NotebookFailed):
        run_program(tmp_path, "assert x > 0, x", declares="x: int = 0", parameters={"x": -1})
    again = run_notebook(
        tmp_path / "done.ipynb", tmp_path / "again.ipynb", {"x": 1}, html=False, display="off"
    )
    cells = nbformat.read(again.output, as_version=4).cells
    assert [cell.source for cell in cells] == [
        "x: int = 0",
        "# Parameters\nx = 1\n",
        "assert x > 0, x",
    ]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("%nosuchmagic", "raised UsageError: Line magic function `%nosuchmagic` not found"),
        ("%%bash\nexit 3", "raised CalledProcessError"),
        ("import sys\nsys.exit(0)", r"ended the notebook with sys\.exit\(0\)"),
        ("exit()", r"code cell 1 of work\.ipynb ended its kernel with exit\(\) or quit\(\)"),
    ],
)
def test_a_cell_that_ends_the_notebook_fails_it(cell: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(NotebookFailed, match=message):
        run_program(tmp_path, cell, "open('ran', 'w').close()", cwd=tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("cell", ["quit()", "get_ipython().exit_now = True"])
def test_an_exit_in_the_last_cell_is_no_success(cell: str, tmp_path: Path) -> None:
    with pytest.raises(NotebookFailed, match=r"exit\(\) or quit\(\)|ended before its last cell"):
        run_program(tmp_path, cell)


def test_a_cell_that_may_fail_by_its_tag_does_not_fail_the_notebook(tmp_path: Path) -> None:
    path = write_program(tmp_path, "1 / 0", "import nbtoolkit as nb\nnb.publish({'came': 'here'})")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].metadata["tags"] = ["raises-exception"]
    nbformat.write(notebook, path)
    done = run_notebook(path, tmp_path / "done.ipynb", html=False, display="off")
    assert done.values == {"came": "here"}
    assert outputs(done)[0][0].ename == "ZeroDivisionError"


# --- died or hung ---


def test_a_killed_kernel_is_told_with_cell_signal_memory_lines_and_command(tmp_path: Path) -> None:
    kill = f"""
import os, pathlib, time
log = pathlib.Path({str(tmp_path / "done.run.log")!r})
large = b"x" * 300_000_000
print("the last words", flush=True)
while "the last words" not in log.read_text():
    time.sleep(0.02)
os.kill(os.getpid(), 9)
"""
    with pytest.raises(NotebookDied) as caught:
        run_program(tmp_path, "1", kill, "2", declares="tag: str = 'a'")
    told = str(caught.value)
    assert "code cell 3 of work.ipynb lost its kernel: signal SIGKILL" in told
    assert float(re.search(r"it used at most ([\d.]+) GiB of ", told)[1]) >= 0.3
    assert "the last words" in told
    run, done = (shlex.quote(f"{tmp_path}/{name}.ipynb") for name in ("work", "done"))
    assert f"nbtoolkit run {run} --output {done}" in told
    copy = nbformat.read(tmp_path / "done.ipynb", as_version=4)
    died = [cell for cell in copy.cells if "os.kill" in cell.source and cell.cell_type == "code"]
    assert died[0].metadata.papermill.status == "failed"
    assert "SIGKILL" in copy.cells[0].source


def test_a_hanging_cell_is_ended_at_its_timeout(tmp_path: Path) -> None:
    hangs = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
time.sleep(600)
"""
    before = descendants(os.getpid())
    with pytest.raises(
        NotebookTimeout,
        match=r"code cell 1 of work\.ipynb took longer than the 1 s that a cell may",
    ):
        run_program(tmp_path, hangs, cell_timeout=1)
    assert descendants(os.getpid()) <= before


def test_a_notebook_is_ended_at_its_timeout(tmp_path: Path) -> None:
    with pytest.raises(
        NotebookTimeout, match="still running after the 1 s that the notebook may take"
    ):
        run_program(tmp_path, *["import time; time.sleep(0.8)"] * 4, timeout=1, cell_timeout=600)


def test_a_hundred_megabytes_of_output_are_in_the_log_and_not_in_the_copy(tmp_path: Path) -> None:
    flood = "for _ in range(100):\n    print('x' * 1_000_000)"
    done = run_program(tmp_path, flood, "print('after')", max_output=10_000)
    assert done.log.stat().st_size > 100_000_000
    assert done.output.stat().st_size < 20_000
    first, second = outputs(done)
    assert "characters more: " in first[-1].text
    assert second[0].text == "after\n"


def test_output_that_a_cell_takes_back_is_not_counted(tmp_path: Path) -> None:
    bar = """
from IPython.display import clear_output
for step in range(20):
    clear_output()
    print("x" * 900, step)
"""
    [output] = outputs(run_program(tmp_path, bar, max_output=1_000))[0]
    assert output.text == "x" * 900 + " 19\n"


def test_a_disk_that_is_full_meanwhile_is_told_and_the_kernel_ended(tmp_path: Path) -> None:
    path = write_program(tmp_path, "1", "print('x' * 100_000)")
    program = f"""
import resource
import nbtoolkit as nb
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # no file may become larger
nb.run_notebook({str(path)!r}, {str(tmp_path / "done.ipynb")!r}, html=False, display="off")
"""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    assert (
        f"NotebookFailed: code cell 2 of work.ipynb was not saved: {tmp_path}/done.ipynb cannot be "
        "written: File too large" in done.stderr
    )
    assert "a folder on a disk with free space" in done.stderr


# --- the page ---


def test_a_page_that_cannot_be_made_does_not_hide_a_run_that_succeeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "jupyter" / "nbconvert" / "templates" / "lab" / "index.html.j2"
    template.parent.mkdir(parents=True)
    template.write_text("{% no such tag %}")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    result = run_program(tmp_path, "import nbtoolkit as nb\nnb.publish({'x': 1})", html=True)
    assert result.values == {"x": 1}
    assert record(tmp_path)["status"] == "completed"
    assert not record(tmp_path)["html"]
    log = next(tmp_path.rglob("*.log")).read_text()
    assert re.search(r"the page \S+ was not written: TemplateSyntaxError", log)
