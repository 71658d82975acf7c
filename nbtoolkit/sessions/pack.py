"""Pack the runs of an output folder into one file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbtoolkit.cards import properties_html
from nbtoolkit.config.schema import ConfigLike, as_config
from nbtoolkit.environment.resources import free_space, read_size, size_text
from nbtoolkit.errors import BundleError, NbtoolkitError
from nbtoolkit.host import Host, detect_host
from nbtoolkit.run.attempts import run_config
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.sessions.bundle import DEFAULT_NAME, DISK_FULL, SUFFIX, write_bundle
from nbtoolkit.sessions.carried_files import UNREADABLE, describe, is_pipeline, is_run
from nbtoolkit.sessions.contents import NEEDED, Contents, contents_of

_MARGIN = 16 * 2**20  # bytes to leave free on a disk: a bundle must not fill it
_BESIDES_FILES = 2**14  # bytes of a bundle's comment, of its last member and of its end
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
        return properties_html("packed", rows, [*left_out, *self.notes])


def runs_text(runs: Sequence[str]) -> str:
    """Return the number of runs as ``"1 run"`` or ``"3 runs"``."""
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}"


def pack(
    output: str | os.PathLike[str] | None = None,
    *,
    source: str | os.PathLike[str] | None = None,
    size_limit: int | str | None = None,
) -> PackResult:
    """Write the important files of an output folder into one file, a bundle.

    The bundle contains the records of all runs, the studies of sweeps, the newest and the best
    checkpoint of unfinished runs, and the best checkpoint of finished runs. Runs that are still
    running are packed in their present state. MLflow's database is not in the bundle:
    :func:`nbtoolkit.unpack` writes the runs to the database of the next session.

    If there is too little space, the weights of trials that did not win are left out first, then
    the output of ranks, then the checkpoints of finished runs. Files outside run folders, kinds of
    files that no bundle may hold, such as code, files that may contain credentials and files that
    cannot be read are always left out. The result lists what was left out.

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
    folder = _source_folder(source)
    target = _target(output, detect_host())
    contents = contents_of(folder, base_of(folder))
    if not contents.runs:
        raise BundleError(
            f"there are no runs in {folder}",
            allowed="an output folder in which something was launched",
            do='nb.pack(source="..."), or --source in a shell',
        )
    by_rules = describe(contents.left_out)
    room, bound = _room(target, size_limit)
    room -= _BESIDES_FILES + sum(map(len, by_rules))
    dropped = [f"{group}, {size_text(size)}" for group, size in contents.fit(room).items()]
    if (needed := contents.sizes.get(NEEDED, 0)) > room:
        raise _does_not_fit(needed, room, bound)
    running = [run for run in contents.runs if _is_running(contents.folder / run)]
    count, unreadable = _write(target, contents, [*dropped, *by_rules])
    notes = []
    if running:
        names = ", ".join(running)
        notes.append(f"packed while running: {names} (what comes from now on is not in the bundle)")
    return PackResult(
        path=target,
        size=target.stat().st_size,
        files=count,
        runs=tuple(contents.runs),
        left_out=(
            *(f"{text} ({bound})" for text in dropped),
            *by_rules,
            *describe({UNREADABLE: unreadable}),
        ),
        notes=tuple(notes),
        seconds=time.monotonic() - start,
    )


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


def base_of(folder: Path) -> Path:
    """Return the folder that names in a bundle begin at: ``folder``, or one above it.

    A run or a pipeline, or what lies below the default output folder, is unpacked to where the next
    session looks for it.
    """
    with contextlib.suppress(NbtoolkitError):
        if folder.is_relative_to(output := output_folder()):
            return output
    return folder.parent if is_run(folder) or is_pipeline(folder) else folder


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


def _room(target: Path, limit: int | str | None) -> tuple[int, str]:
    """Bytes available for files, and the reason for that bound."""
    free = max(0, free_space(target.parent) - _MARGIN)
    if limit is not None and (limit_bytes := read_size(limit)) <= free:
        return limit_bytes, f"size_limit is {size_text(limit_bytes)}"
    beside = f", beside the existing {target.name}" if target.exists() else ""
    return free, f"{target.parent} has {size_text(free)} free{beside}"


def _is_running(run: Path) -> bool:
    with contextlib.suppress(OSError):
        paths = RunPaths(run)
        return paths.lock.is_file() and paths.owned()
    return False


def _write(target: Path, contents: Contents, left_out: Sequence[str]) -> tuple[int, list[str]]:
    """Write the bundle; returns the number of files in it, and the files that cannot be read."""
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        fd, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        temporary = Path(name)
        fcntl.flock(fd, fcntl.LOCK_EX)  # not abandoned as long as this process lives
        # No fsync, which takes seconds per GB: the end of a session kills processes, and their
        # files stay. After a crash of the machine the last member may be missing.
        with open(fd, "wb") as out:
            written = write_bundle(out, contents.folder, contents.files, left_out)
        os.replace(temporary, target)
    except OSError as error:
        raise _cannot_write(target, error) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return written


def _remove_abandoned(target: Path) -> None:
    """Remove the temporary files, maybe large, of processes that were killed while packing."""
    for file in filter(Path.is_file, target.parent.glob(f".{target.name}.*")):
        with file.open("r+b") as opened, contextlib.suppress(BlockingIOError):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink(missing_ok=True)


def _cannot_write(target: Path, error: OSError) -> BundleError:
    full = error.errno in DISK_FULL
    return BundleError(
        f"the bundle {target} cannot be written: {error.strerror or error}",
        allowed="a folder on a disk with free space that you may write to",
        do="free some space, or set size_limit" if full else 'another folder: nb.pack("...")',
    )


def _does_not_fit(needed: int, room: int, bound: str) -> BundleError:
    has = size_text(max(0, room))
    return BundleError(
        f"the bundle needs {size_text(needed)} for {NEEDED}, and has {has}: {bound}",
        allowed="a bundle from which any of its runs can resume",
        do="raise size_limit, free space, choose another output, or delete runs from "
        "runtime.output_dir",
    )


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
        in_default = folder.is_relative_to(output_folder())
    except Exception as error:  # the run's own result must be returned
        say(f"warning: nothing was packed for the next session: {error}")
        return None
    call = "nb.unpack()" if in_default else "nb.unpack(config=...) with this configuration"
    say(f"packed for the next session: {packed}. In that session, call {call} and launch again")
    if host.kept is None:
        say(
            f"warning: {packed.path} ends with this session: download it, or mount Google Drive "
            "(/content/drive) and call nb.pack()"
        )
    return packed
