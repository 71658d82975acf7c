"""Name every file of a run, write files whole, and make run ids and fingerprints.

<output_dir>/<run id>/                    0700: its owner's alone; what is inside follows the umask
config.yaml  plan.json  versions.json     what was decided, before anything starts
owner.lock  owner.json                    who is in charge (flock, mode 0600; pid, boot id)
events.jsonl                              the run's diary, append-only: the only thing readers read
stop                                      written by a handle: "please end"
tracking.json                             how much of it MLflow has (with tracking on)
ranks/launcher.txt                        output of notebook_launcher's own process
ranks/<rank>/log.txt  stacks.txt          all output of a rank; its stacks when it hangs
ranks/<rank>/error.pkl                    what a rank raised (pickled)
values/<rank>.pkl                         return values (pickled: load only your own runs)
checkpoints/                              written by ctx.save and fit
samples/rank-<rank>.jsonl                 what each step was trained on (tracking.record_samples)
result.json | error.json, error.pkl       how it ended
previous/                                 the same of the attempt before, and what was decided then

A search's folder has sweep.yaml, study.jsonl and trials/<number>/, or folds/<number>/ and
folds.json, too (docs/search.md); each trial and fold is a run's folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import inspect
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from nbtoolkit.errors import LaunchError, RunFileError, RunFolderError

# --- paths ---


# Settings that do not change what a run computes (up to the order of sums): they do not enter its
# fingerprint. How many ranks share a step is among them, since the step's batch is global.
# The function is in it by its source, whatever its module is called.
_NOT_IDENTITY = (
    "task",
    "tracking.",
    "runtime.",
    "checkpoint.",
    "distributed.",
    "train.num_workers",
)
_BUT = (
    "distributed.sync_batchnorm",
    "distributed.compression",
    "distributed.powersgd_rank",
    "checkpoint.monitor",  # what is best decides about patience and the plateau
    "checkpoint.mode",
    "checkpoint.weights",  # of what is predicted at the end
)
_OF_THE_STEP = ("distributed.world_size", "train.gradient_accumulation_steps")


@dataclass(frozen=True)
class RunPaths:
    """The files of one run. Make one with :meth:`create` or around a folder that exists."""

    folder: Path

    @property
    def run_id(self) -> str:
        """The folder's name: ``<UTC time>-<name>-<4 hex>``."""
        return self.folder.name

    @property
    def config(self) -> Path:
        """The resolved configuration (YAML)."""
        return self.folder / "config.yaml"

    @property
    def plan(self) -> Path:
        """The plan that was acted on (JSON)."""
        return self.folder / "plan.json"

    @property
    def versions(self) -> Path:
        """Versions, host, function name and fingerprint (JSON)."""
        return self.folder / "versions.json"

    @property
    def events(self) -> Path:
        """The run's diary (JSON lines)."""
        return self.folder / "events.jsonl"

    @property
    def lock(self) -> Path:
        """Locked (flock) by the supervisor as long as it lives."""
        return self.folder / "owner.lock"

    @property
    def owner(self) -> Path:
        """Who owns or owned the run (JSON: pid, boot_id)."""
        return self.folder / "owner.json"

    @property
    def stop(self) -> Path:
        """A request to end, written by a handle (JSON: grace, reason)."""
        return self.folder / "stop"

    @property
    def checkpoints(self) -> Path:
        """Where ctx.save and fit write."""
        return self.folder / "checkpoints"

    @property
    def result(self) -> Path:
        """How it ended, when it ended well (JSON)."""
        return self.folder / "result.json"

    @property
    def error(self) -> Path:
        """How it ended, when it failed (JSON; the exception itself in ``error.pkl`` beside it)."""
        return self.folder / "error.json"

    @property
    def error_pickle(self) -> Path:
        """The failed rank's exception."""
        return self.folder / "error.pkl"

    @property
    def commands(self) -> Path:
        """What handles ask of a search, a file each; the search removes what it has read."""
        return self.folder / "commands"

    @property
    def tracking(self) -> Path:
        """How far tracking has read the events (JSON)."""
        return self.folder / "tracking.json"

    def log(self, rank: int) -> Path:
        """Everything rank ``rank`` wrote to stdout and stderr."""
        return self.folder / "ranks" / str(rank) / "log.txt"

    def stacks(self, rank: int) -> Path:
        """Stacks of rank ``rank``, written when it is suspected to hang."""
        return self.folder / "ranks" / str(rank) / "stacks.txt"

    def agent_log(self) -> Path:
        """Output of the launcher process itself (accelerate, elastic)."""
        return self.folder / "ranks" / "launcher.txt"

    def samples(self, rank: int) -> Path:
        """Which samples rank ``rank`` took in every optimizer step (JSON lines)."""
        return self.folder / "samples" / f"rank-{rank}.jsonl"

    @property
    def layers(self) -> Path:
        """Layers whose results differ by the ranks, with why (tracking.record_samples)."""
        return self.folder / "samples" / "layers.json"

    @property
    def previous(self) -> Path:
        """How the attempt before this one was decided and ended."""
        return self.folder / "previous"

    @property
    def elastic(self) -> Path:
        """Temporary files of the launcher; removed by the supervisor."""
        return self.folder / "ranks" / "elastic"

    def rank_error(self, rank: int) -> Path:
        """The packed exception of rank ``rank``, as the rank wrote it."""
        return self.folder / "ranks" / str(rank) / "error.pkl"

    def value(self, rank: int) -> Path:
        """The pickled return value of rank ``rank``."""
        return self.folder / "values" / f"{rank}.pkl"

    @classmethod
    def create(cls, output_dir: str | Path, name: str) -> RunPaths:
        """Make a new, empty run folder with a fresh run id under ``output_dir``.

        Raises:
            RunFolderError: the folder cannot be made.
        """
        parent = Path(output_dir).expanduser().absolute()
        slug = re.sub(r"[^A-Za-z0-9_.]+", "_", name).strip("._")[:40] or "run"
        try:
            parent.mkdir(parents=True, exist_ok=True)
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

    def owned(self) -> bool:
        """Whether a live supervisor holds this run (its lock is held by some process)."""
        try:
            fd = os.open(self.lock, os.O_RDONLY)
        except FileNotFoundError:
            return False
        except PermissionError:  # another user's, whose lock is in the kernel's list
            return f":{self.lock.stat().st_ino} " in Path("/proc/locks").read_text()
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    def completed(self) -> bool:
        """Whether the run is through; one that was stopped, ran out of time or failed is not."""
        # a result that a crash of the machine cut short is none
        return read_or_empty(self.result).get("status") in ("completed", "pruned")

    def ended(self) -> bool:
        """Whether the run ended (a result or an error was written)."""
        return self.result.exists() or self.error.exists()


