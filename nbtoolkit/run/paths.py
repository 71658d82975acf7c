"""Name every file of a run, write files atomically, and make run ids.

<output_dir>/<run id>/                    mode 0700: private; the files inside follow the umask
events.jsonl                              the run's record, append-only: what every reader reads
config.yaml                               the settings of the newest attempt, for people
owner.lock                                held (flock, mode 0600) by the process in charge; its pid
stop                                      a handle's request to stop
tracking.lock  tracking.json              how much of it MLflow has (with tracking on; flock)
ranks/launcher.txt                        output of notebook_launcher's own process
ranks/<rank>/log.txt  stacks.txt          all output of a rank; its stacks when it hangs
ranks/<rank>/error.pkl                    the exception of a rank (pickled)
ranks/<rank>/trace.json.gz                the trace of a profiled rank (train.profile)
values/<rank>.pkl                         return values (pickled: load only your own runs)
checkpoints/                              written by ctx.save and fit
predictor.pkl                             the model of a fold (pickled: load only your own runs)
inexact.jsonl                             layers and generators that depend on the ranks (nb.verify)
error.pkl                                 the exception that ended a failed run (pickled)

The folder of a search also has sweep.yaml, study.jsonl and trials/<number>/, or folds/<number>/
and folds.json (docs/sweep.md); each trial and fold is the folder of a run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pickle
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, Literal

from nbtoolkit.errors import LaunchError, RunFileError, RunFolderError

EVENTS = "events.jsonl"
"""The file that makes a folder the folder of a run."""


class _File:
    """An attribute of :class:`RunPaths`: a path relative to the run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunPaths, _: object) -> Path:
        return run.folder / self._name


@dataclass(frozen=True)
class RunPaths:
    """The files of one run. Use :meth:`create` for a new folder, the class for an existing one."""

    folder: Path

    config = _File("config.yaml")
    """The resolved configuration (YAML), for people; the events have it, too."""
    events = _File(EVENTS)
    """The run's record: its events (JSON lines)."""
    lock = _File("owner.lock")
    """Locked (flock) by the supervisor while it lives; holds its pid."""
    stop = _File("stop")
    """A handle's request to stop (JSON: grace, reason)."""
    checkpoints = _File("checkpoints")
    """The folder that ctx.save and fit write to."""
    error_pickle = _File("error.pkl")
    """The exception that ended a failed run; its text is in the last event, too."""
    commands = _File("commands")
    """Handles' commands to a search, one file each; the search removes those it has read."""
    tracking_lock = _File("tracking.lock")
    """Locked (flock) by the process that reads the events for tracking."""
    tracking = _File("tracking.json")
    """How far tracking has read the events (JSON)."""
    inexact = _File("inexact.jsonl")
    """Layers and generators that differ between the ranks, with the reason (for nb.verify)."""
    predictor = _File("predictor.pkl")
    """What predicts a test set with the model of a fold (pickled; ``cv.predict`` reads it)."""
    remote = _File("remote/job.json")
    """The job of a cluster that trains the run (JSON: where, job)."""
    elastic = _File("ranks/elastic")
    """Temporary files of the launcher; removed by the supervisor."""
    agent_log = _File("ranks/launcher.txt")
    """The output of the launcher process itself (accelerate, elastic)."""

    @property
    def run_id(self) -> str:
        """The folder's name: ``<UTC time>-<name>-<4 hex>``."""
        return self.folder.name

    def log(self, rank: int) -> Path:
        """Return the stdout and stderr of rank ``rank``."""
        return self.folder / "ranks" / str(rank) / "log.txt"

    def stacks(self, rank: int) -> Path:
        """Stacks of rank ``rank``, written when it is suspected to hang."""
        return self.folder / "ranks" / str(rank) / "stacks.txt"

    def trace(self, rank: int) -> Path:
        """Return the trace of rank ``rank`` for Chrome and Perfetto (``train.profile``)."""
        return self.folder / "ranks" / str(rank) / "trace.json.gz"

    def rank_error(self, rank: int) -> Path:
        """Return the packed exception of rank ``rank``, as the rank wrote it."""
        return self.folder / "ranks" / str(rank) / "error.pkl"

    def value(self, rank: int) -> Path:
        """Return the pickled return value of rank ``rank``."""
        return self.folder / "values" / f"{rank}.pkl"

    @classmethod
    def create(cls, output_dir: str | os.PathLike[str], name: str) -> RunPaths:
        """Make a new, empty run folder with a fresh run id under ``output_dir``.

        Raises:
            RunFolderError: the folder cannot be made.
        """
        parent = Path(output_dir).expanduser().absolute()
        slug = re.sub(r"[^A-Za-z0-9_.]+", "_", name).strip("._")[:40] or "run"
        try:
            make_folder(parent)
            while True:
                stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
                folder = parent / f"{stamp}-{slug}-{secrets.token_hex(2)}"
                try:
                    folder.mkdir(mode=0o700)  # pickles, outputs: chmod it to share it
                    return cls(folder)
                except FileExistsError:
                    continue
        except OSError as error:
            raise folder_error(parent, error) from error

    def owner(self) -> int | None:
        """Return the pid of the process that owns this run; None if no process does."""
        if not self.owned():
            return None
        try:
            return int(self.lock.read_text())
        except (OSError, ValueError):  # another user's run, or it is being started
            return None

    def owned(self) -> bool:
        """Whether a live supervisor owns this run: some process holds its lock.

        Raises:
            RunFileError: the lock is no regular file.
        """
        with reading(self.lock):
            try:
                fd = open_regular(self.lock, os.O_RDONLY)
            except FileNotFoundError:
                return False
            except PermissionError:  # another user's run, whose lock Linux lists
                return f":{self.lock.stat().st_ino} " in Path("/proc/locks").read_text()
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)


