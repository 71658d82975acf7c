"""PipelineFolder: every file of a pipeline, and the lock that one run of it holds.

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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbtoolkit.errors import NotebookError
from nbtoolkit.notebooks.files import NotebookFiles
from nbtoolkit.runtime.paths import RunPaths, read_json, runs_in, write_json

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
