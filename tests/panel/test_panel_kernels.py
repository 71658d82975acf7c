"""The panel's clicks by version of ipykernel: handled by the main thread or by a subshell.

ipykernel 6 has no subshells. 7.3 handles in a subshell what a front end sends to one, while a cell
runs; 7.4 uses the shell that last sent something on that widget. The panel works with all.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from kernels import SECONDS, Cell, Notebook, notebook, until
from records import owned_runs
from run_folders import sweep, trained, trial, write_run

VERSIONS = ("6.31.0", "7.3.0", "7.4.0")
OVERLAYS = Path(__file__).parents[2] / "build" / "kernels"

OPEN = """
import panel_functions, ipykernel, pathlib, threading, time
panel = nb.panel(panel_functions.until_told, {config!r})
board = panel._controller.board
said = []
board.message.observe(lambda change: said.append(change["new"]), "value")
threads = set()
board.load_run.on_click(lambda _: threads.add(threading.current_thread().name.partition("-")[0]))
print(ipykernel.__version__)
"""

BUSY = """
pathlib.Path("busy").touch()
while {condition}:
    {wait}
print("the cell's own")
"""

# Clicks may be done in another thread, whenever that is: three that load and one that cannot.
ALL_DONE = """
while len([text for text in said if "Set up has" in text or "alert" in text]) < 4:
    time.sleep(0.02)
panel.refresh()
print(*said, sep="\\n")
said.clear()
"""


def overlay(version: str) -> str:
    """A folder with that ipykernel alone, fetched once; empty where the installed one is it."""
    import ipykernel

    if version == "7.4.0" and sys.version_info < (3, 11):
        pytest.skip("ipykernel 7.4.0 itself needs Python 3.11: create_task(context=)")
    if ipykernel.__version__ == version:
        return ""
    folder = OVERLAYS / version
    OVERLAYS.mkdir(parents=True, exist_ok=True)
    # Other tests may be at the same, and one that was cut off leaves nothing half.
    with tempfile.TemporaryDirectory(dir=OVERLAYS) as new, (OVERLAYS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            program = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            program += ["--target", f"{new}/fetched", f"ipykernel=={version}"]
            done = subprocess.run(program, capture_output=True, text=True, timeout=SECONDS)
            if done.returncode:
                told = f"NOT TESTED with ipykernel {version}: pip cannot fetch it: {done.stderr}"
                pytest.skip(told)
            os.rename(f"{new}/fetched", folder)
    return str(folder)


@pytest.fixture(
    params=[*(pytest.param(one, marks=pytest.mark.long) for one in VERSIONS[:-1]), VERSIONS[-1]]
)
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Notebook]:
    """A kernel of each version with a panel in it."""
    first = [overlay(request.param), os.environ.get("PYTHONPATH", "")]
    with notebook(tmp_path, PYTHONPATH=os.pathsep.join(filter(None, first))) as running:
        config = {
            "tracking.mlflow": False,
            "runtime.output_dir": str(tmp_path / "out"),
            "model.end": str(tmp_path / "end"),
        }
        assert running.run(OPEN.format(config=config)).ok().text.strip() == request.param
        yield running
        (tmp_path / "end").touch()


def subshell(kernel: Notebook) -> str | None:
    """A subshell of the kernel, made as JupyterLab does; None: it has none."""
    client = kernel._client
    if "kernel subshells" not in _answer(kernel, "kernel_info_request")["supported_features"]:
        return None
    assert client.control_channel.is_alive()
    return str(_answer(kernel, "create_subshell_request")["subshell_id"])


def _answer(kernel: Notebook, request: str) -> dict[str, Any]:
    client = kernel._client
    message = client.session.msg(request)
    client.control_channel.send(message)
    while True:
        answer = client.get_control_msg(timeout=SECONDS)
        if answer["parent_header"].get("msg_id") == message["header"]["msg_id"]:
            return {"supported_features": [], **answer["content"]}


def arrived(kernel: Notebook, shell: str) -> None:
    """Wait until the kernel has handed out what was sent so far; the subshell answers meanwhile."""
    client = kernel._client
    message = client.session.msg("kernel_info_request")
    message["header"]["subshell_id"] = shell
    client.shell_channel.send(message)
    while client.get_shell_msg(timeout=SECONDS)["parent_header"].get("msg_id") != message["msg_id"]:
        pass


def comm(kernel: Notebook, widget: str) -> str:
    """By which a front end speaks to a widget."""
    return kernel.run(f"print({widget}.comm.comm_id)").ok().text.strip()


def send(kernel: Notebook, comm_id: str, data: dict[str, Any], shell: str | None) -> None:
    client = kernel._client
    message = client.session.msg("comm_msg", {"comm_id": comm_id, "data": data})
    if shell is not None:
        message["header"]["subshell_id"] = shell
    client.shell_channel.send(message)


def click(kernel: Notebook, button: str, shell: str | None) -> None:
    send(kernel, button, {"method": "custom", "content": {"event": "click"}}, shell)


def choose(kernel: Notebook, field: str, index: int, shell: str | None) -> None:
    state = {"method": "update", "state": {"index": index}, "buffer_paths": []}
    send(kernel, field, state, shell)


def watched(kernel: Notebook, message: str) -> tuple[Cell, list[dict[str, Any]]]:
    """A cell's output, and every message that belongs to no cell, until nothing more comes.

    What a callback writes has the click's message as its parent.
    """
    cell, others, ended = Cell(), [], False
    while True:
        try:
            answer = kernel._client.get_iopub_msg(timeout=0.3 if ended else SECONDS)
        except Empty:
            assert ended, f"the cell did not end; it wrote: {cell.text}"
            return cell, others
        if answer["parent_header"].get("msg_id") == message:
            ended = cell.take(answer) or ended
        elif answer["msg_type"] in ("stream", "error", "display_data"):
            others.append(answer["content"])


# The folders in the list of runs, once the panel has seen all four.
ENTRIES = """
while len(board.run.options) < 5:
    time.sleep(0.02)
