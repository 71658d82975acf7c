"""Describe a host's environment by its Python and its installed packages."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from nbtoolkit.errors import WheelsError

_PYTHON = re.compile(r"#\s*python\s+(3\.\d+)", re.IGNORECASE)
_PACKAGE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==(\S+)|\s*@.*)?$")

_COMMAND = (
    "(python -c \"import sys; print('# python %d.%d' % sys.version_info[:2])\"; "
    "pip freeze) > image.txt"
)


@dataclass(frozen=True, kw_only=True)
class Image:
    """A host's environment: CPython on Linux x86-64."""

    name: str
    """``kaggle``, ``colab``, or the path of the file."""
    python: str
    """``3.12``."""
    packages: Mapping[str, str]
    """Normalised name -> version; empty: installed in an unknown version."""


def host_image(host: str) -> Image:
    """Return the image of a host, as of this release.

    Args:
        host: ``"kaggle"`` or ``"colab"``.

    Raises:
        WheelsError: the host is unknown.
    """
    folder = files("nbtoolkit.kaggle") / "images"
    known = sorted(entry.name.removesuffix(".txt") for entry in folder.iterdir())
    if host not in known:
        raise WheelsError(
            f"the packages of the host {host!r} are not known",
            allowed=", ".join(known),
            do="or describe the host with --image FILE, written there by " + _COMMAND,
        )
    return _parse((folder / f"{host}.txt").read_text(encoding="utf-8"), host)


def read_image(path: str | os.PathLike[str]) -> Image:
    """Read an image from a file with a line ``# python 3.12`` and the output of ``pip freeze``.

    Raises:
        WheelsError: the file cannot be read, or does not name its Python.
    """
    file = Path(path).expanduser()
    try:
        return _parse(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WheelsError(f"the image {file} cannot be read: {reason}", do=_COMMAND) from error


def _parse(text: str, name: str) -> Image:
    from packaging.utils import canonicalize_name

    python = _PYTHON.search(text)
    matches = [match for line in text.splitlines() if (match := _PACKAGE.match(line.strip()))]
    if python is None or not matches:
        missing = "which Python it has" if matches else "which packages it has"
        raise WheelsError(
            f"the image {name} does not say {missing}",
            allowed="a line `# python 3.12`, and lines as pip freeze prints them",
            do=f"write it on the host: {_COMMAND}",
        )
    packages: dict[str, str] = {canonicalize_name(m[1]): m[2] or "" for m in matches}
    return Image(name=name, python=python[1], packages=packages)