def find_run(run: str | os.PathLike[str], output_dir: str | Path = "outputs") -> RunPaths:
    """The run with this id or in this folder.

    Raises:
        LaunchError: there is none.
        RunFileError: it is another user's.
    """
    if not isinstance(run, (str, os.PathLike)):
        raise LaunchError(
            f"{run!r} names no run", allowed="a run's folder or id", do="pass result.paths.folder"
        )
    for folder in (Path(run).expanduser(), Path(output_dir).expanduser() / run):
        with reading(folder):  # another user's
            if (folder / "versions.json").is_file():
                return RunPaths(folder.absolute())
    raise LaunchError(
        f"there is no run {run}",
        allowed=f"a run's folder, or the id of a run under {Path(output_dir).absolute()}",
        do="look for folders named <time>-<name>-<4 hex> there",
    )


def folder_error(folder: Path, error: OSError) -> RunFolderError:
    """An OSError met while writing ``folder``, as an error that says what to do."""
    return RunFolderError(
        f"the run folder {folder} cannot be written: {error.strerror or error}",
        allowed="a folder on a disk with free space that you may write to",
        do="free some space, or set runtime.output_dir to another folder",
    )


def write_whole(path: Path, data: bytes | str, *, durable: bool = True) -> None:
    """Write ``path`` so that a reader sees all or nothing: temporary file, fsync, ``os.replace``.

    Args:
        path: the file; its parent folder is made when missing.
        data: its whole content.
        durable: fsync before the replace; False where a crash of the machine may lose it.

    Raises:
        OSError: disk full, not writable, ...
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = data.encode() if isinstance(data, str) else data
    temporary = unused_beside(path)
    try:
        with temporary.open("xb") as file:
            file.write(raw)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def unused_beside(path: Path) -> Path:
    """A hidden name beside ``path``; what is made there has the umask's mode, mkstemp's has not."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Write ``value`` as JSON with :func:`write_whole`."""
    write_whole(path, json.dumps(value, indent=1, default=str), durable=durable)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error of reading a file of a run into one that names the file and says what to do.

    Raises:
        RunFileError: what is inside the ``with`` block raised an exception.
    """
    try:
        yield
    except RunFileError:
        raise
    except Exception as error:  # damaged pickles, databases and YAML raise any type
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise RunFileError(
            f"{path} cannot be read: {why[:300]}",
            allowed="a file as nbtoolkit wrote it, which this user may read",
            do="let its owner share the folder (chmod go+rX); put a damaged file back from a copy; "
            "a run without a result resumes when it is launched again",
        ) from error


def read_json(path: Path) -> Any:
    """Read a JSON file; None when it does not exist.

    Raises:
        RunFileError: it is damaged, or another user's.
    """
    with reading(path):
        try:
            # a FIFO would be waited for, without end
            if not stat.S_ISREG(path.stat().st_mode):
                raise OSError("it is not a file")
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None


def read_record(path: Path) -> dict[str, Any] | None:
    """Read a JSON file of names and values; None when it does not exist.

    Raises:
        RunFileError: it is damaged, holds something else, or is another user's.
    """
    value = read_json(path)
    with reading(path):
        if not isinstance(value, (dict, type(None))):
            raise TypeError(f"it holds a {type(value).__name__}, not names and values")
    return value


def read_or_empty(path: Path) -> dict[str, Any]:
    """The names and values in a JSON file; empty where it is missing or cannot be read."""
    try:
        return read_record(path) or {}
    except RunFileError:
        return {}


def function_source(function: Callable[..., Any]) -> str:
    """What a function does, as text: its source (or byte code) and the plain values bound to it.

    Bound are a partial's arguments, defaults, what a closure holds, and an object's attributes.
    """
    if isinstance(function, functools.partial):
        bound = function.args, sorted(function.keywords.items())
        return f"{function_source(function.func)} {bound!r}"
    routine = inspect.isroutine(function) or inspect.isclass(function)
    text = _code_text(function if routine else type(function))
    return " ".join([text, *map(repr, _bound_values(function))])


def _code_text(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        if code is None:
            return repr(getattr(function, "__qualname__", type(function)))
        constants = [value for value in code.co_consts if isinstance(value, (int, float, str))]
        return f"{code.co_code.hex()} {code.co_names} {constants}"


def _bound_values(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """The numbers and texts that two functions of one source may differ in, by name."""
    owner = getattr(function, "__self__", function)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    found = list(getattr(owner, "__dict__", {}).items())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell: not assigned yet
            found.append((name, cell.cell_contents))
    found += [("default", value) for value in getattr(function, "__defaults__", None) or ()]
    return [(name, value) for name, value in found if isinstance(value, (int, float, str))]


def fingerprint(config: dict[str, Any], function: Callable[..., Any]) -> str:
    """16 hex digits over what decides a run's result: its config and its function's source.

    Args:
        config: the resolved configuration as plain Python; output and tracking keys are left out.
        function: the training function.
    """
    flat = _flat(config)
    kept = {key: value for key, value in flat.items() if decides_result(key, config)}
    text = json.dumps(kept, sort_keys=True, default=str) + "\n" + function_source(function)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def decides_result(key: str, config: dict[str, Any]) -> bool:
    """Whether a setting changes what a run computes.

    Args:
        key: its dotted name.
        config: the resolved configuration as plain Python: with ``train.batch_size_per_device`` the
            number of ranks and accumulation steps decides how large a step is.
    """
    if key in _OF_THE_STEP:
        return (config.get("train") or {}).get("batch_size_per_device") is not None
    return key in _BUT or not key.startswith(_NOT_IDENTITY)


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else None
        found.update(inner or {f"{prefix}{key}": value})
    return found


def runs_in(output_dir: str | Path) -> list[RunPaths]:
    """The runs under ``output_dir``, newest first."""
    parent = Path(output_dir).expanduser().absolute()
    if not os.path.isdir(parent):
        return []
    # os.path: what of other users lies there and may not be looked into is no run of ours
    folders = [entry for entry in parent.iterdir() if os.path.isfile(entry / "versions.json")]
    return [RunPaths(folder) for folder in sorted(folders, key=by_age, reverse=True)]


def by_age(folder: Path) -> tuple[str, int, str]:
    """What sorts the folders of runs, oldest first: by the second in their id, then by the clock.

    Args:
        folder: of a run.
    """
    second = _SECOND.match(folder.name)
    if second is None:
        return folder.name, 0, ""
    try:
        written = (folder / "versions.json").stat().st_mtime_ns
    except OSError:  # deleted meanwhile
        written = 0
    return second[0], written, folder.name


_SECOND = re.compile(r"\d{8}T\d{6}")
"""What the id of a run begins with."""


def boot_id() -> str:
    """The id of this boot of the machine (a pid means something only together with it)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


# --- runs of a notebook ---
# Which runs a notebook has started, told to whoever runs the notebook, while it runs.


TARGET = "NBTOOLKIT_RUNS"
"""Variable that names the file to which a kernel's runs are written, a folder a line."""


def tell_made(folder: Path) -> None:
    """Say that a run, a sweep or a cross-validation has this folder; nothing where nobody asked.

    Args:
        folder: an absolute path.
    """
    if target := os.environ.get(TARGET):
        # Appended in one piece: several threads of a kernel may launch at once. The folder of the
        # file may be gone while a program that the notebook left behind goes on.
        with contextlib.suppress(FileNotFoundError), open(target, "ab") as file:
            file.write(os.fsencode(folder) + b"\n")


def read_made(file: Path) -> list[Path]:
    """The folders that were told so far, each once, oldest first.

    Args:
        file: the one that :data:`TARGET` named.
    """
    try:
        whole = file.read_bytes().split(b"\n")[:-1]  # without a line that is being written
    except FileNotFoundError:
        return []
    return [Path(os.fsdecode(line)) for line in dict.fromkeys(whole)]
