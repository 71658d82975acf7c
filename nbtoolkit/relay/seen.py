"""Seen: what an output folder has been packed into or unpacked from, by when that was made.

``nb.unpack()`` at the top of a notebook finds the same bundle whenever the notebook is run: it need
not be read through again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from nbtoolkit.runtime.paths import RunPaths, read_json, write_json

SEEN_FILE = ".nbtoolkit-bundles.json"
_KEPT = 100  # the newest ones


def note_bundle(folder: Path, created: float) -> None:
    """Remember a bundle; where that cannot be written it is read through again.

    Args:
        folder: the output folder.
        created: when it was packed, in unix seconds; of a folder of runs :func:`changed_last`.
    """
    with contextlib.suppress(OSError):
        write_json(folder / SEEN_FILE, [*_stamps(folder), created][-_KEPT:], durable=False)


def was_seen(folder: Path, runs: Iterable[str], created: float) -> bool:
    """Whether these runs are in a folder by way of that bundle, or came from there."""
    return all((folder / run).is_dir() for run in runs) and created in _stamps(folder)


def changed_last(folder: Path, runs: Iterable[str]) -> float:
    """When any of the runs below a folder wrote to its diary last, in unix seconds."""
    return max((RunPaths(folder / run).events.stat().st_mtime for run in runs), default=0.0)


def _stamps(folder: Path) -> list[float]:
    try:
        return list(read_json(folder / SEEN_FILE) or ())
    except (OSError, ValueError):
        return []
