from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from kernels import SECONDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel of this checkout installs."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=SECONDS)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_carries_configuration_notebooks_and_types(installed: Path) -> None:
    for path in (ROOT / "config").rglob("*.yaml"):
        assert (installed / "nbtoolkit/_config" / path.relative_to(ROOT / "config")).is_file()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert (installed / "nbtoolkit/_notebooks" / path.name).is_file()
    assert (installed / "nbtoolkit/py.typed").is_file()
    assert not (installed / "config").exists()


def test_configuration_loads_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    program = (
        "import nbtoolkit as nb\n"
        "config = nb.load_config('config/train.yaml', env='kaggle')\n"
        "print(nb.__file__, config.runtime.session_limit, config.train.epochs, sep='|')"
    )
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.stdout == f"{installed / 'nbtoolkit/__init__.py'}|43200.0|30\n", done
