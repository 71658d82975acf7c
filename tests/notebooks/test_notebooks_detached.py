"""Background notebooks outlive the process that starts them, and can be queried and stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kernels import HERE, SECONDS, all_gone, descendants, script, until
from pipelines import own_tmpdir
from programs import write_program

import nbtoolkit as nb
from nbtoolkit.errors import NotebookDied, NotebookError, NotebookFailed, ParameterError
from nbtoolkit.notebooks.handle import NotebookResult
from nbtoolkit.notebooks.run import run_notebook
from nbtoolkit.run.paths import RUNS_FILE, announce_run, announced_runs

__all__ = ["own_tmpdir"]  # a fixture

DECLARES = "name: str = 'none'"

LAUNCHES = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import nbtoolkit as nb, panel_functions
config = {{"tracking.mlflow": False, "train.epochs": 1, "model.end": "end"}}
"""

WAITS = """
import pathlib, time
pathlib.Path("waiting").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.02)
"""

Start = Callable[..., nb.NotebookHandle]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a notebook of these cells; at the end it is stopped, and gone."""
    begun: list[nb.NotebookHandle] = []

    def start_one(*cells: str, **options: Any) -> nb.NotebookHandle:
        path = write_program(tmp_path, *cells, declares=DECLARES)
        quiet = {"output": tmp_path / "done.ipynb", "html": False, "cwd": tmp_path, **options}
        begun.append(run_notebook(path, **quiet, wait=False))
        return begun[-1]

    yield start_one
    for handle in begun:
        handle.stop()
        until(handle.done, f"the end of {handle}")


def pid(handle: nb.NotebookHandle) -> int:
    return int(json.loads(handle.output.with_suffix(".run.json").read_text())["pid"])


def test_it_runs_in_the_background_and_ends_as_it_would_have_here(
    start: Start, tmp_path: Path
) -> None:
    publishes = "import nbtoolkit as nb\nnb.publish({'name': name})\nprint('hello')"
    handle = start(WAITS, publishes, parameters={"name": "007"})
    until((tmp_path / "waiting").exists, "the first cell")
    assert not handle.done()
    assert repr(handle) == f"NotebookHandle(running, {tmp_path / 'done.ipynb'})"
    with pytest.raises(TimeoutError, match="is not done after 0 s; it continues"):
        handle.result(timeout=0)
    (tmp_path / "go").touch()
    result = handle.result()
    assert isinstance(result, NotebookResult)
    assert (result.values, result.parameters) == ({"name": "007"}, {"name": "007"})
    assert (result.output, result.html, result.runs) == (handle.output, None, [])
    assert "hello" in handle.log.read_text()
    assert handle.done()
    handle.stop()  # nobody is there any more
    assert nb.NotebookHandle(handle.output).result().values == result.values


@pytest.mark.long
def test_the_runs_that_it_starts_are_known_while_it_runs(start: Start, tmp_path: Path) -> None:
    run = "nb.launch(panel_functions.reports, config, start='inline', display='off')"
    handle = start(LAUNCHES, WAITS, run, f"{run}.paths.folder", WAITS.replace("go", "end"))
    until((tmp_path / "waiting").exists, "a cell")
    assert handle.runs == []
    (tmp_path / "go").touch()
    first, second = until(lambda: len(handle.runs) == 2 and handle.runs, "two runs")
    assert not handle.done()
    assert {first, second} == {*(tmp_path / "outputs").iterdir()}
    assert "reports" in first.name
    (tmp_path / "end").touch()
    assert handle.result().runs == [first, second]


def test_folders_of_any_name_are_told_each_once_and_never_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "runs.txt"
    announce_run(tmp_path)  # nobody asked
    assert announced_runs(file) == []
    monkeypatch.setenv(RUNS_FILE, str(file))
    folders = [tmp_path / name for name in ("a b", "日本\u2028<b>", "\udcff")]
    for folder in [*folders, folders[0]]:
        announce_run(folder)
    with open(file, "ab") as half:
        half.write(b"/half")
    assert announced_runs(file) == folders
    monkeypatch.setenv(RUNS_FILE, str(tmp_path / "gone/runs.txt"))
    announce_run(folders[0])  # and nobody minds


def test_it_outlives_the_process_that_starts_it(tmp_path: Path) -> None:
    path = write_program(tmp_path, WAITS, "import nbtoolkit as nb\nnb.publish({'ended': 'well'})")
    code = f"print(nb.run_notebook({str(path)!r}, 'done.ipynb', html=False, wait=False).output)"
    with script(code, tmp_path) as starter:
        output = Path(starter.output().strip())
    handle = nb.NotebookHandle(output)
    until((tmp_path / "waiting").exists, "the first cell")
    assert not handle.done()
    (tmp_path / "go").touch()
    assert handle.result(timeout=SECONDS).values == {"ended": "well"}


@pytest.mark.long
def test_the_command_line_starts_one_and_returns(tmp_path: Path) -> None:
    write_program(tmp_path, WAITS, "import nbtoolkit as nb\nnb.publish({'ended': 'well'})")
    program = [sys.executable, "-m", "nbtoolkit", "run", "work.ipynb", "--no-html", "--detach"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    handle = nb.NotebookHandle(done.stdout.strip())
    assert not handle.done()
    (tmp_path / "go").touch()
    assert handle.result(timeout=SECONDS).values == {"ended": "well"}


def test_a_module_in_the_working_directory_is_not_taken_for_one_of_python_s(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here/pickle.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path / "here")
    assert start("1").result(timeout=SECONDS).values == {}


def test_what_is_wrong_is_told_here_and_nothing_is_started(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="did you mean 'name'"):
        start("1", parameters={"nme": 1})
    with pytest.raises(NotebookError, match="is not Python"):
        start("print(")
    (tmp_path / "file").touch()
    with pytest.raises(NotebookError, match="cannot be written"):
        start("1", output=tmp_path / "file/done.ipynb")
    assert not [*tmp_path.glob("done*")]
    with pytest.raises(NotebookError, match="no notebook run writes to"):
        nb.NotebookHandle(tmp_path / "done.ipynb")
    start(WAITS)
    with pytest.raises(NotebookError, match="another run writes to"):
        start("1")


@pytest.mark.long
def test_a_cell_that_fails_is_told_as_it_would_have_been_here(start: Start, tmp_path: Path) -> None:
    handle = start("1", "raise ValueError('no luck')")
    with pytest.raises(NotebookFailed, match="raised ValueError: no luck") as told:
        handle.result()
    assert (told.value.cell, told.value.output) == (3, handle.output)
    with pytest.raises(NotebookFailed) as here:
        run_notebook(tmp_path / "work.ipynb", handle.output, html=False, display="off")
    assert str(here.value).replace("Cell In[3]", "") == str(told.value).replace("Cell In[3]", "")


def test_who_stops_it_ends_its_kernel_and_what_runs_in_it(start: Start, tmp_path: Path) -> None:
    handle = start(LAUNCHES, "nb.launch(panel_functions.until_told, config, display='off')")
    [run] = until(lambda: handle.runs, "the run")
    until((run / "owner.lock").read_text, "its supervisor")
    family = {pid(handle), *descendants(pid(handle))}
    assert len(family) > 2
    nb.NotebookHandle(handle.output).stop()
    with pytest.raises(NotebookFailed, match=r"code cell 3 of work\.ipynb was interrupted"):
        handle.result()
    all_gone(family)
    until(lambda: not nb.attach(run).paths.owned(), "the end of the run")


def test_who_stops_it_at_once_is_told_so(start: Start, tmp_path: Path) -> None:
    handle = start(WAITS, "open('ran', 'w').close()")
    handle.stop()  # before the notebook's process has begun, or just after
    with pytest.raises(NotebookFailed, match=r"was (stopped before it began|interrupted)"):
        handle.result(timeout=SECONDS)
    assert not (tmp_path / "ran").exists()


# Python ignores what a callback of a weak reference raises; its imports use some.
LOSES_AN_INTERRUPT = """
import os, signal, sys, weakref

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "papermill" and "notebooks.job import main" in " ".join(sys.orig_argv):
            thing = type("Thing", (), {})
            lost = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))
            del thing
            import gc; gc.collect()

