"""A virtual environment with a host image's versions, built once in ``build/hosts``."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

from names import COMMON, MORE
from packaging.utils import canonicalize_name
from pythons.environments import find_python

from nbtoolkit.sessions.wheels import Image, host_image

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/hosts"

# Not of the image, but of the tests: nbval runs in the kernel's environment.
TOOLS = ["pytest", "nbval"]


def image_venv(host: str) -> Path:
    """The environment of a host; built where there is none yet of these versions (minutes)."""
    image = host_image(host)
    wanted = [*COMMON, *MORE[host], *TOOLS]
    whole = json.dumps([image.python, wanted, _constraints(image)])
    folder = FOLDER / f"{host}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}"
    if not (folder / "freeze.txt").exists():
        shutil.rmtree(folder, ignore_errors=True)
        _build(folder, image, wanted)
    return folder


def _constraints(image: Image) -> list[str]:
    """The image's versions of what is asked for; what that needs comes in versions that fit."""
    names = map(canonicalize_name, [*COMMON, *MORE[image.name]])
    held = {name: image.packages.get(name) for name in names if name != "pip"}
    # the index's own build of torch, whatever CUDA the image's is for
    return [f"{name}=={version.partition('+')[0]}" for name, version in held.items() if version]


def _build(folder: Path, image: Image, wanted: list[str]) -> None:
    subprocess.run([find_python(image.python), "-m", "venv", folder / "venv"], check=True)
    (folder / "constraints.txt").write_text("\n".join(_constraints(image)))
    pip = [str(folder / "venv/bin/python"), "-m", "pip"]
    limits = ["--constraint", str(folder / "constraints.txt")]
    subprocess.run([*pip, "install", "--quiet", *limits, *wanted], check=True)
    subprocess.run([*pip, "check"], check=True)
    freeze = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True).stdout
    (folder / "freeze.txt").write_text(f"# python {image.python}\n{freeze}")
