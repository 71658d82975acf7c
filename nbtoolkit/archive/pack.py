"""Pack the runs of an output folder into one file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nbtoolkit.archive.bundle_format import (
    DEFAULT_NAME,
    NO_ROOM,
    SUFFIX,
    BundleWriter,
    size_of_frame,
)
from nbtoolkit.archive.file_rules import UNREADABLE, named, plain
from nbtoolkit.archive.mlflow_databases import copy_database, is_database
from nbtoolkit.archive.selection import ORDER, SAID, Item, OutputContents, choose, look_into
from nbtoolkit.config.schema import ConfigLike, as_config, load_config
from nbtoolkit.environment.resources import free_space, read_size, size_text
from nbtoolkit.errors import BundleError, NbtoolkitError
from nbtoolkit.host import Host, detect_host
from nbtoolkit.run.paths import RunPaths, read_json, write_json
from nbtoolkit.text_table import html_table
from nbtoolkit.version import __version__

# --- result ---
# What nb.pack and nb.unpack did.


@dataclass(frozen=True, kw_only=True, repr=False)
class PackResult:
    """A bundle that was written; :func:`nbtoolkit.unpack` takes it."""

    path: Path
    """The bundle."""
    size: int
    """Its bytes."""
    files: int
    """How many files are in it."""
    runs: tuple[str, ...]
    """The runs, sweeps and cross-validations in it, by their folders."""
    left_out: tuple[str, ...]
    """What was left out, in words: for lack of room, or for what it is."""
    notes: tuple[str, ...]
    """What else is to be known: runs that were going on."""
    seconds: float
    """How long it took."""

    def __repr__(self) -> str:
        left_out = "".join(f", without {what}" for what in self.left_out)
        return f"PackResult({_runs(self.runs)}, {size_text(self.size)}{left_out}, {self.path})"

    def _repr_html_(self) -> str:
        rows = [
            ("bundle", str(self.path)),
            ("holds", f"{_runs(self.runs)}, {self.files} files, {size_text(self.size)}"),
        ]
        return html_table("packed", rows, [*(f"left out: {t}" for t in self.left_out), *self.notes])


@dataclass(frozen=True, kw_only=True, repr=False)
class UnpackResult:
    """What a bundle brought into an output folder."""

    bundle: Path | None
    """The bundle, or the folder of runs; None: none was found, and nothing was done."""
    folder: Path
    """The output folder."""
    new: tuple[str, ...] = ()
    """Runs that were not there before, by their folders."""
    advanced: tuple[str, ...] = ()
    """Runs that were there, and are now as far as in the bundle."""
    unchanged: tuple[str, ...] = ()
    """Runs that were left as they were: equally far, further, or going on."""
    files: int = 0
    """Files beside the runs that were written."""
    tracked: tuple[str, ...] = ()
    """Runs that MLflow's database has by this call, by their folders."""
    notes: tuple[str, ...] = ()
    """What else is to be known: what the bundle lacks, what was not taken and why."""

    def __repr__(self) -> str:
        if self.bundle is None:
            return f"UnpackResult(nothing found to unpack into {self.folder})"
        return f"UnpackResult({self._taken()}, from {self.bundle}, in {self.folder})"

    def _repr_html_(self) -> str:
        if self.bundle is None:
            return html_table("unpacked: nothing was found", [("folder", str(self.folder))])
        rows = [("bundle", str(self.bundle)), ("folder", str(self.folder)), ("took", self._taken())]
        return html_table("unpacked", rows, self.notes)

    def _taken(self) -> str:
        parts = [("new", self.new), ("advanced", self.advanced), ("unchanged", self.unchanged)]
        told = [f"{len(runs)} {what}" for what, runs in parts if runs]
        mlflow = f"; MLflow: {_runs(self.tracked)}" if self.tracked else ""
        return f"runs: {', '.join(told) or 'none'}; other files: {self.files}{mlflow}"


def _runs(runs: tuple[str, ...]) -> str:
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}"


# --- bundles seen before ---
# What an output folder has been packed into or unpacked from, by when that was made.
#
# ``nb.unpack()`` at the top of a notebook finds the same bundle whenever the notebook is run: it
# need not be read through again.


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


# --- pack ---


_MARGIN = 16 * 2**20  # bytes of a disk that are left free: a bundle must not fill it


