"""Name the files of a pipeline's folder, and skip steps that ran with equal inputs.

<folder>/
pipeline.lock          locked (flock) while the pipeline runs
steps/<step>.ipynb     the executed copy; .html, .run.json and .run.log beside it
steps/<step>.done.json what the step was run with and what it published; only of steps that are done
...                    whatever the notebooks write: they are given ${pipeline.folder}

In these files the folder itself is written `${pipeline.folder}`: it may be moved, or packed on one
machine and unpacked on another, and its steps are still done.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbtoolkit.config.layers import places_to_look
from nbtoolkit.errors import NotebookError, PipelineError
from nbtoolkit.notebooks.handle import NotebookFiles
from nbtoolkit.pipeline.definition import Step
from nbtoolkit.pipeline.load import Published
from nbtoolkit.run.paths import RunPaths, read_json, runs_in, write_json
from nbtoolkit.version import __version__

# --- inputs ---
# What decides a step's result; a step that was done with equal inputs is not run again.


_NAMED_FILE = re.compile(r"""["']([^"'\n]+\.(?:ya?ml|json))["']""")

_WORDS = {
    "code": "the notebook's code has changed",
    "nbtoolkit": "nbtoolkit has another version",
    "after": "what was done before it has other results",
}


def inputs_of(step: Step, values: Mapping[str, Any], published: Published) -> dict[str, Any]:
    """The inputs of a step as plain values, to be compared with those of an earlier run.

    Args:
        step: the step.
        values: its parameters, resolved.
        published: what the steps before it published.

    Raises:
        PipelineError: a file it depends on is not there.
    """
    return {
        "code": _hash("\0".join(step.glance.code).encode()),
        "parameters": _plain(values),
        "settings": {name: _hash(path.read_bytes()) for name, path in _settings(step, values)},
        "files": {name: _hash(Path(name).read_bytes()) for name in _files(step)},
        "after": {name: _hash(_text(published[name])) for name in step.sweep_config.after},
        "nbtoolkit": __version__,
    }


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What is different in the inputs, in words; empty: nothing."""
    told = []
    for part in now:
        earlier, later = before.get(part), now[part]
        if part == "settings":  # one that is there only now was written by the step itself
            later = {name: later.get(name) for name in earlier or ()}
        if earlier != later:
            told.append(_WORDS.get(part) or f"other {part}: {_names(earlier, later)}")
    return "; ".join(told)


