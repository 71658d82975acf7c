"""Make a folder of wheels from which nbtoolkit installs without internet."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from nbtoolkit.errors import WheelsError
from nbtoolkit.kaggle.image import (
    Fetch,
    Image,
    Wheel,
    fetch_wheels,
    host_image,
    missing_wheels,
    own_wheel,
    read_image,
    read_wheel,
)
from nbtoolkit.run.paths import write_json

if TYPE_CHECKING:
    from packaging.requirements import Requirement

EXTRAS = ("training", "tracking", "search", "notebooks", "panel", "cli")
"""What the notebooks need, and the command line."""

_METADATA = "dataset-metadata.json"


@dataclass(frozen=True, kw_only=True)
class WheelBundle:
    """A folder of wheels, and what they do to the host."""

    folder: Path
    wheels: tuple[Wheel, ...]
    """nbtoolkit's own is the first."""
    image: Image

    @property
    def size(self) -> int:
        """Bytes of all wheels."""
        return sum(wheel.path.stat().st_size for wheel in self.wheels)

    @property
    def replaced(self) -> list[str]:
        """What the host has in a version that does not do: ``name old -> new``."""
        return [
            f"{wheel.name} {there} -> {wheel.version}"
            for wheel in self.wheels
            if (there := self.image.packages.get(wheel.name))
        ]

    def explain(self) -> str:
        """What is in it, as text."""
        names = " ".join(f"{wheel.name}-{wheel.version}" for wheel in self.wheels)
        many = f"{len(self.wheels)} wheels" if len(self.wheels) > 1 else "1 wheel"
        lines = [f"{many}, {self.size / 2**20:.0f} MiB: {names}"]
        if self.replaced:
            lines.append(f"replaces what {self.image.name} has: {', '.join(self.replaced)}")
        if (self.folder / _METADATA).exists():
            lines.append(f"kaggle datasets create -p {self.folder}")
        return "\n".join(lines)


def make_bundle(
    host: str = "kaggle",
    output: str | os.PathLike[str] | None = None,
    *,
    image: str | os.PathLike[str] | None = None,
    wheel: str | os.PathLike[str] | None = None,
    extras: Sequence[str] = EXTRAS,
    user: str | None = None,
) -> WheelBundle:
    """Fill a folder with nbtoolkit's wheel and those that a host lacks, or has too old.

    Attached to a notebook as a data set it is all that the notebook's first cell needs. The host's
    torch stays as it is. Needs a connection here, and pip.

    Args:
        host: ``"kaggle"`` or ``"colab"``.
        output: the folder; default: ``outputs/<host>-wheels``. Wheels of an earlier time in it go.
        image: a file that says what the host holds, where it is other than this release knows.
        wheel: nbtoolkit's own wheel; default: made of the checkout that this runs from.
        extras: the extras that shall work there.
        user: your name on Kaggle: a ``dataset-metadata.json`` for Kaggle's client is written, too.

    Returns:
        The folder and its wheels.

    Raises:
        WheelsError: a wheel cannot be had, the host's torch does not do, or the folder holds
            other things.
    """
    there = host_image(host) if image is None else read_image(image)
    folder = Path(output or Path("outputs") / f"{host}-wheels").expanduser().absolute()
    _refuse_other_things(folder)
    with tempfile.TemporaryDirectory(prefix="nbtoolkit-") as temporary:
        own = own_wheel(Path(temporary)) if wheel is None else read_wheel(Path(wheel).expanduser())
        fetch = _fetch(there.python, Path(temporary))
        wheels = [own, *missing_wheels(own, extras, there, fetch)]
        _fill(folder, wheels)
    if user is not None:
        write_json(folder / _METADATA, _dataset(user))
    kept = tuple(read_wheel(folder / one.path.name) for one in wheels)
    return WheelBundle(folder=folder, wheels=kept, image=there)


def _fetch(python: str, temporary: Path) -> Fetch:
    """Every call into a folder of its own: of a name that is fetched twice the last counts."""
    rounds = count()

    def fetch(wanted: list[Requirement]) -> list[Wheel]:
        folder = temporary / str(next(rounds))
        return fetch_wheels(wanted, python, folder)

    return fetch


def _refuse_other_things(folder: Path) -> None:
    others = [
        entry.name
        for entry in (folder.iterdir() if folder.is_dir() else ())
        if entry.suffix != ".whl" and entry.name != _METADATA
    ]
    if others:
        raise WheelsError(
            f"{folder} holds other things than wheels: {', '.join(sorted(others)[:5])}",
            allowed="a new folder, or that of an earlier bundle",
            do="choose another output",
        )


def _fill(folder: Path, wheels: Sequence[Wheel]) -> None:
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


def _dataset(user: str) -> dict[str, object]:
    """See https://github.com/Kaggle/kaggle-cli/blob/main/docs/datasets_metadata.md."""
    return {
        "title": "nbtoolkit wheels",
        "id": f"{user}/nbtoolkit-wheels",
        "licenses": [{"name": "other"}],
    }
