"""Output of a run while it runs, in a cell, a terminal or a log: real kernels and papermill."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest
from demo import IPC
from kernels import SECONDS, START, Notebook, run_folder, shared_notebook, until
from records import owner_pid

import nbtoolkit as nb
from nbtoolkit.errors import LaunchError
from nbtoolkit.run.output import Display, DisplayFacts, choose_screen

SCRIPT = DisplayFacts()
EDITOR = DisplayFacts(kernel=True, front_end=True)
SILENT = DisplayFacts(kernel=True, front_end=None)
PAPERMILL = DisplayFacts(kernel=True, front_end=False)

ENDED = r"reports-....: completed, epoch 2/2, [\d.:]+( s)?, best score .* \(at epoch 2\)"
"""The last line about a run, however long it took."""


@pytest.mark.parametrize(
    ("display", "around", "shape"),
    [
        ("auto", EDITOR, "html"),
        ("auto", SILENT, "html"),
        ("auto", PAPERMILL, "lines"),
        ("auto", SCRIPT, "lines"),
        ("text", EDITOR, "lines"),
        ("html", PAPERMILL, "html"),
        ("off", EDITOR, "off"),
        ("off", SCRIPT, "off"),
    ],
)
def test_what_is_shown_fits_the_place(display: Display, around: DisplayFacts, shape: str) -> None:
    screen = choose_screen(display, around)
    assert screen.shape == shape
    assert screen.reason


def test_a_page_is_refused_where_there_can_be_none(config: nb.Config) -> None:
    with pytest.raises(LaunchError, match='outside a notebook\n  Allowed: "auto", "text", "off"'):
        nb.launch(print, config, display="html")
    with pytest.raises(LaunchError, match="outside a notebook"):
        nb.attach("anything", display="html")
    with pytest.raises(LaunchError, match="display='rich' is not valid\n  Allowed: 'auto'"):
        nb.attach("anything", display="rich")  # type: ignore[arg-type]


@pytest.fixture
def config(tmp_path: Path) -> nb.Config:
    return nb.load_config(overrides=settings(tmp_path))


def settings(folder: Path) -> dict[str, Any]:
    """A run that reports until the file ``end`` is there."""
    return {
        "runtime.output_dir": str(folder / "out"),
        "tracking.mlflow": False,
        "model.end": str(folder / "end"),
        "distributed.world_size": 1,
    }


# --- in a kernel with a front end ---


@pytest.fixture(scope="module")
def kernel(
    session_leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Notebook]:
    """One kernel, with one fork server, for all tests."""
    with shared_notebook(tmp_path_factory.mktemp("home")) as running:
        running.run("import panel_functions, sys, threading").ok()
        yield running


@pytest.fixture
def launch(tmp_path: Path) -> str:
    """A cell's beginning that launches; ``, wait=False)`` and the like end it."""
    return f"nb.launch(panel_functions.until_told, {settings(tmp_path)!r}, resume='never'"


def page(word: str) -> Callable[[dict[str, Any]], Any]:
    """Whether a message replaces an output by a page with a word in it."""

    def look(message: dict[str, Any]) -> Any:
        data = message["content"].get("data", {})
        changed = message["msg_type"] == "update_display_data"
        return data if changed and word in data["text/html"] else None

    return look


def no_view_thread(kernel: Notebook) -> None:
    names = "{thread.name for thread in threading.enumerate()}"
    until(lambda: "nbtoolkit-view" not in kernel.run(f"print({names})").text, "the thread's end")


def test_a_launch_is_a_live_page_in_its_cell(kernel: Notebook, launch: str, tmp_path: Path) -> None:
    cell = kernel.start(f"result = {launch}); print('after')")
    live = kernel.hear(page('<img alt="score by step'), "its curves")
    assert "<svg" not in live["text/html"]  # which is stored if the notebook is saved now
    (tmp_path / "end").touch()
    ended = kernel.hear(page("completed"), "the end")
    assert '<img alt="score by step: score from' in ended["text/html"]
    assert ": completed, " in ended["text/plain"]
    assert kernel.wait(cell).ok().text == "after\n"
    no_view_thread(kernel)


def test_the_lines_of_rank_0_are_in_the_log_of_the_view_and_not_below_it(
    kernel: Notebook, tmp_path: Path
) -> None:
    few = {**settings(tmp_path), "train.epochs": 2}
    cell = kernel.run(f"result = nb.launch(panel_functions.reports, {few!r})").ok()
    assert "hello from 0" in cell.updated[-1]["text/html"]
    assert "hello from 0" not in cell.text
    assert "plan: 1 process" in cell.text
    cell = kernel.run(f"nb.launch(panel_functions.reports, {few!r}, display='text')").ok()
    assert "hello from 0" in cell.text


@pytest.mark.long
def test_without_waiting_the_page_goes_on_until_the_run_is_stopped(
    kernel: Notebook, launch: str
) -> None:
    cell = kernel.run(f"handle = {launch}, wait=False)\nhandle").ok()
    assert len(cell.displayed) == 1  # the handle's own view would be the same again
    kernel.hear(page("● running"), "the page")
    kernel.interrupt()  # of no cell: the view goes on
    kernel.run("handle.stop()").ok()
    kernel.hear(page("stopped"), "the end")
    no_view_thread(kernel)


def test_an_interrupt_of_a_waiting_cell_ends_the_run_and_the_view_says_so(
    kernel: Notebook, launch: str
) -> None:
    cell = kernel.start(f"{launch})")
    kernel.hear(page("● running"), "the page")
    kernel.interrupt()
    kernel.hear(page("stopped"), "the end")
    assert kernel.wait(cell).error == "KeyboardInterrupt"
    no_view_thread(kernel)


