"""Define the files, the record, the result and the background handle of a notebook run."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, TextIO, TypedDict

from nbtoolkit.cards import properties_html
from nbtoolkit.config.loading import dump
from nbtoolkit.environment.deadline import span
from nbtoolkit.environment.resources import try_lock
from nbtoolkit.errors import (
    NotebookDied,
    NotebookError,
    NotebookFailed,
    NotebookTimeout,
)
from nbtoolkit.run.paths import announced_runs, read_json

_LOCK_TRIES = 3

LAST_LINES = 12
"""Number of lines of a log or a cell that an error message shows."""

_LAST_BYTES = 4_000

# Seconds between two checks of a waiting handle.
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class NotebookFiles:
    """The files of one notebook run: the executed copy, and the files beside it."""

    copy: Path
    """``<name>.ipynb``; complete after every cell."""

    @property
    def html(self) -> Path:
        """``<name>.html``: the executed copy as a page."""
        return self.copy.with_suffix(".html")

    @property
    def record(self) -> Path:
        """``<name>.run.json``: a :class:`RunningRecord`, at the end a :class:`NotebookRecord`."""
        return self.copy.with_suffix(".run.json")

    @property
    def log(self) -> Path:
        """``<name>.run.log``: all output of the cells; locked while the notebook runs."""
        return self.copy.with_suffix(".run.log")

    @property
    def runs(self) -> Path:
        """``<name>.runs.txt``: folders of the runs that the notebook starts, one per line."""
        return self.copy.with_suffix(".runs.txt")

    def running(self) -> bool:
        """Whether a notebook run holds the lock on the log."""
        try:
            with open(self.log, "rb") as log:
                return not try_lock(log.fileno(), shared=True)
        except FileNotFoundError:
            return False

    def open(self) -> TextIO:
        """Lock and empty the log, and remove the files of an earlier run.

        Returns:
            The log, open for appending; closing it releases the lock.

        Raises:
            NotebookError: the folder cannot be written, or another run holds the lock.
        """
        try:
            self.copy.parent.mkdir(parents=True, exist_ok=True)
            log = open(self.log, "a", encoding="utf-8")  # noqa: SIM115 - open during the run
        except OSError as error:
            raise not_written(self.copy, error) from error
        if not _lock(log):
            log.close()
            raise NotebookError(
                f"another run writes to {self.copy}",
                allowed="one run per executed copy at a time",
                do="wait until it ends, or choose another output",
            )
        os.truncate(log.fileno(), 0)
        for old in (self.copy, self.html, self.record, self.runs):
            old.unlink(missing_ok=True)
        return log


def _lock(log: TextIO) -> bool:
    """Lock an open log; return False if a run holds the lock.

    Several tries: :meth:`NotebookFiles.running` of another process takes the lock for a moment.
    """
    for _ in range(_LOCK_TRIES):
        if try_lock(log.fileno()):
            return True
        time.sleep(0.01)
    return False


def not_written(copy: Path, error: OSError) -> NotebookError:
    """Return the error for an OSError that occurred while writing a run's files."""
    return NotebookError(
        f"the executed copy {copy} cannot be written: {error.strerror or error}",
        allowed="a folder on a disk with free space that you may write to",
        do='free some space, or choose another output: output="...", or --output in a shell',
    )


def files_for(notebook: Path, output: str | os.PathLike[str] | None) -> NotebookFiles:
    """Choose the files of a run.

    Args:
        notebook: the notebook to run.
        output: path of the executed copy; None: ``outputs/<UTC time>-<name>-<4 hex>.ipynb``.

    Raises:
        NotebookError: ``output`` does not end in ``.ipynb``, or is the notebook itself.
    """
    if output is None:
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
        name = f"{stamp}-{notebook.stem}-{secrets.token_hex(2)}.ipynb"
        return NotebookFiles(Path("outputs").absolute() / name)
    path = Path(output).expanduser().absolute()
    if path.suffix != ".ipynb":
        raise NotebookError(
            f"the output {path} does not end in .ipynb",
            allowed="a path that ends in .ipynb; HTML, record and log are written beside it",
            do=f"output={str(path / notebook.name)!r}",
        )
    if path.resolve() == notebook.resolve():
        raise NotebookError(
            f"the output {path} is the notebook itself",
            allowed="another path: a run does not change the notebook",
            do="omit output: the executed copy then goes to outputs/",
        )
    return NotebookFiles(path)


class RunningRecord(TypedDict):
    """The record of a notebook that runs."""

    status: Literal["running"]
    pid: int
    """The process that :meth:`NotebookHandle.stop` interrupts."""


FailureKind = Literal["error", "exit", "death", "timeout", "kernel", "disk", "interrupt"]
"""``kernel``: the kernel did not start. ``disk``: the executed copy could not be written."""


class FailureRecord(TypedDict):
    """Why a run failed: the parts of the error to raise."""

    kind: FailureKind
    cell: int
    """Number of the code cell, from 1; 0: the run failed before the first cell."""
    what: str
    allowed: str
    do: str


class NotebookRecord(TypedDict):
    """The record of a notebook run that has ended."""

    status: Literal["completed", "failed"]
    notebook: str
    kernel: str
    parameters: dict[str, Any]
    values: dict[str, Any]
    html: bool
    seconds: float
    failure: FailureRecord | None


