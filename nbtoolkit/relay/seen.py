"""Seen: the bundles an output folder has been packed into or unpacked from, by when they were made.

``nb.unpack()`` at the top of a notebook finds the same bundle whenever the notebook is run: it need
not be read through again.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from nbtoolkit.relay.reading import Bundle
from nbtoolkit.runtime.paths import read_json, write_json

_FILE = ".nbtoolkit-bundles.json"
_KEPT = 100  # the newest ones


def note_bundle(folder: Path, created: float) -> None:
    """Remember a bundle; where that cannot be written it is read through again."""
    with contextlib.suppress(OSError):
        write_json(folder / _FILE, [*_stamps(folder), created][-_KEPT:], durable=False)


def was_seen(folder: Path, bundle: Bundle) -> bool:
    """Whether all of a bundle is in a folder by way of it, or came from there."""
    there = all((folder / run).is_dir() for run in bundle.runs())
    return there and bundle.created in _stamps(folder)


def _stamps(folder: Path) -> list[float]:
    try:
        return list(read_json(folder / _FILE) or ())
    except (OSError, ValueError):
        return []
