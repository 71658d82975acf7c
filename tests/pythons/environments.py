"""The environments of users: Pythons, host images' versions, both ends of our version bounds.

Each is built once, in ``build/pythons``, and again when its sources change.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from nbtoolkit.sessions.wheels import host_image

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/pythons"

EXTRAS = "tracking,tensorboard,training,search,notebooks,panel,cli,metric-learning"

# Of the tests, not of what users have.
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "nbval", "psutil", "hatchling", "kaggle")


# Libraries of CUDA are those of the build of torch: an image's own build may have others.
_OF_THE_BUILD = ("nvidia-", "cuda-", "triton")
_EXTRAS = [word for name in EXTRAS.split(",") for word in ("--extra", name)]


@dataclass(frozen=True)
class Environment:
    """A Python and what is installed for it.

    Attributes:
        name: of its folder, and in the table.
        python: ``"3.12"``.
        image: the host whose versions it has; empty: those that the resolution gives.
        resolution: uv's: ``"highest"``, or ``"lowest-direct"`` for the lower bounds of
            pyproject.toml.
    """

    name: str
    python: str
    image: str = ""
    resolution: str = "highest"

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return FOLDER / self.name

    @property
    def interpreter(self) -> Path:
        """Its Python."""
        return self.folder / "venv/bin/python"


ENVIRONMENTS = (
    Environment("3.12-newest", "3.12"),
    Environment("3.12-kaggle", "3.12", image="kaggle"),
    Environment("3.13-newest", "3.13"),
    Environment("3.13-colab", "3.13", image="colab"),
    Environment("3.11-kaggle", "3.11", image="kaggle"),
    Environment("3.10-lowest", "3.10", resolution="lowest-direct"),
)


def build(environment: Environment) -> None:
    """Install an environment, unless it is there (minutes; some GB of CUDA libraries).

    Into an image's versions as pip does it there: what is there and fits, stays.
    """
    made_from = _made_from(environment)
    stamp = environment.folder / "made_from"
    if stamp.is_file() and stamp.read_text() == made_from:
        return
    shutil.rmtree(environment.folder, ignore_errors=True)
    environment.folder.mkdir(parents=True)
    run_uv(
        "venv", "--seed", "--python", find_python(environment.python), environment.folder / "venv"
    )
    into = ["pip", "install", "--python", environment.interpreter]
    if held := _held(environment):
        run_uv(*into, "--no-deps", *held)
    run_uv(*into, "--resolution", environment.resolution, "-e", f"{ROOT}[{EXTRAS}]")
    run_uv(*into, *_tools(environment.python))
    run_uv("pip", "check", "--python", environment.interpreter)
    stamp.write_text(made_from)


def _held(environment: Environment) -> list[str]:
    """What its image has of what we need, but for torch the index's own build."""
    if not environment.image:
        return []
    image = host_image(environment.image)
    needs = run_uv(
        "pip", "compile", *_EXTRAS, "--python-version", image.python, ROOT / "pyproject.toml"
    )
    names = {canonicalize_name(line.partition("==")[0]) for line in needs.splitlines()}
    return [
        f"{name}=={held.partition('+')[0]}"
        for name, held in image.packages.items()
        if name in names and held and not name.startswith(_OF_THE_BUILD)
    ]


def _tools(python: str) -> list[str]:
    """The tools of the tests in the versions that the tests run with everywhere."""
    lines = (ROOT / "tests/constraints.txt").read_text().splitlines()
    tools = [name for name in TOOLS if name != "kaggle" or python != "3.10"]  # it needs 3.11
    return [line for line in lines if line.partition("==")[0] in tools]


def run_uv(*words: str | Path) -> str:
    """What uv prints.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    uv = Path(sys.executable).with_name("uv")
    done = subprocess.run([uv, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"uv {' '.join(map(str, words))} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def find_python(version: str) -> str:
    """An interpreter of this version: on the path, or of pyenv's.

    Raises:
        FileNotFoundError: there is none.
    """
    named = shutil.which(f"python{version}")
    there = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for path in [*([named] if named else []), *map(str, there)]:
        # pyenv's shims are on the path also where their version is not switched on
        if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    raise FileNotFoundError(f"Python {version} is not here: put python{version} on the PATH")


def _made_from(environment: Environment) -> str:
    """The sources of an environment as text; if the text changes, it is built again."""
    texts = [str(environment), *_tools(environment.python), (ROOT / "pyproject.toml").read_text()]
    if environment.image:
        texts += sorted(map(str, host_image(environment.image).packages.items()))
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()
