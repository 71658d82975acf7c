"""Find: where the bundle of an earlier session lies on this host."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from nbtoolkit.errors import BundleError
from nbtoolkit.relay.bundle import SUFFIX
from nbtoolkit.relay.reading import Bundle
from nbtoolkit.runtime.host import Host

# Kaggle mounts the output of an earlier session at /kaggle/input/<name>, or deeper:
# /kaggle/input/notebooks/<owner>/<name>. Data sets beside it may hold millions of files.
_DEPTH = 5
_ENTRIES = 5_000  # of one folder that are looked at
_IN_ALL = 50_000  # a second or two on a slow disk; upper folders come first


def find_source(where: str | os.PathLike[str], host: Host) -> Path | None:
    """The newest bundle, or else a folder of runs.

    Args:
        where: ``"auto"`` (all of the host's input; its kept and its working folder themselves), a
            folder that is searched like the input, or a file.
        host: this one.

    Raises:
        BundleError: ``where`` is a path that is not there, or holds neither.
    """
    if where == "auto":
        near = [place for place in dict.fromkeys((host.kept, host.working)) if place is not None]
        beside = [file for place in near for file in next(_walk(place))[1]]
        return _newest(host.input, beside)
    path = Path(where).expanduser().absolute()
    if path.is_file():
        return path
    if path.is_dir() and (found := _newest(path, ())):
        return found
    raise BundleError(
        f"there is no bundle in {path}" if path.is_dir() else f"there is no {path}",
        allowed=f"a file written by nb.pack (*{SUFFIX}), a folder with one, or a folder of runs",
        do="attach the earlier session's output to this notebook, or copy its bundle here",
    )


def _newest(place: Path | None, beside: Iterable[Path]) -> Path | None:
    """The newest bundle below a folder or among the files beside it; else the uppermost runs."""
    found = [] if place is None else list(_walk(place))
    bundles = [*_bundles(beside), *_bundles(file for _, files in found for file in files)]
    if bundles:
        return max(bundles, key=lambda bundle: bundle.created).path
    runs = [folder for folder, files in found if _is_run(files)]
    upper = min((len(run.parts) for run in runs), default=0)
    newest = max((run for run in runs if len(run.parts) == upper), key=_begun, default=None)
    return None if newest is None else newest.parent


def _begun(run: Path) -> str:
    """When a run began: its folder's name says so first."""
    return run.name


def _bundles(files: Iterable[Path]) -> Iterator[Bundle]:
    """Those of the files that are bundles; git calls files of its own so, too."""
    for file in files:
        if file.name.endswith(SUFFIX):
            with contextlib.suppress(BundleError):
                yield Bundle.open(file)


def _is_run(files: list[Path]) -> bool:
    return {"versions.json", "events.jsonl"} <= {file.name for file in files}


def _walk(place: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Folders and their files, the upper ones first; nothing hidden, and nothing inside a run."""
    waiting, seen = deque([(place, 0)]), 0
    while waiting and seen < _IN_ALL:
        folder, depth = waiting.popleft()
        entries = list(_entries(folder))
        seen += len(entries)
        files = [Path(entry.path) for entry in entries if not entry.is_dir()]
        yield folder, files
        if depth < _DEPTH and not _is_run(files):
            waiting += [(Path(entry.path), depth + 1) for entry in entries if entry.is_dir()]


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            for count, entry in enumerate(found):
                if count >= _ENTRIES:
                    return
                if not entry.name.startswith("."):
                    yield entry
    except OSError:  # not ours to look into
        return
