"""`nbtoolkit panel`: a shell shows a run and presses its buttons."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import MINE, SPACE, command
from kernels import finish, until

import nbtoolkit as nb


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A working directory with the user's own module in it."""
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


GOES_ON = ["-o", "task=mine:goes_on", "-o", "tracking.mlflow=false"]


def started(home: Path, *words: str) -> Path:
    """The folder of something detached."""
    ran = command(home, *words, "--detach")
    assert ran.returncode == 0, ran.stderr
    return Path(ran.stdout.strip().splitlines()[-1])


@pytest.mark.long
def test_the_newest_run_is_shown_stopped_and_gone_on_with(home: Path) -> None:
    run = started(home, "train", *GOES_ON)
    seen = command(home, "panel", "--once")
    assert seen.returncode == 0
    name = run.name.partition("-")[2]
    assert f"{name}  ● running" in seen.stdout
    stopped = command(home, "panel", run.name, "--press", "stop")
    assert stopped.returncode == 3
    assert f"{name}  ■ stopped" in stopped.stdout
    assert "Resume continues it" in stopped.stdout
    again = command(home, "panel", str(run), "--press", "resume", "--once")
    assert again.returncode == 0, again.stderr
    assert f"{name}  ● running" in again.stdout
    assert command(home, "panel", "--press", "stop").returncode == 3


@pytest.mark.long
def test_a_sweep_is_given_more_trials_and_its_best_is_trained(home: Path) -> None:
    (home / "space.yaml").write_text(SPACE)
    sweep_config = ["-o", "task=mine:score", "-o", "tracking.mlflow=false"]
    sweep = started(home, "sweep", "space.yaml", *sweep_config, "--trials", "2")
    whole = command(home, "panel", str(sweep))
    assert whole.returncode == 0, whole.stderr
    assert f"{sweep.name.partition('-')[2]}  ✓ completed" in whole.stdout
    assert "2/2" in whole.stdout
    late = command(home, "panel", str(sweep), "--press", "pause")
    assert late.returncode == 2
    assert "Pause cannot be pressed" in late.stderr
    assert "train_best" in late.stderr
    more = command(home, "panel", str(sweep), "--press", "add_trials=2")
    assert more.returncode == 0, more.stderr
    assert "4/4" in more.stdout
    final = command(home, "panel", str(sweep), "--press", "train_best")
    assert final.returncode == 0, final.stderr
    assert "-best-" in final.stdout
    assert "completed" in final.stdout


@pytest.mark.long
def test_what_failed_ends_with_1_and_shows_the_error(home: Path) -> None:
    run = started(home, "train", "-o", "task=mine:fails", "-o", "tracking.mlflow=false")
    ended = command(home, "panel", str(run))
    assert ended.returncode == 1
    assert "no luck today" in ended.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "there is no run nowhere"),
        ([], "there is no run in"),
    ],
)
def test_a_run_that_is_not_there_is_refused(
    home: Path,
    words: list[str],
    told: str,
) -> None:
    ran = command(home, "panel", *words)
    assert ran.returncode == 2
    assert told in ran.stderr


@pytest.mark.long
def test_in_a_terminal_the_page_is_written_anew_and_an_interrupt_leaves_the_run(
    home: Path,
) -> None:
    run = started(home, "train", *GOES_ON)
    mine, theirs = pty.openpty()
    program = [sys.executable, "-m", "nbtoolkit", "panel", str(run)]
    watching = subprocess.Popen(program, cwd=home, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    try:
        seen = b""

        def twice() -> bool:
            nonlocal seen
            seen += os.read(mine, 65536)
            return seen.count(b"\x1b[H\x1b[J") >= 2

        until(twice, "the page for the second time")
        watching.send_signal(signal.SIGINT)
        assert watching.wait(120) == 0
    finally:
        watching.kill()
        watching.communicate()
        os.close(mine)
    handle = nb.attach(run)
    assert not handle.done()
    handle.stop()
    assert finish(handle, 120).status == "stopped"
