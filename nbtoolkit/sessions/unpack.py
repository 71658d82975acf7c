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
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from nbtoolkit.config.schema import ConfigLike
from nbtoolkit.environment.resources import free_space, size_text
from nbtoolkit.errors import BundleError
from nbtoolkit.host import Host, detect_host
from nbtoolkit.run.paths import EVENTS, age_key
from nbtoolkit.sessions.bundle import SUFFIX, Bundle
from nbtoolkit.sessions.carried_files import runs_below
from nbtoolkit.sessions.merge import Merger
from nbtoolkit.sessions.pack import (
    default_output_of,
    last_change,
    note_bundle,
    output_folder,
    pack,
    runs_text,
    was_seen,
)
from nbtoolkit.text_table import html_table

# Kaggle mounts the output of an earlier session at /kaggle/input/<name>, or deeper:
# /kaggle/input/notebooks/<owner>/<name>. Data sets beside it may hold millions of files.
_MAX_DEPTH = 5
_MAX_ENTRIES = 5_000  # of one folder
_MAX_TOTAL = 50_000  # entries: a second or two on a slow disk; upper folders come first

_STAGING = ".nbtoolkit-unpacking-"


@dataclass(frozen=True, kw_only=True, repr=False)
class UnpackResult:
    """The result of :func:`nbtoolkit.unpack`."""

    bundle: Path | None
    """The bundle or the folder of runs that was unpacked; None if none was found."""
    folder: Path
    """The output folder."""
    new: tuple[str, ...] = ()
    """The folders of the runs that the output folder did not contain before."""
    advanced: tuple[str, ...] = ()
    """The folders of the runs that were replaced by a newer state from the bundle."""
    unchanged: tuple[str, ...] = ()
    """The folders of the runs that stayed as they are: an active run, or a run that is as new as in
    the bundle, or newer."""
    files: int = 0
    """The number of written files that belong to no run."""
    tracked: tuple[str, ...] = ()
    """The folders of the runs that this call added to the database of MLflow."""
    notes: tuple[str, ...] = ()
    """Notes about what the bundle lacks, and about what was not unpacked and why."""

    def __repr__(self) -> str:
        if self.bundle is None:
            return f"UnpackResult(nothing found to unpack into {self.folder})"
        return f"UnpackResult({self._written()}, from {self.bundle}, in {self.folder})"

    def _repr_html_(self) -> str:
        if self.bundle is None:
            return html_table("unpacked: nothing was found", [("folder", str(self.folder))])
        rows = [("bundle", self.bundle), ("folder", self.folder), ("wrote", self._written())]
        return html_table("unpacked", rows, self.notes)

    def _written(self) -> str:
        groups = [("new", self.new), ("advanced", self.advanced), ("unchanged", self.unchanged)]
        counts = [f"{len(runs)} {name}" for name, runs in groups if runs]
        mlflow = f"; MLflow: {runs_text(self.tracked)}" if self.tracked else ""
        return f"runs: {', '.join(counts) or 'none'}; other files: {self.files}{mlflow}"


def unpack(
    where: str | os.PathLike[str] = "auto",
    *,
    into: str | os.PathLike[str] | None = None,
    config: ConfigLike = None,
    host: Host | None = None,
) -> UnpackResult:
    """Write the runs of an earlier session into the output folder; later launches resume them.

    The function checks the whole bundle before it writes anything. A run that is newer in the
    output folder, or that is running, stays as it is; a second call changes nothing. No content is
    loaded or executed. Only run folders are written (see carried_files.py); the
    result lists all other content of the bundle.

    Args:
        where: a bundle, or a folder that contains a bundle or runs, such as the output of a session
            that ended before it could pack. ``"auto"``: the newest bundle in ``/kaggle/input``, a
            mounted Drive or the working directory, or else runs in ``/kaggle/input``; if there are
            none, nothing happens.
        into: the output folder; None: ``runtime.output_dir`` of ``config``.
        config: the configuration of later launches; None: the default configuration.
        host: the host of this process; None: detected.

    Raises:
        BundleError: there is no such bundle; it is damaged, unsafe, dated in the future or not made
            by nbtoolkit; or the folder cannot be written.
        ConfigError: ``config`` is not a configuration.
    """
    folder = output_folder(config) if into is None else Path(into).expanduser().absolute()
    source = find_source(where, host or detect_host())
    if source is None:
        return UnpackResult(bundle=None, folder=folder)
    if source.is_dir():
        return _unpack_runs(source, folder, skip_seen=where == "auto")
    bundle = Bundle.open(source)
    runs = bundle.runs()
    if where == "auto" and was_seen(folder, runs, bundle.header.created):
        return UnpackResult(bundle=source, folder=folder, unchanged=tuple(runs))
    result = _unpack(bundle, folder, source)
    place = bundle.header.place
    if into is None and place and Path(place).absolute() != folder:
        note = f"its runs were in {place!r}: to unpack them there, nb.unpack(into={place!r})"
        result = replace(result, notes=(*result.notes, note))
    return result


