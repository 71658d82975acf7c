"""Pipelines run notebooks in the order of their dependencies and skip completed steps."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernels import SECONDS
from pipelines import edit, run, statuses, write_pipeline, write_two_steps
from programs import write_program


def test_a_step_is_given_what_the_one_before_it_published(tmp_path: Path) -> None:
    done = run(write_two_steps(tmp_path))
    assert list(done.steps) == ["find", "use"]  # though the file names them the other way round
    assert done["use"].values == {"used": {"lr": pytest.approx(0.3)}, "said": "found 3"}
    assert (done.status, statuses(done)) == ("completed", "find done, use done")
    assert done["use"].output == tmp_path / "out/steps/use.ipynb"
    assert "use: done" in repr(done)
    assert "said=&#x27;found 3&#x27;" in done._repr_html_()


def test_what_was_done_with_equal_inputs_is_skipped_and_the_rest_run_again(tmp_path: Path) -> None:
    path = write_two_steps(tmp_path)
    first = run(path)
    before = first["find"].output.stat().st_mtime_ns

    again = run(path)
    assert statuses(again) == "find skipped, use skipped"
    assert again.values == first.values
    assert again["find"].output.stat().st_mtime_ns == before

    other_tag = run(path, overrides=["find.tag=007"])
    assert other_tag["find"].reason == "its inputs have changed"
    assert other_tag["find"].values["tag"] == "007"
    assert statuses(other_tag) == "find done, use skipped"  # nothing that it was given has changed

    edit(tmp_path / "use.ipynb", "'said': said", "'said': said * 2")
    changed = run(path, overrides={"find.tag": "007"})
    assert changed["use"].reason == "its inputs have changed"
    assert (statuses(changed), changed["use"].values["said"]) == (
        "find skipped, use done",
        "found 3found 3",
    )
    assert statuses(run(path, overrides={"find.tag": "007"}, again=["find"])) == (
        "find done, use skipped"
    )


@pytest.mark.long
def test_a_new_text_around_the_code_changes_nothing_and_a_settings_file_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text("seed: 1")
    (tmp_path / "code.py").write_text("x = 1")
    named = "config_path: str = 'my.yaml'"
    path = write_program(tmp_path, "print(config_path)", declares=named, name="one")
    pipeline = write_pipeline(tmp_path, one={"notebook": "one.ipynb", "files": "*.py"})
    run(pipeline)

    notebook = json.loads(path.read_text())
    notebook["cells"].insert(0, {"cell_type": "markdown", "metadata": {}, "source": "# Title"})
    path.write_text(json.dumps(notebook))
    assert statuses(run(pipeline)) == "one skipped"

    (tmp_path / "my.yaml").write_text("seed: 2")
    assert run(pipeline)["one"].reason == "its inputs have changed"
    (tmp_path / "code.py").write_text("x = 2")
    assert run(pipeline)["one"].reason == "its inputs have changed"


def test_a_settings_file_that_the_step_writes_itself_is_none_of_its_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    work = "import pathlib, time\npathlib.Path('own.json').write_text(str(time.time_ns()))"
    write_program(tmp_path, work, name="one")
    path = write_pipeline(tmp_path, one={"notebook": "one.ipynb"})
    assert [statuses(run(path)) for _ in range(2)] == ["one done", "one skipped"]
    assert statuses(run(path, again=["one"])) == "one done"  # now it is there before the step
    assert statuses(run(path)) == "one skipped"


@pytest.mark.long
def test_a_folder_that_was_moved_is_still_done(tmp_path: Path) -> None:
    write_program(
        tmp_path,
        "import nbtoolkit as nb\nnb.publish({'file': f'{folder}/a.txt'})",
        declares="folder: str = ''\nnamed: str = ''",
        name="one",
    )
    given = {"folder": "${pipeline.folder}", "named": "${pipeline.folder}/my.yaml"}
    path = write_pipeline(tmp_path, one={"notebook": "one.ipynb", "parameters": given})
    (tmp_path / "out").mkdir()
    (tmp_path / "out/my.yaml").write_text("seed: 1")
    assert run(path)["one"].values["file"] == str(tmp_path / "out/a.txt")
    shutil.move(tmp_path / "out", tmp_path / "elsewhere")
    moved = run(path, folder=tmp_path / "elsewhere")
    assert statuses(moved) == "one skipped"
    assert moved["one"].values["file"] == str(tmp_path / "elsewhere/a.txt")
    (tmp_path / "elsewhere/my.yaml").write_text("seed: 2")
    changed = run(path, folder=tmp_path / "elsewhere")
    assert changed["one"].reason == "its inputs have changed"


@pytest.mark.long
def test_a_step_that_published_that_there_is_more_to_do_ends_the_pipeline_for_now(
    tmp_path: Path,
) -> None:
    work = """
import nbtoolkit as nb
nb.publish({"n": n, "status": "deadline" if n == 1 else "completed"})
"""
    no_more_to_show = "assert n > 1"
    write_program(tmp_path, work, no_more_to_show, declares="n: int = 1", name="one")
    write_program(tmp_path, "1", name="two")
    path = write_pipeline(
        tmp_path, one={"notebook": "one.ipynb"}, two={"notebook": "two.ipynb", "after": "one"}
    )
    early = run(path)
    assert (early.status, statuses(early)) == ("deadline", "one early")
    assert not (tmp_path / "out/steps/two.ipynb").exists()
    later = run(path, overrides={"one.n": 2})
    assert (later.status, statuses(later)) == ("completed", "one done, two done")
    other = run(path, overrides={"one.n": 3})
    assert other["two"].reason == "its inputs have changed"


@pytest.mark.long
def test_the_command_prints_what_was_published_and_skips_without_loading_a_kernels_client(
    tmp_path: Path,
) -> None:
    write_two_steps(tmp_path)

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-X", "importtime", "-m", "nbtoolkit", "pipeline", "two.yaml"]
        return subprocess.run(
            [*program, "--no-html", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )

    first = command("-o", "find.n=5")
    assert first.returncode == 0, first.stderr
    assert first.stdout.endswith("use:\n  used:\n    lr: 0.5\n  said: found 5\n")
    assert "[1/2] find: find.ipynb (not done before)" in first.stderr
    assert f"completed, everything is in {tmp_path}/outputs/two" in first.stderr

    second = command("-o", "find.n=5")
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert "[2/2] use: skipped, done with the same inputs" in second.stderr
    loaded = {line.rpartition("|")[2].strip() for line in second.stderr.splitlines()}
    assert "nbtoolkit.notebooks.pipeline" in loaded
    assert not loaded & {"torch", "numpy", "papermill", "nbclient"}

    wrong = command("-o", "fnd.n=5")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "there is no step 'fnd'\n  Allowed: use, find\n  Do now:  did you mean 'find'?" in (
        wrong.stderr
    )
