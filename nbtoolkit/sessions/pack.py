"""Pack the runs of an output folder into one file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import sqlite3
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nbtoolkit.config.schema import ConfigLike, as_config
from nbtoolkit.environment.resources import free_space, read_size, size_text
from nbtoolkit.errors import BundleError, NbtoolkitError
from nbtoolkit.host import Host, detect_host
from nbtoolkit.run.attempts import run_config
from nbtoolkit.run.paths import RunPaths, read_json, write_json
from nbtoolkit.sessions.bundle import (
    DEFAULT_NAME,
    DISK_FULL,
    FORMAT,
    SUFFIX,
    BundleWriter,
    Header,
    size_without_files,
)
from nbtoolkit.sessions.carried_files import UNREADABLE, describe, is_database, printable
from nbtoolkit.sessions.selection import (
    DESCRIPTIONS,
    PRIORITIES,
    Item,
    OutputContents,
    choose_items,
)
from nbtoolkit.text_table import html_table
from nbtoolkit.version import __version__

SEEN_FILE = ".nbtoolkit-bundles.json"
"""Creation times of the bundles that an output folder was packed into or unpacked from."""

_MAX_SEEN = 100
_MARGIN = 16 * 2**20  # bytes to leave free on a disk: a bundle must not fill it
_LOCK_TIMEOUT = 20.0  # seconds to wait for a database; writers hold a lock for milliseconds
_BUSY = (5, 6)  # SQLITE_BUSY, SQLITE_LOCKED (the module has these names from Python 3.11 on)
_ENDING_HOSTS = ("kaggle", "colab")  # their sessions end and take their disk with them


@dataclass(frozen=True, kw_only=True, repr=False)
class PackResult:
    """A bundle that :func:`nbtoolkit.pack` wrote and :func:`nbtoolkit.unpack` reads."""

    path: Path
    """The path of the bundle."""
    size: int
    """The size of the bundle in bytes."""
    files: int
    """The number of files in the bundle."""
    runs: tuple[str, ...]
    """The folders of the runs, sweeps and cross-validations in the bundle."""
    left_out: tuple[str, ...]
    """Texts that say what was left out, and why."""
    notes: tuple[str, ...]
    """Other notes, for example which runs were active while they were packed."""
    seconds: float
    """The duration of the call."""

    def __repr__(self) -> str:
        left_out = "".join(f", without {text}" for text in self.left_out)
        return f"PackResult({runs_text(self.runs)}, {size_text(self.size)}{left_out}, {self.path})"

    def _repr_html_(self) -> str:
        content = f"{runs_text(self.runs)}, {self.files} files, {size_text(self.size)}"
        rows = [("bundle", str(self.path)), ("holds", content)]
        left_out = [f"left out: {text}" for text in self.left_out]
        return html_table("packed", rows, [*left_out, *self.notes])


def runs_text(runs: tuple[str, ...]) -> str:
    """The number of runs as ``"1 run"`` or ``"3 runs"``."""
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}"


def pack(
    output: str | os.PathLike[str] | None = None,
    *,
    source: str | os.PathLike[str] | None = None,
    size_limit: int | str | None = None,
) -> PackResult:
    """Write the important files of an output folder into one file, a bundle.

    The bundle contains the records of all runs, the studies of sweeps, MLflow's database, the
    newest and the best checkpoint of unfinished runs, and the best checkpoint of finished runs.
    Runs that are still running are packed in their present state.

    If there is too little space, some files are left out, in the order that
    :mod:`nbtoolkit.sessions.selection` describes. Files outside run folders, code, files that may
    contain credentials (see carried_files.py) and files that cannot be read are
    always left out. The result lists what was left out.

    Args:
        output: the path of the bundle, or a folder, in which it is then called
            ``nbtoolkit-relay.bundle``. None: this name in the folder that the host keeps
            (``/kaggle/working``, a mounted Drive, else the working directory). An existing file is
            replaced when the new one is complete.
        source: the output folder; None: ``runtime.output_dir`` of the default configuration. If
            ``source`` is a folder inside this default folder, the bundle stores the paths of the
            runs relative to the default folder.
        size_limit: the largest size of the bundle, in bytes or as a string such as ``"15GB"``;
            None: the free space of the disk.

    Raises:
        BundleError: there are no runs, the file cannot be written, its name does not end in
            ``.bundle``, or the files that the next session needs do not fit.
        ConfigError: ``size_limit`` is not a size.
    """
    start = time.monotonic()
    host = detect_host()
    folder, target = _source_folder(source), _target(output, host)
    contents = OutputContents.scan(folder, default_output_of(folder))
    by_rules = describe(contents.left_out)
    header = _header(contents, by_rules, host)
    room, bound = _room(target, size_limit, header)
    kept, dropped = choose_items(contents.items, room)
    needed = sum(item.size for item in kept if item.priority == "needed")
    if needed > room:
        raise _does_not_fit(needed, room, bound)
    for_space = _summaries(dropped)
    header = header.model_copy(update={"left_out": (*for_space, *by_rules)})
    # Databases last: they then have what the records say was written to them.
    files = sorted((file for item in kept for file in item.files), key=lambda f: f.suffix == ".db")
    count, unreadable = _write(target, contents.folder, header, files)
    note_bundle(folder, header.created)
    return PackResult(
        path=target,
        size=target.stat().st_size,
        files=count,
        runs=tuple(run.folder for run in header.runs),
        left_out=(
            *(f"{text} ({bound})" for text in for_space),
            *by_rules,
            *(describe({UNREADABLE: unreadable}) if unreadable else ()),
        ),
        notes=_notes(header),
        seconds=time.monotonic() - start,
    )


# --- source and target ---


def _source_folder(source: str | os.PathLike[str] | None) -> Path:
    folder = output_folder() if source is None else Path(source).expanduser().absolute()
    if not folder.is_dir():
        raise BundleError(
            f"there is no output folder {folder}",
            allowed="the folder that runtime.output_dir names, with runs in it",
            do='nb.pack(source="..."), or --source in a shell',
        )
    return folder


def output_folder(config: ConfigLike = None) -> Path:
    """``runtime.output_dir`` of a configuration."""
    return Path(as_config(config).runtime.output_dir).expanduser().absolute()


def default_output_of(folder: Path) -> Path | None:
    """``runtime.output_dir`` of the default configuration if a folder is below it, else None.

    The folder of a pipeline is below it. Unpacking writes it to where the pipeline looks for it.
    """
    with contextlib.suppress(NbtoolkitError):
        if folder.is_relative_to(output := output_folder()):
            return output
    return None


def _target(output: str | os.PathLike[str] | None, host: Host) -> Path:
    if output is None:
        return (host.kept or host.working) / DEFAULT_NAME
    path = Path(output).expanduser().absolute()
    if path.is_dir():
        return path / DEFAULT_NAME
    if path.suffix != SUFFIX:
        raise BundleError(
            f"the output {path} is not named like a bundle",
            allowed=f"an existing folder, or a file whose name ends in {SUFFIX}",
            do=f"output={str(path.with_suffix(SUFFIX))!r}",
        )
    return path


# --- header and size ---


def _header(contents: OutputContents, left_out: list[str], host: Host) -> Header:
    folder, working = contents.folder, Path.cwd()
    if not contents.runs:
        raise BundleError(
            f"there are no runs in {folder}",
            allowed="an output folder in which something was launched",
            do='nb.pack(source="..."), or --source in a shell',
        )
    below_working = folder != working and folder.is_relative_to(working)
    return Header(
        format=FORMAT,
        created=time.time(),
        source=printable(str(folder)),
        place=printable(folder.relative_to(working).as_posix()) if below_working else None,
        host=host.kind,
        nbtoolkit=__version__,
        runs=tuple(contents.runs),
        left_out=tuple(left_out),
    )


def _room(target: Path, limit: int | str | None, header: Header) -> tuple[int, str]:
    """Bytes available for files, and the reason for that bound."""
    longest = header.model_copy(update={"left_out": (*DESCRIPTIONS.values(), *header.left_out)})
    overhead = size_without_files(longest)
    free = max(0, free_space(target.parent) - _MARGIN)
    if limit is not None and (limit_bytes := read_size(limit)) <= free:
        return limit_bytes - overhead, f"size_limit is {size_text(limit_bytes)}"
    beside = f", beside the existing {target.name}" if target.exists() else ""
    return free - overhead, f"{target.parent} has {size_text(free)} free{beside}"


def _summaries(left_out: Iterable[Item]) -> list[str]:
    """A text with the size for each priority."""
    sizes: Counter[str] = Counter()
    for item in left_out:
        sizes[item.priority] += item.size
    return [f"{DESCRIPTIONS[name]}, {size_text(sizes[name])}" for name in PRIORITIES if sizes[name]]


def _notes(header: Header) -> tuple[str, ...]:
    alive = ", ".join(run.folder for run in header.runs if run.alive)
    if not alive:
        return ()
    return (f"packed while running: {alive} (what comes from now on is not in the bundle)",)


# --- writing ---


def _write(
    target: Path, folder: Path, header: Header, files: Iterable[Path]
) -> tuple[int, list[str]]:
    """Write the bundle; returns the number of files in it, and the files that cannot be read."""
    temporary, unreadable = None, []
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        fd, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        fcntl.flock(fd, fcntl.LOCK_EX)  # not abandoned as long as this process lives
        # No fsync: the end of a session kills processes, and their files stay. After a crash of the
        # machine the digests show the damage. An fsync of 1 GB takes seconds.
        with open(fd, "wb") as out, ThreadPoolExecutor(1) as thread:
            writer = BundleWriter(out, header, thread)
            for path in files:
                name = path.relative_to(folder).as_posix()
                if not _add(writer, path, name, Path(f"{temporary}.db")):
                    unreadable.append(name)
            count = writer.close()
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        raise _cannot_write(target, error) from error
    finally:
        if temporary is not None:
            _remove(Path(temporary))
    return count, unreadable


def _remove_abandoned(target: Path) -> None:
    """Remove the temporary files, maybe large, of processes that were killed while packing."""
    # The eight characters of mkstemp, and not the copy of a database that belongs to such a file.
    for file in filter(Path.is_file, target.parent.glob(f".{target.name}.????????")):
        with file.open("r+b") as opened, contextlib.suppress(BlockingIOError):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(file)


def _remove(temporary: Path) -> None:
    """Remove a temporary file, and the copy of a database beside it."""
    for file in temporary.parent.glob(f"{temporary.name}*"):
        file.unlink(missing_ok=True)


def _add(writer: BundleWriter, path: Path, name: str, copy: Path) -> bool:
    """Copy one file; False if it cannot be read. A file that is gone (a checkpoint) is skipped.

    Args:
        writer: of the bundle.
        path: the file.
        name: its name in the bundle.
        copy: a path for the copy of a database, on the disk of the bundle.
    """
    try:
        # O_NONBLOCK, O_NOFOLLOW: a FIFO or a link may have replaced the file since the scan.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    with open(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return False
        try:
            if is_database(path):
                return _add_database(writer, path, name, copy)
            size = info.st_size if path.suffix != ".jsonl" else _whole_lines(file, info.st_size)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno in DISK_FULL:
                raise
            return False
        return writer.add(name, file, size, info.st_mtime_ns)


def _add_database(writer: BundleWriter, path: Path, name: str, copy: Path) -> bool:
    """Copy a database; False if it is damaged or stays locked."""
    try:
        _copy_database(path, copy)
        with copy.open("rb") as file:
            return writer.add(name, file, copy.stat().st_size, path.stat().st_mtime_ns)
    except sqlite3.Error as error:
        if "disk is full" in str(error):  # sqlite_errorcode exists from Python 3.11 on
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        return False
    finally:
        copy.unlink(missing_ok=True)


def _copy_database(source: Path, target: Path) -> None:
    """Copy a database as it is at one moment, while others may write to it.

    SQLite's own backup includes the write-ahead log and waits for writers
    (https://www.sqlite.org/backup.html). The copy has no log beside it.

    Raises:
        sqlite3.Error: the source is damaged, or was locked for 20 s.
        OSError: the copy cannot be written.
    """
    writable = os.access(source.parent, os.W_OK)
    if not writable and Path(f"{source}-wal").exists():
        _copy_read_only(source, target)  # reading a log needs a file beside the database
        return
    uri = f"{source.absolute().as_uri()}?{'mode=rw' if writable else 'immutable=1'}"
    end = time.monotonic() + _LOCK_TIMEOUT

    def progress(status: int, remaining: int, total: int) -> None:
        if status in _BUSY and time.monotonic() > end:  # backup() alone retries without limit
            raise sqlite3.OperationalError(f"{source} is locked")

    with (
        closing(sqlite3.connect(uri, uri=True, timeout=1)) as reading,
        closing(sqlite3.connect(target)) as writing,
    ):
        reading.backup(writing, progress=progress)
        writing.execute("pragma journal_mode = delete")


def _copy_read_only(source: Path, target: Path) -> None:
    """Copy a dead session's database, with its log, from a folder that is read-only."""
    copy = Path(f"{target}-read")
    try:
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{source}{suffix}", f"{copy}{suffix}")
        _copy_database(copy, target)
    finally:
        for suffix in ("", "-wal"):
            Path(f"{copy}{suffix}").unlink(missing_ok=True)


def _whole_lines(file: IO[bytes], size: int) -> int:
    """Bytes up to the end of the last line: a writer may be in the middle of the next one."""
    tail_start = max(0, size - 2**20)
    tail = os.pread(file.fileno(), size - tail_start, tail_start)
    return tail_start + tail.rfind(b"\n") + 1


def _cannot_write(target: Path, error: OSError) -> BundleError:
    full = error.errno in DISK_FULL
    return BundleError(
        f"the bundle {target} cannot be written: {error.strerror or error}",
        allowed="a folder on a disk with free space that you may write to",
        do="free some space, or set size_limit" if full else 'another folder: nb.pack("...")',
    )


def _does_not_fit(needed: int, room: int, bound: str) -> BundleError:
    return BundleError(
        f"the bundle needs {size_text(needed)} for records and for what unfinished runs resume "
        f"from, and has {size_text(max(0, room))}: {bound}",
        allowed="a bundle from which any of its runs can resume",
        do="raise size_limit, free space, choose another output, or delete runs from "
        "runtime.output_dir",
    )


# --- bundles seen before ---


def note_bundle(folder: Path, created: float) -> None:
    """Record a bundle, so that ``nb.unpack()`` does not read it again in every session.

    If the record cannot be written, the bundle is read again.

    Args:
        folder: the output folder.
        created: when the bundle was packed, in unix seconds; of a folder of runs
            :func:`last_change`.
    """
    with contextlib.suppress(OSError):
        write_json(folder / SEEN_FILE, [*_seen(folder), created][-_MAX_SEEN:], durable=False)


def was_seen(folder: Path, runs: Iterable[str], created: float) -> bool:
    """Whether a folder has these runs, and was packed into or unpacked from that bundle."""
    return all((folder / run).is_dir() for run in runs) and created in _seen(folder)


def last_change(folder: Path, runs: Iterable[str]) -> float:
    """When any of the runs below a folder last wrote an event, in unix seconds."""
    return max((RunPaths(folder / run).events.stat().st_mtime for run in runs), default=0.0)


def _seen(folder: Path) -> list[float]:
    try:
        return list(read_json(folder / SEEN_FILE) or ())
    except (OSError, ValueError):
        return []


# --- packing at the deadline ---


def pack_for_next_session(
    paths: RunPaths, say: Callable[[str], None], *, host: Host | None = None
) -> PackResult | None:
    """Pack the output folder of a run into the host's kept folder, as ``runtime.pack`` says.

    It reports a failure instead of raising it: how the run ended matters more.

    Args:
        paths: the run.
        say: shows a sentence to the user.
        host: the host; None: detected.

    Returns:
        The bundle; None: none was requested, or none could be written.
    """
    folder = paths.folder.parent
    try:
        host = host or detect_host()
        setting = run_config(paths).runtime.pack
        if not (host.kind in _ENDING_HOSTS if setting == "auto" else setting):
            return None
        packed = pack(host.kept or host.working, source=folder)
        default = default_output_of(folder)
    except Exception as error:  # the run's own result must be returned
        say(f"warning: nothing was packed for the next session: {error}")
        return None
    call = "nb.unpack()" if default else "nb.unpack(config=...) with this configuration"
    say(f"packed for the next session: {packed}. In that session, call {call} and launch again")
    if host.kept is None:
        say(
            f"warning: {packed.path} ends with this session: download it, or mount Google Drive "
            "(/content/drive) and call nb.pack()"
        )
    return packed
