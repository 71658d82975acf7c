"""The command line, called from a shell: output, streams and exit codes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from command_line import MINE, SPACE, command
from kernels import until
from records import ended_runs, last_of

import nbtoolkit
from nbtoolkit.__main__ import main
from nbtoolkit.attach import attach
from nbtoolkit.errors import ConfigError
from nbtoolkit.search.folds.make_folds import make_folds
from nbtoolkit.tasks.find import find_task


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with the user's own module and configuration in it."""
    (tmp_path / "mine.py").write_text(MINE)
    settings = {"task": "mine:twice", "data": {"x": 4}, "tracking": {"mlflow": False}}
    (tmp_path / "mine.json").write_text(json.dumps(settings))
    return tmp_path


Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def call(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Call]:
    """The same command in this process, whose fork server has torch already (2 s of import)."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def called(*words: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["nbtoolkit", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        code = int(ended.value.code or 0)
        return subprocess.CompletedProcess(sys.argv, code, *capsys.readouterr())

    yield called
    sys.modules.pop("mine", None)


def test_train_runs_the_task_of_the_configuration_with_overrides(folder: Path) -> None:
    done = command(folder, "train", "mine.json", "-o", "data.x=21", "--name", "mine")
    assert done.returncode == 0, done.stderr
    [run] = (folder / "outputs").glob("*-mine-*")
    assert last_of(run).metrics == {"twice": 42.0}
    assert done.stdout.splitlines()[-1].endswith(f"{run})")
    assert "completed, twice=42" in done.stdout


def test_a_result_is_printed_where_stdout_is_ascii(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = command(folder, "cv", "mine.json", "-o", "task=mine:score", "--folds", "2")
    assert done.returncode == 0, done.stderr
    assert re.search(r"held_out=\d \? \d", done.stdout)  # mean and standard deviation


@pytest.mark.long
def test_the_installed_script_finds_modules_of_the_working_directory(folder: Path) -> None:
    script = "from nbtoolkit.__main__ import main; main()"
    program = [sys.executable, "-I", "-c", script, "train", "mine.json"]  # -I: no "" in sys.path
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "completed, twice=8" in done.stdout


def test_an_interrupted_run_stops_and_exits_with_130(folder: Path) -> None:
    program = [sys.executable, "-m", "nbtoolkit", "train", "mine.json", "-o", "task=mine:goes_on"]
    pipe = subprocess.PIPE
    with subprocess.Popen(program, cwd=folder, stdout=pipe, stderr=pipe, text=True) as process:
        diaries = partial(folder.glob, "*/*/events.jsonl")
        try:
            until(lambda: any('"report"' in diary.read_text() for diary in diaries()), "a report")
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert "stopping: interrupted" in out
    assert err.splitlines()[-1] == "interrupted"
    [run] = ended_runs(folder / "outputs")
    assert last_of(run).status == "stopped"


def test_an_error_of_the_function_is_told_in_sentences_and_exits_with_1(call: Call) -> None:
    done = call("train", "mine.json", "-o", "task=mine:fails")
    assert done.returncode == 1
    first, where, hint = done.stderr.splitlines()
    assert first == "ValueError: no luck today"
    assert "rank 0" in where
    assert "mine.py:8" in where
    assert "--debug" in hint


@pytest.mark.long
def test_debug_shows_the_traceback(folder: Path) -> None:
    done = command(folder, "train", "mine.json", "-o", "task=mine:fails", "--debug")
    assert done.returncode == 1
    assert 'raise ValueError("no luck today")' in done.stderr
    assert "Traceback" in done.stderr


def test_a_run_out_of_time_exits_with_3(call: Call) -> None:
    sweep_config = ["-o", "task=mine:goes_on", "-o", "runtime.time_budget=0.2"]
    done = call("train", "mine.json", *sweep_config)
    assert (done.returncode, done.stderr) == (3, "")
    assert "RunResult(deadline, alive=1" in done.stdout


@pytest.mark.long
def test_a_detached_run_outlives_the_command_that_prints_its_folder(folder: Path) -> None:
    sweep_config = ["-o", "task=mine:goes_on", "--detach"]
    done = command(folder, "train", "mine.json", *sweep_config)
    assert done.returncode == 0, done.stderr
    handle = attach(done.stdout.splitlines()[-1])
    assert not handle.done()
    handle.stop()
    assert handle.result(timeout=120).status == "stopped"


@pytest.mark.long
def test_cv_makes_folds_of_the_tasks_own_data_set(call: Call) -> None:
    done = call("cv", "mine.json", "-o", "task=mine:score", "--folds", "3")
    assert done.returncode == 0, done.stderr
    assert "held_out=4 ± 0" in done.stdout.splitlines()[-1]


@pytest.mark.long
def test_cv_takes_folds_from_a_file(folder: Path, call: Call) -> None:
    make_folds([0, 1] * 3, k=2, kind="kfold").save(folder / "two.json")
    done = call("cv", "mine.json", "-o", "task=mine:score", "--folds", "two.json")
    assert done.returncode == 0, done.stderr
    assert "2 of 2 folds" in done.stdout
    assert "held_out=3 ± 0" in done.stdout


def test_sweep_writes_the_best_configuration_and_train_takes_it(folder: Path, call: Call) -> None:
    (folder / "space.yaml").write_text(SPACE)
    sweep_config = ["-o", "task=mine:score", "--trials", "3"]
    done = call("sweep", "space.yaml", "mine.json", *sweep_config)
    assert done.returncode == 0, done.stderr
    [best] = (folder / "outputs").glob("*/best.yaml")
    assert f"best configuration: {best}" in done.stdout
    assert "3/3 trials, 3 complete" in done.stdout
    trained = call("train", str(best))
    assert trained.returncode == 0, trained.stderr
    summary = last_of(best.parent).summary
    assert f"score={summary['best_value']:.4g}" in trained.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "-o", "train.epoch=3"], "did you mean 'train.epochs'?"),
        (["train", "no.yaml"], "there is no configuration file 'no.yaml'"),
        (["train", "-o", "task=mine:twise"], 'did you mean "mine:twice"?'),
        (["train", "-o", "task=mime:twice"], "there is no module 'mime'"),
        (["train", "-p", "0"], "processes"),
        (["cv", "--folds", "no.json"], "the folds cannot be read from no.json"),
        (["cv", "--folds", "1", "-o", "task=mine:score"], "k"),
        (["cv", "--folds", "3", "-o", "task=textwrap:dedent"], "has no function load()"),
        (["sweep", "no.yaml"], "there is no configuration file 'no.yaml'"),
        (["train", "--bogus"], "No such option"),
        (["trian"], "No such command"),
    ],
)
def test_a_wrong_call_starts_nothing_and_exits_with_2(
    folder: Path, call: Call, words: list[str], told: str
) -> None:
    done = call(*words)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "outputs").exists()


def test_without_a_verb_it_says_what_there_is(folder: Path) -> None:
    done = command(folder)
    assert "train " in done.stdout + done.stderr  # which of them, typer's versions do not agree
    assert "doctor " in done.stdout + done.stderr


def test_doctor_prints_the_plan_and_ends_as_its_findings_say(call: Call) -> None:
    done = call("doctor")
    findings = nbtoolkit.doctor()
    assert done.returncode == (0 if findings.ok else 1)
    assert findings.plan is not None
    assert findings.plan.explain().splitlines()[0] in done.stdout


def test_it_prints_its_version(call: Call) -> None:
    done = call("--version")
    assert (done.returncode, done.stdout) == (0, f"nbtoolkit {nbtoolkit.__version__}\n")


def test_without_typer_it_says_how_to_install_it(folder: Path) -> None:
    hide = "import sys; sys.modules['typer'] = None; from nbtoolkit.__main__ import main; main()"
    program = [sys.executable, "-c", hide]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "Do now:  pip install typer" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_task_that_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no function 'MODELS'.*\n.*make_model, split, train"):
        find_task("nbtoolkit.tasks.digits:MODELS")


def test_a_task_whose_module_lacks_what_it_imports_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacking_one.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        find_task("lacking_one:train")
