"""Launches from unusual processes, deleted run folders, and other rare cases."""

from __future__ import annotations

import io
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest
from kernels import SECONDS, script

import nbtoolkit as nb
from nbtoolkit.errors import LaunchError, RunFolderError
from nbtoolkit.launcher.run_handle import StartedRun
from nbtoolkit.run.events import EventReader
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.wire.messages import SupervisorLost
from nbtoolkit.wire.transport import Connection

# --- the run's folder -----------------------------------------------------------------------------


def deletes(config: Any, ctx: Any) -> float:
    if ctx.is_main:
        shutil.rmtree(ctx.paths.folder)
    return 1.0


def deletes_and_raises(config: Any, ctx: Any) -> float:
    shutil.rmtree(ctx.paths.folder)
    raise ValueError("its own error")


STARTS = [("inline", 1), ("forkserver", 1), ("forkserver", 2)]
DELETED = r"(?s)was deleted during the run.*Allowed: .*Do now:  find the code that deletes it"


@pytest.mark.parametrize(("start", "processes"), STARTS)
def test_a_function_that_deletes_its_runs_folder_is_told(
    config: nb.Config, start: Any, processes: int
) -> None:
    with pytest.raises(RunFolderError, match=DELETED):
        nb.launch(deletes, config, start=start, processes=processes, display="off")


def test_the_functions_own_error_is_the_cause(config: nb.Config) -> None:
    with pytest.raises(RunFolderError, match=DELETED) as caught:
        nb.launch(deletes_and_raises, config, processes=1, display="off")
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_supervisor_that_cannot_write_to_a_deleted_folder_is_told_as_that(tmp_path: Path) -> None:
    """On a busy machine a rank deletes the folder before the supervisor has flushed its name."""
    paths = RunPaths.create(tmp_path, "gone")
    supervisor, kernel = Connection.pair()
    handle = nb.RunHandle(paths, StartedRun(line=kernel))
    shutil.rmtree(paths.folder)
    supervisor.send(SupervisorLost(error="RunFolderError", what="no", allowed="", do="free space"))
    supervisor.close()
    with pytest.raises(RunFolderError, match=DELETED):
        handle.result(timeout=SECONDS)


# --- unusual processes ----------------------------------------------------------------------------


def returns(config: Any, ctx: Any) -> float:
    print("a line \N{CHECK MARK}")
    return 1.0


def no_stream() -> None:
    return None


def ascii_stream() -> TextIO:
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii")


def stream_that_nobody_reads() -> TextIO:
    reads, writes = os.pipe()
    os.close(reads)
    return os.fdopen(writes, "w", buffering=1, encoding="utf-8")


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (no_stream, {"display": "text"}),
        (no_stream, {"start": "inline"}),
        (ascii_stream, {"display": "text"}),
        (stream_that_nobody_reads, {"display": "text"}),
        (stream_that_nobody_reads, {"display": "auto"}),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stdout_that_cannot_show_the_output_does_not_end_a_launch(
    config: nb.Config,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], TextIO | None],
    options: dict[str, Any],
) -> None:
    stdout = make()
    monkeypatch.setattr(sys, "stdout", stdout)
    assert nb.launch(returns, config, processes=1, resume="never", **options).value == 1.0
    if isinstance(stdout, io.TextIOWrapper) and stdout.encoding == "ascii":
        stdout.flush()
        assert b"a line ?" in stdout.buffer.getvalue()  # type: ignore[attr-defined] # a BytesIO


def loses_its_streams(config: Any, ctx: Any) -> float:
    sys.stdout = sys.stderr = None
    return 1.0


def closes_its_streams(config: Any, ctx: Any) -> float:
    sys.stdout.close()
    sys.stderr.close()
    return 1.0


def raises_without_streams(config: Any, ctx: Any) -> float:
    sys.stdout = sys.stderr = None
    raise ValueError("its own error")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_function_may_lose_its_stdout_and_stderr(config: nb.Config, processes: int) -> None:
    options: dict[str, Any] = {"processes": processes, "display": "off"}
    for function in (loses_its_streams, closes_its_streams):
        assert nb.launch(function, config, **options).values == [1.0] * processes
    with pytest.raises(ValueError, match="its own error") as caught:
        nb.launch(raises_without_streams, config, **options)
    [note] = caught.value.__notes__
    assert "ValueError: its own error" in Path(note.rpartition("log: ")[2]).read_text()


def forks(config: Any, ctx: Any) -> list[int]:
    """Fork children that return, raise and exit; the parent returns their exit codes."""
    folder = ctx.paths.folder
    for child in ("returns", "raises", "exits"):
        if os.fork() == 0:
            (folder / f"{child}-{ctx.rank}").write_text(str(os.getpid()))
            if child == "raises":
                raise ZeroDivisionError("in a child")
            if child == "exits":
                sys.exit(7)
            return [99]
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(3)]
    process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(5,))
    process.start()
    process.join()
    return [*sorted(codes), process.exitcode or 0]


