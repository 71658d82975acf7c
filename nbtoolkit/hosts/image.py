"""Image: what a host's Python environment holds already."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.errors import WheelsError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

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
    folder = files("nbtoolkit.hosts") / "images"
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
