"""Notebooks as programs: parameters in, published values out, an executed copy."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import numpy as np
import pytest
from kernels import SECONDS
from programs import outputs, run_program, write_program

import nbtoolkit as nb
from nbtoolkit.errors import NotebookError, PublishError

DECLARES = """
tag: str = "none"
folds: int | None = 3
settings: dict = {}
pair: tuple[float, float] = (0.0, 1.0)
"""


def test_parameters_go_in_typed_and_published_values_come_out(tmp_path: Path) -> None:
    given = {"tag": "007", "folds": None, "settings": {"a": [math.inf, True, None]}, "pair": [1, 2]}
    work = """
import nbtoolkit as nb
nb.publish({"seen": repr([tag, folds, settings, pair])})
nb.publish({"accuracy": 0.5, "seen_twice": True})
"""
    done = run_program(tmp_path, work, declares=DECLARES, parameters=given)
    assert done.values == {
        "seen": "['007', None, {'a': [inf, True, None]}, (1.0, 2.0)]",
        "accuracy": 0.5,
        "seen_twice": True,
    }
    assert "accuracy=0.5" in repr(done)
    assert "<th" in done._repr_html_()
    record = json.loads((tmp_path / "done.run.json").read_text())
    assert (record["status"], record["values"]) == ("completed", done.values)


def test_the_executed_copy_has_outputs_and_the_given_values_and_no_trace_of_the_sentinel(
    tmp_path: Path,
) -> None:
    path = write_program(tmp_path, "print(tag)", "1 + 1", declares="tag = 'a'")
    before = path.read_bytes()
    done = nb.run_notebook(path, tmp_path / "out/done.ipynb", {"tag": "b"}, display="off")
    cells = nbformat.read(done.output, as_version=4).cells
    assert [cell.source for cell in cells] == [
        "tag = 'a'",
        "# Parameters\ntag = 'b'\n",
        "print(tag)",
        "1 + 1",
    ]
    assert outputs(done)[2][0].text == "b\n"
    assert path.read_bytes() == before
    assert done.html is not None
    assert "b\n" in done.html.read_text()
    assert done.log.read_text().startswith("b\n")  # what the kernel itself says may follow


def test_a_notebook_without_parameters_runs_and_takes_none(tmp_path: Path) -> None:
    assert run_program(tmp_path, "1").parameters == {}
    with pytest.raises(nb.errors.ParameterError, match="no parameter 'a'"):
        run_program(tmp_path, "1", parameters={"a": 1})


def test_the_kernel_is_alone_in_a_profile_and_a_working_directory_of_its_own(
    tmp_path: Path,
) -> None:
    (tmp_path / "here").mkdir()
    work = """
import json, os, nbtoolkit as nb
from ipykernel.connect import get_connection_file
transport = json.load(open(get_connection_file()))["transport"]
nb.publish({"cwd": os.getcwd(), "profile": os.environ["IPYTHONDIR"], "transport": transport})
"""
    first = run_program(tmp_path, work, cwd=tmp_path / "here").values
    second = run_program(tmp_path, work, cwd=tmp_path / "here").values
    assert first["cwd"] == str(tmp_path / "here")
    assert first["transport"] == "ipc"
    assert first["profile"] != second["profile"]
    assert not Path(first["profile"]).exists()


@pytest.mark.long
def test_several_at_once_do_not_clash(tmp_path: Path) -> None:
    path = write_program(tmp_path, "import nbtoolkit as nb\nnb.publish({'n': n})", declares="n = 0")

    def run(n: int) -> object:
        output = tmp_path / f"{n}.ipynb"
        return nb.run_notebook(path, output, {"n": n}, html=False, display="off").values["n"]

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(run, range(3))] == [0, 1, 2]


def test_a_notebook_runs_another_in_its_own_cell(tmp_path: Path) -> None:
    inner = write_program(tmp_path, "import nbtoolkit as nb\nnb.publish({'in': 1})", name="inner")
    work = f"""
import nbtoolkit as nb
nb.publish(nb.run_notebook({str(inner)!r}, {str(tmp_path / "in.ipynb")!r}, html=False).values)
nb.publish({{"out": 2}})
"""
    done = run_program(tmp_path, work)
    assert done.values == {"in": 1, "out": 2}
    assert outputs(done)[0][0].text.startswith("[1/1] nb.publish({'in': 1})  ")


def test_a_notebook_of_an_old_version_without_a_kernels_name_runs(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "language": "python", "input": ["1+1"], "outputs": []}
    sheets = [{"cells": [{**cell, "prompt_number": 3, "metadata": {}, "collapsed": False}]}]
    old = {"nbformat": 3, "nbformat_minor": 0, "metadata": {"name": ""}, "worksheets": sheets}
    (tmp_path / "old.ipynb").write_text(json.dumps(old))
    done = nb.run_notebook(tmp_path / "old.ipynb", tmp_path / "d.ipynb", html=False, display="off")
    assert outputs(done)[0][0].data["text/plain"] == "2"


def test_progress_is_a_line_a_cell(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_program(tmp_path, "import os\n# a comment\nx = 1", "print('hidden')", display="auto")
    out, err = capfd.readouterr()
    first, second = err.splitlines()
    assert out == ""
    assert re.fullmatch(r"\[1/2\] x = 1  \d+\.\d s", first)
    assert re.fullmatch(r"\[2/2\] print\('hidden'\)  \d+\.\d s", second)
    with pytest.raises(NotebookError, match="display is 'loud'\n  Allowed: 'auto'"):
        run_program(tmp_path, "1", display="loud")


def test_publishing_outside_of_a_run_only_checks(tmp_path: Path) -> None:
    nb.publish({"path": tmp_path, "array": np.arange(2), "config": nb.load_config(env=None)})
    with pytest.raises(PublishError, match=r"cannot publish 'thing': a object is no plain value"):
        nb.publish({"thing": object()})
    with pytest.raises(PublishError, match="was given the name 3"):
        nb.publish({3: 1})


def test_what_is_not_installed_is_told_with_the_install_line() -> None:
    program = """
import sys
sys.modules["nbconvert"] = None  # as where it is not installed
from nbtoolkit.notebooks.run import require_packages
require_packages(html=False)
require_packages(html=True)
"""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    assert re.search(
        r"MissingExtra: running a notebook needs nbconvert[\s\S]*html=False", done.stderr
    )
    assert re.search(r"pip install [^\n]*'nbconvert>=", done.stderr)
