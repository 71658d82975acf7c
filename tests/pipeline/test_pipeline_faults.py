"""Pipelines whose steps fail or are killed, and whose folder is in use or cannot be written."""

from __future__ import annotations

import fcntl
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from shlex import quote

import pytest
from kernels import SECONDS, alive, descendants, until
from pipelines import edit, own_tmpdir, run, statuses, write_pipeline, write_two_steps
from programs import write_program

from nbtoolkit.errors import (
    NotebookDied,
    NotebookError,
    NotebookFailed,
    PipelineError,
    PipelineFailed,
)
from nbtoolkit.notebooks.handle import NotebookFiles
from nbtoolkit.notebooks.pipeline import _locked, _wait_for_leftovers
from nbtoolkit.run.events import EventLog, RunStarted
from nbtoolkit.run.paths import RunPaths

__all__ = ["own_tmpdir"]  # a fixture


def test_a_failing_step_leaves_the_rest_untouched_and_names_the_command_that_goes_on(
    tmp_path: Path,
) -> None:
    path = write_two_steps(tmp_path)
    write_program(tmp_path, "raise ValueError('no luck')", name="last")
    steps = "  last: {notebook: last.ipynb, after: use}\n"
    path.write_text(path.read_text() + steps)
    with pytest.raises(PipelineFailed) as caught:
        run(path, overrides=["find.tag=a b"])
    failed = caught.value
    assert str(failed).startswith("the step 'last' failed: code cell 1 of last.ipynb raised Value")
    assert (failed.step, failed.cell) == ("last", 1)
    assert failed.output == tmp_path / "out/steps/last.ipynb"
    assert isinstance(failed, NotebookFailed)
    folder = quote(f"{tmp_path}/out")
    assert (
        f"nbtoolkit pipeline {quote(str(path))} -o 'find.tag=a b' --folder {folder} "
        "(done: find, use; left: last;" in failed.do
    )
    edit(tmp_path / "last.ipynb", "raise ValueError('no luck')", "1")
    assert statuses(run(path, overrides=["find.tag=a b"])) == (
        "find skipped, use skipped, last done"
    )


def test_a_step_that_fails_with_other_inputs_is_not_done_any_more(tmp_path: Path) -> None:
    write_program(tmp_path, "assert n < 2", declares="n: int = 1", name="one")
    path = write_pipeline(tmp_path, one={"notebook": "one.ipynb"})
    run(path)
    with pytest.raises(PipelineFailed, match="raised AssertionError"):
        run(path, overrides={"one.n": 2})
    assert run(path)["one"].reason == "not done before"  # its executed copy is the failed one's


def test_a_kernel_that_dies_in_a_step_is_told_with_its_signal(tmp_path: Path) -> None:
    kills = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    write_program(tmp_path, "1", kills, name="one")
    with pytest.raises(PipelineFailed, match=r"the step 'one' failed: code cell 2.*SIGKILL") as one:
        run(write_pipeline(tmp_path, one={"notebook": "one.ipynb"}))
    assert isinstance(one.value.__cause__, NotebookDied)
    assert one.value.cell == 2


def test_a_time_limit_of_a_step_holds(tmp_path: Path) -> None:
    write_program(tmp_path, "import time\ntime.sleep(600)", name="one")
    path = write_pipeline(tmp_path, one={"notebook": "one.ipynb", "cell_timeout": 0.5})
    with pytest.raises(PipelineFailed, match=r"took longer than the 0\.5 s that a cell may"):
        run(path)


def test_a_missing_kernel_and_a_missing_file_are_told_with_the_step(tmp_path: Path) -> None:
    write_program(tmp_path, "1", name="one")
    with pytest.raises(PipelineFailed, match=r"the step 'one' failed: .*needs the kernel 'nosuch'"):
        run(write_pipeline(tmp_path, one={"notebook": "one.ipynb", "kernel": "nosuch"}))
    with pytest.raises(PipelineError, match=r"two\.yaml:4: there is no file 'no\*\.py'"):
        run(write_pipeline(tmp_path, one={"notebook": "one.ipynb", "files": ["no*.py"]}))