@dataclass(frozen=True, kw_only=True, repr=False)
class NotebookResult:
    """The published values and the files of a notebook run that has completed.

    If the notebook fails, there is no result: :func:`nbtoolkit.run_notebook` raises an error.
    """

    values: dict[str, Any]
    """The values that the notebook published with ``nb.publish``."""
    parameters: dict[str, Any]
    """The parameters that were passed. All others had the values of the notebook."""
    output: Path
    """The path of the executed copy."""
    html: Path | None
    """The path of the executed copy as an HTML page; None if it was not written."""
    log: Path
    """The path of the log, which contains all output of the cells."""
    runs: list[Path]
    """Folders of the runs, sweeps and cross-validations that the notebook started, oldest first."""
    seconds: float
    """The time from the start of the kernel to the end of the last cell."""

    def values_as_yaml(self) -> str:
        """Return the published values as YAML text; empty if there are none."""
        return dump(self.values) if self.values else ""

    def __repr__(self) -> str:
        values = published_text(self.values) or "nothing published"
        return f"NotebookResult({values}, {span(self.seconds)}, {self.output})"

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object]] = [*self.values.items()]
        rows += [("run", folder) for folder in self.runs]
        rows += [("executed copy", self.output), ("time", span(self.seconds))]
        return properties_html("notebook: completed", rows)


def published_text(values: Mapping[str, object]) -> str:
    """Return published values as ``name=value, ...``, each in at most 60 characters."""
    return ", ".join(f"{name}={_short(value)}" for name, value in values.items())


def _short(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_ERRORS = {"timeout": NotebookTimeout, "death": NotebookDied, "kernel": NotebookDied}


def result_of(files: NotebookFiles, record: NotebookRecord) -> NotebookResult:
    """Return the result of a run that has ended.

    Raises:
        NotebookFailed: the run failed; or one of its subclasses, as ``nb.run_notebook`` says.
    """
    if failure := record["failure"]:
        kind = _ERRORS.get(failure["kind"], NotebookFailed)
        error = kind(failure["what"], allowed=failure["allowed"], do=failure["do"])
        error.cell = failure["cell"]
        error.output = files.copy
        raise error
    return NotebookResult(
        values=record["values"],
        parameters=record["parameters"],
        output=files.copy,
        html=files.html if record["html"] else None,
        log=files.log,
        runs=announced_runs(files.runs),
        seconds=record["seconds"],
    )


def last_lines(log: Path) -> list[str]:
    """Return the end of a log as lines of an error message; [] if it is empty or missing."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        end = file.read().decode(errors="replace").strip()
    return ["  The last lines:", *indented(end, LAST_LINES)] if end else []


def indented(text: str, lines: int) -> list[str]:
    """Return the last lines of a text, indented."""
    return [f"    {line}" for line in text.strip().splitlines()[-lines:]]


class NotebookHandle:
    """A handle of a notebook that runs in the background (``nb.run_notebook(wait=False)``).

    In another kernel, ``nb.NotebookHandle(output)`` returns a new handle of the same run.

    Args:
        output: the path of the executed copy, which ends in ``.ipynb``. The copy itself need not
            exist yet.
        process: the process that runs the notebook; None if another process has started it.

    Raises:
        NotebookError: no run of a notebook with this path has been started.
    """

    def __init__(
        self, output: str | os.PathLike[str], process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self._process = process
        self._stop_requested = False
        self._files = NotebookFiles(Path(output).expanduser().absolute())
        if not self._files.log.exists():
            raise NotebookError(
                f"no notebook run writes to {output}",
                allowed="the executed copy of a notebook that runs or has run",
                do="start one with nb.run_notebook(path, output, wait=False)",
            )

    @property
    def output(self) -> Path:
        """The path of the executed copy. It is written after each cell."""
        return self._files.copy

    @property
    def log(self) -> Path:
        """The path of the log, which contains all output of the cells so far."""
        return self._files.log

    @property
    def runs(self) -> list[Path]:
        """The folders of the runs, sweeps and cross-validations so far, oldest first."""
        return announced_runs(self._files.runs)

    def done(self) -> bool:
        """Return True if the run has ended, successfully or not."""
        if self._process is not None and self._process.poll() is None:
            return False
        return not self._files.running()

    def stop(self) -> None:
        """Stop the kernel and everything that its cells have started, if the run has not ended."""
        record = self._record()
        if not self.done() and record and record["status"] == "running":
            self._stop_requested = True
            os.kill(record["pid"], signal.SIGINT)

    def result(self, timeout: float | None = None) -> NotebookResult:
        """Wait for the end of the run, and return its result.

        An interrupt ends only the wait. The notebook continues.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            TimeoutError: the run has not ended in this time. It continues.
            NotebookFailed: the notebook failed, or it was stopped.
            NotebookDied: the kernel died, or the process that runs the notebook died.
            NotebookTimeout: a time limit was exceeded.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self.output} is not done after {timeout:g} s; it continues")
            time.sleep(_POLL_SECONDS)
        record = self._record()
        if record is None or record["status"] == "running":
            raise self._lost()
        return result_of(self._files, record)

    def _record(self) -> RunningRecord | NotebookRecord | None:
        record: RunningRecord | NotebookRecord | None = read_json(self._files.record)
        return record

    def _lost(self) -> NotebookFailed:
        """Return the error of a run that ended without a record of its outcome."""
        if self._stop_requested:
            return NotebookFailed(f"the notebook {self.output} was stopped before it began")
        if self._process is not None and self._process.returncode == os.EX_IOERR:
            return NotebookFailed(
                f"{self._files.record} cannot be written: the disk is full, or the folder is gone",
                do="free some space, and run the notebook again",
            )
        error = NotebookDied(
            "\n".join([f"the process that ran {self.output} is gone", *last_lines(self.log)]),
            allowed="unfinished launches of its cells resume from their checkpoints",
            do="run it again; the usual cause is too little memory",
        )
        error.output = self.output
        return error

    def __repr__(self) -> str:
        return f"NotebookHandle({'ended' if self.done() else 'running'}, {self.output})"