def _unpack_runs(source: Path, folder: Path, *, skip_seen: bool) -> UnpackResult:
    """Unpack a folder of runs by packing it first, which copies open databases correctly."""
    base = default_output_of(source) or source
    runs = [(source / run).relative_to(base).as_posix() for run in runs_below(source)]
    changed = last_change(base, runs)
    if base == folder or (skip_seen and was_seen(folder, runs, changed)):
        return UnpackResult(bundle=source, folder=folder, unchanged=tuple(runs))
    # The temporary folder may be a small file system in memory, and the output folder's disk full.
    roomiest = max(Path(tempfile.gettempdir()), folder, key=free_space)
    try:
        roomiest.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".nbtoolkit-archive-", dir=roomiest) as temporary:
            packed = pack(temporary, source=source)
            result = _unpack(Bundle.open(packed.path), folder, source)
    except OSError as error:
        raise _cannot_unpack(source, folder, error) from error
    note_bundle(folder, changed)
    return result


def _unpack(bundle: Bundle, folder: Path, source: Path) -> UnpackResult:
    """Unpack a bundle; ``source`` is the path that the user knows it by."""
    _need_room(bundle, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _staging(folder) as staged:
            bundle.extract(staged)
            merger = Merger(staged, folder, Path(bundle.header.source))
            merger.merge()
            note_bundle(folder, bundle.header.created)
    except OSError as error:
        raise _cannot_unpack(source, folder, error) from error
    left_out = [f"the bundle was packed without {text}" for text in bundle.header.left_out]
    return UnpackResult(
        bundle=source,
        folder=folder,
        new=tuple(merger.new),
        advanced=tuple(merger.advanced),
        unchanged=tuple(merger.unchanged),
        files=merger.files,
        tracked=tuple(merger.tracked),
        notes=(*left_out, *merger.notes),
    )


def _cannot_unpack(source: Path, folder: Path, error: OSError) -> BundleError:
    return BundleError(
        f"the bundle {source} cannot be unpacked into {folder}: {error.strerror or error}",
        allowed="a folder on a disk with free space that you may write to",
        do='free some space, or choose another folder: nb.unpack(into="...")',
    )


def _need_room(bundle: Bundle, folder: Path) -> None:
    needed, free = bundle.path.stat().st_size, free_space(folder)
    if needed > free:
        raise BundleError(
            f"{folder} has {size_text(free)} free, and {bundle.path} needs {size_text(needed)}",
            allowed="a disk with room for everything in the bundle",
            do='free some space, or choose another folder: nb.unpack(into="...")',
        )


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A temporary folder on the same disk, whose files need only be renamed; one at a time.

    It first removes what a killed process left.
    """
    lock = os.open(folder / ".unpack.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for abandoned in folder.glob(f"{_STAGING}*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        staged = Path(tempfile.mkdtemp(prefix=_STAGING, dir=folder))
        try:
            yield staged
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    finally:
        os.close(lock)


# --- finding the source ---


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
    """The newest bundle below a folder or among more files; else the uppermost folder of runs."""
    walked = [] if top is None else list(_walk(top))
    bundles = [*_bundles(more_files), *_bundles(file for _, files in walked for file in files)]
    if bundles:
        return max(bundles, key=lambda bundle: bundle.header.created).path
    runs = [folder for folder, files in walked if _is_run(files)]
    upper = min((len(run.parts) for run in runs), default=0)
    newest = max((run for run in runs if len(run.parts) == upper), key=age_key, default=None)
    return None if newest is None else newest.parent


def _bundles(files: Iterable[Path]) -> Iterator[Bundle]:
    """Those of the files that are bundles: git gives its bundles the same suffix."""
    for file in files:
        if file.name.endswith(SUFFIX):
            with contextlib.suppress(BundleError):
                yield Bundle.open(file)


def _is_run(files: list[Path]) -> bool:
    return any(file.name == EVENTS for file in files)


def _walk(top: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Folders and their files, upper folders first; nothing hidden, and nothing inside a run."""
    waiting, total = deque([(top, 0)]), 0
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