def pack(
    output: str | os.PathLike[str] | None = None,
    *,
    source: str | os.PathLike[str] | None = None,
    size_limit: int | str | None = None,
) -> PackResult:
    """Write what is worth keeping of an output folder into one file.

    In it are the records of all runs, the studies of sweeps, MLflow's database, what unfinished
    runs go on from (their newest checkpoint and their best one) and the best checkpoint of
    finished ones. Runs may go on meanwhile: they are packed as they are then. What is left out
    first where room is short stands in :mod:`nbtoolkit.archive.selection`, and is told. Files of
    no run folder, code and what may hold credentials are left out, and named (see
    :mod:`nbtoolkit.archive.file_rules`); so is what cannot be read: it does not stop the
    rest.

    Args:
        output: the file, or the folder for ``nbtoolkit-relay.bundle``; None: that name in the
            host's kept folder (``/kaggle/working``, a mounted Drive, else the working directory).
            A file of that name is replaced once the new one is whole.
        source: the output folder; None: ``runtime.output_dir`` of the default configuration. Of a
            folder below that one, where it lies there is kept.
        size_limit: the file's largest size in bytes, or a text such as ``"15GB"``; None: what the
            disk has room for.

    Raises:
        BundleError: there are no runs, the file cannot be written, or what unfinished runs go on
            from does not fit.
        ConfigError: ``size_limit`` is no size.
    """
    begun = time.monotonic()
    host = detect_host()
    folder, target = _folder(source), _target(output, host)
    contents = look_into(folder, default_output_of(folder))
    named_out = named(contents.left_out)
    about = {**_about(contents, host), "left_out": named_out}
    room, bound = _room(target, size_limit, about)
    kept, left_out = choose(contents.pieces, room)
    told = _summaries(left_out)
    needed = sum(piece.size for piece in kept if piece.worth == "needed")
    if needed > room:
        raise _does_not_fit(target, needed, room, bound)
    about["left_out"] = [*told, *named_out]
    names, unreadable = _write(target, contents.folder, about, _files(kept))
    more = named({UNREADABLE: unreadable}) if unreadable else []
    note_bundle(folder, about["created"])
    return PackResult(
        path=target,
        size=target.stat().st_size,
        files=names,
        runs=tuple(run["folder"] for run in contents.runs),
        left_out=(*(f"{what} ({bound})" for what in told), *named_out, *more),
        notes=tuple(_notes(contents)),
        seconds=time.monotonic() - begun,
    )


# --- what, where, how much ------------------------------------------------------------------------


