"""`nbtoolkit kaggle-kernel`: Kaggle's client accepts the folder; we check what it does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from kaggle_client import pushed
from programs import write_program

from nbtoolkit.errors import MetadataError, NotebookError, ParameterError
from nbtoolkit.sessions.kernel import FILE, GPUS, KernelSettings, write_kernel

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


def kernel(folder: Path, **options: Any) -> Path:
    path = write_program(folder, "print(n)", declares="n: int = 1", name="some_work")
    return write_kernel(path, folder / "kernel", KernelSettings(**{"user": "me", **options}))


def metadata(folder: Path) -> dict[str, Any]:
    return json.loads((folder / FILE).read_text())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_kaggles_client_takes_our_notebooks(path: Path, tmp_path: Path) -> None:
    settings = KernelSettings(user="me", gpu="t4", datasets=["me/wheels"])
    folder = write_kernel(path, tmp_path, settings)
    request, told = pushed(folder)
    assert told == ""  # it warns where title and id differ
    assert request.slug == f"me/{path.stem.replace('_', '-')}"
    assert (request.enable_gpu, request.machine_shape) == (True, "NvidiaTeslaT4")
    assert (request.is_private, request.enable_internet) == (True, False)
    assert request.dataset_data_sources == ["me/wheels"]
    sent = json.loads(request.text)["cells"]
    assert len(sent) == len(nbformat.read(path, as_version=4).cells)


def test_outputs_stay_here_and_parameters_go_with_it(tmp_path: Path) -> None:
    path = write_program(tmp_path, "1", declares="n: int = 1\ntag: str = 'a'")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="a secret")]
    nbformat.write(notebook, path)
    settings = KernelSettings(user="me", title="Some work")
    folder = write_kernel(path, tmp_path / "k", settings, {"n": 7})
    copy = nbformat.read(folder / "work.ipynb", as_version=4)
    assert [cell.source for cell in copy.cells][1] == "# Parameters\nn = 7\n"
    assert "a secret" not in pushed(folder)[0].text
    with pytest.raises(ParameterError, match=r"work\.ipynb has no parameter 'm'"):
        write_kernel(path, tmp_path / "k", settings, {"m": 7})


def test_what_stands_there_already_stays(tmp_path: Path) -> None:
    folder = kernel(tmp_path, title="Some other work", gpu="l4", datasets=["me/one"])
    values = metadata(folder) | {"keywords": ["tabular"], "is_private": "false"}
    (folder / FILE).write_text(json.dumps(values))
    settings = KernelSettings(internet=True, datasets=["me/two", "me/one"])
    write_kernel(tmp_path / "some_work.ipynb", folder, settings)
    now = metadata(folder)
    assert now["keywords"] == ["tabular"]
    assert (now["id"], now["title"]) == ("me/some-other-work", "Some other work")
    assert (now["is_private"], now["enable_internet"]) == ("false", True)
    assert now["machine_shape"] == GPUS["l4"]
    assert now["dataset_sources"] == ["me/one", "me/two"]
    assert pushed(folder)[0].is_private is False


@pytest.mark.parametrize("text", ["{", "[]", '{"id": 1'])
def test_a_damaged_file_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    folder = kernel(tmp_path)
    (folder / FILE).write_text(text)
    with pytest.raises(MetadataError, match=rf"{FILE} is not (JSON: |a JSON object)"):
        write_kernel(tmp_path / "some_work.ipynb", folder)
    assert (folder / FILE).read_text() == text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"user": None}, r"the notebook has no owner(?s:.*)--user NAME"),
        ({"gpu": "t5"}, r"Kaggle has no GPU 't5'\n.*t4, p100"),
    ],
)
def test_what_the_client_would_not_notice_is_refused_and_nothing_written(
    wrong: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KAGGLE_USERNAME", raising=False)
    with pytest.raises(MetadataError, match=message):
        kernel(tmp_path, **wrong)
    assert not (tmp_path / "kernel").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"title": "abc"}, "at least five characters"),
        ({"user": "me/you"}, "five characters"),
        ({"title": "?????"}, "Kernel must be specified in the form"),
        ({"datasets": ["wheels"]}, "Dataset must be specified in the form"),
        ({"kernels": ["mine"]}, "Kernel must be specified in the form"),
    ],
)
def test_the_client_refuses_the_rest(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = kernel(tmp_path, **wrong)
    with pytest.raises(ValueError, match=message):
        pushed(folder)


def test_a_notebook_that_is_not_python_is_not_sent(tmp_path: Path) -> None:
    path = write_program(tmp_path, "1 +")
    with pytest.raises(NotebookError, match="code cell 1 is not Python"):
        write_kernel(path, tmp_path / "kernel", KernelSettings(user="me", title="Some work"))


def test_the_command_prints_what_sends_it(tmp_path: Path) -> None:
    write_program(tmp_path, "print(n)", declares="n: int = 1", name="some_work")
    words = ["some_work.ipynb", "--user", "me", "--gpu", "t4", "-p", "n=3", "--dataset", "me/w"]
    program = [sys.executable, "-m", "nbtoolkit", "kaggle-kernel", *words]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "kaggle kernels push -p outputs/kaggle/some-work\n"
    request, _ = pushed(tmp_path / "outputs/kaggle/some-work")
    assert "n = 3" in request.text

    wrong = subprocess.run(
        [*program, "--gpu", "t5"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "Kaggle has no GPU 't5'" in wrong.stderr
