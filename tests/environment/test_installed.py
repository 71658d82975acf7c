"""The install lines of missing packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest
from whole import needs_extras

from nbtoolkit.environment.installed import install_line

ROOT = Path(__file__).resolve().parents[2]
CALLS = {
    extra
    for file in (ROOT / "nbtoolkit").rglob("*.py")
    for extra in re.findall(r"install_line\([\"']([\w-]+)[\"']\)", file.read_text())
}


@pytest.mark.parametrize("extra", sorted(CALLS))
def test_an_install_line_names_the_packages_of_the_extra(extra: str) -> None:
    if extra not in metadata("nbtoolkit-torch").get_all("Provides-Extra", []):
        pytest.skip(f"nbtoolkit was installed here before it had the extra {extra}")
    line = install_line(extra)
    assert re.fullmatch(r"pip install( '[a-z-]+(\[[a-z]+\])?>=[\d.]+')+", line)


@needs_extras
def test_the_extras_are_those_of_the_metadata() -> None:
    assert {"search", "panel", "notebooks", "training", "metric-learning"} <= CALLS
    assert install_line("panel") == "pip install 'ipywidgets>=8.1'"
    assert "'scikit-learn>=1.4'" in install_line("training")


def test_a_clone_that_is_not_installed_is_named_itself() -> None:
    program = "from nbtoolkit.environment.installed import install_line as f; print(f('panel'))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"pip install '{ROOT}[panel]'"
