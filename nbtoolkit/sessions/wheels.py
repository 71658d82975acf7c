"""Make a folder of wheels from which nbtoolkit installs on a host without internet.

uv finds the requirements that the host lacks: it resolves them into a folder that looks like the
host's ``site-packages``. uv cannot download wheels, so pip does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.environment.installed import install_line
from nbtoolkit.errors import MissingExtra, WheelsError
from nbtoolkit.run.paths import write_json

if TYPE_CHECKING:
    from packaging.version import Version

EXTRAS = ("training", "tracking", "search", "notebooks", "panel", "cli", "metric-learning")
"""The extras that the shipped notebooks and the command line need."""

# A host has its own torch, for its GPUs; another one is several GB and may not run there.
NEVER = ("torch", "torchvision", "torchaudio", "triton")

_METADATA = "dataset-metadata.json"
_CHECKOUT = Path(__file__).parents[2]

# Ubuntu 22.04, as on Kaggle and Colab, has glibc 2.35. uv takes the newest platform, pip needs
# each one by name, the newest first.
_UV_PLATFORM = "x86_64-manylinux_2_35"
_PIP_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(35, 16, -1)]
_PIP_PLATFORMS += ["manylinux2014_x86_64", "manylinux_2_12_x86_64", "manylinux2010_x86_64"]
_PIP_PLATFORMS += ["manylinux_2_5_x86_64", "manylinux1_x86_64", "linux_x86_64"]


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


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel file."""

    path: Path
    name: str
    """Normalised."""
    version: Version


@dataclass(frozen=True, kw_only=True)
class WheelBundle:
    """A folder of wheels for a host."""

    folder: Path
    wheels: tuple[Wheel, ...]
    """The first is nbtoolkit's own."""
    image: Image

    @property
    def size(self) -> int:
        """Bytes of all wheels."""
        return sum(wheel.path.stat().st_size for wheel in self.wheels)

    @property
    def replaced(self) -> list[str]:
        """Packages of the host that are too old and get replaced: ``name old -> new``."""
        return [
            f"{wheel.name} {version} -> {wheel.version}"
            for wheel in self.wheels
            if (version := self.image.packages.get(wheel.name))
        ]

    def explain(self) -> str:
        """Return the contents as text, with the command that uploads the folder."""
        names = " ".join(f"{wheel.name}-{wheel.version}" for wheel in self.wheels)
        count = f"{len(self.wheels)} wheels" if len(self.wheels) > 1 else "1 wheel"
        lines = [f"{count}, {self.size / 2**20:.0f} MiB: {names}"]
        if self.replaced:
            lines.append(f"replaces packages of {self.image.name}: {', '.join(self.replaced)}")
        if (self.folder / _METADATA).exists():
            lines.append(f"kaggle datasets create -p {self.folder}")
        return "\n".join(lines)


def make_bundle(
    host: str = "kaggle",
    output: str | os.PathLike[str] | None = None,
    *,
    image: str | os.PathLike[str] | None = None,
    wheel: str | os.PathLike[str] | None = None,
    user: str | None = None,
) -> WheelBundle:
    """Fill a folder with nbtoolkit's wheel, and wheels of what a host lacks or has too old.

    The first cell of each shipped notebook installs from this folder, attached as a data set. The
    host's torch stays as it is. Needs an internet connection here, uv and pip.

    Args:
        host: ``"kaggle"`` or ``"colab"``.
        output: the folder; default: ``outputs/<host>-wheels``. Wheels in it are removed.
        image: a file that describes the host, if its packages differ from those of this release.
        wheel: nbtoolkit's own wheel; default: made from the checkout that this runs from.
        user: your name on Kaggle: also writes a ``dataset-metadata.json`` for Kaggle's client.

    Returns:
        The folder and its wheels.

    Raises:
        WheelsError: a wheel is not available, the host's torch is too old, or the folder contains
            other files.
        MissingExtra: uv is not installed.
    """
    host_packages = host_image(host) if image is None else read_image(image)
    folder = Path(output or Path("outputs") / f"{host}-wheels").expanduser().absolute()
    _refuse_other_files(folder)
    with tempfile.TemporaryDirectory(prefix="nbtoolkit-") as temporary:
        own = own_wheel(Path(temporary)) if wheel is None else read_wheel(Path(wheel).expanduser())
        pins = missing_requirements(own, EXTRAS, host_packages)
        wheels = [own, *_download(pins, host_packages.python, Path(temporary) / "wheels")]
        _fill(folder, wheels)
    if user is not None:
        # https://github.com/Kaggle/kaggle-cli/blob/main/docs/datasets_metadata.md
        metadata = {
            "title": "nbtoolkit wheels",
            "id": f"{user}/nbtoolkit-wheels",
            "licenses": [{"name": "other"}],
        }
        write_json(folder / _METADATA, metadata)
    bundled = tuple(read_wheel(folder / wheel.path.name) for wheel in wheels)
    return WheelBundle(folder=folder, wheels=bundled, image=host_packages)


def read_wheel(path: Path) -> Wheel:
    """Read a wheel's name and version.

    Raises:
        WheelsError: the file is missing, or is not a wheel.
    """
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    try:
        name, version, _, _ = parse_wheel_filename(path.name)
        zipfile.ZipFile(path).close()
    except (OSError, InvalidWheelFilename, zipfile.BadZipFile) as error:
        raise WheelsError(
            f"{path} is no wheel: {error}",
            allowed="a file such as nbtoolkit_torch-0.2.0-py3-none-any.whl",
        ) from error
    return Wheel(path=path, name=name, version=version)


