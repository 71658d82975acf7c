"""Run tests/integrations where all frameworks are installed: ``make test-integrations``.

    python -m tests.pythons.integrations [PYTEST ARGUMENTS]

The environment is built once, in ``build/integrations``, and again when its sources change. It sees
the packages of this Python (torch among them, which is not installed a second time), and has its
own copies only of what is missing there, or must have another version.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from packaging.utils import canonicalize_name

from tests.pythons.environments import ROOT, run_uv

FOLDER = ROOT / "build/integrations"

# This Python has a torch, whose build the index may not have; libraries of CUDA are of a build.
_NOT_HERE = ("torch==", "triton==", "nvidia-", "cuda-", "nbtoolkit")


def main(arguments: list[str]) -> int:
    """Build the environment if necessary, and run the tests there."""
    words = arguments or ["-q", "-n", "2", "--dist", "loadscope", "tests/integrations"]
    return run_beside(FOLDER, "integrations", words)


def run_beside(folder: Path, extra: str, words: list[str]) -> int:
    """Build the environment of an extra in ``folder`` if necessary, and run pytest in it."""
    build(folder, extra)
    return subprocess.run(
        [folder / "venv/bin/python", "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "KERAS_HOME": str(folder / "keras")},
        check=False,
    ).returncode


def build(folder: Path, extra: str) -> None:
    """Install the environment of an extra, unless it is there (minutes)."""
    present = run_uv("pip", "freeze", "--python", sys.executable)
    sources = present + (ROOT / "pyproject.toml").read_text() + Path(__file__).read_text()
    made_from, stamp = hashlib.sha256(sources.encode()).hexdigest(), folder / "made_from"
    if stamp.is_file() and stamp.read_text() == made_from:
        return
    print(f"installing into {folder} (minutes the first time)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run_uv("venv", "--python", sys.executable, folder / "venv")
    missing = _missing(present, folder, extra)
    if missing:
        run_uv("pip", "install", "--python", folder / "venv/bin/python", "--no-deps", *missing)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "venv/lib" / version / "site-packages"
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
