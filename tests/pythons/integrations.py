"""Run tests/extras/integrations where all frameworks are installed: ``make test-integrations``.

    python -m tests.pythons.integrations [PYTEST ARGUMENTS]

The environment is built once, in ``build/integrations``, and again when its sources change. It sees
the packages of this Python (torch among them, which is not installed a second time), and has its
own copies only of what is missing there, or must have another version.

PyPI's wheels of torchvision do not load with a CPU build of torch. Where this Python has one, the
tests of torchvision and timm run in ``build/vision``, with PyPI's torch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from packaging.utils import canonicalize_name

from tests.pythons.environments import ROOT, run_uv

FOLDER = ROOT / "build/integrations"
VISION = ROOT / "build/vision"

# This Python has a torch, whose build the index may not have; libraries of CUDA are of a build.
_NOT_HERE = ("torch==", "triton==", "nvidia-", "cuda-", "nbtoolkit")


def main(arguments: list[str]) -> int:
    """Build the environment if necessary, and run the tests there."""
    words = arguments or ["-q", "-n", "2", "--dist", "loadscope", "tests/extras/integrations"]
    code = run_beside(FOLDER, "integrations", words)
    if arguments or "+cpu" not in version("torch"):
        return code
    _build_vision()
    return run_in(VISION, ["-q", "tests/extras/integrations/test_metric_learning.py"]) or code


def run_beside(folder: Path, extra: str, words: list[str]) -> int:
    """Build the environment of an extra in ``folder`` if necessary, and run pytest in it."""
    build(folder, extra)
    return run_in(folder, words)


def run_in(folder: Path, words: list[str]) -> int:
    """Run pytest in the environment of ``folder``."""
    return subprocess.run(
        [folder / "venv/bin/python", "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "KERAS_HOME": str(folder / "keras")},
        check=False,
    ).returncode


def build(folder: Path, extra: str) -> None:
    """Install the environment of an extra, unless it is there (minutes)."""
    present = run_uv("pip", "freeze", "--python", sys.executable)
    with _new(folder, present) as python:
        if python is not None and (missing := _missing(present, folder, extra)):
            run_uv("pip", "install", "--python", python, "--no-deps", *missing)


def _build_vision() -> None:
    """Install PyPI's torch of this Python's version, and torchvision, timm and the losses."""
    present = run_uv("pip", "freeze", "--python", sys.executable)
    with _new(VISION, present) as python:
        if python is not None:
            torch = f"torch=={version('torch').partition('+')[0]}"
            packages = (torch, "torchvision", "timm", "pytorch-metric-learning")
            run_uv("pip", "install", "--python", python, *packages)


@contextmanager
def _new(folder: Path, present: str) -> Iterator[Path | None]:
    """Make an environment that sees this Python's packages; None: it is there, from these sources.

    It is complete when the block ends.
    """
    sources = present + (ROOT / "pyproject.toml").read_text() + Path(__file__).read_text()
    made_from, stamp = hashlib.sha256(sources.encode()).hexdigest(), folder / "made_from"
    if stamp.is_file() and stamp.read_text() == made_from:
        yield None
        return
    print(f"installing into {folder} (minutes the first time)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run_uv("venv", "--python", sys.executable, folder / "venv")
    yield folder / "venv/bin/python"
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "venv/lib" / name / "site-packages"
    (packages / "other.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    stamp.write_text(made_from)


def _missing(present: str, folder: Path, extra: str) -> list[str]:
    """What the extra needs and this Python lacks, in versions that fit what it has."""
    needs = folder / "requirements.txt"
    held = [line for line in present.splitlines() if "==" in line]
    needs.write_text("\n".join(held))  # uv keeps the versions of its last result where it can
    source = ["--extra", extra, ROOT / "pyproject.toml"]
    options = ["--no-header", "--no-annotate", "--python", sys.executable]
    run_uv("pip", "compile", *options, *source, "-o", needs)
    pinned = [line.strip() for line in needs.read_text().splitlines() if "==" in line]
    there = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in held}
    return [
        line
        for line in pinned
        if not line.startswith(_NOT_HERE)
        and there.get(canonicalize_name(line.partition("==")[0])) != line.partition("==")[2]
    ]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