def own_wheel(folder: Path) -> Wheel:
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
    return read_wheel(next(folder.glob("nbtoolkit_torch-*.whl")))


def missing_requirements(own: Wheel, extras: Iterable[str], image: Image) -> list[str]:
    """Return the requirements of a wheel that a host lacks or has too old: ``name==version``.

    Args:
        own: the wheel to be installed.
        extras: its extras to be installed.
        image: the host's packages.

    Raises:
        WheelsError: a requirement cannot be met, or the host's torch is missing or too old.
        MissingExtra: uv is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="nbtoolkit-") as temporary:
        site, overrides = Path(temporary) / "site", Path(temporary) / "overrides.txt"
        # uv takes these stubs for the host's installed packages. They have no requirements.
        for name, version in image.packages.items():
            info = site / f"{name.replace('-', '_')}-{version or '0'}.dist-info"
            info.mkdir(parents=True)
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version or '0'}\n"
            (info / "METADATA").write_text(metadata)
        # Any version requirement on a package of unknown version counts as met.
        unknown = [name for name, version in image.packages.items() if not version]
        overrides.write_text("\n".join(unknown))
        requirement = f"{own.name}[{','.join(extras)}] @ {own.path.absolute().as_uri()}"
        target = ["--target", str(site), "--python-version", image.python]
        target += ["--python-platform", _UV_PLATFORM, "--only-binary", ":all:"]
        printed = _uv_dry_run(*target, "--overrides", str(overrides), requirement)
    pins = re.findall(r"^ \+ (\S+==\S+)$", printed, re.MULTILINE)
    for pin in pins:
        name = pin.partition("==")[0]
        if name in NEVER:
            installed = image.packages.get(name)
            raise WheelsError(
                f"{image.name} has {f'{name} {installed}' if installed else f'no {name}'}, "
                f"which does not meet the requirements of nbtoolkit: uv would install {pin}",
                allowed="an image whose torch meets them: a bundle never contains torch",
            )
    return pins


def _uv_dry_run(*words: str) -> str:
    """Return what ``uv pip install --dry-run`` prints, with pip's settings for the index."""
    try:
        from uv import find_uv_bin
    except ImportError as error:
        raise MissingExtra("making a bundle needs uv", do=install_line("bundle")) from error
    environ = dict(os.environ)
    # pip separates several values with spaces, uv with these.
    for name, separator in {"INDEX_URL": " ", "EXTRA_INDEX_URL": " ", "FIND_LINKS": ","}.items():
        if value := environ.get(f"PIP_{name}"):
            environ.setdefault(f"UV_{name}", separator.join(value.split()))
    program = [find_uv_bin(), "pip", "install", "--dry-run", "--python", sys.executable, *words]
    if environ.get("PIP_NO_INDEX", "0").lower() not in ("0", "false"):
        program.append("--no-index")
    return _run("uv pip install", program, environ)


def _pip(command: str, *words: str) -> None:
    program = [sys.executable, "-m", "pip", command, *words]
    _run(f"pip {command}", [*program, "--quiet", "--disable-pip-version-check"], os.environ)


def _run(name: str, program: Sequence[str], environ: Mapping[str, str]) -> str:
    done = subprocess.run(program, env=environ, capture_output=True, text=True)
    if done.returncode:
        noise = re.compile(r"$|WARNING|warning|Using CPython")
        lines = [line for line in done.stderr.splitlines() if not noise.match(line)]
        raise WheelsError(
            f"{name} failed:\n" + "\n".join(f"    {line}" for line in lines[-20:]),
            do="check the connection (or PIP_INDEX_URL, PIP_FIND_LINKS), and run this again; "
            "without pip: python -m ensurepip",
        )
    return done.stderr


def _download(pins: Sequence[str], python: str, folder: Path) -> list[Wheel]:
    """Download wheels with pip.

    Raises:
        WheelsError: there is no such wheel, or no connection.
    """
    if not pins:
        return []
    platforms = [word for name in _PIP_PLATFORMS for word in ("--platform", name)]
    target = ["--python-version", python, "--implementation", "cp", *platforms]
    _pip("download", "--no-deps", "--only-binary=:all:", *target, "--dest", str(folder), *pins)
    return [read_wheel(path) for path in sorted(folder.glob("*.whl"))]


def _refuse_other_files(folder: Path) -> None:
    others = [
        entry.name
        for entry in (folder.iterdir() if folder.is_dir() else ())
        if entry.suffix != ".whl" and entry.name != _METADATA
    ]
    if others:
        raise WheelsError(
            f"{folder} contains other files than wheels: {', '.join(sorted(others)[:5])}",
            allowed="a new folder, or that of an earlier bundle",
            do="choose another output",
        )


def _fill(folder: Path, wheels: Sequence[Wheel]) -> None:
    """Copy the wheels into the folder, and remove others."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.whl"):
            if old not in [wheel.path for wheel in wheels]:
                old.unlink()
        for wheel in wheels:
            if wheel.path.parent != folder:
                shutil.copy2(wheel.path, folder)
    except OSError as error:
        raise WheelsError(
            f"{folder} cannot be written: {error.strerror or error}",
            allowed="a folder on a disk with free space that you may write to",
        ) from error


# --- the hosts' packages ---


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
