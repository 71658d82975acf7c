"""Wheels: our own made, others fetched by pip, and what each of them requires."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.errors import WheelsError

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.version import Version

_CHECKOUT = Path(__file__).parents[2]

# What a host of these years takes, the newest first; pip wants every one by name.
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(35, 16, -1)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux_2_12_x86_64", "manylinux2010_x86_64"]
_PLATFORMS += ["manylinux_2_5_x86_64", "manylinux1_x86_64", "linux_x86_64"]


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One wheel on disk."""

    path: Path
    name: str
    """Normalised."""
    version: Version
    requires: tuple[Requirement, ...]
    """All of it, with the markers."""


def read_wheel(path: Path) -> Wheel:
    """A wheel's name, version and requirements.

    Raises:
        WheelsError: it is no wheel.
    """
    from packaging.requirements import Requirement
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    try:
        name, number, _, _ = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            [inner] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
            metadata = Parser().parsestr(archive.read(inner).decode())
    except (OSError, ValueError, InvalidWheelFilename, zipfile.BadZipFile) as error:
        raise WheelsError(
            f"{path} is no wheel: {error}",
            allowed="a file such as nbtoolkit_torch-0.1.0-py3-none-any.whl",
        ) from error
    requires = tuple(Requirement(text) for text in metadata.get_all("Requires-Dist", []))
    return Wheel(path=path, name=name, version=number, requires=requires)


def own_wheel(folder: Path) -> Wheel:
    """Make a wheel of the checkout that this package runs from.

    Args:
        folder: where it is put.

    Raises:
        WheelsError: it does not run from a checkout, or the wheel cannot be made.
    """
    if not (_CHECKOUT / "pyproject.toml").exists():
        raise WheelsError(
            "nbtoolkit is installed here from a wheel, and cannot make another one",
            # What is on an index may be somebody else's: it is never asked for there.
            do="give the wheel: --wheel nbtoolkit_torch-...whl, or run this in a clone",
        )
    isolation = ["--no-build-isolation"] if find_spec("hatchling") else []
    _pip("wheel", "--no-deps", *isolation, "--wheel-dir", str(folder), str(_CHECKOUT))
    return read_wheel(next(folder.glob("nbtoolkit_torch-*.whl")))


def fetch_wheels(wanted: Iterable[Requirement], python: str, folder: Path) -> list[Wheel]:
    """Fetch wheels by pip, from wherever it is set up to look.

    In the versions that are installed here, where these do: they are known to go together. Of what
    is not installed here the newest.

    Args:
        wanted: requirements, such as ``mlflow>=2.19``, one a name.
        python: the version they are to run on.
        folder: where they are put; it is to be empty.

    Raises:
        WheelsError: there is none, or no connection.
    """
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    target = ["--python-version", python, "--implementation", "cp", *platforms]
    words = ["download", "--no-deps", "--only-binary=:all:", *target, "--dest", str(folder)]
    _pip(*words, *map(_as_here, wanted))
    return [read_wheel(path) for path in sorted(folder.glob("*.whl"))]


def _as_here(wanted: Requirement) -> str:
    try:
        here = version(wanted.name)
    except PackageNotFoundError:
        return str(wanted)
    return f"{wanted.name}=={here}" if here in wanted.specifier else str(wanted)


def _pip(*words: str) -> None:
    program = [sys.executable, "-m", "pip", *words, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(program, capture_output=True, text=True)
    if done.returncode:
        told = [line for line in done.stderr.splitlines() if "WARNING" not in line]
        raise WheelsError(
            f"pip {words[0]} failed:\n" + "\n".join(f"    {line}" for line in told[-8:]),
            do="see to its connection (or --find-links, PIP_INDEX_URL), and run this again; "
            "without pip: python -m ensurepip",
        )