print(*(value or "none" for _, value in board.run.options), sep="\\n")
"""


def written_sweep(folder: Path, name: str) -> Path:
    """A sweep with one trial."""
    made = sweep(folder, [trial(0, value=0.5)]).folder
    (folder / "out").mkdir(exist_ok=True)
    return made.rename(folder / "out" / name)


# In which thread a click arrives, with its version, without and with a subshell.
_THREADS = (
    ["MainThread 6.31.0", "MainThread 7.3.0", "MainThread 7.4.0"],
    ["subshell 7.3.0", "MainThread 7.4.0"],
)


def test_clicks_while_a_cell_is_busy_are_done_once_and_in_order_and_write_into_no_cell(
    kernel: Notebook, tmp_path: Path
) -> None:
    run, load = comm(kernel, "board.run"), comm(kernel, "board.load_run")
    sweeps = [written_sweep(tmp_path, name) for name in "abc"]
    write_run(tmp_path / "out", "a-run", events=trained({"score": [1.0]}))
    entries = kernel.run(ENTRIES).ok().text.split()
    for shell in [None, subshell(kernel)]:
        busy = kernel.start(BUSY.format(condition='not pathlib.Path("go").exists()', wait="pass"))
        until((tmp_path / "busy").exists, "the busy cell")
        for entry in [*map(str, sweeps), "none"]:
            choose(kernel, run, entries.index(entry), shell)
            click(kernel, load, shell)
        # ipykernel 7.4 answers the first choice that comes from a subshell. From then on it hands
        # the list's choices to that subshell, and the button's clicks still to the main thread.
        if shell is not None:
            arrived(kernel, shell)
        (tmp_path / "go").touch()
        cell, others = watched(kernel, busy)
        assert cell.ok().text == "the cell's own\n"
        cell, late = watched(kernel, kernel.start(ALL_DONE))
        assert others + late == []  # an error is shown on the panel, not written anywhere
        told = cell.ok().text
        places = [told.index(f"Set up has the settings of {folder.name}") for folder in sweeps]
        assert places == sorted(places)
        assert told.count("Set up has") == len(sweeps)
        assert told.count('role="alert"') == 1
        seen = kernel.run("print(*threads, ipykernel.__version__); threads.clear()").ok().text
        assert seen.strip() in _THREADS[shell is not None], seen
        for file in ("busy", "go"):
            (tmp_path / file).unlink()


@pytest.mark.long
def test_two_clicks_start_one_run_and_an_interrupt_breaks_the_cell_and_not_the_panel(
    kernel: Notebook, tmp_path: Path
) -> None:
    launch, shell = comm(kernel, "board.buttons['launch']"), subshell(kernel)
    busy = kernel.start(BUSY.format(condition="True", wait="time.sleep(0.02)"))
    until((tmp_path / "busy").exists, "the busy cell")
    click(kernel, launch, None)
    click(kernel, launch, shell)  # both at once, in two threads where there are two
    kernel.interrupt()
    assert kernel.wait(busy).error == "KeyboardInterrupt"
    until(lambda: owned_runs(tmp_path / "out"), "the run")
    condition = "'completed' not in board.strip.value"
    follows = kernel.start(BUSY.format(condition=condition, wait="pass"))
    (tmp_path / "end").touch()
    cell, others = watched(kernel, follows)
    assert (cell.ok().text, others) == ("the cell's own\n", [])
    told = kernel.run("print(*said, sep='\\n')").ok().text
    assert told.count("Launch ...") == 1
    assert len([one for one in (tmp_path / "out").iterdir() if one.is_dir()]) == 1
    assert kernel.run("panel.close(); print(panel)").ok().text.count("completed") == 1


@pytest.mark.long
@pytest.mark.parametrize("kernel", VERSIONS[-1:], indirect=True)
def test_a_cell_that_is_run_again_replaces_its_panel_and_no_other(
    kernel: Notebook, tmp_path: Path
) -> None:
    def run(cell: str, name: str) -> None:
        client = kernel._client
        code = f"{name} = nb.panel(panel_functions.reports, {{'runtime.output_dir': 'out'}})"
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
        message = client.session.msg("execute_request", content, metadata={"cellId": cell})
        client.shell_channel.send(message)
        kernel.wait(message["header"]["msg_id"]).ok()

    count = "print(sum(one.name == 'nbtoolkit-view' for one in threading.enumerate()))"
    before = int(kernel.run(count).ok().text)
    for cell, name in (("a", "one"), ("a", "two"), ("b", "three"), ("a", "four")):
        run(cell, name)
    assert int(kernel.run(count).ok().text) == before + 2
    alive = kernel.run("three.refresh(); four.refresh(); panel.refresh(); one.refresh()")
    assert alive.error == "LaunchError"
    assert "the panel is closed" in alive.traceback
    assert kernel.run("two.close(); print(one)").ok().text