@pytest.mark.parametrize(("start", "processes"), STARTS)
def test_a_child_that_the_function_forks_ends_with_the_function(
    config: nb.Config, start: Any, processes: int
) -> None:
    result = nb.launch(forks, config, start=start, processes=processes, display="off")
    assert result.values == [[0, 1, 7, 5]] * processes
    assert result.status == "completed"
    events = [event.type for event in EventReader(result.paths.events).read()]
    assert events.count("ended") == 1
    assert not any(result.paths.folder.glob("ranks/*/error.pkl"))


class OwnError(Exception):
    def __init__(self, code: int, *, text: str) -> None:
        super().__init__(code, text)
        self.text = text


LONG = "head" + 20_000_000 * "x" + "tail"


def raises_a_long_text(config: Any, ctx: Any) -> float:
    try:
        raise OwnError(3, text=LONG)
    except OwnError as error:
        raise ValueError(LONG) from error


def test_of_a_long_text_of_an_exception_both_ends_are_kept(config: nb.Config) -> None:
    with pytest.raises(ValueError, match="head") as caught:
        nb.launch(raises_a_long_text, config, processes=1, display="off")
    first, middle, last = str(caught.value).splitlines()
    assert (first[:5], last[-5:]) == ("headx", "xtail")
    assert "characters" in middle
    assert len(str(caught.value)) < 100_000
    cause = caught.value.__cause__
    assert isinstance(cause, OwnError)
    assert cause.args[0] == 3
    assert len(cause.text) < 100_000
    files = [file for file in Path(config.runtime.output_dir).rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 2_000_000


SPAWNS = """
import multiprocessing
import nbtoolkit as nb

def train(config, ctx):
    return OTHER

OTHER = 5

def work(daemon):
    overrides = {"tracking.mlflow": False, "runtime.output_dir": "out"}
    config = nb.load_config(env=None, overrides=overrides)
    print(daemon, nb.launch(train, config, processes=1, resume="never", display="off").value)

if __name__ == "__main__":
    for daemon in (False, True):
        one = multiprocessing.get_context("spawn").Process(
            target=work, args=(daemon,), daemon=daemon
        )
        one.start()
        one.join()
"""


@pytest.mark.long
def test_a_spawned_process_launches_a_function_of_its_script(tmp_path: Path) -> None:
    file = tmp_path / "spawns.py"  # which a spawned process imports as __mp_main__
    file.write_text(SPAWNS)
    command = [sys.executable, str(file)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert (ended.returncode, ended.stdout) == (0, "False 5\nTrue 5\n"), ended.stderr


LATE = """
import atexit, threading

overrides = {"tracking.mlflow": False, "runtime.output_dir": "out"}
config = nb.load_config(env=None, overrides=overrides)
options = {"processes": 1, "resume": "never", "display": "off"}
ends, tried = threading.Event(), threading.Event()

def train(config, ctx):
    return 1

def late():
    ends.wait()
    try:
        nb.launch(train, config, **options)
    except nb.errors.LaunchError as error:
        print(error.what, flush=True)
    except BaseException as error:
        print("raw:", repr(error), flush=True)
    tried.set()

# called after the fork server's end, since it is registered before
atexit.register(lambda: (ends.set(), tried.wait(60)))
threading.Thread(target=late, daemon=True).start()
nb.launch(train, config, **options)
"""


def test_a_daemon_thread_that_launches_at_the_end_is_told(tmp_path: Path) -> None:
    with script(LATE, tmp_path) as kernel:
        out, err = kernel.end(SECONDS)
    told = "this process is exiting: its fork server has shut down\n"
    assert (kernel.process.returncode, out) == (0, told), err


# --- names, panel ---


def test_dir_shows_public_names_only() -> None:
    assert dir(nb) == sorted(nb.__all__)


def waits(config: Any, ctx: Any) -> None:
    while True:
        time.sleep(0.05)
        ctx.raise_if_stopped()


def test_a_panel_watches_nothing_and_says_why_launch_cannot_be_pressed(config: nb.Config) -> None:
    panel = nb.panel(waits, config)
    try:
        panel.press("launch")
        run = panel.folder
        assert run is not None
        with pytest.raises(LaunchError, match=rf"Launch cannot be pressed now: {run.name} is runn"):
            panel.press("launch")
        panel.watch(None)
        assert panel.folder is None
        panel.watch(run)
        panel.press("stop")
        nb.attach(run, display="off").result(SECONDS)
        panel.watch(None)
        panel._controller.board.setup.fields["train.epochs"].value = "many"
        with pytest.raises(LaunchError, match=r"Launch cannot be pressed now: train.epochs: "):
            panel.press("launch")
    finally:
        panel.close()


def test_a_rank_that_ends_does_not_have_torch_import_its_compiler() -> None:
    """It takes 6 s of CPU with torch 2.15; meanwhile nobody knew the rank's exit code."""
    code = """
import logging, sys
import torch
from nbtoolkit.launcher.agent import plain_record
logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
logger.addFilter(plain_record)
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("failed (exitcode: %s)", 7)
print("torch._dynamo" in sys.modules)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert "failed (exitcode: 7)" in done.stderr
    assert done.stdout == "False\n"
