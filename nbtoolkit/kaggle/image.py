"""Find which requirements a host's image lacks, and fetch wheels for them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.errors import WheelsError

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version


# --- image ---


_PYTHON = re.compile(r"#\s*python\s+(3\.\d+)", re.IGNORECASE)
_PACKAGE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==(\S+)|\s*@.*)?$")

_MADE_BY = (
    "(python -c \"import sys; print('# python %d.%d' % sys.version_info[:2])\"; "
    "pip freeze) > image.txt"
)


@dataclass(frozen=True, kw_only=True)
class Image:
    """A host's environment: Linux on x86-64, CPython."""

    name: str
    """``kaggle``, ``colab``, or the file it was read from."""
    python: str
    """``3.12``."""
    packages: Mapping[str, str]
    """Normalised name -> version; an empty one: it is there in a version that is not known."""

    def has(self, requirement: Requirement) -> bool:
        """Whether a requirement is met by what is there; an unknown version is taken to do."""
        from packaging.utils import canonicalize_name

        version = self.packages.get(canonicalize_name(requirement.name))
        if version is None:
            return False
        return not version or requirement.specifier.contains(version, prereleases=True)

    def wants(self, requirement: Requirement, extras: frozenset[str]) -> bool:
        """Whether a requirement holds on this host at all, by its marker.

        Args:
            requirement: one of a wheel's.
            extras: those of the wheel that are asked for.
        """
        marker, environment = requirement.marker, self._environment()
        return marker is None or any(
            marker.evaluate({**environment, "extra": extra}) for extra in {"", *extras}
        )

    def _environment(self) -> dict[str, str]:
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "os_name": "posix",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": "x86_64",
        }


def host_image(host: str) -> Image:
    """The image of a host, as it was when this release was made.

    Args:
        host: ``"kaggle"`` or ``"colab"``.

    Raises:
        WheelsError: there is no such host.
    """
    folder = files("nbtoolkit.kaggle") / "images"
    known = sorted(entry.name.removesuffix(".txt") for entry in folder.iterdir())
    if host not in known:
        raise WheelsError(
            f"what the host {host!r} holds is not known",
            allowed=", ".join(known),
            do="or say what it holds: --image FILE, written there by " + _MADE_BY,
        )
    return _parsed((folder / f"{host}.txt").read_text(encoding="utf-8"), host)


def read_image(path: str | os.PathLike[str]) -> Image:
    """An image from a file: a line ``# python 3.12``, and what ``pip freeze`` prints.

    Raises:
        WheelsError: it cannot be read, or does not say which Python it is of.
    """
    file = Path(path).expanduser()
    try:
        return _parsed(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise WheelsError(f"the image {file} cannot be read: {why}", do=_MADE_BY) from error


def _parsed(text: str, name: str) -> Image:
    from packaging.utils import canonicalize_name

    python = _PYTHON.search(text)
    found = [match for line in text.splitlines() if (match := _PACKAGE.match(line.strip()))]
    if python is None or not found:
        missing = "which Python it is of" if found else "what packages it holds"
        raise WheelsError(
            f"the image {name} does not say {missing}",
            allowed="a line `# python 3.12`, and lines as pip freeze prints them",
            do=f"write it on the host: {_MADE_BY}",
        )
    packages: dict[str, str] = {canonicalize_name(m[1]): m[2] or "" for m in found}
    return Image(name=name, python=python[1], packages=packages)


# --- wheels ---
# Our own made, others fetched by pip, and what each of them requires.


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
            allowed="a file such as nbtoolkit_torch-0.2.0-py3-none-any.whl",
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


# --- what an image lacks ---
# What a host lacks: a walk along requirements, to all that none of its packages meets.


Fetch = Callable[["list[Requirement]"], list[Wheel]]

# A host has its torch, for its GPUs; several GB that would not run there.
NEVER = ("torch", "torchvision", "torchaudio", "triton")


def missing_wheels(own: Wheel, extras: Iterable[str], image: Image, fetch: Fetch) -> list[Wheel]:
    """Fetch what a wheel needs on a host and is not there, or is too old there.

    Args:
        own: the wheel that is to run.
        extras: those of its extras that are wanted.
        image: what the host holds.
        fetch: takes requirements, returns a wheel for each.

    Returns:
        The other wheels, by name.

    Raises:
        WheelsError: the host's torch does not do, or a wheel cannot be had.
    """
    walk = _Walk(own, image)
    todo = walk.requirements(own, frozenset(extras))
    while wanted := walk.lacking(todo):
        got = fetch(wanted)
        walk.have.update({wheel.name: wheel for wheel in got})
        todo = [one for wheel in got for one in walk.requirements(wheel, walk.extras(wheel.name))]
    return [wheel for name, wheel in sorted(walk.have.items()) if wheel is not own]


class _Walk:
    """What is known so far: the wheels there are, and all that was ever asked of each name."""

    def __init__(self, own: Wheel, image: Image) -> None:
        self.have = {own.name: own}
        self._image = image
        self._asked: dict[str, tuple[SpecifierSet, frozenset[str]]] = {}

    def extras(self, name: str) -> frozenset[str]:
        return self._asked[name][1]

    def requirements(self, wheel: Wheel, extras: frozenset[str]) -> list[Requirement]:
        """Those of a wheel that hold on the host; of extras of itself what they stand for."""
        from packaging.utils import canonicalize_name

        held = [one for one in wheel.requires if self._image.wants(one, extras)]
        inner = {
            extra
            for one in held
            if canonicalize_name(one.name) == wheel.name
            for extra in one.extras
        }
        if inner - extras:
            return self.requirements(wheel, extras | inner)
        return [one for one in held if canonicalize_name(one.name) != wheel.name]

    def lacking(self, todo: Iterable[Requirement]) -> list[Requirement]:
        """For each name that nothing there meets: all that was ever asked of it, in one."""
        from packaging.requirements import Requirement
        from packaging.utils import canonicalize_name

        names = []
        for one in todo:
            name = canonicalize_name(one.name)
            specifier, extras = self._asked.get(name, (None, frozenset()))
            together = one.specifier if specifier is None else specifier & one.specifier
            self._asked[name] = together, extras | one.extras
            if not self._met(name, one, extras):
                names.append(name)
        lacking = [Requirement(name) for name in dict.fromkeys(names)]
        for one in lacking:
            one.specifier, extras = self._asked[one.name]
            one.extras = set(extras)
        return lacking

    def _met(self, name: str, one: Requirement, extras: frozenset[str]) -> bool:
        """Whether something that is there already does.

        Raises:
            WheelsError: nothing does, and it is nothing that could be brought along.
        """
        if name in self.have:
            version = self.have[name].version
            return one.specifier.contains(version, prereleases=True) and one.extras <= extras
        if not self._image.has(one) and name in NEVER:
            there = self._image.packages.get(name)
            raise WheelsError(
                f"{self._image.name} has {f'{name} {there}' if there else f'no {name}'}, "
                f"and nbtoolkit needs {one}",
                allowed="an image whose torch does: it is never brought along",
            )
        return self._image.has(one)