Kind = Literal["run", "sweep", "cv"]
KIND_NAMES: dict[Kind, str] = {"run": "run", "sweep": "sweep", "cv": "cross-validation"}


def find_run(
    run: str | os.PathLike[str], output_dir: str | os.PathLike[str] = "outputs"
) -> RunPaths:
    """Return the run with this id, or in this folder.

    Raises:
        LaunchError: there is no such run.
        RunFileError: it is another user's.
    """
    if not isinstance(run, (str, os.PathLike)):
        raise LaunchError(
            f"{run!r} is not a run", allowed="a run's folder or id", do="pass result.paths.folder"
        )
    for folder in (Path(run).expanduser(), Path(output_dir).expanduser() / run):
        with reading(folder):  # another user's
            if (folder / EVENTS).is_file():
                return RunPaths(folder.absolute())
    raise LaunchError(
        f"there is no run {run}",
        allowed=f"a run's folder, or the id of a run under {Path(output_dir).absolute()}",
        do="look for folders named <time>-<name>-<4 hex> there",
    )


def sign_lock(lock: int) -> None:
    """Write this process's pid into the file of a lock that it holds, by its descriptor."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def folder_error(folder: Path, error: OSError) -> RunFolderError:
    """Return the error to raise for an OSError while writing ``folder``."""
    return RunFolderError(
        f"the run folder {folder} cannot be written: {error.strerror or error}",
        allowed="a folder on a disk with free space that you may write to",
        do="free some space, or set runtime.output_dir to another folder",
    )


@contextlib.contextmanager
def atomic_file(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces ``path`` at the end of the block, unless that raises.

    Args:
        path: the file; its parent folder is created if it is missing.
        durable: a crash of the machine leaves the file whole once the block has ended; False where
            it may lose it.

    Raises:
        OSError: disk full, not writable, ...
    """
    make_folder(path.parent, durable=durable)
    temporary = temporary_beside(path)
    try:
        with temporary.open("xb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        put_in_place(temporary, path, durable=durable)
    finally:
        temporary.unlink(missing_ok=True)


def put_in_place(temporary: Path, target: Path, *, durable: bool = True) -> None:
    """Rename a file or a folder, whose files are on the disk, to its name.

    Args:
        temporary: the file or folder, beside its name.
        target: its name; no folder has it.
        durable: flush it to the disk such that a crash of the machine leaves all of it or nothing.

    Raises:
        OSError: disk full, not writable, ...
    """
    if durable and temporary.is_dir():
        for folder, _, _ in os.walk(temporary):
            sync_folder(Path(folder))
    os.replace(temporary, target)
    if durable:
        sync_folder(target.parent)


def make_folder(folder: Path, *, durable: bool = True) -> None:
    """Make a folder and the missing ones above it; does nothing if it exists.

    Args:
        folder: the folder.
        durable: flush their names to the disk.

    Raises:
        OSError: a file has its name, not writable, ...
    """
    if folder.is_dir():
        return
    make_folder(folder.parent, durable=durable)
    folder.mkdir(exist_ok=True)
    if durable:
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk.

    Raises:
        OSError: the disk fails, ...
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # the training function deleted it, which is told at the end
        return
    try:
        os.fsync(fd)
    except OSError as error:
        # File systems in user space, such as a mounted Google Drive, may not have it.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def write_whole(path: Path, data: bytes | str, *, durable: bool = True) -> None:
    """Write the whole content of a file with :func:`atomic_file`."""
    with atomic_file(path, durable=durable) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def temporary_beside(path: Path) -> Path:
    """Return an unused hidden name beside ``path``. mkstemp would ignore the umask."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def write_json(path: Path, value: object, *, durable: bool = True) -> None:
    """Write ``value`` as JSON with :func:`write_whole`."""
    write_whole(path, json.dumps(value, indent=1, default=str), durable=durable)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Keep other processes that call this out, while the ``with`` block reads and writes ``path``.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def open_regular(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file of a run, and return its descriptor.

    Raises:
        OSError: it is no regular file, or cannot be opened. To open or read a FIFO waits forever.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return fd


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error of the ``with`` block, which reads a run's file, into a RunFileError.

    Raises:
        RunFileError: names the file and says what to do.
    """
    try:
        yield
    except RunFileError:
        raise
    except Exception as error:  # damaged pickles, databases and YAML raise any type
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise RunFileError(
            f"{path} cannot be read: {why[:300]}",
            allowed="an undamaged file of nbtoolkit that this user may read",
            do="ask its owner to share the folder (chmod go+rX); restore a damaged file from a "
            "copy; a run without a result resumes when it is launched again",
        ) from error


def read_pickle(path: Path) -> Any:
    """Read a pickled value (load only your own runs).

    Raises:
        RunFileError: it is damaged, another user's, or something in it cannot be imported here.
    """
    with reading(path):
        return pickle.loads(path.read_bytes())


def read_json(path: Path) -> Any:
    """Read a JSON file; None if it does not exist.

    Raises:
        RunFileError: it is damaged, or another user's.
    """
    with reading(path):
        try:
            with os.fdopen(open_regular(path, os.O_RDONLY), encoding="utf-8") as file:
                return json.load(file)
        except FileNotFoundError:
            return None


def read_record(path: Path) -> dict[str, object] | None:
    """Read the JSON object in a file; None if the file does not exist.

    Raises:
        RunFileError: it is damaged, holds something else, or is another user's.
    """
    value = read_json(path)
    with reading(path):
        if not isinstance(value, (dict, type(None))):
            raise TypeError(f"it holds a {type(value).__name__}, not a JSON object")
    return value


def read_or_empty(path: Path) -> dict[str, object]:
    """Return the JSON object in a file; empty if the file is missing or cannot be read."""
    try:
        return read_record(path) or {}
    except RunFileError:
        return {}


Status = Literal["completed", "pruned", "stopped", "deadline"]


def runs_in(output_dir: str | os.PathLike[str]) -> list[RunPaths]:
    """Return the runs under ``output_dir``, newest first."""
    parent = Path(output_dir).expanduser().absolute()
    if not os.path.isdir(parent):
        return []
    # os.path.isfile is False for the folders of other users, where Path.is_file raises.
    folders = [entry for entry in parent.iterdir() if os.path.isfile(entry / EVENTS)]
    return [RunPaths(folder) for folder in sorted(folders, key=age_key, reverse=True)]


def age_key(folder: Path) -> tuple[str, int, str]:
    """Return the key that sorts run folders: the second in the id, then the file time."""
    second = RUN_ID.match(folder.name)
    if second is None:
        return folder.name, 0, ""
    try:
        written = (folder / "config.yaml").stat().st_mtime_ns
    except OSError:  # deleted meanwhile, or lost
        written = 0
    return second[0], written, folder.name


RUN_ID = re.compile(r"\d{8}T\d{6}")
"""The beginning of a run id."""


RUNS_FILE = "NBTOOLKIT_RUNS"
"""Variable that names the file in which a notebook's kernel lists its runs, one folder per line."""


def announce_run(folder: Path) -> None:
    """Append the absolute folder of a run or search to the file in :data:`RUNS_FILE`, if set."""
    if target := os.environ.get(RUNS_FILE):
        # One write per line, since several threads of a kernel may launch at once. The file's
        # folder may be gone while a program that the notebook has left behind is still running.
        with contextlib.suppress(FileNotFoundError), open(target, "ab") as file:
            file.write(os.fsencode(folder) + b"\n")


def announced_runs(file: Path) -> list[Path]:
    """Return the folders written to a file by :func:`announce_run`, each once, oldest first."""
    try:
        lines = file.read_bytes().split(b"\n")[:-1]  # the last line may be incomplete
    except FileNotFoundError:
        return []
    return [Path(os.fsdecode(line)) for line in dict.fromkeys(lines)]