def _folder(source: str | os.PathLike[str] | None) -> Path:
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
    """``runtime.output_dir`` of the default configuration; None: a folder is not below it.

    A pipeline's folder, say, is below it: unpacked, it is to be where that looks for it.
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
            f"the output {path} is no bundle's name",
            allowed=f"a folder that is there, or a file whose name ends in {SUFFIX}",
            do=f"output={str(path.with_suffix(SUFFIX))!r}",
        )
    return path


def _about(contents: OutputContents, host: Host) -> dict[str, Any]:
    if not contents.runs:
        raise BundleError(
            f"there are no runs in {contents.folder}",
            allowed="an output folder in which something was launched",
            do='nb.pack(source="..."), or --source in a shell',
        )
    runs = [{**run, "folder": plain(run["folder"])} for run in contents.runs]
    return {
        "created": time.time(),
        "source": plain(str(contents.folder)),
        "place": _place(contents.folder),
        "host": host.kind,
        "nbtoolkit": __version__,
        "runs": runs,
    }


def _place(folder: Path) -> str | None:
    """The folder below the working directory, where it is below it."""
    here = Path.cwd()
    below = folder != here and folder.is_relative_to(here)
    return plain(folder.relative_to(here).as_posix()) if below else None


def _room(target: Path, limit: int | str | None, about: dict[str, Any]) -> tuple[int, str]:
    """Bytes there are for files, and what sets that bound."""
    free = max(0, free_space(target.parent) - _MARGIN)
    frame = size_of_frame({**about, "left_out": [*SAID.values(), *about["left_out"]]})
    wished = None if limit is None else read_size(limit)
    if wished is not None and wished <= free:
        return wished - frame, f"size_limit is {size_text(wished)}"
    before = f", beside the {target.name} that is there" if target.exists() else ""
    return free - frame, f"{target.parent} has {size_text(free)} free{before}"


def _summaries(left_out: Iterable[Item]) -> list[str]:
    """What is left out, in words, with its size."""
    sizes: Counter[str] = Counter()
    for piece in left_out:
        sizes[piece.worth] += piece.size
    return [f"{SAID[worth]}, {size_text(sizes[worth])}" for worth in ORDER if sizes[worth]]


def _notes(contents: OutputContents) -> Iterator[str]:
    alive = [run["folder"] for run in contents.runs if run["alive"]]
    if alive:
        yield (
            f"packed as it was at that moment, since it goes on: {', '.join(alive)} (what it does "
            "from now on is not in the bundle)"
        )


def _files(kept: Iterable[Item]) -> list[Path]:
    """All files, databases last: what records say was written to them is then in them."""
    files = [file for piece in kept for file in piece.files]
    return sorted(files, key=lambda file: file.suffix == ".db")


# --- writing --------------------------------------------------------------------------------------


def _write(
    target: Path, folder: Path, about: dict[str, Any], files: Iterable[Path]
) -> tuple[int, list[str]]:
    """Write the bundle whole; returns how many files are in it, and those that cannot be read."""
    temporary, unreadable = None, []
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_over(target)
        fd, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        fcntl.flock(fd, fcntl.LOCK_EX)  # it is not left over as long as this process lives
        # Not flushed to the disk: a session's end ends processes, and the files stay; a crash of
        # the machine is told by the digests. A flush of 1 GB takes seconds.
        with open(fd, "wb") as out, ThreadPoolExecutor(1) as thread:
            writer = BundleWriter(out, about, thread)
            for path in files:
                name = path.relative_to(folder).as_posix()
                if not _add(writer, path, name):
                    unreadable.append(name)
            count = writer.close()
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        raise _not_written(target, error) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    return count, unreadable


def _remove_left_over(target: Path) -> None:
    """Remove what a process wrote that was killed while it packed; it may be large."""
    for file in filter(Path.is_file, target.parent.glob(f".{target.name}.*")):
        with file.open("rb") as opened, contextlib.suppress(BlockingIOError):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink()


def _add(writer: BundleWriter, path: Path, name: str) -> bool:
    """Copy one file; False: it cannot be read. One that is gone (a checkpoint) is no matter."""
    try:
        # Not waiting: since it was looked at, a FIFO may have come in its place, or a link.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    with open(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            return False
        try:
            if is_database(path):
                return _add_database(writer, path, name)
            size = about.st_size if path.suffix != ".jsonl" else _whole_lines(file, about.st_size)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            return False
        return writer.add(name, file, size, about.st_mtime_ns)


def _add_database(writer: BundleWriter, path: Path, name: str) -> bool:
    """Copy a database; False: it is damaged, or somebody does not let go of it."""
    with tempfile.TemporaryDirectory(prefix="nbtoolkit-relay-") as folder:
        copy = Path(folder) / path.name
        try:
            copy_database(path, copy)
        except sqlite3.Error:
            return False
        with copy.open("rb") as file:
            return writer.add(name, file, copy.stat().st_size, path.stat().st_mtime_ns)


def _whole_lines(file: IO[bytes], size: int) -> int:
    """Bytes up to the end of the last line: its writer may be in the midst of one."""
    begin = max(0, size - 2**20)
    end = os.pread(file.fileno(), size - begin, begin).rfind(b"\n")
    return begin + end + 1


def _not_written(target: Path, error: OSError) -> BundleError:
    full = error.errno in NO_ROOM
    return BundleError(
        f"the bundle {target} cannot be written: {error.strerror or error}",
        allowed="a folder on a disk with free space that you may write to",
        do="free some space, or set size_limit" if full else 'another place: nb.pack("...")',
    )


def _does_not_fit(target: Path, needed: int, room: int, bound: str) -> BundleError:
    return BundleError(
        f"the bundle needs {size_text(needed)} for the records and for what unfinished runs go on "
        f"from, and has {size_text(max(0, room))}: {bound}",
        allowed="a bundle that any of its runs can go on from",
        do="raise size_limit, free space, choose another output, or delete runs from "
        "runtime.output_dir",
    )


# --- deadline ---
# A run or search that ended with its session's time is packed by itself.


_ENDING_HOSTS = ("kaggle", "colab")  # their sessions end, and take their disk with them


def pack_for_next_session(
    paths: RunPaths, say: Callable[[str], None], *, host: Host | None = None
) -> PackResult | None:
    """Pack the output folder of a run into the host's kept folder, where ``runtime.pack`` says so.

    What goes wrong is said and no error: how the run ended matters more.

    Args:
        paths: the run.
        say: shows a sentence to the user.
        host: where this is; None: detected.

    Returns:
        The bundle; None: none was wanted, or none could be written.
    """
    folder = paths.folder.parent
    try:
        host = host or detect_host()
        wish = load_config(paths.config, env=None).runtime.pack
        if not (host.kind in _ENDING_HOSTS if wish == "auto" else wish):
            return None
        packed = pack(host.kept or host.working, source=folder)
        default = default_output_of(folder)
    except Exception as error:  # whatever it is, the run's own result is to come back
        say(f"warning: nothing was packed for the next session: {error}")
        return None
    call = "nb.unpack()" if default else "nb.unpack(config=...) with this configuration"
    say(f"packed for the next session: {packed}; there, {call} and the same call go on")
    if host.kept is None:
        say(
            f"warning: {packed.path} ends with this session: download it, or mount Google Drive "
            "(/content/drive) and call nb.pack()"
        )
    return packed
