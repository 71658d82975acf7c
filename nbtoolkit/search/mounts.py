"""Mounts: is a folder on a disk of this machine, or on one where SQLite's locks fail."""

from __future__ import annotations

import tempfile
from pathlib import Path

from nbtoolkit.runtime.limits import ROOT

# Google Drive in Colab is "fuse.drive"; Kaggle's working folder is a disk of the machine.
_FAR = ("fuse", "nfs", "cifs", "smb", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "davfs")
_NEAR = ("fuse.overlayfs", "fuse-overlayfs", "fuse.mergerfs")  # containers' own file systems


def file_system(folder: Path, *, root: Path = ROOT) -> str:
    """The kind of file system that a folder lies on: ``"ext4"``, ``"fuse.drive"``; "" if unknown.

    Args:
        folder: an existing folder.
        root: where ``/proc`` is looked for.
    """
    try:
        lines = (root / "proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    found, longest = "", -1
    for line in lines:
        _, place, kind, *_ = line.split(" ")
        place = place.replace("\\040", " ")
        if folder.resolve().is_relative_to(place) and len(place) >= longest:
            found, longest = kind, len(place)
    return found


def is_far(folder: Path, *, root: Path = ROOT) -> bool:
    """Whether a folder is on a network disk (or another one that is no disk of this machine)."""
    kind = file_system(folder, root=root)
    return kind.startswith(_FAR) and kind not in _NEAR


def local_folder(folder: Path, *, root: Path = ROOT) -> Path | None:
    """Where to keep a database whose home is ``folder`` while it is open; None: there itself."""
    if not is_far(folder, root=root):
        return None
    return Path(tempfile.gettempdir()) / "nbtoolkit-studies" / folder.name
