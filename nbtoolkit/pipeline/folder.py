"""Name the files of a pipeline's folder, and detect steps that ran with equal inputs.

<folder>/
pipeline.lock          locked (flock) while the pipeline runs
steps/<step>.ipynb     executed copy; .html, .run.json and .run.log are beside it
steps/<step>.done.json inputs and published values; exists only for steps that are done
...                    files that the notebooks write: they are given ${pipeline.folder}

In these files the folder itself is written as `${pipeline.folder}`. It may be moved, or packed on
one machine and unpacked on another, and its steps are still done.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from nbtoolkit.config.loading import places_to_look
from nbtoolkit.environment.resources import try_lock
from nbtoolkit.errors import NotebookError, PipelineError
from nbtoolkit.notebooks.handle import NotebookFiles
from nbtoolkit.pipeline.definition import Published, Step
from nbtoolkit.run.attempts import readable_first_event
from nbtoolkit.run.paths import RunPaths, read_json, runs_in, write_json
from nbtoolkit.version import __version__

_NAMED_FILE = re.compile(r"""["']([^"'\n]+\.(?:ya?ml|json))["']""")

_FOLDER = "${pipeline.folder}"

# A kernel and a run's supervisor end by themselves after their parent has ended. A step that does
# not wait for them starts its runs from the beginning. On a quiet machine a kernel ends after 1 s
# (it checks once a second whether its parent is alive), a supervisor 2 s after its kernel; tracking
# may take longer.
_KERNEL_SECONDS = 120.0
_SUPERVISOR_SECONDS = 60.0


class StepInputs(TypedDict):
    """Everything that decides a step's result, in hashes and plain values."""

    code: str
    parameters: dict[str, object]
    settings: dict[str, str]
    """YAML and JSON files that parameters or code name."""
    files: dict[str, str]
    after: dict[str, str]
    """Published values of the steps in ``after``."""
    nbtoolkit: str
    """The version."""


class RunOutcome(TypedDict):
    """Published values of a step, and the duration of its run."""

    values: dict[str, Any]
    seconds: float


class StepRecord(TypedDict):
    """The record of a step that is done."""

    inputs: StepInputs
    result: RunOutcome


def inputs_of(step: Step, values: Mapping[str, object], published: Published) -> StepInputs:
    """Return the inputs of a step, to be compared with those of an earlier run.

    Args:
        step: the step.
        values: its parameters, resolved.
        published: published values of the steps before it.

    Raises:
        PipelineError: a file in ``files`` does not exist.
    """
    return {
        "code": _hash("\0".join(step.summary.code).encode()),
        "parameters": json.loads(_as_json(values)),
        "settings": {name: _hash(path.read_bytes()) for name, path in _settings(step, values)},
        "files": {name: _hash(Path(name).read_bytes()) for name in _files(step)},
        "after": {name: _hash(_as_json(published[name])) for name in step.config.after},
        "nbtoolkit": __version__,
    }


def difference(before: StepInputs, now: StepInputs) -> str:
    """Describe how the inputs differ; empty if they are equal."""
    # A settings file that exists only now was written by the step itself.
    settings = {name: now["settings"].get(name) for name in before["settings"]}
    reasons = []
    if before["code"] != now["code"]:
        reasons.append("the notebook's code has changed")
    if names := _changed(before["parameters"], now["parameters"]):
        reasons.append(f"other parameters: {names}")
    if names := _changed(before["settings"], settings):
        reasons.append(f"other settings: {names}")
    if names := _changed(before["files"], now["files"]):
        reasons.append(f"other files: {names}")
    if before["after"] != now["after"]:
        reasons.append("a step in `after` has other results")
    if before["nbtoolkit"] != now["nbtoolkit"]:
        reasons.append("nbtoolkit has another version")
    return "; ".join(reasons)


def without_own_files(before: StepInputs, after: StepInputs) -> StepInputs:
    """Return the inputs of a step without the settings files that it wrote itself.

    Args:
        before: inputs before the run.
        after: inputs after the run.
    """
    hashes = after["settings"]
    unchanged = {name: h for name, h in before["settings"].items() if hashes.get(name) == h}
    return {**before, "settings": unchanged}


