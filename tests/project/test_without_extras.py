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
# What a clone does not have, and the two folders of the extras.
LEFT_OUT = (".git", ".venv", ".*_cache", "__pycache__", "build", "dist", "outputs", "extras")

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
    clone = tmp_path / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(*LEFT_OUT))
    assert not (clone / "nbtoolkit/extras").exists()
    run_pytest(clone, "--collect-only", "tests")
    quick = "not long and not apart and not hosts and not gpu and not cluster"
    assert " passed" in run_pytest(clone, "-m", quick, *TESTS)