def test_a_folder_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path) -> None:
    path = write_two_steps(tmp_path)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file/out", Path("/proc/out")):
        with pytest.raises(NotebookError, match=r"pipeline's folder .*out cannot be written") as no:
            run(path, folder=folder)
        assert "--folder in a shell" in no.value.do


def test_two_runs_into_one_folder_are_refused(tmp_path: Path) -> None:
    path = write_two_steps(tmp_path)
    with (
        _locked(tmp_path / "out"),
        pytest.raises(NotebookError, match=r"another run of a pipeline writes to .*out\n"),
    ):
        run(path)
    assert statuses(run(path)) == "find done, use done"


@pytest.mark.parametrize("seconds", [0.3, pytest.param(4.0, marks=pytest.mark.long)])
def test_runs_of_a_killed_step_are_waited_for_unless_they_are_detached(
    seconds: float, tmp_path: Path
) -> None:
    files = NotebookFiles(tmp_path / "one.ipynb")
    files.log.touch()
    paths = RunPaths.create(tmp_path, "left")
    log = EventLog(paths.events)
    with open(paths.lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        log.write(RunStarted(detached=True))
        _wait_for_leftovers(files, tmp_path)
        log.write(RunStarted(detached=False))
        ends = threading.Timer(seconds, lock.close)
        ends.start()
        _wait_for_leftovers(files, tmp_path)
        assert lock.closed
        ends.join()
    log.close()


@pytest.mark.long
def test_a_kernel_that_is_left_over_is_waited_for(tmp_path: Path) -> None:
    write_program(tmp_path, "1", name="one")
    path = write_pipeline(tmp_path, one={"notebook": "one.ipynb"})
    (tmp_path / "out/steps").mkdir(parents=True)
    began = tmp_path / "out/pipeline.lock"
    with open(tmp_path / "out/steps/one.run.log", "w") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        with ThreadPoolExecutor(1) as thread:
            ran = thread.submit(run, path)
            until(began.exists, "the run that waits")
            with pytest.raises(NotYet):
                ran.result(timeout=0.5)
            log.close()
            assert statuses(ran.result(timeout=SECONDS)) == "one done"


@pytest.mark.parametrize(
    "damaged", ["{", *(pytest.param(one, marks=pytest.mark.long) for one in ("", '{"inputs": {}}'))]
)
def test_a_record_that_was_cut_short_is_that_of_a_step_not_done(
    damaged: str, tmp_path: Path
) -> None:
    write_program(tmp_path, "1", name="one")
    path = write_pipeline(tmp_path, one={"notebook": "one.ipynb"})
    run(path)
    (tmp_path / "out/steps/one.done.json").write_text(damaged)
    assert statuses(run(path)) == "one done"
    (tmp_path / "out/steps/one.ipynb").unlink()
    assert statuses(run(path)) == "one done"


@pytest.mark.chaos
@pytest.mark.usefixtures("own_tmpdir")
def test_after_a_kill_the_next_call_waits_for_the_kernel_that_is_left(tmp_path: Path) -> None:
    """A kernel notices only once a second that its parent is gone."""
    write_program(
        tmp_path,
        "import os, pathlib, time\nmark = pathlib.Path('begun')\nfirst = not mark.exists()",
        "mark.write_text(str(os.getpid()))\nwhile first: time.sleep(0.1)",
        name="one",
    )
    path = write_pipeline(tmp_path, one={"notebook": "one.ipynb"})
    program = [sys.executable, "-m", "nbtoolkit", "pipeline", str(path), "--folder", "out"]
    with subprocess.Popen(program, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as command:
        mark = tmp_path / "begun"
        kernel = int(until(lambda: mark.exists() and mark.read_text(), "the kernel"))
        assert kernel in descendants(command.pid)
        command.send_signal(signal.SIGKILL)
    done = subprocess.run(
        [*program, "--no-html"], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\[1/1\] one: one\.ipynb \(not done before\)", done.stderr)
    assert not alive(kernel)
