"""Small pipelines for tests: notebooks of a few cells, and the file that names them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import write_program

from nbtoolkit.config.loading import dump
from nbtoolkit.notebooks.pipeline import PipelineResult, run_pipeline

FIND = "import nbtoolkit as nb\nnb.publish({'best': {'lr': 0.1 * n}, 'score': n, 'tag': tag})"
USE = "import nbtoolkit as nb\nnb.publish({'used': settings, 'said': said})"


def write_two_steps(folder: Path) -> Path:
    """`find` publishes what it is given, `use` what `find` published; named in the other order."""
    write_program(folder, FIND, declares="n: int = 1\ntag: str = ''", name="find")
    write_program(folder, USE, declares="settings: dict = {}\nsaid: str = ''", name="use")
    return write_pipeline(
        folder,
        use={
            "notebook": "use.ipynb",
            "parameters": {"settings": "${find.best}", "said": "found ${find.score}"},
        },
        find={"notebook": "find.ipynb", "parameters": {"n": 3}},
    )


def write_pipeline(folder: Path, **steps: dict[str, Any]) -> Path:
    """Write `two.yaml` with these steps."""
    path = folder / "two.yaml"
    path.write_text(dump({"steps": steps}))
    return path


def run(path: Path, **options: Any) -> PipelineResult:
    """Run a pipeline beside its file; nothing is shown, no page is written."""
    quiet = {"folder": path.parent / "out", "html": False, "display": "off", **options}
    return run_pipeline(path, **quiet)


def edit(path: Path, old: str, new: str) -> None:
    """Replace a text in a file, which must have it."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def statuses(result: PipelineResult) -> str:
    """``"find skipped, use done"``."""
    return ", ".join(f"{step.name} {step.status}" for step in result.steps.values())


@pytest.fixture
def own_tmpdir(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A place for the temporary folders of processes that are killed: nobody else removes those.

    Its path is short, since Unix sockets lie below it.
    """
    folder = tempfile.mkdtemp(prefix="k")
    monkeypatch.setenv("TMPDIR", folder)
    yield
    shutil.rmtree(folder, ignore_errors=True)
