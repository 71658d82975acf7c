"""Find the bundle, or the runs, of an earlier session."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from nbtoolkit.errors import BundleError
from nbtoolkit.host import Host
from nbtoolkit.run.paths import EVENTS, age_key
from nbtoolkit.sessions.bundle import SUFFIX, open_bundle, packing_time

# Kaggle mounts the output of an earlier session at /kaggle/input/<name>, or deeper:
# /kaggle/input/notebooks/<owner>/<name>. Data sets beside it may hold millions of files.
_MAX_DEPTH = 5
_MAX_ENTRIES = 5_000  # of one folder
_MAX_TOTAL = 50_000  # entries: a second or two on a slow disk; upper folders come first


def find_source(where: str | os.PathLike[str], host: Host) -> Path | None:
    """Find the newest bundle, or else a folder of runs.

    Args:
        where: ``"auto"`` (below the host's input; directly in its kept and its working folder), a
            folder to search like the input, or a file.
        host: this host.

    Raises:
        BundleError: the path ``where`` does not exist, or holds neither.
    """
    if where == "auto":
        folders = dict.fromkeys(folder for folder in (host.kept, host.working) if folder)
        return _newest(host.input, [file for top in folders for file in next(_walk(top))[1]])
    path = Path(where).expanduser().absolute()
    if path.is_file():
        return path
    if path.is_dir() and (newest := _newest(path, ())):
        return newest
    raise BundleError(
        f"there is no bundle in {path}" if path.is_dir() else f"there is no {path}",
        allowed=f"a file written by nb.pack (*{SUFFIX}), a folder with one, or a folder of runs",
        do="attach the earlier session's output to this notebook, or copy its bundle here",
    )


def _newest(top: Path | None, more_files: Iterable[Path]) -> Path | None:
    """Return the newest bundle below a folder or among more files.

    Else the uppermost folder of runs.
    """
    walked = [] if top is None else list(_walk(top))
    files = [*more_files, *(file for _, names in walked for file in names)]
    bundles = {path: time for path in files if (time := _packed_at(path)) is not None}
    if bundles:
        return max(bundles, key=lambda path: bundles[path])
    runs = [folder for folder, files in walked if _is_run(files)]
    upper = min((len(run.parts) for run in runs), default=0)
    newest = max((run for run in runs if len(run.parts) == upper), key=age_key, default=None)
    return None if newest is None else newest.parent


def _packed_at(file: Path) -> float | None:
    """When a bundle was packed; None: it is no bundle. Git gives its bundles the same suffix."""
    if file.suffix != SUFFIX:
        return None
    try:
        with open_bundle(file) as tar:
            return packing_time(tar, file)
    except BundleError:
        return None


def _is_run(files: list[Path]) -> bool:
    return any(file.name == EVENTS for file in files)


def _walk(top: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Folders and their files, upper folders first; nothing hidden, and nothing inside a run."""
    waiting = deque([(top, 0)])
    total = 0
    while waiting and total < _MAX_TOTAL:
        folder, depth = waiting.popleft()
        entries = list(_entries(folder))
        total += len(entries)
        files = [Path(entry.path) for entry in entries if not entry.is_dir()]
        yield folder, files
        if depth < _MAX_DEPTH and not _is_run(files):
            waiting += [(Path(entry.path), depth + 1) for entry in entries if entry.is_dir()]


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # not readable for us
        for entry in islice(entries, _MAX_ENTRIES):
            if not entry.name.startswith("."):
                yield entry
