"""The folder of the extras can be deleted: the core's tests do not need it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from whole import needs_extras

ROOT = Path(__file__).parents[2]
PARTS = ("config", "docs", "nbtoolkit", "notebooks", "tests", "pyproject.toml", "README.md")

# Those that name an extra, or that read the whole package. The others are collected only: all of
# them take as long as `make test`.
TESTS = (
    "tests/cli",
    "tests/config/test_every_field.py",
    "tests/environment/test_installed.py",
    "tests/launcher/test_misuse.py",
    "tests/panel/test_form.py",
    "tests/project/test_imports_one_way.py",
    "tests/project/test_public_names.py",
    "tests/tasks",
    "tests/views/test_stored.py",
)


def run_pytest(folder: Path, *words: str) -> str:
    """Run pytest in a copy of the project, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@needs_extras
@pytest.mark.long
def test_the_core_passes_without_the_extras(tmp_path: Path) -> None:
    for part in PARTS:
        copy = shutil.copy2 if (ROOT / part).is_file() else shutil.copytree
        copy(ROOT / part, tmp_path / part)
    shutil.rmtree(tmp_path / "nbtoolkit/extras")
    shutil.rmtree(tmp_path / "tests/extras")
    run_pytest(tmp_path, "--collect-only", "tests")
    quick = "not long and not apart and not hosts and not gpu and not cluster"
    assert " passed" in run_pytest(tmp_path, "-m", quick, *TESTS)