def without_own(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a step that was run, without settings files that it wrote itself.

    Args:
        before: its inputs before it ran.
        after: the same looked at again.
    """
    kept = {n: one for n, one in before["settings"].items() if after["settings"].get(n) == one}
    return {**before, "settings": kept}


def _settings(step: Step, values: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """The YAML and JSON files that parameters or code name, if they are there."""
    texts = [value for value in values.values() if isinstance(value, str)]
    named = [text for text in texts if text.endswith((".yaml", ".yml", ".json"))]
    for name in dict.fromkeys([*named, *_NAMED_FILE.findall("\n".join(step.glance.code))]):
        found = (path for path in places_to_look(Path(name).expanduser()) if path.is_file())
        if path := next(found, None):
            yield name, path


def _files(step: Step) -> list[str]:
    patterns = step.sweep_config.files
    return [name for pattern in patterns for name in _matching(pattern, step.place("files"))]


def _matching(pattern: str, place: str) -> list[str]:
    """The names of a pattern's files.

    Raises:
        PipelineError: there is none.
    """
    names = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
    found = [name for name in names if Path(name).is_file()]
    if not found:
        raise PipelineError(
            f"{place}: there is no file {pattern!r}",
            allowed="files or patterns (src/**/*.py), from the working directory",
        )
    return found


def _names(before: Any, now: Mapping[str, Any]) -> str:
    earlier: Mapping[str, Any] = before if isinstance(before, Mapping) else {}
    missing = object()
    names = dict.fromkeys([*earlier, *now])
    return ", ".join(n for n in names if earlier.get(n, missing) != now.get(n, missing))


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(_text(value))


def _text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=_listed).encode()


def _listed(value: Any) -> Any:
    """A set in an order; else as a text."""
    return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else str(value)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# --- folder ---


HERE = "${pipeline.folder}"

# Both end by themselves, and a step that does not wait for them starts its runs anew. On a quiet
# machine a kernel has ended after 1 s (it looks once a second whether its parent is still there),
# a run's owner 2 s after its kernel; tracking may take longer.
_KERNEL_SECONDS = 120.0
_OWNER_SECONDS = 60.0


@dataclass(frozen=True)
class PipelineFolder:
    """The files of a pipeline."""

    path: Path

    def files(self, step: str) -> NotebookFiles:
        """The executed copy of a step, and what lies beside it."""
        return NotebookFiles(self.path / "steps" / f"{step}.ipynb")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the pipeline's lock.

        Raises:
            NotebookError: another run holds it, or the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = open(self.path / "pipeline.lock", "w")  # noqa: SIM115 - held as long as the with
        except OSError as error:
            raise self._not_written(error) from error
        with file:
            if not _locked(file.fileno()):
                raise NotebookError(
                    f"another run of a pipeline writes to {self.path}",
                    allowed="one at a time in each folder",
                    do="wait for it, or choose another folder: folder='...', --folder in a shell",
                )
            yield

    def wait_for_leftovers(self, step: str) -> None:
        """Wait until the kernel of a killed run, and its launches, have ended by themselves.

        A launch goes on with an unfinished run only when nobody owns that any more.
        """
        with contextlib.suppress(OSError), open(self.files(step).log, "rb") as log:
            _until(lambda: _locked(log.fileno()), _KERNEL_SECONDS)
            _until(lambda: not any(map(_ends_soon, runs_in(self.path))), _OWNER_SECONDS)

    def record(self, step: str) -> dict[str, Any] | None:
        """What a step that is done was run with, and what it published; None: it is not done."""
        try:
            record = read_json(self._done(step))
        except (OSError, ValueError):  # cut short by a crash of the machine
            return None
        if record is None or not self.files(step).copy.exists():
            return None
        return dict(replaced(record, HERE, str(self.path)))

    def write_record(self, step: str, record: dict[str, Any]) -> None:
        """Note that a step is done.

        Raises:
            NotebookError: the folder cannot be written.
        """
        try:
            write_json(self._done(step), replaced(record, str(self.path), HERE))
        except OSError as error:
            raise self._not_written(error) from error

    def forget(self, step: str) -> None:
        """Note that a step is not done.

        Raises:
            NotebookError: the folder cannot be written.
        """
        try:
            self._done(step).unlink(missing_ok=True)
        except OSError as error:
            raise self._not_written(error) from error

    def _done(self, step: str) -> Path:
        return self.path / "steps" / f"{step}.done.json"

    def _not_written(self, error: OSError) -> NotebookError:
        return NotebookError(
            f"the pipeline's folder {self.path} cannot be written: {error.strerror or error}",
            allowed="a folder on a disk with free space that you may write to",
            do="free some space, or choose another place: folder='...', or --folder in a shell",
        )


def replaced(value: Any, old: str, new: str) -> Any:
    """A plain value with one text in place of another, wherever it stands in texts."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, dict):
        return {n.replace(old, new): replaced(inner, old, new) for n, inner in value.items()}
    if isinstance(value, list):
        return [replaced(inner, old, new) for inner in value]
    return value


def _ends_soon(run: RunPaths) -> bool:
    """Whether somebody owns a run, and is to end with the kernel that launched it."""
    return run.owned() and not (read_json(run.owner) or {}).get("detached")


def _until(look: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not look() and time.monotonic() < end:
        time.sleep(0.1)


def _locked(descriptor: int) -> bool:
    """Lock an open file for as long as it is open; False: somebody else holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
