"""A virtual environment like a host's image: built once, in ``build/hosts``."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from names import COMMON, MORE, PINNED
from packaging.utils import canonicalize_name

from nbtoolkit.hosts.image import host_image

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/hosts"

# Not of the image, but of the tests: nbval runs in the kernel's environment.
TOOLS = ["pytest", "nbval"]


def image_venv(host: str) -> Path:
    """The environment of a host; built where there is none yet of these versions (minutes)."""
    wanted = [*COMMON, *MORE[host], *TOOLS]
    constraints = _constraints(host)
    whole = json.dumps([sys.version, _torch(), wanted, constraints])
    folder = FOLDER / f"{host}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}"
    if not (folder / "freeze.txt").exists():
        shutil.rmtree(folder, ignore_errors=True)
        _build(folder, wanted, constraints)
    return folder


def _constraints(host: str) -> list[str]:
    """The image's versions of what is asked for; what that needs comes in versions that fit."""
    held = {**host_image(host).packages, **PINNED[host]}
    names = map(canonicalize_name, [*COMMON, *MORE[host]])
    return [f"{name}=={held[name]}" for name in names if held.get(name) and name != "pip"]


def _build(folder: Path, wanted: list[str], constraints: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    (folder / "constraints.txt").write_text("\n".join(constraints))
    pip = [str(folder / "venv/bin/python"), "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", _torch()], check=True)
    limits = ["--constraint", str(folder / "constraints.txt")]
    subprocess.run([*pip, "install", "--quiet", *limits, _torch(), *wanted], check=True)
    subprocess.run([*pip, "check"], check=True)
    freeze = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True).stdout
    python = "# python {}.{}".format(*sys.version_info)
    (folder / "freeze.txt").write_text(f"{python}\n{freeze}")


def _torch() -> str:
    lines = (ROOT / "tests/constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))
