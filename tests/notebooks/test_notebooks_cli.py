"""`nbtoolkit run NOTEBOOK`, called from a shell."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kernels import SECONDS, all_gone, until
from programs import write_program

from nbtoolkit.run.paths import read_json

DECLARES = "tag: str = 'a'\nn: int = 1\nmany: list = []"
WORK = "import nbtoolkit as nb\nprint('in the log')\nnb.publish({'all': [tag, n, many]})"


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "nbtoolkit", "run", *words]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=SECONDS)


def test_run_takes_parameters_of_files_and_options_and_prints_what_was_published(
    tmp_path: Path,
) -> None:
    write_program(tmp_path, WORK, declares=DECLARES)
    (tmp_path / "params.yaml").write_text("n: 5\nmany: [1, x]\n")
    options = ["-p", "tag=007", "-p", "n=7", "-f", "params.yaml", "--no-html"]
    done = command(tmp_path, "work.ipynb", *options, "--output", "out/done.ipynb")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all:\n- '007'\n- 7\n- - 1\n  - x\n"
    assert f"executed copy: {tmp_path}/out/done.ipynb" in done.stderr
    beside = {file.name for file in (tmp_path / "out").iterdir()}
    assert beside == {"done.ipynb", "done.run.json", "done.run.log"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-p", "tagg=1"], "work.ipynb has no parameter 'tagg'\n  Allowed: tag, n, many"),
        (["-p", "n=some"], "n is 'some'\n  Allowed: int"),
        (["-p", "n"], "parameter 'n': has no name, or no '='"),
        (["--kernel", "nosuch"], "the kernel 'nosuch', which is not installed here"),
    ],
)
def test_a_wrong_call_is_told_without_a_kernel(
    words: list[str], message: str, tmp_path: Path
) -> None:
    write_program(tmp_path, WORK, declares=DECLARES)
    done = command(tmp_path, "work.ipynb", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert not (tmp_path / "outputs").exists()


def test_a_failing_notebook_ends_with_1_and_its_copy_in_outputs(tmp_path: Path) -> None:
    write_program(tmp_path, "assert False, 'no luck'")
    done = command(tmp_path, "work.ipynb", "--no-html")
    assert done.returncode == 1
    assert "code cell 1 of work.ipynb raised AssertionError: no luck" in done.stderr
    [copy] = (tmp_path / "outputs").glob("*-work-*.ipynb")
    assert str(copy) in done.stderr


def test_an_interrupt_ends_the_kernel_and_says_where_it_was(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    waits = f"import os, time, pathlib\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))"
    write_program(tmp_path, waits, "time.sleep(600)")
    program = [sys.executable, "-m", "nbtoolkit", "run", "work.ipynb", "--output", "d.ipynb"]
    with subprocess.Popen(program, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as running:
        kernel = int(until(lambda: pid.exists() and pid.read_text(), "the kernel"))
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=SECONDS)
    assert running.returncode == 130
    assert "interrupted" in told
    all_gone({kernel})  # a zombie counts as gone: its new parent may be slow to reap it
    assert read_json(tmp_path / "d.run.json")["failure"]["kind"] == "interrupt"


def test_a_run_ends_with_the_process_that_waits_for_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    waits = f"import os, time, pathlib\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))"
    write_program(tmp_path, waits, "time.sleep(600)")
    program = [sys.executable, "-m", "nbtoolkit", "run", "work.ipynb", "--output", "d.ipynb"]
    with subprocess.Popen(program, cwd=tmp_path, stderr=subprocess.DEVNULL) as running:
        kernel = int(until(lambda: pid.exists() and pid.read_text(), "the kernel"))
        running.kill()
    all_gone({kernel})
    until(lambda: read_json(tmp_path / "d.run.json")["status"] == "failed", "the record")
    assert read_json(tmp_path / "d.run.json")["failure"]["kind"] == "interrupt"