def remove_at_once(folder: Path) -> None:
    """Remove the folder of a run that may write: it would add files while they are removed."""
    gone = folder.parents[1] / "gone"
    folder.rename(gone)
    shutil.rmtree(gone)


def test_a_run_that_is_killed_or_whose_folder_goes_is_said_to_be(
    kernel: Notebook, launch: str, tmp_path: Path
) -> None:
    kernel.run(f"handle = {launch}, wait=False)").ok()
    kernel.hear(page("● running"), "the page")
    folder = run_folder(tmp_path / "out")
    os.kill(owner_pid(folder), signal.SIGKILL)
    kernel.hear(page("its process died"), "the end")
    assert kernel.run("handle.result()").error == "LaunchError"
    remove_at_once(folder)

    kernel.run(f"handle = {launch}, wait=False)").ok()
    kernel.hear(page("● running"), "the page")
    remove_at_once(run_folder(tmp_path / "out"))
    kernel.hear(page("Its folder was deleted"), "the end")
    kernel.run("handle.stop(grace=0.0)")
    no_view_thread(kernel)


def test_a_folder_that_cannot_be_read_for_a_moment_does_not_end_the_view(
    kernel: Notebook, launch: str, tmp_path: Path
) -> None:
    kernel.run(f"handle = {launch}, wait=False)").ok()
    kernel.hear(page("● running"), "the page")
    events = run_folder(tmp_path / "out") / "events.jsonl"
    events.rename(events.with_suffix(".aside"))
    events.mkdir()  # reading fails, for root too
    kernel.hear(page("unreadable"), "the fault")
    events.rmdir()
    events.with_suffix(".aside").rename(events)
    kernel.hear(page("● running"), "the run again")
    (tmp_path / "end").touch()
    assert "<img alt=" in kernel.hear(page("completed"), "the end")["text/html"]
    no_view_thread(kernel)


@pytest.mark.long
def test_attach_shows_nothing_before_it_is_looked_at(
    kernel: Notebook, launch: str, tmp_path: Path
) -> None:
    kernel.run(f"mine = {launch}, wait=False, display='off')").ok()
    cell = kernel.run("other = nb.attach(mine.paths.folder)").ok()
    assert (cell.text, cell.displayed) == ("", [])
    assert kernel.run("other").ok().displayed
    kernel.hear(page("● running"), "the page of the handle that is a cell's value")
    (tmp_path / "end").touch()
    kernel.hear(page("completed"), "its end")
    cell = kernel.run("other.result(); nb.attach(mine.paths.folder, display='off').result()").ok()
    assert len(cell.displayed) == 2  # the view of result(), and the value
    no_view_thread(kernel)


SWEEP = """
space = {{"study": {{"metric": "score", "sampler": "random"}}, "budget": {{"n_trials": 2}},
         "space": {{"optim.lr": {{"type": "float", "low": 0.001, "high": 0.1}}}}}}
config = {config!r}
found = nb.sweep(panel_functions.reports, config, space)
folds = nb.make_folds([0, 1] * 8, k=2)
scores = nb.cross_validate(panel_functions.reports, config, folds)
"""


@pytest.mark.long
def test_a_sweep_and_folds_end_as_their_tables(kernel: Notebook, tmp_path: Path) -> None:
    few = {**settings(tmp_path), "train.epochs": 2}
    cell = kernel.run(SWEEP.format(config=few)).ok()
    ended = [data for data in cell.updated if "completed" in data["text/html"]]
    assert "2/2" in ended[0]["text/html"]
    assert "2/2" in ended[-1]["text/html"]
    assert "best score" in ended[0]["text/plain"]
    assert not [line for line in cell.text.splitlines() if line.startswith(("trial", "fold"))]


# --- where nobody looks ---


@pytest.mark.long
def test_under_papermill_there_are_lines_and_at_the_end_a_picture(tmp_path: Path) -> None:
    few = {**settings(tmp_path), "train.epochs": 2}
    code = START + "import panel_functions\nprint('ipywidgets' in sys.modules)\n"
    code += f"result = nb.launch(panel_functions.reports, {few!r})\n"
    made = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(code + SWEEP.format(config=few))]
    )
    made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(made, tmp_path / "in.ipynb")
    done = papermill.execute_notebook(
        tmp_path / "in.ipynb",
        tmp_path / "out.ipynb",
        progress_bar=False,
        start_timeout=SECONDS,
        config=IPC,
    )
    outputs = done.cells[0].outputs
    text = "".join(one.get("text", "") for one in outputs).splitlines()
    [last] = [at for at, line in enumerate(text) if re.fullmatch(ENDED, line)]
    assert text[:last].count("hello from 0") == 1
    assert [line for line in text if "2/2 trials" in line and "best score" in line]
    assert [line for line in text if "2/2 folds" in line]
    pictures = [one["data"] for one in outputs if one.output_type == "display_data"]
    assert len(pictures) == 3
    assert "<img alt=" in pictures[0]["text/html"]


# --- in a terminal ---

IN_TERMINAL = """
import panel_functions
result = nb.launch(panel_functions.reports, {config!r})
"""


def test_in_a_terminal_there_are_lines(tmp_path: Path) -> None:
    few = {**settings(tmp_path), "train.epochs": 2}
    del few["model.end"]  # a warning would say that the function does not read it
    code = START + IN_TERMINAL.format(config=few)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("plan: 1 process")
    # A loaded machine may need 10 s for the fork server, which is reported.
    shown = [line for line in lines[1:-1] if not line.startswith("waiting for the fork server")]
    assert shown == ["hello from 0"]
    assert re.fullmatch(ENDED, lines[-1])