def _settings(step: Step, values: Mapping[str, object]) -> Iterator[tuple[str, Path]]:
    """Yield the existing YAML and JSON files that parameters or code name."""
    texts = [value for value in values.values() if isinstance(value, str)]
    named = [text for text in texts if text.endswith((".yaml", ".yml", ".json"))]
    for name in dict.fromkeys([*named, *_NAMED_FILE.findall("\n".join(step.summary.code))]):
        existing = (path for path in places_to_look(Path(name).expanduser()) if path.is_file())
        if path := next(existing, None):
            yield name, path


def _files(step: Step) -> Iterator[str]:
    """Yield the files that match the patterns in ``files``.

    Raises:
        PipelineError: no file matches a pattern.
    """
    for pattern in step.config.files:
        names = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
        matching = [name for name in names if Path(name).is_file()]
        if not matching:
            raise PipelineError(
                f"{step.place('files')}: there is no file {pattern!r}",
                allowed="files or patterns (src/**/*.py), relative to the working directory",
            )
        yield from matching


def _changed(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Return the names whose values differ, or that only one of the two has."""
    missing = object()
    names = dict.fromkeys([*before, *now])
    return ", ".join(n for n in names if before.get(n, missing) != now.get(n, missing))


def _as_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, default=_sortable).encode()


def _sortable(value: object) -> object:
    """Return a set as a sorted list, another object as a text."""
    return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else str(value)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


@dataclass(frozen=True)
class PipelineFolder:
    """The folder of a pipeline."""

    path: Path

    def files(self, step: str) -> NotebookFiles:
        """Return the executed copy of a step, and the files beside it."""
        return NotebookFiles(self.path / "steps" / f"{step}.ipynb")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the pipeline's lock.

        Raises:
            NotebookError: another run holds the lock, or the folder cannot be written.
        """
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            file = open(self.path / "pipeline.lock", "w")  # noqa: SIM115 - closed below
        with file:
            if not try_lock(file.fileno()):
                raise NotebookError(
                    f"another run of a pipeline writes to {self.path}",
                    allowed="one run per folder at a time",
                    do="wait until it ends, or choose another folder: folder='...', "
                    "--folder in a shell",
                )
            yield

    def wait_for_leftovers(self, step: str) -> None:
        """Wait until the kernel of a killed run, and its launches, have ended by themselves.

        A launch resumes an unfinished run only if no supervisor owns that run.
        """
        with contextlib.suppress(OSError), open(self.files(step).log, "r+b") as log:
            _wait_until(lambda: try_lock(log.fileno()), _KERNEL_SECONDS)
            _wait_until(lambda: not any(map(_ends_soon, runs_in(self.path))), _SUPERVISOR_SECONDS)

    def record(self, step: str) -> StepRecord | None:
        """Return the record of a step; None if the step is not done."""
        try:
            record = read_json(self._done(step))
        except (OSError, ValueError):  # cut short by a crash of the machine
            return None
        if not record or "result" not in record or not self.files(step).copy.exists():
            return None
        result: StepRecord = _replace(record, _FOLDER, str(self.path))
        return result

    def write_record(self, step: str, record: StepRecord) -> None:
        """Record that a step is done.

        Raises:
            NotebookError: the folder cannot be written.
        """
        with self._writing():
            write_json(self._done(step), _replace(record, str(self.path), _FOLDER))

    def forget(self, step: str) -> None:
        """Record that a step is not done.

        Raises:
            NotebookError: the folder cannot be written.
        """
        with self._writing():
            self._done(step).unlink(missing_ok=True)

    def _done(self, step: str) -> Path:
        return self.path / "steps" / f"{step}.done.json"

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise NotebookError(
                f"the pipeline's folder {self.path} cannot be written: {error.strerror or error}",
                allowed="a folder on a disk with free space that you may write to",
                do="free some space, or choose another folder: folder='...', --folder in a shell",
            ) from error


def _replace(value: Any, old: str, new: str) -> Any:
    """Replace a text in all texts of a plain value, including names."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, dict):
        return {n.replace(old, new): _replace(item, old, new) for n, item in value.items()}
    if isinstance(value, list):
        return [_replace(item, old, new) for item in value]
    return value


def _ends_soon(run: RunPaths) -> bool:
    """Whether a supervisor owns a run, and ends with the kernel that launched the run."""
    first = readable_first_event(run)
    return run.owned() and not (first is not None and first.detached)


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
