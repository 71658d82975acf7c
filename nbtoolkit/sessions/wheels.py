"""Make a folder of wheels from which nbtoolkit installs on a host without internet.

pip downloads what the host's image lacks or has too old. An empty wheel stands for each package of
the image, in the image's version and without requirements, and a constraint makes pip take it. So
torch and CUDA are never downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from nbtoolkit.errors import WheelsError, some_names
from nbtoolkit.run.paths import write_json

EXTRAS = ("training", "tracking", "search", "notebooks", "panel", "cli", "metric-learning")
"""The extras that the shipped notebooks and the command line need."""

_HOSTS = "host"  # the local part of the versions of empty wheels
_METADATA = "dataset-metadata.json"
_CHECKOUT = Path(__file__).parents[2]

# Ubuntu 22.04, as on Kaggle and Colab, has glibc 2.35. pip needs each platform by name, the newest
# first.
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(35, 16, -1)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux_2_12_x86_64", "manylinux2010_x86_64"]
_PLATFORMS += ["manylinux_2_5_x86_64", "manylinux1_x86_64", "linux_x86_64"]

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


def make_bundle(
    host: str = "kaggle",
    output: str | os.PathLike[str] | None = None,
    *,
    image: str | os.PathLike[str] | None = None,
    wheel: str | os.PathLike[str] | None = None,
    user: str | None = None,
) -> list[Path]:
    """Fill a folder with nbtoolkit's wheel, and wheels of what a host lacks or has too old.

    The first cell of each shipped notebook installs from this folder, attached as a data set. The
    host's torch stays as it is. Needs an internet connection here, and pip.

    Args:
        host: ``"kaggle"`` or ``"colab"``.
        output: the folder; default: ``outputs/<host>-wheels``. Wheels in it are removed.
        image: a file that describes the host, if its packages differ from those of this release.
        wheel: nbtoolkit's own wheel; default: made from the checkout that this runs from.
        user: your name on Kaggle: also writes a ``dataset-metadata.json`` for Kaggle's client.

    Returns:
        The wheels in the folder; the first is nbtoolkit's own.

    Raises:
        WheelsError: a wheel is not available, the host's torch is too old, or the folder contains
            other files.
    """
    host_packages = host_image(host) if image is None else read_image(image)
    folder = Path(output or Path("outputs") / f"{host}-wheels").expanduser().absolute()
    _refuse_other_files(folder)
    with tempfile.TemporaryDirectory(prefix="nbtoolkit-") as temporary:
        given = None if wheel is None else Path(wheel).expanduser().absolute()
        built = given or own_wheel(Path(temporary))
        wheels = [built, *download_lacking(built, host_packages, Path(temporary) / "lacking")]
        for old in folder.glob("*.whl"):
            if old not in wheels:
                old.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        for path in wheels:
            if path.parent != folder:
                shutil.copy2(path, folder)
    if user is not None:
        # https://github.com/Kaggle/kaggle-cli/blob/main/docs/datasets_metadata.md
        metadata = {
            "title": "nbtoolkit wheels",
            "id": f"{user}/nbtoolkit-wheels",
            "licenses": [{"name": "other"}],
        }
        write_json(folder / _METADATA, metadata)
    return [folder / path.name for path in wheels]


def explain(wheels: Sequence[Path]) -> str:
    """Return the contents of a folder of wheels as text, with the command that uploads it."""
    folder = wheels[0].parent
    names = " ".join("-".join(path.name.split("-")[:2]) for path in wheels)
    size = sum(path.stat().st_size for path in wheels)
    upload = f"\nkaggle datasets create -p {folder}" if (folder / _METADATA).exists() else ""
    count = f"{len(wheels)} wheel{'s' if len(wheels) > 1 else ''}"
    return f"{count}, {size / 2**20:.0f} MiB: {names}{upload}"


def own_wheel(folder: Path) -> Path:
    """Make a wheel of the checkout that this package runs from.

    Args:
        folder: the folder for the wheel.

    Raises:
        WheelsError: this package does not run from a checkout, or the wheel cannot be made.
    """
    if not (_CHECKOUT / "pyproject.toml").exists():
        raise WheelsError(
            "nbtoolkit is installed here from a wheel, and cannot make another one",
            # Not downloaded: a package of this name on an index may be another project's.
            do="give the wheel: --wheel nbtoolkit_torch-...whl, or run this in a clone",
        )
    isolation = ["--no-build-isolation"] if find_spec("hatchling") else []
    _pip("wheel", "--no-deps", *isolation, "--wheel-dir", str(folder), str(_CHECKOUT))
    return next(folder.glob("nbtoolkit_torch-*.whl"))


def download_lacking(
    built: Path, image: Image, folder: Path, extras: Sequence[str] = EXTRAS
) -> list[Path]:
    """Download the wheels that a host lacks or has too old.

    Args:
        built: nbtoolkit's wheel.
        image: the host's packages.
        folder: a new folder, for the wheels.
        extras: extras of nbtoolkit that the host is to have.

    Raises:
        WheelsError: there is no such wheel, no connection, or the host's torch is missing or
            too old.
    """
    if "torch" not in image.packages:
        raise WheelsError(
            f"{image.name} has no torch",
            allowed="an image with torch, for its own GPUs: a bundle never contains torch",
        )
    # A package of an unknown version has no empty wheel: pip downloads it, and it is left out.
    present = {name: version for name, version in image.packages.items() if version}
    while True:
        try:
            wheels = _download(built, image.python, present, folder, extras)
            break
        except WheelsError as error:
            # Too old for what nbtoolkit needs: it is brought along, and replaces the host's.
            named = re.findall(r"\(constraint\) ([\w.-]+?)[<>=!~]", error.what)
            too_old = present.keys() & set(named)
            if not too_old or "torch" in too_old:
                raise
            present = {name: version for name, version in present.items() if name not in too_old}
    replaced = {name for name, version in image.packages.items() if version} - present.keys()
    kept = image.packages.keys() - replaced
    return [wheel for wheel in wheels if _name_of(wheel) not in {_name_of(built), *kept}]


def _download(
    built: Path, python: str, present: Mapping[str, str], folder: Path, extras: Sequence[str]
) -> list[Path]:
    """Download what nbtoolkit requires; for what is present take empty wheels.

    Raises:
        WheelsError: with what pip printed.
    """
    empty = folder.with_name("present")
    shutil.rmtree(empty, ignore_errors=True)
    empty.mkdir()
    for name, version in present.items():
        _write_empty_wheel(empty, name, _as_local(version))
    constraints = empty / "constraints.txt"
    constraints.write_text("\n".join(f"{name}=={_as_local(present[name])}" for name in present))
    target = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:"]
    target += [word for name in _PLATFORMS for word in ("--platform", name)]
    source = ["--find-links", str(empty), "--constraint", str(constraints)]
    requirement = f"{_name_of(built)}[{','.join(extras)}] @ {built.as_uri()}"
    _pip("download", *target, *source, "--dest", str(folder), requirement)
    return sorted(folder.glob("*.whl"))


def _as_local(version: str) -> str:
    """Mark a version, so that pip does not take the same one from an index."""
    return f"{version}.{_HOSTS}" if "+" in version else f"{version}+{_HOSTS}"


def _write_empty_wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel without requirements: of torch, those would be gigabytes of CUDA."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def _pip(command: str, *words: str) -> None:
    program = [sys.executable, "-m", "pip", command, *words, "--disable-pip-version-check"]
    done = subprocess.run(program, capture_output=True, text=True)
    if done.returncode:
        # pip prints what a conflict is caused by as output, not as an error.
        _, marker, causes = done.stdout.partition("The conflict is caused by:")
        printed = f"{marker}{causes}\n{done.stderr}".splitlines()
        lines = [line for line in printed if line and "WARNING" not in line]
        raise WheelsError(
            f"pip {command} failed:\n" + "\n".join(f"    {line}" for line in lines[-20:]),
            allowed="a host whose packages meet nbtoolkit's requirements, torch among them",
            do="check the connection (or PIP_INDEX_URL, PIP_FIND_LINKS), and run this again; "
            "without pip: python -m ensurepip",
        )


def _name_of(wheel: Path) -> str:
    """Return the normalised name of a wheel's package.

    Raises:
        WheelsError: the file is missing, or is not a wheel.
    """
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    try:
        zipfile.ZipFile(wheel).close()
        return parse_wheel_filename(wheel.name)[0]
    except (OSError, InvalidWheelFilename, zipfile.BadZipFile) as error:
        raise WheelsError(
            f"{wheel} is no wheel: {error}",
            allowed="a file such as nbtoolkit_torch-0.2.0-py3-none-any.whl",
        ) from error


def _refuse_other_files(folder: Path) -> None:
    """Refuse a folder whose files would be uploaded together with the wheels."""
    entries = folder.iterdir() if folder.is_dir() else ()
    names = sorted(entry.name for entry in entries if entry.suffix != ".whl")
    if others := [name for name in names if name != _METADATA]:
        raise WheelsError(
            f"{folder} contains other files than wheels: {some_names(others)}",
            allowed="a new folder, or that of an earlier bundle",
            do="choose another output",
        )


def host_image(host: str) -> Image:
    """Return the image of a host, as of this release.

    Args:
        host: ``"kaggle"`` or ``"colab"``.

    Raises:
        WheelsError: the host is unknown.
    """
    folder = files("nbtoolkit.sessions") / "images"
    known = sorted(entry.name.removesuffix(".txt") for entry in folder.iterdir())
    if host not in known:
        raise WheelsError(
            f"the packages of the host {host!r} are not known",
            allowed=", ".join(known),
            do="or describe the host with --image FILE, written there by " + _COMMAND,
        )
    return _parse_image((folder / f"{host}.txt").read_text(encoding="utf-8"), host)


def read_image(path: str | os.PathLike[str]) -> Image:
    """Read an image from a file with a line ``# python 3.12`` and the output of ``pip freeze``.

    Raises:
        WheelsError: the file cannot be read, or does not name its Python.
    """
    file = Path(path).expanduser()
    try:
        return _parse_image(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WheelsError(f"the image {file} cannot be read: {reason}", do=_COMMAND) from error


def _parse_image(text: str, name: str) -> Image:
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
