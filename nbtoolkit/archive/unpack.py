"""Find the bundle of an earlier session and unpack it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from nbtoolkit.archive.bundle_format import SUFFIX, Bundle
from nbtoolkit.archive.merge import merge
from nbtoolkit.archive.pack import (
    UnpackResult,
    changed_last,
    default_output_of,
    note_bundle,
    output_folder,
    pack,
    was_seen,
)
from nbtoolkit.archive.selection import look_into
from nbtoolkit.config.schema import ConfigLike
from nbtoolkit.environment.resources import free_space, size_text
from nbtoolkit.errors import BundleError
from nbtoolkit.host import Host, detect_host

# --- find ---
# Where the bundle of an earlier session lies on this host.


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
    newest = max((run for run in runs if len(run.parts) == upper), key=_begin_time, default=None)
    return None if newest is None else newest.parent


def _begin_time(run: Path) -> str:
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


# --- unpack ---


_STAGED = ".nbtoolkit-unpacking-"


def unpack(
    where: str | os.PathLike[str] = "auto",
    *,
    into: str | os.PathLike[str] | None = None,
    config: ConfigLike = None,
    host: Host | None = None,
) -> UnpackResult:
    """Bring the runs of an earlier session into the output folder; launches then go on with them.

    The bundle is checked whole before anything is taken from it. A run that is here and further, or
    going on, stays as it is; unpacking twice changes nothing. Nothing is loaded or run. Written are
    run folders alone (see :mod:`nbtoolkit.archive.file_rules`); what else is in it is named.

    Args:
        where: ``"auto"`` (the newest bundle in ``/kaggle/input``, in a mounted Drive, or in the
            working directory; nothing is done where there is none), a bundle, or a folder: with a
            bundle in it, or with runs, such as the output of a session that ended before it could
            pack.
        into: the output folder; None: ``runtime.output_dir`` of ``config``.
        config: what will be launched with; None: the default configuration.
        host: where this is; None: detected.

    Raises:
        BundleError: there is no such bundle, or it is damaged, foreign, unsafe or dated in the
            future, or the folder cannot be written.
        ConfigError: ``config`` is none.
    """
    folder = output_folder(config) if into is None else Path(into).expanduser().absolute()
    source = find_source(where, host or detect_host())
    if source is None:
        return UnpackResult(bundle=None, folder=folder)
    if source.is_dir():
        return _unpack_runs(source, folder, again=where != "auto")
    bundle = Bundle.open(source)
    runs = bundle.runs()
    if where == "auto" and was_seen(folder, runs, bundle.created):
        return UnpackResult(bundle=source, folder=folder, unchanged=tuple(runs))
    done = _unpack(bundle, folder, told=source)
    place = bundle.header.place
    if into is None and place and Path(place).absolute() != folder:
        note = f"its runs lay in {place!r}: to have them there, nb.unpack(into={place!r})"
        done = replace(done, notes=(*done.notes, note))
    return done


def _unpack_runs(source: Path, folder: Path, *, again: bool) -> UnpackResult:
    """Take a folder of runs: by way of a bundle, which copies open databases as they should be."""
    base = default_output_of(source) or source
    runs = [str(run["folder"]) for run in look_into(source, base).runs]
    created = changed_last(base, runs)
    if base == folder or (not again and was_seen(folder, runs, created)):
        return UnpackResult(bundle=source, folder=folder, unchanged=tuple(runs))
    with tempfile.TemporaryDirectory(prefix="nbtoolkit-relay-") as passing:
        packed = pack(passing, source=source)
        done = _unpack(Bundle.open(packed.path), folder, told=source)
    note_bundle(folder, created)
    return done


def _unpack(bundle: Bundle, folder: Path, *, told: Path) -> UnpackResult:
    _need_room(bundle, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _staging(folder) as staged:
            bundle.extract(staged)
            merged = merge(staged, folder, Path(bundle.header.source))
            note_bundle(folder, bundle.created)
    except OSError as error:
        raise BundleError(
            f"the bundle {told} cannot be unpacked into {folder}: {error.strerror or error}",
            allowed="a folder on a disk with free space that you may write to",
            do='free some space, or choose another folder: nb.unpack(into="...")',
        ) from error
    left_out = [f"the bundle was packed without {what}" for what in bundle.header.left_out]
    return UnpackResult(
        bundle=told,
        folder=folder,
        new=tuple(merged.new),
        advanced=tuple(merged.advanced),
        unchanged=tuple(merged.unchanged),
        files=merged.files,
        tracked=tuple(merged.tracked),
        notes=(*left_out, *merged.notes),
    )


def _need_room(bundle: Bundle, folder: Path) -> None:
    needed, free = bundle.path.stat().st_size, free_space(folder)
    if needed > free:
        raise BundleError(
            f"{folder} has {size_text(free)} free, and {bundle.path} needs {size_text(needed)}",
            allowed="a disk with room for all that is in the bundle",
            do='free some space, or choose another folder: nb.unpack(into="...")',
        )


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A folder on the same disk, whose files need only be renamed; one at a time, gone in the end.

    What a process left that was killed here is removed by the next one.
    """
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left_over in folder.glob(f"{_STAGED}*"):
            shutil.rmtree(left_over, ignore_errors=True)
        staged = Path(tempfile.mkdtemp(prefix=_STAGED, dir=folder))
        try:
            yield staged
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    finally:
        os.close(lock)