sys.meta_path.insert(0, Finder())
"""


def test_an_interrupt_that_comes_during_its_imports_is_not_lost(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LOSES_AN_INTERRUPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    handle = start("open('ran', 'w').close()")
    with pytest.raises(NotebookDied, match="is gone"):
        handle.result(timeout=SECONDS)
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
def test_one_whose_folder_is_deleted_makes_it_anew(start: Start, tmp_path: Path) -> None:
    publishes = "import nbtoolkit as nb\nnb.publish({'at': 'the end'})"
    handle = start(WAITS, publishes, output=tmp_path / "out/done.ipynb")
    until((tmp_path / "waiting").exists, "a cell")
    shutil.rmtree(tmp_path / "out")
    assert not handle.done()
    (tmp_path / "go").touch()
    assert handle.result(timeout=SECONDS).values == {"at": "the end"}
    assert handle.output.exists()


@pytest.mark.usefixtures("own_tmpdir")
def test_one_that_is_killed_and_its_files_deleted_is_told(start: Start, tmp_path: Path) -> None:
    handle = start(WAITS, output=tmp_path / "out/done.ipynb")
    until((tmp_path / "waiting").exists, "a cell")
    family = descendants(pid(handle))
    os.kill(pid(handle), signal.SIGKILL)
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(NotebookDied, match="is gone"):
        handle.result(timeout=SECONDS)
    assert handle.runs == []
    all_gone(family)  # by itself, within a second or two


@pytest.mark.usefixtures("own_tmpdir")
def test_a_process_that_is_killed_is_told_and_its_kernel_ends(start: Start, tmp_path: Path) -> None:
    handle = start("print('at work')", WAITS)
    until((tmp_path / "waiting").exists, "a cell")
    family = descendants(pid(handle))
    os.kill(pid(handle), signal.SIGKILL)
    with pytest.raises(NotebookDied, match=r"is gone\n  The last lines:\n    at work"):
        handle.result(timeout=SECONDS)
    all_gone(family)
